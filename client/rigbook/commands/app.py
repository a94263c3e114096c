"""All commands, put together."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Final

import typer

from rigbook import __version__

__all__ = ["app_for"]

GROUPS: Final = (
    "demands", "deploy", "views", "story", "stop", "fleet", "rules", "why", "policy", "history", "journal", "replay", "audit", "whatif", "doctor", "recover", "up", "serve", "showing", "schema",
)  # fmt: skip
# Long-running services, of which a machine may have many: they load nothing of tables and files.
ALONE: Final = {"serve": ("serve",), "agent": ("serve",)}


def app_for(words: list[str]) -> typer.Typer:
    """The command line; for a service only the part that starts it."""
    app = typer.Typer(
        name="rigbook",
        no_args_is_help=True,
        pretty_exceptions_enable=False,  # our failures are no tracebacks, and a bug's must be complete
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
        help="The book of record for a team's GPUs: who owns which card, since when, why, and whether that is still true.",
        epilog="Exit codes: 0 ok, 2 command line, 3 no answer, 4 not found, 5 wrong file or value, 6 in the way, "
        "7 can never be met, 8 timed out, 9 unhealthy, 10 would wait, 11 not installed, 12 a part failed.",
    )
    app.callback()(_root)
    for name in ALONE.get(words[0] if words else "", GROUPS):
        import_module(f"rigbook.commands.{name}").register(app)
    return app


def _version(value: bool) -> None:
    if value:
        typer.echo(f"rigbook {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    del version
