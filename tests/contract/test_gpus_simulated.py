"""Simulated cards with real processes of this machine.

Goal: what holds a simulated card behaves as on a real one: it shows up with its pid, its memory comes back
when it ends however it ends, and it can squat, overuse, run out of memory, and outlive its launcher.
Method: the shipped workload (`python -m rigbook_nodeagent.gpus.hold`), and a plain shell.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rigbook_nodeagent.gpus import holding
from rigbook_nodeagent.gpus.simulated import SimulatedGpus

GIB = 1024**3
PATIENCE_SECONDS = 10.0


@pytest.fixture
def gpus(tmp_path):
    gpus = SimulatedGpus("sim:2xRTX4090", tmp_path / "cards")
    assert gpus.open().ok
    return gpus


@pytest.fixture
def cards(gpus):
    return [card.uuid for card in gpus.inventory()]


@pytest.fixture
def hold(gpus, cards):
    """Starts the workload on some cards and waits for its first line; ends what is left afterwards."""
    started: list[subprocess.Popen[str]] = []

    def begin(*options: str, on: list[str] | None = None, wait: bool = True) -> subprocess.Popen[str]:
        chosen = cards[:1] if on is None else on
        process = subprocess.Popen(
            [sys.executable, "-m", "rigbook_nodeagent.gpus.hold", *options],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                **gpus.environment(chosen),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        if wait:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("holding"), process.stderr.read()
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()
    for sample in gpus.sample():
        for one in sample.processes or ():
            os.kill(one.pid, signal.SIGKILL)


def used(gpus: SimulatedGpus) -> list[float]:
    return [(sample.memory_used_bytes or 0) / GIB for sample in gpus.sample()]


def until(condition) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def test_memory_is_held_while_the_process_lives_and_comes_back_when_it_is_killed(gpus, cards, hold):
    process = hold("--memory", "20GiB")
    first, second = gpus.sample()
    assert (first.memory_used_bytes, first.memory_total_bytes) == (20 * GIB, 24 * GIB)
    assert [(one.pid, one.memory_bytes) for one in first.processes] == [(process.pid, 20 * GIB)]
    assert "hold" in first.processes[0].command
    assert (first.utilisation_percent, second.utilisation_percent) == (90.0, 0.0)
    assert second.processes == ()
    process.kill()
    process.wait()
    assert used(gpus) == [0, 0]
    assert not (Path(gpus._directory) / cards[0] / str(process.pid)).exists()


def test_a_zombie_holds_nothing(gpus, hold):
    process = hold("--memory", "1GiB")
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: used(gpus) == [0, 0])
    assert process.poll() is not None


def test_it_ends_on_request_or_after_its_time(gpus, hold):
    process = hold("--memory", "1GiB")
    process.terminate()
    assert process.wait() == 0
    assert hold("--memory", "1GiB", "--seconds", "0.05", "--exit-code", "3").wait() == 3
    assert used(gpus) == [0, 0]


def test_it_can_ignore_the_request(gpus, hold):
    process = hold("--memory", "1GiB", "--on-term", "ignore")
    process.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    assert used(gpus) == [1, 0]


def test_more_than_the_card_has_left_is_out_of_memory(gpus, hold):
    hold("--memory", "20GiB")
    second = hold("--memory", "5GiB", wait=False)
    _, error = second.communicate()
    assert second.returncode == 1
    assert "CUDA out of memory. Tried to allocate 5.00 GiB" in error
    assert "total capacity of 24.00 GiB of which 4.00 GiB is free" in error
    hold("--memory", "4GiB")
    assert used(gpus) == [24, 0]


def test_two_at_once_cannot_both_have_the_last_memory(gpus, hold):
    contenders = [hold("--memory", "13GiB", wait=False) for _ in range(6)]
    until(lambda: sum(one.poll() is not None for one in contenders) == 5)
    assert used(gpus) == [13, 0]


def test_all_visible_cards_or_one_of_them(gpus, cards, hold):
    hold("--memory", "3GiB", on=cards)
    hold("--memory", "1GiB", "--card", "1", on=cards)
    hold("--memory", "2GiB", "--card", cards[0], on=cards)
    assert used(gpus) == [5, 4]


def test_without_a_visible_card_there_is_no_device(hold):
    process = hold("--memory", "1GiB", on=[], wait=False)
    _, error = process.communicate()
    assert (process.returncode, error) == (1, "RuntimeError: No CUDA GPUs are available\n")


def test_a_program_that_was_given_no_card_can_squat(gpus, cards, hold):
    squatter = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "rigbook_nodeagent.gpus.hold",
            "--memory",
            "6GiB",
            "--card",
            "1",
            "--directory",
            str(gpus._directory),
        ],
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
    )
    until(lambda: used(gpus) == [0, 6])
    squatter.kill()
    squatter.communicate()


def test_it_can_take_more_later(gpus, hold):
    hold("--memory", "10GiB", "--over-after", "0.05", "--over", "4GiB")
    until(lambda: used(gpus) == [14, 0])


def test_a_daemon_outlives_its_launcher_and_holds_the_card(gpus, hold):
    launcher = hold("--memory", "20GiB", "--daemonise", "--on-term", "ignore")
    assert launcher.wait() == 0
    (process,) = gpus.sample()[0].processes
    assert process.pid != launcher.pid
    session = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[3])
    assert session != os.getsid(0)
    os.kill(process.pid, signal.SIGTERM)
    assert used(gpus) == [20, 0]
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: used(gpus) == [0, 0])


def test_a_launcher_can_wait_and_leave_its_daemon_behind(gpus, hold):
    launcher = hold("--memory", "20GiB", "--daemonise=wait")
    assert launcher.poll() is None
    launcher.terminate()
    assert launcher.wait() == 0
    assert used(gpus) == [20, 0]


def test_a_daemon_that_gets_no_memory_fails_its_launcher(gpus, hold):
    launcher = hold("--memory", "25GiB", "--daemonise", wait=False)
    _, error = launcher.communicate()
    assert launcher.returncode == 1
    assert "CUDA out of memory" in error


def test_a_shell_can_hold_a_card_with_one_line(gpus, cards):
    line = 'echo 21474836480 > "$RIGBOOK_SIM_DIR/$NVIDIA_VISIBLE_DEVICES/$$"; echo; read x'
    shell = subprocess.Popen(
        ["sh", "-c", line],
        env={**os.environ, **gpus.environment(cards[1:])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    shell.stdout.readline()
    sample = gpus.sample()[1]
    assert [(one.pid, one.memory_bytes) for one in sample.processes] == [(shell.pid, 20 * GIB)]
    shell.communicate(b"\n")
    assert used(gpus) == [0, 0]


def test_a_file_of_a_pid_that_was_used_again_does_not_count(gpus, cards, tmp_path):
    folder = tmp_path / "cards" / cards[0]
    start = holding.process_start(os.getpid())
    holding.write(str(folder / str(os.getpid())), {"bytes": "1", "start_ticks": str(start + 1)})
    assert used(gpus) == [0, 0]
    assert not (folder / str(os.getpid())).exists()
    # without a start time: written before this process started
    (folder / str(os.getpid())).write_text("1073741824\n")
    os.utime(folder / str(os.getpid()), (1, 1))
    assert used(gpus) == [0, 0]


def test_what_is_no_registration_is_ignored(gpus, cards, tmp_path):
    folder = tmp_path / "cards" / cards[0]
    for name, content in ((str(os.getpid()), ""), ("notes", "100"), ("1-x", "1"), (".7.9", "3")):
        (folder / name).write_text(content)
    (folder / str(os.getpid())).write_bytes(b"\xff\xfe=\n\0bytes=many\n")
    assert used(gpus) == [0, 0]


@pytest.mark.parametrize(
    ("options", "status", "text"),
    [
        ((), 2, "--memory is missing"),
        (("--memory", "lots"), 2, "not a size"),
        (("--memory", "1GiB", "--daemonise=maybe"), 2, "--daemonise"),
        (("--memory", "1GiB", "--fast"), 2, "unknown option '--fast'"),
        (("--memory", "1GiB", "--seconds", "soon"), 2, "not a number"),
    ],
)
def test_a_wrong_command_line_is_explained(hold, options, status, text):
    process = hold(*options, wait=False)
    _, error = process.communicate()
    assert process.returncode == status
    assert text in error


def test_the_workload_starts_without_heavy_imports():
    """It is started hundreds of times a second in the bench: no typing, pathlib, argparse, msgspec."""
    program = (
        "import sys; before = set(sys.modules); import rigbook_nodeagent.gpus.hold;"
        "print(sorted(set(sys.modules) - before))"
    )
    told = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for heavy in ("'typing'", "'pathlib'", "'argparse'", "'msgspec'", "'dataclasses'", "'re'"):
        assert heavy not in told


# -- faults -------------------------------------------------------------------------------------------


def test_a_lost_and_an_unreadable_card(gpus, cards, tmp_path, hold):
    hold("--memory", "2GiB", on=cards)
    (tmp_path / "cards" / cards[0] / "fault").write_text("lost\n")
    (tmp_path / "cards" / cards[1] / "fault").write_text("unknown\n")
    lost, unknown = gpus.sample()
    assert (lost.memory_used_bytes, lost.processes, "lost" in lost.unknown) == (None, None, True)
    assert (unknown.memory_used_bytes, unknown.processes) == (None, None)
    assert "Unknown Error" in unknown.unknown
    assert [card.usable for card in gpus.inventory()] == [False, True]
    (tmp_path / "cards" / cards[0] / "fault").unlink()
    assert [card.usable for card in gpus.inventory()] == [True, True]


def test_an_absurd_sample_is_rejected_and_the_last_good_one_kept(gpus, cards, tmp_path, hold):
    hold("--memory", "2GiB")
    good = gpus.sample()[0]
    (tmp_path / "cards" / cards[0] / "fault").write_text("absurd")
    kept = gpus.sample()[0]
    assert (kept.memory_used_bytes, kept.as_of, gpus.samples_rejected) == (2 * GIB, good.as_of, 1)
    assert "72.0 GiB used of 24.0" in kept.unknown


@pytest.mark.parametrize("word", ["mismatch", "absent"])
def test_a_driver_that_does_not_answer(gpus, tmp_path, word):
    (tmp_path / "cards" / "fault").write_text(word)
    assert not gpus.open().ok
    with pytest.raises(Exception, match=word):
        gpus.sample()
