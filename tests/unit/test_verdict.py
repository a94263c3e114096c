"""Why it ended: from evidence to a verdict, first match in the documented order."""

from __future__ import annotations

from typing import Any

import pytest
from rigbook_nodeagent.engines.protocol import Running
from rigbook_nodeagent.orders import Stop
from rigbook_nodeagent.verdict import verdict
from rigbook_schemas.values import Engine, EvictionReason, VerdictClass


def ended(**more: Any) -> Running:
    values: dict[str, Any] = {"exit_code": 0, "ended": "2026-11-30T02:00:00Z", **more}
    return Running(
        cluster="c",
        node="a",
        demand="d",
        epoch=1,
        component="main",
        engine=Engine.PROCESS,
        ref="pid:1@2",
        running=False,
        **values,
    )


def stop(reason: EvictionReason = EvictionReason.WITHDRAWN) -> Stop:
    return Stop(epoch=1, demand="d", seq=9, event_id="x", reason=reason, by="ann")


@pytest.mark.parametrize(
    ("components", "order", "refused", "expected"),
    [
        ([ended()], None, None, VerdictClass.COMPLETED),
        ([ended(exit_code=3)], None, None, VerdictClass.APPLICATION_EXIT),
        ([ended(), ended(exit_code=1)], None, None, VerdictClass.APPLICATION_EXIT),
        ([ended(exit_code=None, signal=11)], None, None, VerdictClass.APPLICATION_EXIT),
        ([ended(exit_code=137)], stop(), None, VerdictClass.STOPPED_BY_US),
        ([ended(exit_code=None, signal=9)], stop(), None, VerdictClass.STOPPED_BY_US),
        ([ended(exit_code=137)], stop(EvictionReason.PREEMPTION), None, VerdictClass.PREEMPTED),
        ([ended(exit_code=137)], None, None, VerdictClass.APPLICATION_EXIT),
        ([ended(exit_code=137, oom_killed=True)], None, None, VerdictClass.OOM_CGROUP),
        ([ended(exit_code=None)], None, None, VerdictClass.UNKNOWN),
        ([], None, None, VerdictClass.UNKNOWN),
        ([], None, ("runtime_missing", "no toolkit"), VerdictClass.RUNTIME_MISSING),
        ([], None, ("image_pull", "no such image"), VerdictClass.IMAGE_PULL),
        ([], stop(), ("no_such_program", "x"), VerdictClass.START_FAILED),
        ([], stop(), None, VerdictClass.STOPPED_BY_US),
    ],
)
def test_verdict(
    components: list[Running], order: Stop | None, refused: tuple[str, str] | None, expected: VerdictClass
) -> None:
    said = verdict(components, stop=order, refused=refused)
    assert said.verdict is expected
    assert said.sentence
    assert said.confidence in ("high", "medium", "low")


def test_the_sentence_names_component_and_code() -> None:
    assert (
        "component main ended by itself with exit code 3" in verdict([ended(exit_code=3)], stop=None).sentence
    )
    assert "SIGSEGV" in verdict([ended(exit_code=None, signal=11)], stop=None).sentence
