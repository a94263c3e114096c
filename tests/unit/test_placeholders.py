"""Placeholders: figures of the launch in a component. Goal: never more than the allotment, nothing silently left."""

from __future__ import annotations

import pytest
from rigbook_schemas.placeholders import NAMES, Fill, filled, memory_share, problems, rounded_down
from rigbook_schemas.values import GIB, Component, Mount, Port


def component(*command: str, **more: object) -> Component:
    return Component(command=command, image="x", fill=True, **more)  # type: ignore[arg-type]


def fill(memory_gib: float = 24, card_gib: float = 80, **more: object) -> Fill:
    return Fill(memory_bytes=int(memory_gib * GIB), card_memory_bytes=int(card_gib * GIB), **more)  # type: ignore[arg-type]


def test_case_12_the_share_is_allotment_by_card_and_never_rounded_up() -> None:
    made = filled(component("--gpu-memory-utilization={memory_share}"), fill(24, 80))
    assert made.command == ("--gpu-memory-utilization=0.300",)
    assert rounded_down(2 / 3) == "0.666"
    assert rounded_down(0.3) == "0.300", "a binary fraction is not a reason to lose a digit"


def test_two_halves_and_what_is_left_never_exceed_the_card() -> None:
    for card in (24 * GIB, 24_564 * 1024**2, 80 * GIB - 1):
        for parts in (1, 2, 3, 7):
            shares = [float(rounded_down(memory_share(card // parts, card)))] * parts
            assert sum(shares) <= 1.0


def test_the_whole_card_leaves_the_driver_its_part() -> None:
    share = memory_share(24 * GIB, 24 * GIB)
    assert 0.96 < share < 0.98
    assert memory_share(512 * 1024**2, 512 * 1024**2) == 0.5, "a tiny card keeps half of it"


def test_all_of_them() -> None:
    made = component(
        *(f"{name}={{{name}}}" for name in NAMES),
        env={"WHERE": "{weights_dir}/x"},
        mounts=(Mount(source="{weights_dir}", target="/models"),),
        ports=(Port(port=8000),),
    )
    done = filled(made, fill(24, 80, gpu_count=2, weights_dir="/srv/weights"))
    told = dict(word.split("=") for word in done.command)
    assert told == {
        "memory_share": "0.300",
        "memory_share_static": "0.270",
        "memory_bytes": str(24 * GIB),
        "memory_mib": "24576",
        "memory_rest_bytes": str(56 * GIB),
        "gpu_count": "2",
        "port": "8000",
        "weights_dir": "/srv/weights",
    }
    assert (done.env, done.mounts[0].source) == ({"WHERE": "/srv/weights/x"}, "/srv/weights")


def test_without_fill_nothing_is_touched() -> None:
    plain = Component(command=("echo", "{memory_share}", "{whatever}"))
    assert problems(plain) == []
    assert filled(plain, fill()) is plain


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (component("{memory_shar}"), "command[0]: {memory_shar} is no placeholder"),
        (component(env={"A": "{prot}"}), "env.A: {prot} is no placeholder"),
        (component("{port}"), "{port} and no port is named"),
        (component("{memory_share}", gpu=False), "{memory_share} in a component without a card"),
    ],
)
def test_what_cannot_be_filled_is_told_at_apply_and_refused_at_launch(wrong: Component, words: str) -> None:
    assert any(words in told for told in problems(wrong))
    empty = Fill(memory_bytes=0, card_memory_bytes=0)
    with pytest.raises(ValueError, match=r"is no placeholder|cannot be filled in here"):
        filled(wrong, empty)


def test_json_in_an_argument_is_no_placeholder() -> None:
    made = component('{"image": 4}', "{}", "${HOME}", "{A}", "{1}")
    assert problems(made) == []
    assert filled(made, fill()).command == made.command
