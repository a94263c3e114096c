"""The NVML driver: our code, the real pynvml, and a C library that answers from a script.

Goal: one card's trouble stays that card's, unknown is never 0, and whatever the driver answers the agent
lives. Method: `nvml_stub/nvml_stub.c`, built in the variants of older drivers; each test writes the script.
Numbers in comments are those of CASES.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest
from rigbook_nodeagent.gpus.nvml import NvmlGpus
from rigbook_nodeagent.gpus.protocol import GpusError
from rigbook_nodeagent.gpus.worker import GpuWorker

GIB = 1024**3
SOURCE = Path(__file__).parent / "nvml_stub" / "nvml_stub.c"
A = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
B = "GPU-bbbbbbbb-0000-0000-0000-000000000000"
C = "GPU-cccccccc-0000-0000-0000-000000000000"
NOT_SUPPORTED, NO_PERMISSION, GPU_IS_LOST, MISMATCH, UNKNOWN = 3, 4, 15, 18, 999
FULL = "util=55 temp=61 power=250500 fan=40 ecc=0 mode=0 mig=0"


def card(index: int, uuid: str, *, name="NVIDIA_A100-SXM4-80GB", total=80 * GIB, used=GIB, rest=FULL) -> str:
    return f"card {index} uuid={uuid} name={name} bus=00000000:{0x10 + index:02X}:00.0 total={total} used={used} {rest}"


HEAD = "driver 550.54.15\ncuda 12040\n"


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """Builds a variant once; returns the file."""
    folder = tmp_path_factory.mktemp("nvml")

    def built(*defines: str) -> Path:
        library = folder / ("-".join(defines) or "full") / "libnvidia-ml.so.1"
        if not library.exists():
            library.parent.mkdir()
            subprocess.run(
                [
                    "gcc",
                    "-Wall",
                    "-Werror",
                    "-shared",
                    "-fPIC",
                    *(f"-D{one}" for one in defines),
                    "-Wl,-soname,libnvidia-ml.so.1",
                    "-o",
                    library,
                    SOURCE,
                ],
                check=True,
            )
        return library

    return built


class World:
    """The machine's driver and cards, as lines of the script."""

    def __init__(self, script: Path) -> None:
        self._script = script

    def is_(self, *lines: str) -> None:
        new = self._script.with_suffix(".new")
        new.write_text(HEAD + "\n".join(lines) + "\n")
        new.replace(self._script)


@pytest.fixture
def world(tmp_path, monkeypatch, libraries, request):
    """The stub in the place of the driver's library; parametrise `world` indirectly for older ones."""
    script = tmp_path / "script"
    monkeypatch.setenv("NVML_STUB_SCRIPT", str(script))
    library = libraries(*getattr(request, "param", ()))
    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(library)))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    world = World(script)
    world.is_()
    return world


@pytest.fixture
def gpus(world):
    gpus = NvmlGpus(host_memory_bytes=lambda: 128 * GIB, now_ns=lambda: 1_700_000_000_000_000_000)
    yield gpus
    gpus.close()


def by_uuid(values):
    return {value.uuid: value for value in values}


def test_facts_inventory_and_sample_of_a_healthy_node(world, gpus):
    world.is_(card(0, A), card(1, B, rest="util=0 temp=30 mode=3"))
    facts = gpus.open()
    assert (facts.ok, facts.driver_version, facts.cuda_version, facts.simulated) == (
        True,
        "550.54.15",
        "12.4",
        False,
    )
    first, second = gpus.inventory()
    assert (first.uuid, first.index, first.model) == (A, 0, "NVIDIA A100-SXM4-80GB")
    assert (first.memory_bytes, first.pci_bus_id, first.usable) == (80 * GIB, "00000000:10:00.0", True)
    assert (first.compute_mode, second.compute_mode) == ("Default", "Exclusive_Process")
    sample = by_uuid(gpus.sample())
    assert (sample[A].memory_used_bytes, sample[A].memory_total_bytes) == (GIB, 80 * GIB)
    assert (sample[A].utilisation_percent, sample[A].temperature_celsius) == (55.0, 61.0)
    assert (sample[A].power_watts, sample[A].fan_percent, sample[A].ecc_uncorrected) == (250.5, 40.0, 0)
    assert (sample[A].processes, sample[A].unknown, sample[A].as_of) == (
        (),
        "",
        "2023-11-14T22:13:20.000000Z",
    )
    # what a card does not have is None, not 0, and no reason to distrust the rest
    assert (sample[B].power_watts, sample[B].fan_percent, sample[B].ecc_uncorrected) == (None, None, None)
    assert sample[B].unknown == ""


