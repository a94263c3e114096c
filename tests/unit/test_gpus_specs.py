"""Descriptions of simulated machines, and samples beyond belief.

Goal: a typing mistake says what was expected; UUIDs outlive restarts; an impossible number is never shown.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given
from rigbook_nodeagent.gpus.plausible import LastGood
from rigbook_nodeagent.gpus.simulated import KNOWN, SimulatedGpus, card_models
from rigbook_schemas.values import GIB, CardObservation


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("sim:4xRTX4090", [("NVIDIA GeForce RTX 4090", 24)] * 4),
        ("sim:2xA800-80GB,T4", [("NVIDIA A800-SXM4-80GB", 80)] * 2 + [("Tesla T4", 16)]),
        ("sim:1xh200", [("NVIDIA H200", 141)]),
        ("sim: 2 x rtx 3090 ", [("NVIDIA GeForce RTX 3090", 24)] * 2),
        ("sim:GB10", [("NVIDIA GB10", 96)]),
        ("sim:2xMI300X-192GB", [("MI300X-192GB", 192)] * 2),
    ],
)
def test_a_machine_in_words(spec, expected):
    assert [(model.name, model.memory_bytes / GIB) for model in card_models(spec)] == expected


def test_every_known_card_can_be_asked_for():
    for name in KNOWN:
        assert card_models(f"sim:{name}")[0].memory_bytes > 0


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("4xRTX4090", "sim:4xRTX4090"),
        ("sim:", "expected COUNTxMODEL"),
        ("sim:0xT4", "expected COUNTxMODEL"),
        ("sim:200xT4", "1 to 128"),
        ("sim:100xT4,100xL4", "at most 128"),
        ("sim:2xA100", "write A100-40GB or A100-80GB"),
        ("sim:2xVoodoo2", "known are RTX3090, RTX4090.*Voodoo2-48GB"),
        ("sim:2xT4,", "expected COUNTxMODEL"),
    ],
)
def test_a_mistake_says_what_was_expected(spec, text):
    with pytest.raises(ValueError, match=text):
        card_models(spec)


@given(st.text(max_size=30))
def test_any_text_is_a_machine_or_a_value_error(text):
    try:
        models = card_models(f"sim:{text}")
    except ValueError:
        return
    assert models


def test_uuids_are_stable_and_tell_nodes_and_cards_apart(tmp_path):
    def uuids(spec: str, **where: str) -> list[str]:
        gpus = SimulatedGpus(spec, tmp_path / where.pop("folder", "a"), **where)
        gpus.open()
        return [card.uuid for card in gpus.inventory()]

    first = uuids("sim:2xT4")
    assert first == uuids("sim:2xT4")
    assert first == uuids("sim:3xT4")[:2], "a card more leaves the others their names"
    assert len({*first, *uuids("sim:2xT4", folder="b"), *uuids("sim:2xL4")}) == 6
    assert uuids("sim:T4", node="n") == uuids("sim:T4", node="n", folder="b"), (
        "by node, wherever its folder is"
    )
    assert all(uuid.startswith("GPU-") for uuid in first)


def observation(**fields) -> CardObservation:
    return CardObservation(uuid="GPU-1", as_of="2026-01-01T00:00:00Z", **fields)


numbers = st.none() | st.integers(-(2**70), 2**70)


@given(st.lists(st.tuples(numbers, numbers), max_size=8))
def test_shown_memory_is_always_possible(readings):
    judge = LastGood()
    for used, total in readings:
        shown = judge.judged(
            observation(memory_used_bytes=used, memory_total_bytes=total), total_bytes=24 * GIB
        )
        if shown.memory_used_bytes is not None:
            assert 0 <= shown.memory_used_bytes <= (shown.memory_total_bytes or 24 * GIB)


def test_a_rejected_sample_before_any_good_one_is_unknown():
    judge = LastGood()
    shown = judge.judged(observation(memory_used_bytes=99 * GIB, memory_total_bytes=24 * GIB))
    assert (shown.memory_used_bytes, shown.memory_total_bytes, judge.rejected) == (None, None, 1)
    assert shown.unknown == "sample rejected: the driver shows 99.0 GiB used of 24.0"


def test_an_unknown_sample_is_no_last_good_one():
    judge = LastGood()
    judge.judged(observation(memory_used_bytes=None, unknown="memory: Unknown Error"))
    shown = judge.judged(observation(memory_used_bytes=-1))
    assert shown.memory_used_bytes is None
