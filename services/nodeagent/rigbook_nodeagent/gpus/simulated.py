"""Simulated cards: files and living processes of this machine instead of a driver.

`sim:4xRTX4090`, `sim:8xA800-80GB,2xT4`. Each card is a folder (see `holding`); a process holds memory of
it by a file that counts while the process lives. So a program that is killed gives its memory back, one
that survives its stop keeps it, and a program that Rigbook does not know can squat, all for real.

Faults for tests, one word in a file named `fault`:
  in a card's folder: `lost`, `unknown` (memory unreadable), `absurd` (more used than there is), `hang`,
    `residue` (half of the memory is used, and no process holds it)
  in the driver's folder: `mismatch` (driver/library), `absent`, `hang`
A hang lasts until the file is gone.
"""

from __future__ import annotations

import re
import time
import uuid
from typing import TYPE_CHECKING, Final

import msgspec
from rigbook_schemas.values import GIB, CardInventory, CardObservation, ProcessObservation, Xid
from rigbook_schemas.wire import rfc3339

from rigbook_nodeagent.gpus import holding, xids
from rigbook_nodeagent.gpus.plausible import LastGood
from rigbook_nodeagent.gpus.protocol import DriverFacts, GpusError
from rigbook_nodeagent.gpus.visibility import visible_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

__all__ = ["CardModel", "SimulatedGpus", "card_models"]

SPEC_PREFIX: Final = "sim:"
CARDS_MAX: Final = 128  # more on one node is a typing mistake
HANG_POLL_SECONDS: Final = 0.02
UNIFIED_SHARE: Final = 0.75  # as the NVML driver's default
IDLE_CELSIUS: Final = 34.0
BUSY_CELSIUS: Final = 38.0  # on top, at full load
NAMESPACE: Final = uuid.UUID("5f0f2b52-2f0c-5c0a-9d0e-7a1f5d1c9a10")  # of UUIDs of simulated cards


class CardModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model of card. `name` is what NVML would say."""

    name: str
    memory_bytes: int
    watts_max: float = 300.0
    unified_memory: bool = False


def _model(name: str, memory_gib: float, watts_max: float, *, unified_memory: bool = False) -> CardModel:
    return CardModel(
        name=name, memory_bytes=int(memory_gib * GIB), watts_max=watts_max, unified_memory=unified_memory
    )


KNOWN: Final = {
    "RTX3090": _model("NVIDIA GeForce RTX 3090", 24, 350),
    "RTX4090": _model("NVIDIA GeForce RTX 4090", 24, 450),
    "A100-40GB": _model("NVIDIA A100-SXM4-40GB", 40, 400),
    "A100-80GB": _model("NVIDIA A100-SXM4-80GB", 80, 400),
    "A800-80GB": _model("NVIDIA A800-SXM4-80GB", 80, 400),
    "H100-80GB": _model("NVIDIA H100 80GB HBM3", 80, 700),
    "H200-141GB": _model("NVIDIA H200", 141, 700),
    "L4": _model("NVIDIA L4", 24, 72),
    "L40S": _model("NVIDIA L40S", 48, 350),
    "T4": _model("Tesla T4", 16, 70),
    "V100-16GB": _model("Tesla V100-SXM2-16GB", 16, 300),
    "V100-32GB": _model("Tesla V100-SXM2-32GB", 32, 300),
    "GB10": _model("NVIDIA GB10", 128 * UNIFIED_SHARE, 140, unified_memory=True),
}
PART: Final = re.compile(r"(?:(\d+)\s*x\s*)?([A-Za-z0-9][A-Za-z0-9 ._-]*)")
OWN_SIZE: Final = re.compile(r"(.+)-(\d{1,4})(?:GB|GiB)", re.IGNORECASE)


def card_models(spec: str) -> list[CardModel]:
    """The cards of `sim:4xRTX4090,2xT4`, in order. `GB` is GiB here, as in the names of cards.

    Raises ValueError with what was expected.
    """
    if not spec.startswith(SPEC_PREFIX):
        raise ValueError(f"not a simulated machine: {spec!r}; write for example sim:4xRTX4090")
    models: list[CardModel] = []
    for part in spec.removeprefix(SPEC_PREFIX).split(","):
        found = PART.fullmatch(part.strip())
        count = int(found[1] or 1) if found else 0
        if found is None or not 1 <= count <= CARDS_MAX:
            raise ValueError(
                f"{part.strip()!r} in {spec!r}: expected COUNTxMODEL, such as 4xRTX4090 (1 to {CARDS_MAX})"
            )
        models.extend([_known(found[2])] * count)
    if len(models) > CARDS_MAX:
        raise ValueError(f"{spec!r} has {len(models)} cards; at most {CARDS_MAX} on one node")
    return models


def _known(word: str) -> CardModel:
    key = word.replace(" ", "").upper()
    if key in KNOWN:
        return KNOWN[key]
    sizes = [name for name in KNOWN if name.startswith(f"{key}-")]
    if len(sizes) == 1:
        return KNOWN[sizes[0]]
    if sizes:
        raise ValueError(f"{word} has more than one size: write {' or '.join(sizes)}")
    sized = OWN_SIZE.fullmatch(word)
    if sized and 1 <= int(sized[2]) <= 1024:
        return _model(word, int(sized[2]), 300)
    raise ValueError(
        f"unknown card {word!r}: known are {', '.join(KNOWN)}; for another one add its memory, {word}-48GB"
    )


class SimulatedGpus:
    """Driver of simulated cards.

    `directory` is the node's own folder (any process that may write there can hold a card). The UUIDs
    depend on `node` (or the folder's path), the index and the model, so they survive a restart.
    `now_ns` is the wall clock, for `as_of`.
    """

    def __init__(
        self, spec: str, directory: Path, *, node: str = "", now_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._models = card_models(spec)
        self._directory = directory.absolute()
        self._now_ns = now_ns
        seed = node or str(self._directory)
        self._cards = [
            CardInventory(
                uuid=f"GPU-{uuid.uuid5(NAMESPACE, f'{seed}/{index}/{model.name}/{model.memory_bytes}')}",
                index=index,
                model=model.name,
                memory_bytes=model.memory_bytes,
                pci_bus_id=f"00000000:{index + 1:02X}:00.0",
                unified_memory=model.unified_memory,
                compute_mode="Default",
            )
            for index, model in enumerate(self._models)
        ]
        self._last_good = LastGood()
        self._alone: set[str] = set()  # cards that admit one process at a time

    @property
    def samples_rejected(self) -> int:
        return self._last_good.rejected

    def open(self) -> DriverFacts:
        fault = self._fault("")
        if fault == "mismatch":
            return DriverFacts(
                ok=False,
                simulated=True,
                text="Driver/library version mismatch (simulated): reboot, or reload the driver",
            )
        if fault == "absent":
            return DriverFacts(
                ok=False, simulated=True, text="no driver (simulated): remove the file `fault`"
            )
        current = {card.uuid for card in self._cards}
        try:
            for old in holding.card_names(str(self._directory)):
                if old not in current:
                    holding.withdraw(str(self._directory / old / "card"))
            for card in self._cards:
                folder = self._directory / card.uuid
                folder.mkdir(parents=True, exist_ok=True)
                holding.write(
                    str(folder / "card"),
                    {"index": str(card.index), "model": card.model, "memory_bytes": str(card.memory_bytes)},
                )
        except OSError as error:
            return DriverFacts(ok=False, simulated=True, text=f"folder of simulated cards: {error}")
        return DriverFacts(driver_version="simulated", simulated=True)

    def inventory(self) -> Sequence[CardInventory]:
        self._answers()
        return [
            msgspec.structs.replace(card, usable=False, why="GPU is lost (simulated): reboot the node")
            if self._fault(card.uuid) == "lost"
            else card
            for card in self._cards
        ]

    def sample(self) -> Sequence[CardObservation]:
        self._answers()
        return [
            self._last_good.judged(self._sample(card, model), total_bytes=card.memory_bytes)
            for card, model in zip(self._cards, self._models, strict=True)
        ]

    def device_nodes(self) -> Mapping[str, str]:
        """A simulated card has none."""
        return {}

    def limit_processes(self, cards: Mapping[str, bool]) -> Mapping[str, str]:
        """Told and shown, not enforced: whoever may write into the folder can hold a card."""
        self._answers()
        known = {card.uuid for card in self._cards}
        self._alone = {
            uuid for uuid in {*self._alone, *cards} if cards.get(uuid, uuid in self._alone)
        } & known
        return {uuid: "the card does not answer" for uuid in cards if uuid not in known}

    def environment(self, cards: Sequence[str]) -> Mapping[str, str]:
        return {
            **visible_environment(cards),
            holding.DIRECTORY_VARIABLE: str(self._directory),
            holding.NAMESPACE_VARIABLE: holding.own_namespace(),
        }

    def close(self) -> None:
        """Nothing is kept open; the cards stay, for whoever holds them."""

    def _sample(self, card: CardInventory, model: CardModel) -> CardObservation:
        as_of = rfc3339(self._now_ns())
        fault = self._fault(card.uuid)
        if fault == "lost":
            fallen = Xid(code=xids.FALLEN_OFF, at=as_of, meaning=xids.meaning(xids.FALLEN_OFF))
            return CardObservation(
                uuid=card.uuid, as_of=as_of, unknown="GPU is lost (simulated)", lost=True, xids=(fallen,)
            )
        try:
            holders = holding.holdings(str(self._directory), card.uuid)
        except OSError as error:
            return CardObservation(uuid=card.uuid, as_of=as_of, unknown=f"simulated card: {error}")
        load = min(100.0, max((held.utilisation for held in holders), default=0.0))
        observation = CardObservation(
            uuid=card.uuid,
            memory_used_bytes=sum(held.bytes for held in holders),
            memory_total_bytes=card.memory_bytes,
            utilisation_percent=load,
            temperature_celsius=IDLE_CELSIUS + BUSY_CELSIUS * load / 100,
            power_watts=round(model.watts_max * (0.08 + 0.8 * load / 100), 1),
            fan_percent=round(0.6 * load, 1),
            ecc_uncorrected=0,
            power_limit_watts=model.watts_max,
            compute_mode="Exclusive_Process" if card.uuid in self._alone else "Default",
            processes=tuple(
                ProcessObservation(pid=held.pid, memory_bytes=held.bytes, command=held.command)
                for held in holders
            ),
            as_of=as_of,
        )
        if fault == "unknown":
            return msgspec.structs.replace(
                observation,
                memory_used_bytes=None,
                processes=None,
                unknown="memory: Unknown Error (simulated)",
            )
        if fault == "residue":
            return msgspec.structs.replace(
                observation, memory_used_bytes=max(observation.memory_used_bytes or 0, card.memory_bytes // 2)
            )
        if fault == "absurd":
            return msgspec.structs.replace(observation, memory_used_bytes=3 * card.memory_bytes)
        return observation

    def _answers(self) -> None:
        fault = self._fault("")
        if fault in {"mismatch", "absent"}:
            raise GpusError(f"the driver does not answer: {fault} (simulated)")

    def _fault(self, folder: str) -> str:
        path = self._directory / folder / "fault"
        try:
            while (word := path.read_text(encoding="utf-8").strip()) == "hang":
                time.sleep(HANG_POLL_SECONDS)
        except OSError:
            return ""
        return word