def test_a_node_without_cards_is_a_node(world, gpus):
    facts = gpus.open()
    assert (facts.ok, facts.text) == (True, "the driver works and sees no card")
    assert list(gpus.inventory()) == []
    assert list(gpus.sample()) == []


# -- the driver as a whole ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (9, "modprobe nvidia"),
        (MISMATCH, "Driver/library version mismatch"),
        (NO_PERMISSION, "/dev/nvidia"),
        (999, "Unknown"),
    ],
)
def test_a_driver_that_does_not_start_says_what_to_do_and_is_tried_again(world, gpus, code, text):
    world.is_(card(0, A), f"error Init * {code}")
    facts = gpus.open()
    assert not facts.ok
    assert text in facts.text
    with pytest.raises(GpusError, match="not open"):
        gpus.inventory()
    world.is_(card(0, A))
    assert gpus.open().ok
    assert len(gpus.inventory()) == 1


def test_an_upgrade_under_a_running_agent_is_a_mismatch_of_the_node(world, gpus):  # 25
    world.is_(card(0, A))
    gpus.open()
    gpus.inventory()
    world.is_(card(0, A), f"error * * {MISMATCH}")
    with pytest.raises(GpusError, match=r"version mismatch.*Running work is left alone.*reboot"):
        gpus.sample()
    facts = gpus.open()
    assert not facts.ok
    assert "version mismatch" in facts.text
    world.is_(card(0, A))
    assert gpus.open().ok
    assert gpus.sample()[0].unknown == ""


def test_a_driver_without_library_is_told(tmp_path):
    program = (
        "from rigbook_nodeagent.gpus.nvml import NvmlGpus\n"
        "facts = NvmlGpus().open()\n"
        "assert not facts.ok\n"
        "print(facts.text)\n"
    )
    told = in_a_process(program, LD_LIBRARY_PATH=str(tmp_path))
    assert "install the NVIDIA driver" in told
    assert "--gpus sim:" in told


def test_the_library_is_found_as_a_drivers_would_be(tmp_path, libraries):
    script = tmp_path / "script"
    script.write_text(HEAD + card(0, A) + "\n")
    program = (
        "from rigbook_nodeagent.gpus.nvml import NvmlGpus\n"
        "gpus = NvmlGpus()\n"
        "print(gpus.open().driver_version, gpus.inventory()[0].uuid, gpus.sample()[0].memory_used_bytes)\n"
    )
    told = in_a_process(program, LD_LIBRARY_PATH=str(libraries().parent), NVML_STUB_SCRIPT=str(script))
    assert told.split() == ["550.54.15", A, str(GIB)]


def in_a_process(program: str, **environment: str) -> str:
    paths = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    ).stdout


# -- one card -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["*", "GetHandleByIndex", "GetMemoryInfo"])
def test_a_lost_card_leaves_the_others_as_they_are(world, gpus, function):  # 24
    cards = [card(0, A), card(1, B), card(2, C)]
    world.is_(*cards)
    gpus.open()
    gpus.inventory()
    world.is_(*cards, f"error {function} 1 {GPU_IS_LOST}")
    for _ in range(2):
        inventory = by_uuid(gpus.inventory())
        assert set(inventory) == {A, B, C}
        assert (inventory[A].usable, inventory[C].usable) == (True, True)
        assert not inventory[B].usable
        assert "GPU is lost" in inventory[B].why
        assert inventory[B].model == "NVIDIA A100-SXM4-80GB", "it keeps its name"
        sample = by_uuid(gpus.sample())
        assert (sample[B].memory_used_bytes, sample[B].processes) == (None, None)
        assert "GPU is lost" in sample[B].unknown
        assert (sample[A].memory_used_bytes, sample[C].unknown) == (GIB, "")
    world.is_(*cards)  # after a reset
    assert all(one.usable for one in gpus.inventory())
    assert by_uuid(gpus.sample())[B].memory_used_bytes == GIB


