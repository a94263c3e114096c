"""A workload for simulated cards: holds card memory until it is told to end.

    python -m rigbook_nodeagent.gpus.hold --memory 20GiB

Options:
  --memory SIZE         memory to hold on each card: 20GiB, 512MiB, 24GB (1000-based), or bytes
  --card N|all|UUID     which of the visible cards (default: all)
  --directory DIR       the driver's folder (default: $RIGBOOK_SIM_DIR)
  --seconds N           end with success after N seconds (default: hold until SIGTERM)
  --over-after S --over SIZE    after S seconds take SIZE more on each card
  --utilisation PERCENT what the card shows for this process (default 90)
  --daemonise[=wait]    hold from a double-forked process in a session of its own, as a badly behaving
                        server does; the launcher ends with success as soon as the memory is held, or,
                        with =wait, stays until SIGTERM and then leaves the daemon behind
  --on-term exit|ignore what SIGTERM does (default: exit, status 0)
  --exit-code N         status at the end of --seconds (default 0)

Visible are the cards of $CUDA_VISIBLE_DEVICES (UUIDs, or indices into $NVIDIA_VISIBLE_DEVICES), else all
cards of the folder. More than a card has left: "CUDA out of memory" on standard error and status 1.
Only the standard library, and little of it, so that it starts in about 15 ms.
"""
# pathlib and argparse would double the time to start; printing is its output
# ruff: noqa: PTH123, T201

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time

from rigbook_nodeagent.gpus import holding

TYPE_CHECKING = False  # without `typing`, which costs 2 ms; type checkers know the name
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main", "size_bytes"]

UNITS = {
    "": 1,
    "b": 1,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
    "tib": 1024**4,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
}
VALUES = {
    "--memory": "",
    "--card": "all",
    "--directory": "",
    "--seconds": "",
    "--over-after": "",
    "--over": "",
    "--utilisation": "90",
    "--daemonise": "",
    "--on-term": "exit",
    "--exit-code": "0",
}
GIB = 1024**3


