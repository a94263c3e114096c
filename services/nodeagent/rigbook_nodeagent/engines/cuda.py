"""Does an image's CUDA fit the node's driver? A warning before the start, in words that say what to do. Pure.

A driver runs every CUDA up to its own version. Images say what they need in `NVIDIA_REQUIRE_CUDA` (alternatives by
blanks, conditions by commas), which the container toolkit enforces, or only in `CUDA_VERSION`. Within one major
version newer images mostly run on older drivers, so of that nothing is said.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["cuda_warning"]

_CONDITION = re.compile(r"(cuda|driver)(>=|<=|<|>|=)([0-9]+(?:\.[0-9]+)*)")


def cuda_warning(image_env: Iterable[str], *, cuda_version: str, driver_version: str) -> str:
    """Empty when it fits, or when it cannot be told. `cuda_version` is the newest that the driver runs."""
    env = {key: value for key, _, value in (line.partition("=") for line in image_env)}
    if not cuda_version or env.get("NVIDIA_DISABLE_REQUIRE", "").lower() in {"1", "true"}:
        return ""
    known = {"cuda": _numbers(cuda_version), "driver": _numbers(driver_version)}
    required = env.get("NVIDIA_REQUIRE_CUDA", "")
    alternatives = [group for group in required.split() if group]
    if alternatives:
        if any(_holds(group, known) for group in alternatives):
            return ""
        wanted = next((g for g in alternatives if g.startswith("cuda")), alternatives[0])
        return _told(f"the image needs {wanted}", cuda_version, driver_version)
    version = env.get("CUDA_VERSION", "")
    if version and _numbers(version)[:1] > known["cuda"][:1]:
        return _told(f"the image is built for CUDA {version}", cuda_version, driver_version)
    return ""


def _told(what: str, cuda_version: str, driver_version: str) -> str:
    return (
        f"{what}, and this node's driver {driver_version or '(unknown)'} runs CUDA up to {cuda_version}: if it fails to "
        "find a device, take an older image or a newer driver"
    )


def _holds(group: str, known: dict[str, tuple[int, ...]]) -> bool:
    """All conditions of one alternative. A brand is not judged: it may be so."""
    for condition in group.split(","):
        found = _CONDITION.fullmatch(condition)
        if found is None:
            continue
        have, want = known[found[1]], _numbers(found[3])
        if not have:
            continue
        size = max(len(have), len(want))
        a, b = have + (0,) * (size - len(have)), want + (0,) * (size - len(want))
        if not {">=": a >= b, "<=": a <= b, "<": a < b, ">": a > b, "=": a[: len(want)] == want}[found[2]]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
