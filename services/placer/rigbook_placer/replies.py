"""Questions to the placer, as bytes in and bytes out. Nothing that is asked can end the service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
from rigbook_schemas.events import DemandRaised

from rigbook_placer.planned import offers, plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rigbook_ledger.state import State

    from rigbook_placer.feasible import Kept, Seen
    from rigbook_placer.place import Shortlist

__all__ = ["Standing", "offers_reply", "plan_reply"]


class Standing(NamedTuple):
    """What an answer is made of."""

    state: State
    seen: Mapping[str, Seen]
    kept: Mapping[str, Kept]
    policy: str
    now_ns: int
    shortlist: Shortlist | None


class _PlanQuestion(msgspec.Struct, frozen=True):
    demand: DemandRaised


class _OffersQuestion(msgspec.Struct, frozen=True):
    project: str = ""


_Question = TypeVar("_Question")


def plan_reply(body: bytes, standing: Standing | None) -> bytes:
    """Dry run: {"demand": DemandRaised} to a `planned.Plan`, or {"error": {"code", "text"}}."""
    asked = _asked(body, _PlanQuestion, standing)
    if isinstance(asked, dict) or standing is None:
        return msgspec.json.encode(asked)
    answer = plan(
        standing.state, asked.demand, standing.seen, standing.policy,
        now_ns=standing.now_ns, kept=standing.kept, shortlist=standing.shortlist,
    )  # fmt: skip
    return msgspec.json.encode(answer)


def offers_reply(body: bytes, standing: Standing | None) -> bytes:
    """What would fit now: {"project"} to {"position", "items": [OfferRow]}, or {"error": {"code", "text"}}."""
    asked = _asked(body or b"{}", _OffersQuestion, standing)
    if isinstance(asked, dict) or standing is None:
        return msgspec.json.encode(asked)
    items = offers(standing.state, standing.seen, standing.kept, project=asked.project)
    return msgspec.json.encode({"position": standing.state.position, "items": items})


def _asked(body: bytes, kind: type[_Question], standing: Standing | None) -> _Question | dict[str, Any]:
    """The question, or the error that is the answer."""
    try:
        asked = msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        return {"error": {"code": "bad_question", "text": str(error)}}
    if standing is None:
        return {"error": {"code": "not_ready", "text": "the placer is still reading the log"}}
    return asked
