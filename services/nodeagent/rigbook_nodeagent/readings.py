"""Readings of every boundary of one share, from its start to its end, on one monotonic clock.

A bounded ring per boundary, and the last reading of each: a container's cgroup is gone when its end is
noticed, so what was seen last has to do there, while the levels around it can still be read.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_schemas.sentences import gib
from rigbook_schemas.values import Boundary, CardBaseline, Evidence
from rigbook_schemas.wire import instant

from rigbook_nodeagent.boundaries import LevelReading
from rigbook_nodeagent.circumstances import CardTrouble, CardUse, HostMemory, LevelChange, MemoryKill

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rigbook_schemas.values import Allotment, CardObservation

    from rigbook_nodeagent.boundaries import Hierarchy, Place
    from rigbook_nodeagent.engines.protocol import Running

__all__ = ["Readings", "thinned"]

RING_MAX: Final = 240  # readings kept of a boundary: four minutes at one a second
POINTS_MAX: Final = 60  # of them in the event
BOUNDARIES_MAX: Final = 24
STORY_MAX: Final = 48
PIDS_MAX: Final = 4096
NEAR: Final = 0.9  # from here on a boundary is worth a line in the story, and is read more often
# The kernel's log and our clock are the same clock, read by different means.
KILL_SLACK_SECONDS: Final = 1.0


class _Level(msgspec.Struct):
    """One level of one component over time."""

    first: LevelReading
    last: LevelReading
    fresh: bool  # the level was made for this component: its counters began at 0
    ring: collections.deque[tuple[float, int]]
    peak_bytes: int = 0
    near: bool = False
    gone: bool = False
    full_avg10: float | None = None


class _Card(msgspec.Struct):
    allotted_bytes: int
    ring: collections.deque[tuple[float, int]]
    total_bytes: int | None = None
    own_bytes: int | None = None
    others_bytes: int | None = None
    ecc: int | None = None
    lost: bool = False
    xids: frozenset[tuple[int, str]] = frozenset()  # told already, or from before


class Readings:
    """Of one attempt. `allotments` are those of the share on this node."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        epoch: int,
        allotments: Iterable[Allotment],
        *,
        at: float,
        wall_ns: int = 0,
    ) -> None:
        self._hierarchy = hierarchy
        self._epoch = epoch
        self.began = at
        self._began_ns = wall_ns
        self._places: dict[str, Place] = {}
        self._levels: dict[tuple[str, str], _Level] = {}
        self._cards = {
            a.card: _Card(allotted_bytes=a.memory_bytes, ring=collections.deque(maxlen=RING_MAX))
            for a in allotments
        }
        self._pids: set[int] = set()
        self._host: collections.deque[tuple[float, int]] = collections.deque(maxlen=RING_MAX)
        self._host_total: int | None = None
        self._host_full: float | None = None
        self._host_kills: int | None = None
        self._story: collections.deque[Evidence] = collections.deque(maxlen=STORY_MAX)
        self.troubles: list[CardTrouble] = []
        self.baseline: tuple[CardBaseline, ...] = ()

    # -- while it runs ----------------------------------------------------------------------------------

    def note(self, what: str, value: str, *, source: str = "", at: str = "") -> None:
        """Something for the story; `at` is the wall clock, RFC 3339."""
        self._story.append(Evidence(what=what, value=value[:300], source=source, at=at))

    def know(self, running: Iterable[Running]) -> None:
        """These are its components: find out where their memory is charged, once for each."""
        for one in running:
            if len(self._pids) < PIDS_MAX:
                self._pids.update(one.pids)
            known = self._places.get(one.component)
            if known is not None and known.version:
                continue
            pid = one.pids[0] if one.pids else 0
            if one.cgroup or pid:
                self._places[one.component] = self._hierarchy.place_of(pid, folder=one.cgroup)

    def living(self) -> list[int]:
        """Processes in the cgroups made for its components, whatever their engine says."""
        return [pid for place in self._places.values() if place.own for pid in self._hierarchy.pids(place)]

    @property
    def near(self) -> bool:
        """Some boundary is nearly full: worth reading more often."""
        return any(level.near and not level.gone for level in self._levels.values())

    def read(self, at: float, wall: str = "", *, thorough: bool = True) -> None:
        """Read every boundary now. Never raises: what cannot be read stays as it was seen last."""
        for component, place in self._places.items():
            for number, reading in enumerate(self._hierarchy.read(place, thorough=thorough)):
                self._take(component, place, reading, own=number == 0, at=at, wall=wall)

    def _take(
        self, component: str, place: Place, reading: LevelReading, *, own: bool, at: float, wall: str
    ) -> None:
        if own and place.own and reading.name.startswith("group "):
            reading = msgspec.structs.replace(reading, name=f"component {component}")  # a group that we made
        key = (component, reading.path)
        level = self._levels.get(key)
        if level is None:
            if reading.current_bytes is None:
                return
            level = self._levels[key] = _Level(
                first=reading,
                last=reading,
                fresh=own and place.own,
                ring=collections.deque(maxlen=RING_MAX),
            )
        elif reading.current_bytes is None:
            level.gone = True
            return
        killed = (reading.events.get("oom_kill") or 0) - (level.last.events.get("oom_kill") or 0)
        level.last = reading
        level.gone = False
        level.peak_bytes = max(level.peak_bytes, reading.current_bytes or 0, self._peak(level, reading))
        level.full_avg10 = reading.full_avg10 if reading.full_avg10 is not None else level.full_avg10
        level.ring.append((at, reading.current_bytes or 0))
        if killed > 0:
            self.note("oom_kill", f"+{killed} at {reading.name}", source=reading.path, at=wall)
        near = (reading.fullness or 0.0) >= NEAR
        if near and not level.near:
            self.note(
                "near the limit",
                f"{component}: {gib(reading.current_bytes)} of {gib(reading.limit_bytes)} at {reading.name}",
                source=reading.path,
                at=wall,
            )
        level.near = near

    @staticmethod
    def _peak(level: _Level, reading: LevelReading) -> int:
        """The kernel's own high-water mark, where it began with this component."""
        return (reading.peak_bytes or 0) if level.fresh else 0

    def saw_host(
        self,
        at: float,
        *,
        available: int | None,
        total: int | None,
        full_avg10: float | None,
        kills: int | None,
    ) -> None:
        if available is not None:
            self._host.append((at, available))
        self._host_total = total if total is not None else self._host_total
        self._host_full = full_avg10 if full_avg10 is not None else self._host_full
        if self._host_kills is None:
            self._host_kills = kills

    def saw_cards(self, at: float, sample: Iterable[CardObservation]) -> None:
        """A sample of the cards, attributed."""
        for shown in sample:
            card = self._cards.get(shown.uuid)
            if card is None:
                continue
            self._trouble(at, card, shown)
            if shown.unknown:
                continue
            if shown.memory_total_bytes is not None:
                card.total_bytes = shown.memory_total_bytes
            if shown.processes is None:
                continue
            own = sum(p.memory_bytes or 0 for p in shown.processes if p.epoch == self._epoch)
            listed = sum(p.memory_bytes or 0 for p in shown.processes if p.epoch != self._epoch)
            others = listed
            if shown.memory_used_bytes is not None:
                others = max(listed, shown.memory_used_bytes - own)  # the driver's own share included
            card.own_bytes = max(card.own_bytes or 0, own)
            card.others_bytes = max(card.others_bytes or 0, others)
            card.ring.append((at, own))

    def _trouble(self, at: float, card: _Card, shown: CardObservation) -> None:
        """What the driver reports of a card since this attempt began."""
        if shown.lost and not card.lost:
            text = shown.unknown or "the driver has lost it"
            self.troubles.append(CardTrouble(at=at, card=shown.uuid, code="lost", text=text))
        card.lost = shown.lost
        for xid in shown.xids:
            if (xid.code, xid.at) in card.xids:
                continue
            card.xids |= {(xid.code, xid.at)}
            heard_ns = instant(xid.at)
            if heard_ns is None or heard_ns >= self._began_ns:
                trouble = CardTrouble(at=at, card=shown.uuid, code=f"xid {xid.code}", text=xid.meaning)
                self.troubles.append(trouble)
        if shown.ecc_uncorrected is not None:
            if card.ecc is not None and shown.ecc_uncorrected > card.ecc:
                text = f"uncorrectable errors rose from {card.ecc} to {shown.ecc_uncorrected}"
                self.troubles.append(CardTrouble(at=at, card=shown.uuid, code="ecc", text=text))
            card.ecc = shown.ecc_uncorrected

    # -- at its end -------------------------------------------------------------------------------------

    def changes(self) -> tuple[LevelChange, ...]:
        """Every level of every component, from the inside outwards."""
        found: list[LevelChange] = []
        for component, place in self._places.items():
            mine = [(path, level) for (name, path), level in self._levels.items() if name == component]
            mine.sort(key=lambda item: -item[0].count("/"))
            found += [
                self._change(component, level, own=number == 0 and place.own)
                for number, (_, level) in enumerate(mine)
            ]
        return tuple(found)

    def _change(self, component: str, level: _Level, *, own: bool) -> LevelChange:
        last = level.last
        return LevelChange(
            component=component,
            name=last.name,
            path=last.path,
            own=own,
            limit_bytes=last.limit_bytes if last.limited else None,
            last_bytes=last.current_bytes,
            peak_bytes=level.peak_bytes or None,
            limit_hits=_since(level, "max", local=True),
            ooms=_since(level, "oom", local=True),
            ooms_below=_since(level, "oom", local=False),
            kills=_since(level, "oom_kill", local=False),
            gone=level.gone,
            full_avg10=level.full_avg10,
        )

    def host(self, *, kills: int | None = None) -> HostMemory:
        available = self._host[-1][1] if self._host else None
        return HostMemory(
            total_bytes=self._host_total,
            available_bytes=available,
            least_available_bytes=min((value for _, value in self._host), default=None),
            full_avg10=self._host_full,
            kills=kills - self._host_kills if kills is not None and self._host_kills is not None else None,
        )

    def victims(self, kills: Iterable[MemoryKill]) -> tuple[MemoryKill, ...]:
        """Those of the kernel's kills whose victim was a process of this attempt."""
        own = [place.path for place in self._places.values() if place.version and place.own]
        return tuple(
            kill
            for kill in kills
            if kill.at >= self.began - KILL_SLACK_SECONDS
            and (kill.pid in self._pids or any(_inside(kill.victim_level, path) for path in own))
        )

    def uses(self, starts_beside: dict[str, tuple[str, ...]]) -> tuple[CardUse, ...]:
        return tuple(
            CardUse(
                card=uuid,
                allotted_bytes=card.allotted_bytes,
                total_bytes=card.total_bytes,
                own_bytes=card.own_bytes,
                others_bytes=card.others_bytes,
                starts_beside=starts_beside.get(uuid, ()),
            )
            for uuid, card in self._cards.items()
        )

    @property
    def story(self) -> tuple[Evidence, ...]:
        return tuple(self._story)

    def boundaries(self) -> tuple[Boundary, ...]:
        """What goes into the event: levels with a limit and each component's own, the machine, the cards."""
        found: list[Boundary] = []
        for change in self.changes():
            if not change.own and change.limit_bytes is None:
                continue
            level = self._levels[change.component, change.path]
            every, points = thinned(level.ring)
            found.append(
                Boundary(
                    component=change.component, name=change.name, path=change.path,
                    limit_bytes=change.limit_bytes, last_bytes=change.last_bytes, peak_bytes=change.peak_bytes,
                    limit_hits=change.limit_hits, oom_kills=change.kills, every_seconds=every, points=points,
                )
            )  # fmt: skip
        if self._host and self._host_total:
            used = [(at, max(0, self._host_total - available)) for at, available in self._host]
            every, points = thinned(used)
            found.append(
                Boundary(
                    component="", name="machine", limit_bytes=self._host_total, last_bytes=used[-1][1],
                    peak_bytes=max(value for _, value in used), every_seconds=every, points=points,
                )
            )  # fmt: skip
        for uuid, card in self._cards.items():
            if card.ring:
                every, points = thinned(card.ring)
                found.append(
                    Boundary(
                        component="", name=f"card {uuid}", limit_bytes=card.allotted_bytes or None,
                        last_bytes=card.ring[-1][1], peak_bytes=card.own_bytes, every_seconds=every, points=points,
                    )
                )  # fmt: skip
        return tuple(found[:BOUNDARIES_MAX])


