"""What a nats-server sends, taken apart: messages by us, the rest of the protocol by nats-py.

nats-py tries a regular expression per kind of line and copies every message twice; on our messages (one stored
header, 300 bytes) this is three times as fast (bench/bus_read.py), and the rebuild of a ledger is mostly this.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from nats.errors import ProtocolError
from nats.protocol.parser import Parser

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nats.aio.client import Client

__all__ = ["Taker", "WireParser"]

log = logging.getLogger("rigbook_bus")

LINE_BYTES_MAX = 8192  # the server's own limit is 4096 unless configured


class Taker(Protocol):
    """Takes one message, straight from the parser: must be short and must not raise."""

    def __call__(self, subject: bytes, reply: bytes, body: bytes, headers: bytes | None, /) -> None: ...


class WireParser:
    """Stands in for nats-py's parser: `parse` and `reset` are its whole face."""

    def __init__(self, client: Client, takers: Mapping[bytes, Taker]) -> None:
        self._client = client
        self._takers = takers
        self._resets = 0
        self.reset()

    def reset(self) -> None:
        """Forget half a message: the connection it was on is gone."""
        self._rest = b""
        self._resets += 1
        self._control = Parser(self._client)

    async def parse(self, data: bytes = b"") -> None:
        """Hand every whole message to its taker. Raises ProtocolError: nats-py then reconnects."""
        resets = self._resets
        if self._rest:
            data = self._rest + data
        at = 0
        end = len(data)
        while (eol := data.find(b"\r\n", at)) >= 0:
            if data.startswith((b"MSG ", b"HMSG "), at):
                next_at = self._message(data, at, eol, end)
                if next_at == 0:
                    break  # the rest of it is still on its way
                at = next_at
            else:
                line = data[at : eol + 2]
                at = eol + 2
                await self._control.parse(line)
                if resets != self._resets:
                    return  # the line was an error that ended the connection
        self._rest = data[at:]
        if len(self._rest) > LINE_BYTES_MAX and b"\r\n" not in self._rest:
            raise ProtocolError("nats: a line without end")

    def _message(self, data: bytes, at: int, eol: int, end: int) -> int:
        """One message; where it ends, or 0 when it is not all there."""
        # MSG subject sid [reply] size
        # HMSG subject sid [reply] header_size size
        words = data[at:eol].split()
        has_headers = data[at] == 0x48  # H
        with_reply = len(words) - 4 - has_headers
        if with_reply not in (0, 1):
            raise ProtocolError("nats: malformed MSG")
        try:
            size = int(words[-1])
            header_size = int(words[-2]) if has_headers else 0
        except ValueError as error:
            raise ProtocolError("nats: malformed MSG") from error
        reply = words[3] if with_reply else b""
        taker = self._takers.get(words[2])
        begin = eol + 2
        stop = begin + size
        if stop + 2 > end:
            return 0
        if taker is not None:
            try:
                taker(
                    words[1],
                    reply,
                    data[begin + header_size : stop],
                    data[begin : begin + header_size] if has_headers else None,
                )
            except Exception:
                # nats-py's read loop would end here and the connection would look alive for 15 seconds
                log.exception("a taker failed on %r", words[1])
        return stop + 2
