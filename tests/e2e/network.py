"""Three machines on one: network namespaces joined by a bridge, each of which can be cut off from the others.

Nothing leaves this host: the bridge has no uplink. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from typing import Self

__all__ = ["Network", "why_no_network"]

COMMAND_SECONDS = 20


def _ip(*words: str) -> str:
    done = subprocess.run(
        ["ip", *words], capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
    )
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def why_no_network() -> str:
    """Why no namespace can be made here; "" = it can."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    if shutil.which("ip") is None:
        return "needs iproute2"
    name = f"rb{secrets.token_hex(3)}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except OSError as error:
        return f"no network namespaces: {error}"
    return ""


class Network:
    """Machines 1 to `count`, at `address(n)`; the test itself is at .254 and reaches all of them, always."""

    def __init__(self, count: int) -> None:
        self.mark = f"rb{secrets.token_hex(3)}"
        self._third = secrets.randbelow(250) + 1
        self.machines = range(1, count + 1)

    def address(self, machine: int) -> str:
        return f"10.213.{self._third}.{machine}"

    def namespace(self, machine: int) -> str:
        return f"{self.mark}-{machine}"

    def inside(self, machine: int) -> list[str]:
        """The beginning of a command that runs on that machine."""
        return ["ip", "netns", "exec", self.namespace(machine)]

    def __enter__(self) -> Self:
        try:
            _ip("link", "add", self.mark, "type", "bridge")
            _ip("addr", "add", f"{self.address(254)}/24", "dev", self.mark)
            _ip("link", "set", self.mark, "up")
            for n in self.machines:
                there, here = self.namespace(n), f"{self.mark}v{n}"
                _ip("netns", "add", there)
                _ip("link", "add", here, "type", "veth", "peer", "name", "eth0", "netns", there)
                _ip("link", "set", here, "master", self.mark, "up")
                _ip("-n", there, "addr", "add", f"{self.address(n)}/24", "dev", "eth0")
                _ip("-n", there, "link", "set", "eth0", "up")
                _ip("-n", there, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for n in self.machines:
            with contextlib.suppress(OSError):
                _ip("netns", "del", self.namespace(n))
        for n in self.machines:
            with contextlib.suppress(OSError):
                _ip("link", "del", f"{self.mark}v{n}")
        with contextlib.suppress(OSError):
            _ip("link", "del", self.mark)

    def cut_off(self, machine: int) -> None:
        """It and the others no longer hear each other; the test still hears all."""
        for other in self.machines:
            if other != machine:
                _ip("-n", self.namespace(machine), "route", "add", "blackhole", self.address(other))
                _ip("-n", self.namespace(other), "route", "add", "blackhole", self.address(machine))

    def heal(self, machine: int) -> None:
        for other in self.machines:
            if other != machine:
                _ip("-n", self.namespace(machine), "route", "del", "blackhole", self.address(other))
                _ip("-n", self.namespace(other), "route", "del", "blackhole", self.address(machine))
