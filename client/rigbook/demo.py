"""`rigbook demo`: a leftover is seen, and healed, and the next in the queue gets the card.

Starts a whole Rigbook with simulated cards on a fresh data folder, and gives the commands that a person
would. Nothing printed is made up: tables are answers of the ledger, lines are events of the log, and the
commands are run. A step that did not happen ends the demo with what was missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group
from rich.live import Live
from rich.text import Text
from rigbook_schemas import events as e
from rigbook_schemas.queries import CardRow, DemandRow, DriftRow, Question

from rigbook import tables
from rigbook.client import Client
from rigbook.commands.story import story_of
from rigbook.context import Context, read_context
from rigbook.exitcodes import Exit
from rigbook.failures import Failed, RigbookFailure
from rigbook.leavings import end_leavings
from rigbook.lookup import demand_named
from rigbook.narrative import record_line, standing
from rigbook.output import console, print_failure, say

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rich.console import RenderableType

__all__ = ["Demo", "run_demo"]

FILES: Final = ("chat.yaml", "train.yaml", "embed.yaml", "next.yaml")
START_SECONDS_MAX: Final = 60.0
STEP_SECONDS_MAX: Final = 45.0
STOP_SECONDS_MAX: Final = 30.0
RELEASE_SECONDS_MAX: Final = 6.0  # a leftover that nobody heals would keep the end waiting
LOOK_SECONDS: Final = 0.25
# Heartbeats twice as often as usual: half the waiting, nothing else differs.
HEARTBEAT_SECONDS: Final = 0.5


def run_demo(*, keep: bool, examples: Path | None, gpus: str, journal: Path | None = None) -> int:
    """The whole show; returns the exit code. Cleans up whatever happens."""
    folder = Path(tempfile.mkdtemp(prefix="rigbook-demo-"))
    began = time.monotonic()
    try:
        asyncio.run(_cancellable(Demo(folder, examples or _examples(), gpus, journal)))
    except RigbookFailure as failure:
        print_failure(failure)
        return failure.exit
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    finally:
        if keep:
            say(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    say(
        f"\nall of it happened, in {time.monotonic() - began:.0f} s; everything above was read back from the running system",
        "bold green",
    )
    return Exit.OK


class Demo:
    """The steps, in order. `folder` is fresh and ours."""

    def __init__(self, folder: Path, examples: Path, gpus: str, journal: Path | None = None) -> None:
        self._data = folder / "data"
        self._output = folder / "up.log"
        self._examples = examples
        self._gpus = gpus
        self._journal = journal
        self._console = console()
        self._began = time.monotonic()
        self._environment = {
            **os.environ,
            "RIGBOOK_DATA": str(self._data),
            # the examples' `python3` must be one that has the simulated workload
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        }
        self._environment.pop("RIGBOOK_NATS", None)

    async def run(self) -> None:
        """Raises Failed with what was missing."""
        missing = [name for name in FILES if not (self._examples / name).is_file()]
        if missing:
            raise Failed(
                f"no {', '.join(missing)} in {self._examples}", remedy="name the folder with --examples DIR"
            )
        up: asyncio.subprocess.Process | None = None
        try:
            self._title(
                "1. a Rigbook on this machine: bus, ledger, placer, reaper, and a node with simulated cards"
            )
            up = await self._start()
            context = await self._until("all parts are ready", self._ready(up), START_SECONDS_MAX)
            self._console.print(Text(self._output.read_text()), soft_wrap=True)
            async with await Client.connect(context.url, source="client/demo") as client:
                await self._show(client)
        finally:
            await self._clean_up(up)

    async def _show(self, client: Client) -> None:
        await self._command("gpu", "list")
        self._title(
            "2. five demands in four files: a shared app, a training run, two small services, and one more"
        )
        await self._command("apply", *[word for name in FILES for word in ("-f", str(self._examples / name))])
        await self._until(
            "chat, train, embed and rerank run and next waits",
            lambda: _filled(client),
            STEP_SECONDS_MAX,
            lambda: self._fleet(client),
        )
        chat = await demand_named(client, "chat")
        card = chat.cards[0]

        self._title(
            "3. the shared app is stopped; its server has left its process group, as a daemon does, and lives on"
        )
        await self._command("stop", "chat")
        await self._until(
            "the access point ended while the server holds the card",
            lambda: _half_stopped(client, chat.demand),
            STEP_SECONDS_MAX,
        )
        await self._command("show", chat.demand)
        await self._command("explain", "next")

        self._title(
            "4. desired, bound and observed differ: the reaper looks more than once, and waits out the grace"
        )
        drift: DriftRow = await self._until(
            "the drift is detected",
            lambda: _leftover(client, chat.demand),
            STEP_SECONDS_MAX,
            self._on_screen(client),
        )
        if drift.drift.healing:
            raise Failed("the drift was healed before healing was switched on", code="step_missing")
        await self._command("drift", "list", "--evidence")

        self._title("5. healing of leftovers is switched on; these are the events that follow, as they come")
        after = await client.last_seq()
        await self._command("drift", "heal", "leftover", "--on", "--reason", "the demo asks for it")
        await self._follow_healing(client, chat.demand, after)

        self._title("6. the next in the queue has the card, by itself; and this is who had it over time")
        await self._until(
            "next runs on the same card", lambda: _runs_on(client, "next", card), STEP_SECONDS_MAX
        )
        await self._command("gpu", "list")
        await self._command("drift", "list")
        await self._command("who", card)
        if self._journal is not None:
            self._title("7. the log of all this in one file, for questions without a bus")
            await self._command("journal", "export", str(self._journal))
            await self._command("history", "gpu", card, "--journal", str(self._journal))

    # -- steps ------------------------------------------------------------------------------------

    async def _start(self) -> asyncio.subprocess.Process:
        words = ["up", "--data", str(self._data), "--gpus", self._gpus, "--port", "0", "--node", "demo", "--engine", "process",
                 "--heartbeat", f"{HEARTBEAT_SECONDS:g}"]  # fmt: skip
        self._say_command("up", "--gpus", self._gpus)
        with self._output.open("wb") as output:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-m", "rigbook", *words,
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, env=self._environment,
                start_new_session=True,  # Ctrl-C is for us: we end it in order
            )  # fmt: skip

    def _ready(self, up: asyncio.subprocess.Process) -> Callable[[], Awaitable[Context | None]]:
        async def look() -> Context | None:
            if up.returncode is not None:
                raise Failed(
                    "`rigbook up` ended at once", why=self._output.read_text()[-2000:], code="step_missing"
                )
            context = read_context(self._data)
            return context if context is not None and context.alive else None

        return look

    async def _follow_healing(self, client: Client, demand: str, after: int) -> None:
        """Print what the log says, until the old binding is released, the drift cleared and the next one started."""
        wanted = {"released", "drift.cleared", "bound", "started"}
        shown = {*wanted, "healing.set", "drift.detected", "eviction.ordered", "exited"}
        try:
            async with asyncio.timeout(STEP_SECONDS_MAX):
                async for record in client.follow(after_seq=after):
                    if record.kind in shown:
                        say(
                            f"  {record.seq:>4}  {record.source:<20}  {record.kind:<16}  {record_line(record)}"
                        )
                    ours = not isinstance(record.data, e.Released) or record.data.demand == demand
                    if ours:
                        wanted.discard(record.kind)
                    if not wanted:
                        return
        except TimeoutError:
            raise self._missing(f"healing: no {', no '.join(sorted(wanted))}", STEP_SECONDS_MAX) from None

    async def _until(
        self,
        what: str,
        look: Callable[[], Awaitable[Any]],
        seconds: float,
        draw: Callable[[], Awaitable[RenderableType]] | None = None,
    ) -> Any:
        """Wait until `look` finds something, drawing meanwhile. Raises Failed when it does not in time."""
        deadline = time.monotonic() + seconds
        before = ""
        live = (
            Live(console=self._console, auto_refresh=False)
            if draw is not None and self._console.is_terminal
            else None
        )
        with live or contextlib.nullcontext():
            while True:
                found = await look()
                if draw is not None:
                    picture = tables.fitted(await draw(), self._console)
                    if live is not None:
                        live.update(picture, refresh=True)
                    else:
                        before = self._print_changed(picture, before)
                if found is not None:
                    return found
                if time.monotonic() > deadline:
                    raise self._missing(what, seconds)
                await asyncio.sleep(LOOK_SECONDS)

    def _print_changed(self, picture: RenderableType, before: str) -> str:
        """Without a terminal: each picture that differs from the one before, once."""
        with self._console.capture() as captured:
            self._console.print(picture)
        text = captured.get()
        if text != before:
            self._console.file.write(text + "\n")
            self._console.file.flush()
        return text

    def _missing(self, what: str, seconds: float) -> Failed:
        logs = self._data / "logs"
        said = [
            f"{log.name}: {line}"
            for log in sorted(logs.glob("*.log"))
            for line in log.read_text(errors="replace").splitlines()[-2:]
        ]
        return Failed(
            f"did not happen within {seconds:g} s: {what}",
            why="\n".join(said),
            remedy="run it with --keep, and look at the logs",
            code="step_missing",
        )

    def _on_screen(self, client: Client) -> Callable[[], Awaitable[RenderableType]] | None:
        """A picture for whoever waits in front of a terminal; in a file it would say the same again."""
        return (lambda: self._fleet(client)) if self._console.is_terminal else None

    async def _fleet(self, client: Client) -> RenderableType:
        """Cards and demands; nothing that only counts seconds, so that a picture differs when something happened."""
        cards: list[CardRow] = await client.rows("cards")
        demands: list[DemandRow] = await client.rows("demands", Question(phase="live"))
        table = tables.plain("DEMAND", "PROJECT", "OWNER", "STATUS", "WHY")
        for row in demands:
            table.add_row(
                row.demand,
                row.project,
                row.owner,
                tables.status(row.phase),
                tables.cell(standing(row)),
            )
        return Group(tables.cards(cards), Text(), table)

    # -- commands ---------------------------------------------------------------------------------

    async def _command(self, *words: str) -> None:
        """Run a `rigbook` command as a person would; what it prints goes where we print."""
        self._say_command(*words)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rigbook", *words, stdin=asyncio.subprocess.DEVNULL, env=self._environment
        )
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            raise
        if code != Exit.OK:
            raise Failed(f"`rigbook {' '.join(words)}` ended with {code}", code="step_missing")

    def _say_command(self, *words: str) -> None:
        shown = [_short(word) for word in words]
        self._console.print(Text(f"$ rigbook {' '.join(shown)}", style="cyan"), soft_wrap=True)

    def _title(self, text: str) -> None:
        text = f"{text}  [{time.monotonic() - self._began:.1f} s]"
        self._console.print(Text(f"\n== {text}", style="bold"), soft_wrap=True)

    # -- the end ----------------------------------------------------------------------------------

    async def _clean_up(self, up: asyncio.subprocess.Process | None) -> None:
        """Take every demand back, end the parts in order, and whatever lived on in spite of it."""
        if up is None:
            return
        context = read_context(self._data)
        self._title("the end: every demand is taken back, then the parts end in order")
        if up.returncode is None:
            if context is not None:
                with contextlib.suppress(RigbookFailure, TimeoutError):
                    async with asyncio.timeout(RELEASE_SECONDS_MAX):
                        await _withdraw_all(context.url)
            with contextlib.suppress(ProcessLookupError):
                up.send_signal(signal.SIGINT)
            try:
                async with asyncio.timeout(STOP_SECONDS_MAX):
                    await up.wait()
            except TimeoutError:
                up.kill()  # its parts end by themselves: their standard input closes
                await up.wait()
        left = end_leavings(self._data)
        if left:
            say(f"ended {left} processes that had outlived everything", "yellow")


# -- what is looked for -----------------------------------------------------------------------------


async def _filled(client: Client) -> bool | None:
    rows = {row.name: row for row in await client.rows("demands", Question(phase="live"))}
    running = all(
        name in rows and rows[name].phase == "running" for name in ("chat", "train", "embed", "rerank")
    )
    used = [card.observed.memory_used_bytes if card.observed else None for card in await client.rows("cards")]
    return True if running and all(used) and "next" in rows and rows["next"].reasons else None


async def _half_stopped(client: Client, demand: str) -> bool | None:
    observed = (await story_of(client, await demand_named(client, demand)))["observed"]
    access = [c for c in observed["components"] or () if c["component"] == "access" and c["running"]]
    return True if observed["components"] is not None and not access and observed["processes"] else None


async def _leftover(client: Client, demand: str) -> DriftRow | None:
    rows: list[DriftRow] = await client.rows("drifts")
    return next((row for row in rows if row.drift.kind == "leftover" and row.drift.demand == demand), None)


async def _runs_on(client: Client, name: str, card: str) -> DemandRow | None:
    row = await demand_named(client, name)
    return row if row.phase == "running" and card in row.cards else None


async def _withdraw_all(url: str) -> None:
    async with await Client.connect(url, source="client/demo", wait_seconds=2.0) as client:
        for row in await client.rows("demands", Question(phase="live")):
            if row.wanted:
                await client.withdraw(row.demand, row.project, by="demo", reason="the demo is over")
        while await client.rows("demands", Question(phase="live")):  # noqa: ASYNC110 - the ledger is what changes
            await asyncio.sleep(LOOK_SECONDS)


async def _cancellable(demo: Demo) -> None:
    """SIGTERM ends it as Ctrl-C does: cleaned up."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        await demo.run()
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _examples() -> Path:
    """The demand files: in an installed package beside this file, in a clone at its root."""
    here = Path(__file__).parent / "examples"
    return here if here.is_dir() else Path(__file__).parents[2] / "examples"


def _short(word: str) -> str:
    path = Path(word)
    return f"{path.parent.name}/{path.name}" if path.suffix == ".yaml" else word