def test_a_card_that_gets_lost_between_inventory_and_sample_is_unknown(world, gpus):
    world.is_(card(0, A), card(1, B))
    gpus.open()
    gpus.inventory()
    world.is_(card(0, A), card(1, B), f"error * 0 {GPU_IS_LOST}")
    sample = by_uuid(gpus.sample())
    assert (sample[A].memory_used_bytes, sample[A].unknown) == (None, "GPU is lost")
    assert sample[B].memory_used_bytes == GIB


def test_a_card_lost_before_the_agent_started_is_listed_without_a_name(world, gpus):
    world.is_(card(0, A), card(1, B), f"error GetHandleByIndex 0 {GPU_IS_LOST}")
    gpus.open()
    inventory = by_uuid(gpus.inventory())
    assert set(inventory) == {"unreadable-0", B}
    assert not inventory["unreadable-0"].usable
    assert "reboot" in inventory["unreadable-0"].why
    assert "GPU is lost" in by_uuid(gpus.sample())["unreadable-0"].unknown


def test_a_card_that_was_taken_out_is_forgotten(world, gpus):
    world.is_(card(0, A), card(1, B))
    gpus.open()
    gpus.inventory()
    world.is_(card(0, A))
    assert [one.uuid for one in gpus.inventory()] == [A]
    assert [one.uuid for one in gpus.sample()] == [A]


def test_insufficient_permission_for_one_card(world, gpus):
    world.is_(card(0, A), card(1, B), f"error GetMemoryInfo 0 {NO_PERMISSION}")
    gpus.open()
    inventory = by_uuid(gpus.inventory())
    assert (inventory[A].usable, inventory[A].why) == (False, "memory is unknown: Insufficient Permissions")
    sample = by_uuid(gpus.sample())
    assert (sample[A].memory_used_bytes, sample[A].unknown) == (None, "memory: Insufficient Permissions")
    assert sample[A].temperature_celsius == 61.0
    assert sample[B].memory_used_bytes == GIB


def test_processes_that_may_not_be_read_are_unknown_not_none_at_all(world, gpus):
    world.is_(card(0, A), f"error GetComputeRunningProcesses * {NO_PERMISSION}")
    gpus.open()
    (sample,) = gpus.sample()
    assert (sample.processes, sample.unknown) == (None, "processes: Insufficient Permissions")


def test_identity_is_the_uuid_whatever_the_index(world, gpus):  # 27
    world.is_(card(0, A, used=1), card(1, B, used=2))
    gpus.open()
    assert [(one.uuid, one.index) for one in gpus.inventory()] == [(A, 0), (B, 1)]
    # after a reboot the indices have changed places
    world.is_(card(0, B, used=2), card(1, A, used=1))
    assert [(one.uuid, one.index) for one in gpus.inventory()] == [(B, 0), (A, 1)]
    sample = by_uuid(gpus.sample())
    assert (sample[A].memory_used_bytes, sample[B].memory_used_bytes) == (1, 2)
    assert gpus.environment([A, B]) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": f"{A},{B}",
        "NVIDIA_VISIBLE_DEVICES": f"{A},{B}",
    }
    assert gpus.environment([])["CUDA_VISIBLE_DEVICES"] == ""


def test_cards_come_in_pci_order(world, gpus):
    world.is_(
        f"card 0 uuid={A} name=X bus=00000000:C1:00.0 total={GIB} used=0",
        f"card 1 uuid={B} name=X bus=00000000:2A:00.0 total={GIB} used=0",
    )
    gpus.open()
    assert [one.uuid for one in gpus.inventory()] == [B, A]


