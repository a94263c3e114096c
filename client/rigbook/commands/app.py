"""All commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from rigbook import __version__
from rigbook.commands import demands, doctor, fleet, rules, schema, serve, showing, stop, story, up, views

__all__ = ["app"]

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


def _version(value: bool) -> None:  # noqa: FBT001 - how typer calls it
    if value:
        typer.echo(f"rigbook {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    del version


for _part in (demands, views, story, stop, fleet, rules, doctor, up, serve, showing, schema):
    _part.register(app)