def thinned(ring: Sequence[tuple[float, int]]) -> tuple[float, tuple[int, ...]]:
    """(seconds between points, at most POINTS_MAX points at an even distance up to the last; -1 = not read)."""
    if not ring:
        return 1.0, ()
    end = ring[-1][0]
    span = max(0.0, end - ring[0][0])
    every = max(1.0, span / (POINTS_MAX - 1))
    count = min(POINTS_MAX, int(span / every) + 1)
    points = [-1] * count
    for at, value in ring:
        place = count - 1 - int((end - at) / every + 0.5)
        if 0 <= place < count:
            points[place] = max(points[place], value)
    points[-1] = ring[-1][1]
    return every, tuple(points)


def _since(level: _Level, word: str, *, local: bool) -> int | None:
    first = level.first.local if local else level.first.events
    last = level.last.local if local else level.last.events
    if word not in last:
        return None
    if level.fresh:
        return last[word]
    return max(0, last[word] - first[word]) if word in first else None


def _inside(path: str, own: str) -> bool:
    """Is this the cgroup `own` or one below it? The kernel names it from the root, we perhaps from elsewhere."""
    if not path or not own:
        return False
    tail = own.rstrip("/").rsplit("/", 1)[-1]
    return path == own or path.startswith(f"{own}/") or tail in path.split("/")
