"""What a demand file and the command line say about policy: headroom, weights, windows, preemption, shares."""

from __future__ import annotations

import pytest
from rigbook.commands.policy import _share
from rigbook.demandfile import DemandFileError, read_text
from rigbook.failures import Invalid
from rigbook_schemas.events import DemandRaised
from rigbook_schemas.values import GIB, Window

HEAD = """\
name: train
project: nlp
owner: Ravi
workload: batch
command: python train.py
"""


def one(resources: str, more: str = "") -> DemandRaised:
    (filed,) = read_text(f"{HEAD}resources: {{memory: 24GB{resources}}}\n{more}", "f.yaml")
    return filed.spec


def test_every_field_of_policy_arrives() -> None:
    spec = one(
        ", headroom: 1.2, weights: qwen3-32b, weights_size: 54GiB",
        'preempts: true\npreemptible: true\nplacement: spread\nwindows: ["22:00-06:00", '
        '{start: "09:00", end: "17:00", days: [mon, fri], utc_offset_minutes: 60}]\n',
    )
    request = spec.resources
    assert (request.headroom, request.weights, request.weights_bytes) == (1.2, "qwen3-32b", 54 * GIB)
    assert (spec.preempts, spec.preemptible, spec.placement) == (True, True, "spread")
    assert spec.windows == (
        Window(start="22:00", end="06:00"),
        Window(start="09:00", end="17:00", days=(1, 5), utc_offset_minutes=60),
    )


@pytest.mark.parametrize(
    ("resources", "more", "field"),
    [
        (", headroom: 0.5", "", "resources.headroom"),
        (", headroom: 5", "", "resources.headroom"),
        (", headroom: much", "", "resources.headroom"),
        ("", 'windows: ["25:00-06:00"]\n', "windows[0]"),
        ("", "windows: [night]\n", "windows[0]"),
        ("", "windows: []\n", "windows"),
        ("", 'windows: [{start: "22:00"}]\n', "windows[0].end"),
        ("", 'windows: [{start: "22:00", end: "7"}]\n', "windows[0].end"),
        ("", 'windows: [{start: "22:00", end: "06:00", days: [someday]}]\n', "windows[0].days[0]"),
        ("", "preempts: perhaps\n", "preempts"),
        ("", "placement: 7\n", "placement"),
    ],
)
def test_what_is_wrong_is_named(resources: str, more: str, field: str) -> None:
    with pytest.raises(DemandFileError) as caught:
        one(resources, more)
    assert [problem.field for problem in caught.value.problems] == [field]


@pytest.mark.parametrize(
    ("text", "share"),
    [("33%", 0.33), ("1/3", 1 / 3), ("0.25", 0.25), (".5", 0.5), ("0", 0.0), ("1", 1.0), ("12.5%", 0.125)],
)
def test_a_share_as_people_write_it(text: str, share: float) -> None:
    assert _share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "third", "4/3", "1/0", "101%", "-1", "1e9", "2"])
def test_what_is_no_share(text: str) -> None:
    with pytest.raises(Invalid):
        _share(text)
