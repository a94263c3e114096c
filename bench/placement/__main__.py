"""Entry: `python bench/placement TRACES`, or `python -m placement TRACES` with `bench` on PYTHONPATH."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from placement.run import main

    raise SystemExit(main())
