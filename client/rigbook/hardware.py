"""What this machine has, for defaults: its name, its cards, its engines."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Final

from rigbook.failures import Invalid

__all__ = ["SIMULATED_DEFAULT", "cards_of", "default_engines", "default_node"]

SIMULATED_DEFAULT: Final = "sim:4xRTX4090"
DOCKER_SOCKET: Final = "/var/run/docker.sock"


def default_node() -> str:
    """The host's short name, as one token of a subject."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", socket.gethostname().partition(".")[0]).strip("-_")
    return plain[:63] or "node"


def default_engines() -> tuple[str, ...]:
    """Plain processes; and containers where a Docker Engine may be used."""
    return ("process", "docker") if os.access(DOCKER_SOCKET, os.W_OK) else ("process",)


def cards_of(spec: str) -> tuple[str, str]:
    """(what to tell the agent, what to tell the person) for `auto`, `nvml` or `sim:...`. Raises Invalid."""
    if spec == "auto":
        found = _nvml_cards()
        if found:
            return "nvml", f"{found} real {'card' if found == 1 else 'cards'} (NVML)"
        return SIMULATED_DEFAULT, f"simulated cards ({SIMULATED_DEFAULT}): no GPU driver answers here"
    if spec == "nvml":
        return spec, "the cards that NVML shows"
    if spec.startswith("sim:"):
        from rigbook_nodeagent.gpus.simulated import card_models

        try:
            models = card_models(spec)
        except ValueError as error:
            raise Invalid(f"--gpus: {error}", code="invalid_flag") from None
        return spec, f"{len(models)} simulated {'card' if len(models) == 1 else 'cards'}"
    raise Invalid(
        f"--gpus: {spec!r}; expected auto, nvml, or a simulation such as sim:4xRTX4090", code="invalid_flag"
    )


def _nvml_cards() -> int:
    """How many cards the driver shows; 0 when there is none, or no driver."""
    if not any(
        Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia/version")
    ):
        # asked first: without a device, loading the library can only fail, and a stand-in library may be in the way
        return 0
    try:
        import pynvml
    except ImportError:
        return 0
    try:
        pynvml.nvmlInit()
        count = int(pynvml.nvmlDeviceGetCount())
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return 0
    return count