class WrongError(Exception):
    """Text for standard error, and an exit status."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


class Order:
    """The command line, understood. Sizes in bytes, times in seconds."""

    def __init__(self, options: dict[str, str]) -> None:
        self.directory = options["--directory"] or os.environ.get(holding.DIRECTORY_VARIABLE, "")
        if not self.directory:
            raise WrongError(
                f"no folder of simulated cards: set ${holding.DIRECTORY_VARIABLE} or --directory", 2
            )
        self.memory_bytes = size_bytes(options["--memory"])
        self.card = options["--card"]
        self.seconds = float(options["--seconds"]) if options["--seconds"] else None
        self.over_after = float(options["--over-after"]) if options["--over-after"] else None
        self.over_bytes = size_bytes(options["--over"] or "0")
        self.utilisation = float(options["--utilisation"])
        self.daemonise = options["--daemonise"]
        self.ignore_term = options["--on-term"] == "ignore"
        self.exit_code = int(options["--exit-code"])
        if self.daemonise not in {"", "exit", "wait"} or options["--on-term"] not in {"exit", "ignore"}:
            raise WrongError("--daemonise takes nothing or =wait, --on-term takes exit or ignore", 2)


def size_bytes(text: str) -> int:
    """`20GiB`, `512 MiB`, `24GB`, `1073741824` in bytes."""
    number = text.strip().rstrip("KMGTiBkmgtb ")
    unit = text.strip()[len(number) :].strip().lower()
    if unit not in UNITS:
        raise WrongError(f"not a size: {text!r} (write 20GiB, 512MiB or bytes)", 2)
    try:
        return int(float(number) * UNITS[unit])
    except ValueError:
        raise WrongError(f"not a size: {text!r} (write 20GiB, 512MiB or bytes)", 2) from None


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--help" in given or "-h" in given:
        print(__doc__)
        return 0
    try:
        order = Order(_options(given))
        uuids = _cards(order)
        if order.daemonise:
            return _daemonise(order, uuids)
        _hold(order, uuids)
    except WrongError as wrong:
        print(wrong, file=sys.stderr, flush=True)
        return wrong.status
    except ValueError as error:
        print(f"not a number: {error}", file=sys.stderr, flush=True)
        return 2
    return order.exit_code


def _options(given: list[str]) -> dict[str, str]:
    options = dict(VALUES)
    rest = iter(given)
    for word in rest:
        name, separator, value = word.partition("=")
        if name not in options:
            raise WrongError(f"unknown option {name!r}; --help lists them", 2)
        if name == "--daemonise":
            options[name] = value or "exit"
        elif separator:
            options[name] = value
        else:
            options[name] = next(rest, "")
    if not options["--memory"]:
        raise WrongError("--memory is missing, such as --memory 20GiB", 2)
    return options


def _cards(order: Order) -> list[str]:
    present = holding.card_names(order.directory)
    visible = present
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        named = [name for name in os.environ.get("NVIDIA_VISIBLE_DEVICES", "").split(",") if name in present]
        visible = []
        for entry in filter(None, os.environ["CUDA_VISIBLE_DEVICES"].split(",")):
            table = named or present
            if entry.isdigit() and int(entry) < len(table):
                visible.append(table[int(entry)])
            elif entry in present:
                visible.append(entry)
            else:
                break  # as CUDA does: an unknown entry hides what follows it
    if order.card == "all":
        chosen = visible
    elif order.card.isdigit():
        chosen = visible[int(order.card) : int(order.card) + 1]
    else:
        chosen = [name for name in visible if name == order.card]
    if not chosen:
        raise WrongError("RuntimeError: No CUDA GPUs are available")
    return chosen


def _take(order: Order, uuid: str, wanted_bytes: int) -> str:
    """Register as holder of `wanted_bytes` of the card; returns the file. One at a time per card."""
    card = holding.card_fields(order.directory, uuid)
    if card is None:
        raise WrongError("RuntimeError: CUDA error: no CUDA-capable device is detected")
    index, _, total_bytes = card
    folder = f"{order.directory}/{uuid}"
    pid = os.getpid()
    namespace = holding.own_namespace()
    foreign = os.environ.get(holding.NAMESPACE_VARIABLE, namespace) != namespace
    path = f"{folder}/{pid}-{namespace}" if foreign else f"{folder}/{pid}"
    with open(f"{folder}/card", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        others = sum(held.bytes for held in holding.holdings(order.directory, uuid) if held.path != path)
        free_bytes = max(0, total_bytes - others)
        if wanted_bytes > free_bytes:
            raise WrongError(
                f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {wanted_bytes / GIB:.2f} GiB. "
                f"GPU {index} has a total capacity of {total_bytes / GIB:.2f} GiB of which "
                f"{free_bytes / GIB:.2f} GiB is free."
            )
        holding.write(
            path,
            {
                "bytes": str(wanted_bytes),
                "start_ticks": str(holding.process_start(pid) or 0),
                "utilisation": str(order.utilisation),
                "command": " ".join(sys.argv)[:512].replace("\n", " "),
            },
        )
    return path


def _hold(order: Order, uuids: list[str], held_pipe: int = -1) -> None:
    """Hold the cards, wait, and give them back; also when a signal ends us."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN if order.ignore_term else _end)
    signal.signal(signal.SIGINT, _end)
    paths: list[str] = []
    started = time.monotonic()
    try:
        paths.extend(_take(order, uuid, order.memory_bytes) for uuid in uuids)
        print(
            f"holding {order.memory_bytes / GIB:.2f} GiB on {', '.join(uuids)} (pid {os.getpid()})",
            flush=True,
        )
        if held_pipe >= 0:
            _detach(held_pipe)
        if order.over_after is not None:
            _wait_until(started + order.over_after)
            for uuid in uuids:
                _take(order, uuid, order.memory_bytes + order.over_bytes)
        _wait_until(None if order.seconds is None else started + order.seconds)
    except _Ended:
        return
    finally:
        for path in paths:
            holding.withdraw(path)


def _wait_until(deadline: float | None) -> None:
    while deadline is None or time.monotonic() < deadline:
        time.sleep(3600.0 if deadline is None else max(0.0, deadline - time.monotonic()))


class _Ended(BaseException):
    """A signal asked for the end."""


def _end(_signal: int, _frame: object) -> None:
    raise _Ended


def _daemonise(order: Order, uuids: list[str]) -> int:
    """Fork twice with a new session in between; returns in the launcher."""
    reader, writer = os.pipe()
    signal.signal(signal.SIGTERM, _end)  # before the daemon says that it holds: a stop may follow at once
    try:
        child = os.fork()
        if child == 0:
            os.close(reader)
            _become_daemon(order, uuids, writer)
        os.close(writer)
        os.waitpid(child, 0)
        held = os.read(reader, 1) == b"h"  # nothing: the daemon failed, and has said why
        if held and order.daemonise == "wait":
            _wait_until(None)
    except _Ended:
        return 0
    return 0 if held else 1


def _become_daemon(order: Order, uuids: list[str], held_pipe: int) -> None:
    """Never returns: neither in the process in between nor in the daemon."""
    status = 1
    try:
        os.setsid()
        if os.fork() == 0:
            _hold(order, uuids, held_pipe=held_pipe)
        status = 0
    except _Ended:
        status = 0
    except WrongError as wrong:
        print(wrong, file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def _detach(held_pipe: int) -> None:
    """Tell the launcher that the memory is held, and let go of its standard streams."""
    os.write(held_pipe, b"h")
    os.close(held_pipe)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)


if __name__ == "__main__":
    raise SystemExit(main())
