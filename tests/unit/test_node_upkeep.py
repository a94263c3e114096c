"""What an agent does for its node: weights by name, processes that hang, cards out of service, device nodes, CUDA."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rigbook_nodeagent.engines.cuda import cuda_warning
from rigbook_nodeagent.engines.procfs import Stat
from rigbook_nodeagent.injected import injected_of
from rigbook_nodeagent.quarantine import quarantines
from rigbook_nodeagent.stuck import REBOOT_SECONDS, Stuck
from rigbook_nodeagent.weights import NAMES_MAX, weights_in
from rigbook_schemas.values import CardObservation, ProcessObservation, Xid

# -- weights --------------------------------------------------------------------------------------


def put(path: Path, text: str = "x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_weights_of_every_layout_by_the_names_that_demands_use(tmp_path) -> None:
    put(tmp_path / "hf/hub/models--Qwen--Qwen2.5-7B-Instruct/snapshots/abc/config.json")
    (tmp_path / "hf/hub/models--gpt2--half/snapshots").mkdir(parents=True)  # a download that never began
    put(tmp_path / "hub/models--BAAI--bge-m3/snapshots/1/model.safetensors")
    put(tmp_path / "ollama/manifests/registry.ollama.ai/library/qwen2.5/7b")
    put(tmp_path / "ollama/manifests/registry.ollama.ai/ada/tuned/latest")
    put(tmp_path / "meta-llama/Llama-3.1-8B/config.json")
    put(tmp_path / "meta-llama/Llama-3.1-8B/model-00001.safetensors")
    put(tmp_path / "local/config.json")
    put(tmp_path / "local/model.bin")
    put(tmp_path / "small.gguf")
    put(tmp_path / "TheBloke/big.Q4.gguf")
    put(tmp_path / "notes/readme.txt")
    assert weights_in([tmp_path]) == (
        "BAAI/bge-m3",
        "Qwen/Qwen2.5-7B-Instruct",
        "TheBloke/big.Q4.gguf",
        "ada/tuned:latest",
        "local",
        "meta-llama/Llama-3.1-8B",
        "qwen2.5:7b",
        "small.gguf",
    )


def test_folders_that_are_not_there_not_folders_or_full_of_other_things(tmp_path) -> None:
    put(tmp_path / "file")
    assert weights_in([tmp_path / "none", tmp_path / "file"]) == ()
    for number in range(NAMES_MAX + 10):
        put(tmp_path / f"m{number:04}.gguf")
    (tmp_path / "odd\nname.gguf").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path)
    found = weights_in([tmp_path])
    assert len(found) == NAMES_MAX
    assert all(name.isprintable() for name in found)


# -- processes that hang --------------------------------------------------------------------------


class Machine:
    def __init__(self) -> None:
        self.now = 0.0
        self.states: dict[int, Stat] = {}
        self.stuck = Stuck(lambda: self.now, stat=self.states.get)

    def state(self, pid: int, state: str, start_ticks: int = 1) -> None:
        self.states[pid] = Stat(state, 1, pid, pid, start_ticks)

    def marked(self, *pids: int) -> list[float | None]:
        processes = tuple(ProcessObservation(pid=pid, memory_bytes=1, command="python") for pid in pids)
        (card,) = self.stuck.mark([CardObservation(uuid="GPU-a", processes=processes)], ())
        return [p.stuck_seconds for p in card.processes or ()]


def test_case_24_a_process_that_stays_in_the_kernel_is_told_with_how_long() -> None:
    m = Machine()
    m.state(7, "D")
    m.state(8, "S")
    assert m.marked(7, 8, 9) == [0.0, None, None]
    assert m.stuck.reboot_needed == ""
    m.now = REBOOT_SECONDS
    assert m.marked(7, 8) == [REBOOT_SECONDS, None]
    assert m.stuck.reboot_needed == "pid 7 (python) hangs in the kernel (state D) and holds GPU-a"
    m.state(7, "R")
    assert m.marked(7) == [None]
    assert m.stuck.reboot_needed == ""


def test_a_disk_access_now_and_then_and_a_pid_used_again_begin_anew() -> None:
    m = Machine()
    m.state(7, "D")
    m.marked(7)
    m.now = 100.0
    m.state(7, "S")
    m.marked(7)
    m.now = 150.0
    m.state(7, "D")
    assert m.marked(7) == [0.0]
    m.now = 200.0
    m.state(7, "D", start_ticks=99)
    assert m.marked(7) == [0.0]


def test_cards_without_a_word_on_processes_stay_as_they_are() -> None:
    card = CardObservation(uuid="GPU-a", processes=None, unknown="lost")
    assert Machine().stuck.mark([card], ()) == (card,)


# -- quarantine -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "due"), [((13, 31, 43, 45, 94), ""), ((31, 48, 43), "48"), ((63,), ""), ((79,), "79")]
)
def test_case_23_and_24_errors_of_the_hardware_and_not_of_a_program(codes, due) -> None:
    xids = tuple(Xid(code=code, at=f"t{code}", meaning="m") for code in codes)
    found = quarantines([CardObservation(uuid="GPU-a", xids=xids), CardObservation(uuid="GPU-b")])
    assert [q.card for q in found] == (["GPU-a"] if due else [])
    if due:
        assert (found[0].about, found[0].reason) == (f"xid-{due}-t{due}", f"Xid {due}: m")


def test_a_card_without_spare_rows() -> None:
    (found,) = quarantines([CardObservation(uuid="GPU-a", remap_failed=True)])
    assert (found.about, "replace the card" in found.reason) == ("remap-failed", True)


# -- what a container reaches ---------------------------------------------------------------------

NODES = {"GPU-a": "/dev/null", "GPU-b": "/dev/zero", "GPU-x": "/dev/not-there"}


def container(tmp_path: Path, *devices: str, rules: str = "") -> dict[str, Path]:
    """A /proc with one process whose root has these device nodes."""
    proc = tmp_path / "proc"
    dev = proc / "77" / "root" / "dev"
    dev.mkdir(parents=True)
    for device in devices:
        (dev / Path(device).name).symlink_to(device)
    (proc / "77" / "cgroup").write_text("5:devices:/docker/abc\n1:name=systemd:/x\n")
    if rules:
        put(tmp_path / "devices/docker/abc/devices.list", rules)
    return {"proc": proc, "devices": tmp_path / "devices"}


def test_case_17_a_container_reaches_what_it_has_a_device_node_for(tmp_path) -> None:
    where = container(tmp_path, "/dev/null")
    assert injected_of(77, ("GPU-a",), NODES, **where) == ("GPU-a",)
    assert injected_of(77, ("GPU-a", "GPU-b"), NODES, **where) == ("GPU-a",)
    assert injected_of(77, ("GPU-b",), NODES, **where) == ("GPU-a",), "another one than it was to get"


def test_a_device_cgroup_without_the_card_is_a_card_out_of_reach(tmp_path) -> None:
    number = os.stat("/dev/zero").st_rdev  # noqa: PTH116
    rules = f"c {os.major(number)}:{os.minor(number)} rw\nc 195:255 rw\n"
    where = container(tmp_path, "/dev/null", "/dev/zero", rules=rules)
    assert injected_of(77, ("GPU-a", "GPU-b"), NODES, **where) == ("GPU-b",)
    shutil.rmtree(tmp_path / "devices")
    put(tmp_path / "devices/docker/abc/devices.list", "a *:* rwm\n")
    assert set(injected_of(77, ("GPU-a", "GPU-b"), NODES, **where) or ()) == {"GPU-a", "GPU-b"}


@pytest.mark.parametrize("cards", [("GPU-x",), ("GPU-unknown",), ()])
def test_what_cannot_be_looked_at_cannot_be_told(tmp_path, cards) -> None:
    where = container(tmp_path, "/dev/null")
    assert injected_of(77, cards, NODES, **where) is None
    assert injected_of(78, ("GPU-a",), NODES, **where) is None
    assert injected_of(0, ("GPU-a",), NODES, **where) is None


# -- CUDA -----------------------------------------------------------------------------------------

TESLA = "NVIDIA_REQUIRE_CUDA=cuda>=12.4 brand=tesla,driver>=470,driver<471 brand=tesla,driver>=525,driver<526"


@pytest.mark.parametrize(
    ("env", "cuda", "driver", "words"),
    [
        ([TESLA], "12.4", "550.54.15", ""),
        ([TESLA], "13.0", "580.1", ""),
        ([TESLA], "12.0", "525.60.13", ""),  # by the compatibility package, on some brands
        ([TESLA], "12.2", "535.54", "the image needs cuda>=12.4"),
        ([TESLA, "NVIDIA_DISABLE_REQUIRE=1"], "12.2", "535.54", ""),
        (["CUDA_VERSION=12.1.1"], "11.6", "510.47", "the image is built for CUDA 12.1.1"),
        (["CUDA_VERSION=12.8.0"], "12.2", "535.54", ""),
        (["PATH=/bin"], "11.6", "510.47", ""),
        (["CUDA_VERSION=12.1.1"], "", "", ""),
        (["NVIDIA_REQUIRE_CUDA=", "CUDA_VERSION=what"], "12.2", "535", ""),
        (["NVIDIA_REQUIRE_CUDA=cuda>=99 nonsense"], "12.2", "535", ""),
    ],
)
def test_an_images_cuda_and_the_driver(env, cuda, driver, words) -> None:
    told = cuda_warning(env, cuda_version=cuda, driver_version=driver)
    assert told.startswith(words)
    assert bool(told) == bool(words)
    assert not words or "older image or a newer driver" in told


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.text(max_size=40), st.from_regex(r"NVIDIA_REQUIRE_CUDA=(cuda|driver)?[<>=]{0,2}[0-9., ]*")
        )
    ),
    st.text(max_size=12),
    st.text(max_size=12),
)
def test_whatever_an_image_or_a_driver_says_is_no_crash(env, cuda, driver) -> None:
    cuda_warning(env, cuda_version=cuda, driver_version=driver)