def test_a_prohibited_card_is_not_usable(world, gpus):
    world.is_(card(0, A, rest="mode=2"))
    gpus.open()
    (inventory,) = gpus.inventory()
    assert (inventory.usable, inventory.compute_mode) == (False, "Prohibited")
    assert "nvidia-smi -c" in inventory.why


# -- health -------------------------------------------------------------------------------------------

SICK = "limit=400000 throttle=72 corrected=12 ecc=3 remapped=2 pending=1 failed=0 mode=0 mig=0 util=7"


def test_health_of_a_card_that_has_all_of_it(world, gpus):
    world.is_(card(0, A, rest=SICK), card(1, B, rest="util=1"))
    gpus.open()
    gpus.inventory()
    sample = by_uuid(gpus.sample())
    sick, plain = sample[A], sample[B]
    assert (sick.power_limit_watts, sick.compute_mode, sick.mig) == (400.0, "Default", False)
    assert sick.throttles == ("hardware slowdown", "hardware thermal slowdown")
    assert (sick.ecc_corrected, sick.ecc_uncorrected) == (12, 3)
    assert (sick.rows_remapped, sick.remap_pending, sick.remap_failed) == (2, True, False)
    assert sick.pages_retired is None, "a card that remaps rows retires no pages"
    assert (plain.power_limit_watts, plain.throttles, plain.rows_remapped, plain.remap_pending) == (None,) * 4
    assert (plain.unknown, plain.memory_used_bytes) == ("", GIB)


def test_an_older_card_tells_its_retired_pages(world, gpus):
    world.is_(card(0, A, rest="retired=3 pending=0"))
    gpus.open()
    gpus.inventory()
    (sample,) = gpus.sample()
    assert (sample.pages_retired, sample.remap_pending, sample.rows_remapped) == (3, False, None)


@pytest.mark.parametrize("world", [("NO_HEALTH", "NO_EVENTS")], indirect=True)
def test_a_driver_without_health_and_events_is_a_driver(world, gpus):
    world.is_(card(0, A), "xid 0 79")
    gpus.open()
    gpus.inventory()
    (sample,) = gpus.sample()
    assert (sample.memory_used_bytes, sample.unknown, sample.xids) == (GIB, "", ())
    assert (sample.throttles, sample.power_limit_watts, sample.pages_retired) == (None, None, None)


def test_xids_are_heard_each_once_and_kept(world, gpus):
    world.is_(card(0, A), card(1, B))
    gpus.open()
    gpus.inventory()
    assert by_uuid(gpus.sample())[A].xids == ()
    world.is_(card(0, A), card(1, B), "xid 1 31", "xid 1 94", "xid 0 13")
    sample = by_uuid(gpus.sample())
    assert [x.code for x in sample[B].xids] == [31, 94]
    assert [x.code for x in sample[A].xids] == [13]
    assert sample[B].xids[1].meaning.startswith("contained ECC error")
    assert sample[B].xids[1].at == "2023-11-14T22:13:20.000000Z"
    assert not sample[B].lost
    assert len(by_uuid(gpus.sample())[B].xids) == 2, "told once, shown again"


def test_xid_79_is_a_lost_card_even_while_it_still_answers(world, gpus):  # 24
    world.is_(card(0, A), card(1, B))
    gpus.open()
    gpus.inventory()
    world.is_(card(0, A), card(1, B), "xid 0 79")
    sample = by_uuid(gpus.sample())
    assert (sample[A].lost, sample[A].memory_used_bytes) == (True, None)
    assert "fallen off the bus" in sample[A].unknown
    assert (sample[B].lost, sample[B].memory_used_bytes) == (False, GIB)
    inventory = by_uuid(gpus.inventory())
    assert not inventory[A].usable
    assert "Xid 79" in inventory[A].why
    assert inventory[B].usable


