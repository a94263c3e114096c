"""`python -m tests.simulation`: run worlds, and say which one fails."""

from __future__ import annotations

import sys

from tests.simulation.soak import main

sys.exit(main())