def test_a_card_that_was_lost_and_reset_is_in_service_again(world):
    ticks = iter(range(1_700_000_000, 1_700_001_000))
    gpus = NvmlGpus(now_ns=lambda: next(ticks) * 10**9)
    world.is_(card(0, A), card(1, B))
    gpus.open()
    gpus.inventory()
    world.is_(card(0, A), card(1, B), "xid 0 79", f"error * 0 {GPU_IS_LOST}")
    assert by_uuid(gpus.sample())[A].lost
    assert not by_uuid(gpus.inventory())[A].usable
    world.is_(card(0, A), card(1, B), "xid 0 79")
    assert by_uuid(gpus.inventory())[A].usable
    sample = by_uuid(gpus.sample())[A]
    assert (sample.lost, sample.memory_used_bytes) == (False, GIB)
    assert [x.code for x in sample.xids] == [79], "the story stays"
    gpus.close()


def test_one_process_at_a_time_is_set_once_and_taken_back(world, gpus):
    cards = [card(0, A), card(1, B)]
    world.is_(*cards)
    gpus.open()
    gpus.inventory()
    assert gpus.limit_processes({A: True, B: False}) == {}
    gpus.inventory()
    sample = by_uuid(gpus.sample())
    assert (sample[A].compute_mode, sample[B].compute_mode) == ("Exclusive_Process", "Default")
    world.is_(*cards, f"error SetComputeMode * {NO_PERMISSION}")
    assert gpus.limit_processes({A: True}) == {}, "it is so already: nothing is set"
    assert gpus.limit_processes({A: False, C: True}) == {
        A: "compute mode: Insufficient Permissions",
        C: "the card does not answer",
    }
    world.is_(*cards)
    assert gpus.limit_processes({A: False}) == {}
    gpus.inventory()
    assert by_uuid(gpus.sample())[A].compute_mode == "Default"


def test_a_storm_of_xids_holds_nobody_up(world, gpus):
    world.is_(card(0, A))
    gpus.open()
    gpus.inventory()
    world.is_(card(0, A), *["xid 0 31"] * 1000)
    for _ in range(3):
        (sample,) = gpus.sample()
        assert len(sample.xids) == 8


@pytest.mark.parametrize("code", [2, 3, 13, 999])
@pytest.mark.parametrize(
    "function", ["EventSetCreate", "GetSupportedEventTypes", "RegisterEvents", "EventSetWait"]
)
def test_events_that_cannot_be_had_cost_nothing_else(world, gpus, function, code):
    world.is_(card(0, A), f"error {function} * {code}", "xid 0 79")
    gpus.open()
    gpus.inventory()
    (sample,) = gpus.sample()
    assert (sample.memory_used_bytes, sample.xids, sample.lost) == (GIB, (), False)


def test_instances_share_the_xids_of_their_card(world, gpus):
    world.is_(*SPLIT)
    gpus.open()
    gpus.inventory()
    world.is_(*SPLIT, "xid 0 79")
    sample = by_uuid(gpus.sample())
    assert (sample["MIG-1"].lost, sample["MIG-2"].lost, sample[B].lost) == (True, True, False)


# -- memory -------------------------------------------------------------------------------------------


def test_unified_memory_is_a_share_of_the_hosts(world, gpus):  # 26
    world.is_(
        f"card 0 uuid={A} name=NVIDIA_GB10 bus=0000000F:01:00.0 util=3", f"process 0 compute 4711 {5 * GIB}"
    )
    gpus.open()
    (inventory,) = gpus.inventory()
    assert (inventory.unified_memory, inventory.usable, inventory.memory_bytes) == (True, True, 96 * GIB)
    (sample,) = gpus.sample()
    assert (sample.memory_used_bytes, sample.memory_total_bytes) == (5 * GIB, 96 * GIB)
    world.is_(f"card 0 uuid={A} name=NVIDIA_GB10 bus=0000000F:01:00.0", "process 0 compute 4711 na")
    (sample,) = gpus.sample()
    assert sample.memory_used_bytes is None
    assert "shared with the host" in sample.unknown


def test_the_same_answer_from_a_discrete_card_is_unknown_and_unusable(world, gpus):  # 26
    world.is_(card(0, A), f"error GetMemoryInfo * {NOT_SUPPORTED}")
    gpus.open()
    (inventory,) = gpus.inventory()
    assert (inventory.unified_memory, inventory.usable, inventory.memory_bytes) == (False, False, 0)
    assert inventory.why == "memory is unknown: Not Supported"
    (sample,) = gpus.sample()
    assert (sample.memory_used_bytes, sample.unknown) == (None, "memory: Not Supported")


def test_a_card_with_no_memory_at_all_is_unusable(world, gpus):
    world.is_(card(0, A, total=0, used=0))
    gpus.open()
    assert gpus.inventory()[0].why == "memory is unknown: the driver shows 0 bytes"


def test_a_sample_beyond_the_card_is_rejected_and_the_last_good_one_kept_with_its_age(world):
    ticks = iter(range(1_700_000_000, 1_700_000_100))
    gpus = NvmlGpus(now_ns=lambda: next(ticks) * 10**9)
    world.is_(card(0, A, used=7 * GIB))
    gpus.open()
    gpus.inventory()
    (good,) = gpus.sample()
    # used + free wraps around below 0 in some drivers after a reset
    world.is_(card(0, A, used=2**63))
    (kept,) = gpus.sample()
    assert (kept.memory_used_bytes, kept.as_of, gpus.samples_rejected) == (7 * GIB, good.as_of, 1)
    assert "rejected" in kept.unknown
    assert good.as_of in kept.unknown
    world.is_(card(0, A, used=8 * GIB))
    (after,) = gpus.sample()
    assert (after.memory_used_bytes, after.unknown, gpus.samples_rejected) == (8 * GIB, "", 1)
    gpus.close()


def test_absurd_side_figures_are_unknown_and_do_not_spoil_the_rest(world, gpus):
    world.is_(card(0, A, rest="util=4294967295 temp=4294967295 power=4294967295 fan=4294967295"))
    gpus.open()
    (sample,) = gpus.sample()
    assert (sample.utilisation_percent, sample.temperature_celsius) == (None, None)
    assert (sample.power_watts, sample.fan_percent) == (None, None)
    assert (sample.memory_used_bytes, sample.unknown) == (GIB, "")


def test_reserved_memory_is_not_use_where_the_driver_tells_them_apart(world, gpus):
    world.is_(card(0, A, rest=f"reserved={GIB}"))
    gpus.open()
    assert gpus.sample()[0].memory_used_bytes == GIB


@pytest.mark.parametrize(
    "world",
    [("NO_MEMORY_V2",), ("NO_PROCESSES_V3",), ("NO_MEMORY_V2", "NO_PROCESSES_V3", "NO_PROCESSES_V2")],
    indirect=True,
)
def test_older_drivers_answer_by_their_older_functions(world, gpus):
    world.is_(card(0, A), f"process 0 compute 4711 {2 * GIB}", "process 0 graphics 4712 na")
    gpus.open()
    for _ in range(2):
        (sample,) = gpus.sample()
        assert (sample.memory_used_bytes, sample.unknown) == (GIB, "")
        assert [(one.pid, one.memory_bytes) for one in sample.processes] == [(4711, 2 * GIB), (4712, None)]


# -- processes ----------------------------------------------------------------------------------------


def test_a_process_in_two_lists_is_one_process(world, gpus):
    world.is_(
        card(0, A),
        f"process 0 compute 10 {GIB}",
        f"process 0 graphics 10 {GIB}",
        f"process 0 mps 11 {2 * GIB}",
        "process 0 compute 12 na",
    )
    gpus.open()
    (sample,) = gpus.sample()
    assert [(one.pid, one.memory_bytes) for one in sample.processes] == [(10, GIB), (11, 2 * GIB), (12, None)]
    assert all(one.epoch is None for one in sample.processes), "whose it is is the agent's business"


def test_pids_that_cannot_be_are_shown_as_unplaced(world, gpus):
    world.is_(
        card(0, A), f"process 0 compute 0 {GIB}", "process 0 compute 4294967295 na", "process 0 compute 7 1"
    )
    gpus.open()
    (sample,) = gpus.sample()
    assert [(one.pid, one.memory_bytes) for one in sample.processes] == [(7, 1), (0, GIB), (0, None)]


def test_a_card_without_graphics_and_mps_lists_its_compute_processes(world, gpus):
    world.is_(
        card(0, A),
        f"error GetGraphicsRunningProcesses * {NOT_SUPPORTED}",
        f"error GetMPSComputeRunningProcesses * {UNKNOWN}",
        "process 0 compute 7 1",
    )
    gpus.open()
    (sample,) = gpus.sample()
    assert ([one.pid for one in sample.processes], sample.unknown) == ([7], "")


# -- MIG ----------------------------------------------------------------------------------------------

SPLIT = (
    card(0, A, rest="mig=1"),
    f"mig 0 0 uuid=MIG-1 name=NVIDIA_A100_MIG_3g.40gb total={40 * GIB} used={GIB}",
    f"mig 0 2 uuid=MIG-2 name=NVIDIA_A100_MIG_1g.10gb total={10 * GIB} used=0",
    f"process 0.0 compute 4711 {GIB}",
    card(1, B),
)


def test_mig_instances_are_cards_of_their_own(world, gpus):
    world.is_(*SPLIT)
    gpus.open()
    inventory = gpus.inventory()
    assert [(one.uuid, one.index, one.parent, one.usable) for one in inventory] == [
        (A, 0, "", False),
        ("MIG-1", 100, A, True),
        ("MIG-2", 102, A, True),
        (B, 1, "", True),
    ]
    assert inventory[0].why == "in MIG mode with 2 instances, which are cards of their own"
    assert (inventory[1].memory_bytes, inventory[1].model) == (40 * GIB, "NVIDIA A100 MIG 3g.40gb")
    sample = by_uuid(gpus.sample())
    assert [one.pid for one in sample["MIG-1"].processes] == [4711]
    assert sample["MIG-1"].memory_used_bytes == GIB
    assert sample["MIG-2"].processes == ()


def test_instances_of_a_lost_card_are_lost_with_it(world, gpus):
    world.is_(*SPLIT)
    gpus.open()
    gpus.inventory()
    world.is_(*SPLIT, f"error * 0 {GPU_IS_LOST}")
    for _ in range(2):
        inventory = by_uuid(gpus.inventory())
        assert {uuid: one.usable for uuid, one in inventory.items()} == {
            A: False,
            "MIG-1": False,
            "MIG-2": False,
            B: True,
        }
        assert by_uuid(gpus.sample())["MIG-2"].unknown


# -- hangs and surprises ------------------------------------------------------------------------------


async def test_a_driver_that_hangs_is_an_error_at_once_and_serves_again(world, gpus):
    worker = GpuWorker(gpus, timeout_seconds=0.2)
    world.is_(card(0, A))
    await worker.facts()
    await worker.inventory()
    world.is_(card(0, A), "hang GetMemoryInfo_v2 0")
    with pytest.raises(GpusError, match="did not answer"):
        await worker.sample()
    with pytest.raises(GpusError, match="hangs: `sample`"):
        await worker.inventory()
    assert worker.status.hung
    world.is_(card(0, A))
    while worker.status.call:
        await asyncio.sleep(0.01)
    assert len(await worker.sample()) == 1
    assert (worker.status.timeouts, worker.status.hung) == (1, False)
    await worker.close()


@pytest.mark.parametrize(
    "line",
    [
        f"error {function} 0 {code}"
        for function in (
            "GetUUID",
            "GetName",
            "GetPciInfo",
            "GetMemoryInfo",
            "GetComputeRunningProcesses",
            "GetFanSpeed",
        )
        for code in (2, 3, 6, 10, 11, 16, 17, 19, 20, 27, 999, 12345)
    ],
)
def test_whatever_one_function_answers_the_other_card_is_fine(world, gpus, line):
    world.is_(card(0, A), card(1, B))
    gpus.open()
    gpus.inventory()
    world.is_(card(0, A), card(1, B), line)
    assert by_uuid(gpus.inventory())[B].usable
    assert by_uuid(gpus.sample())[B].memory_used_bytes == GIB
