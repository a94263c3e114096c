"""One connection to a nats-server: nats-py for the wire, our rules for everything a caller is told.

What nats-py would do by itself and must not (each checked against 2.16):

- It keeps publishes of an outage and sends them after the reconnect, long after the caller was told "not sent".
  Here nothing is accepted unless connected, and what had not left yet is dropped when the link breaks.
- `request` and `publish_async` never resolve on some errors. Here one wildcard inbox carries all answers, and a
  broken link fails every open call at once.
- A denied publish is reported to `error_cb` only, in lower case. Here it fails the call that it belongs to.
- A subscription with a full queue drops messages. Here messages go straight from the parser to a plain function.
- A payload over the limit makes the server hang up, and nats-py then closes for good. Here it is refused before.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.nuid import NUID

from rigbook_bus.protocol import BusDenied, BusUnavailable, BusUnknown, Link
from rigbook_bus.wire_parser import WireParser

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable
    from pathlib import Path

    from nats.aio.client import Server

    from rigbook_bus.wire_parser import Taker

__all__ = ["Connection", "Reply", "Subscription"]

log = logging.getLogger("rigbook_bus")

PING_SECONDS = 5  # with two unanswered pings a half-open connection is noticed within 15 s
PINGS_OUTSTANDING_MAX = 2
CONNECT_TRY_SECONDS = 2  # one TCP connect and one answer
FIRST_RETRY_SECONDS = 0.25  # between tries of the first connect
RECONNECT_SECONDS_MIN = 0.05
RECONNECT_SECONDS_MAX = 2.0  # a server restart takes 60-150 ms; a fleet must not come back in one instant
# nats-py makes a publisher wait above this, and forgets to wake it when the link breaks: our own windows
# (`append_many`) stay well below, so that it is never reached.
PENDING_BYTES_MAX = 64 * 1024 * 1024
# The server counts headers as payload; ours are three short ones.
HEADER_BYTES_MAX = 1024
FLUSH_SECONDS = 2.0
NO_RESPONDERS = 503


class Reply(NamedTuple):
    """An answer on the reply inbox. `status` is 0 for an ordinary message, 503 when nobody serves."""

    status: int
    headers: bytes
    body: bytes


class Subscription(Protocol):
    """What nats-py returns, as far as we use it."""

    async def unsubscribe(self, limit: int = 0) -> None: ...


class _DirectClient(Client):
    """nats-py with one change: messages go from our parser to a plain function, past its queues and tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.takers: dict[bytes, Taker] = {}  # by subscription id, as it stands on the wire
        self._ps = WireParser(self, self.takers)  # type: ignore[assignment]  # has the same two methods

    async def subscribe_direct(self, subject: str, take: Taker, queue: str = "") -> Subscription:
        self.takers[b"%d" % (self._sid + 1)] = take  # before SUB leaves: the first message may come at once
        return await self.subscribe(subject, queue=queue, cb=_never)

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self.takers.pop(b"%d" % sid, None)
        super()._remove_sub(sid, max_msgs)

    async def confirm(self) -> None:
        """Wait until the server has taken everything handed over so far. Raises nats-py's errors, TimeoutError.

        nats-py's own `flush` writes its PING past the commands still waiting, so that the PONG proves nothing.
        """
        async with asyncio.timeout(FLUSH_SECONDS):
            await self._flush_pending(force_flush=True)
            await self.flush()

    def forget_unsent(self) -> None:
        """Drop what was handed over and has not left: its callers are told that the answer is unknown."""
        self._pending.clear()
        self._pending_data_size = 0

    async def _connect_to_server(self, s: Any) -> None:
        # A try that broke between the connect and the greeting leaves its socket open otherwise.
        if self._transport is not None:
            self._transport.close()  # type: ignore[no-untyped-call]
        await super()._connect_to_server(s)

    @property
    def has_begun(self) -> bool:
        """Whether `connect` came as far as making its queues; before, nats-py cannot even be closed."""
        return self._flush_queue is not None

    async def _attempt_reconnect(self) -> None:
        # An exception that nats-py did not foresee would end its task, and with it every hope, without a word.
        while True:
            try:
                return await super()._attempt_reconnect()
            except Exception:
                log.exception("the reconnect failed in an unforeseen way; trying again")
                await asyncio.sleep(RECONNECT_SECONDS_MAX)


async def _never(_: object) -> None:
    """nats-py wants a callback; our parser never comes to it."""


class _Call(NamedTuple):
    future: asyncio.Future[Reply]
    subject: str


class Connection:
    """A connection that survives outages, with one reply inbox for all calls."""

    def __init__(self, url: str, *, name: str, inbox_prefix: str) -> None:
        self.url = url
        self.name = name
        self.inbox_prefix = inbox_prefix
        self.link = Link.AWAY
        self._client = _DirectClient()
        self._listeners: list[Callable[[Link, str], None]] = []
        self._denial_listeners: list[Callable[[str, str], None]] = []
        self._calls: dict[bytes, _Call] = {}
        self._tokens = itertools.count(1)
        self._nuid = NUID()
        self._inbox = self.new_inbox()
        self._last_error = ""
        self._closing = False
        self._refused: asyncio.Future[str] | None = None

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        name: str,
        credentials: str | Path | None = None,
        tls: ssl.SSLContext | None = None,
        inbox_prefix: str = "_INBOX",
        wait_seconds: float | None = 10.0,
    ) -> Connection:
        """Connect; `url` may name several servers, comma-separated. None = try for ever.

        Raises: BusUnavailable when nothing answers in time, BusDenied when the server refuses the credentials or
        the reply inbox.
        """
        self = cls(url, name=name, inbox_prefix=inbox_prefix)
        self._refused = asyncio.get_running_loop().create_future()
        connecting = asyncio.create_task(self._connect(credentials, tls))
        try:
            await self._connected(connecting, wait_seconds)
            await self._open_inbox()
        except BaseException:
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
            await self.close()
            raise
        self._refused = None
        self._tell(Link.CONNECTED, f"connected to {self.server}")
        return self

    async def _connected(self, connecting: asyncio.Task[None], wait_seconds: float | None) -> None:
        # nats-py tries for ever, also where no try can succeed: refused credentials end it here.
        refused = self._refused
        assert refused is not None
        waited: list[asyncio.Future[Any]] = [connecting, refused]
        await asyncio.wait(waited, timeout=wait_seconds, return_when=asyncio.FIRST_COMPLETED)
        if refused.done():
            raise BusDenied(f"{self.url} refuses {self.name}: {refused.result()}; check the credentials")
        if not connecting.done():
            raise BusUnavailable(
                f"no answer from {self.url} within {wait_seconds:g} s ({self._last_error or 'silent'}); "
                "is the nats-server running?"
            )
        connecting.result()

    async def _connect(self, credentials: str | Path | None, tls: ssl.SSLContext | None) -> None:
        # nats-py looks only when the server asks for a signature; a name that leads nowhere is wrong all the same
        if credentials is not None and not await asyncio.to_thread(os.access, credentials, os.R_OK):
            raise BusDenied(f"{credentials}: there is no such credentials file, or it cannot be read")
        try:
            await self._client.connect(
                [one.strip() for one in self.url.split(",")],
                name=self.name,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                closed_cb=self._on_closed,
                allow_reconnect=True,
                connect_timeout=CONNECT_TRY_SECONDS,
                reconnect_time_wait=FIRST_RETRY_SECONDS,  # type: ignore[arg-type]  # only compared and slept
                max_reconnect_attempts=-1,
                reconnect_to_server_handler=self._next_server,
                ping_interval=PING_SECONDS,
                max_outstanding_pings=PINGS_OUTSTANDING_MAX,
                pending_size=PENDING_BYTES_MAX,
                inbox_prefix=self.inbox_prefix,
                tls=tls,
                user_credentials=str(credentials) if credentials is not None else None,
            )
        except ImportError as error:
            raise BusDenied(f"{credentials}: credentials need the PyPI package nkeys: {error}") from error
        except (NatsError, ValueError, OSError) as error:
            # an address that is none; a credentials file that is not there or cannot be read
            raise BusDenied(f"cannot connect to {self.url} as {self.name}: {error}") from error

    async def _open_inbox(self) -> None:
        try:
            await self._client.subscribe_direct(f"{self._inbox}.*", self._on_reply)
            await self._client.confirm()  # a denial arrives before the pong
        except (NatsError, OSError, TimeoutError) as error:
            raise BusUnavailable(f"{self.url} went away while connecting: {error}") from error
        assert self._refused is not None
        if self._refused.done():
            raise BusDenied(
                f"{self.url}: {self.name} may not subscribe to {self._inbox}.*: {self._refused.result()}"
            )

    # ---- what a caller may do ------------------------------------------------------------------------------

    @property
    def server(self) -> str:
        """Address of the server in use, without credentials."""
        at = self._client.connected_url
        return f"{at.hostname}:{at.port}" if at is not None else "no server"

    @property
    def payload_bytes_max(self) -> int:
        return self._client.max_payload - HEADER_BYTES_MAX

    def new_inbox(self) -> str:
        return f"{self.inbox_prefix}.{self._nuid.next().decode()}"

    def on_link(self, told: Callable[[Link, str], None]) -> Callable[[], None]:
        """Call `told` on every change of the link; the returned function ends that."""
        self._listeners.append(told)

        def forget() -> None:
            if told in self._listeners:
                self._listeners.remove(told)

        return forget

    def on_denial(self, told: Callable[[str, str], None]) -> Callable[[], None]:
        """Call `told("publish" or "subscription", subject in lower case)` on every denial of the server."""
        self._denial_listeners.append(told)

        def forget() -> None:
            if told in self._denial_listeners:
                self._denial_listeners.remove(told)

        return forget

    def require(self) -> None:
        """Raise BusUnavailable unless connected: nothing may be handed to nats-py's own buffer."""
        if self.link is not Link.CONNECTED or not self._client.is_connected:
            why = f" ({self._last_error})" if self._last_error else ""
            raise BusUnavailable(f"not connected to {self.url}{why}; nothing was sent")

    async def publish(
        self, subject: str, body: bytes = b"", *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Hand one message to the connection. Raises BusUnavailable, BusDenied when it is too large."""
        self.require()
        if len(body) > self.payload_bytes_max:
            raise BusDenied(
                f"{len(body)} bytes for {subject}: the server takes {self.payload_bytes_max} at most; "
                "send less, or raise max_payload in the server's configuration"
            )
        await self._client.publish(subject, body, reply, headers)

    async def start(
        self, subject: str, body: bytes, *, headers: dict[str, str] | None = None
    ) -> tuple[bytes, asyncio.Future[Reply]]:
        """Send a call; its answer resolves the future. The caller must `forget` the token when it is through."""
        self.require()
        token = b"%d" % next(self._tokens)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[token] = _Call(future, subject)
        try:
            await self.publish(subject, body, reply=f"{self._inbox}.{token.decode()}", headers=headers)
        except BaseException:
            self._calls.pop(token, None)
            raise
        return token, future

    def forget(self, token: bytes) -> None:
        self._calls.pop(token, None)

    async def call(
        self, subject: str, body: bytes, *, timeout_seconds: float, headers: dict[str, str] | None = None
    ) -> Reply:
        """Send and wait for the answer.

        Raises: BusUnavailable (not sent), BusUnknown (no answer, or the link broke), BusDenied (rights, size).
        """
        token = b""
        try:
            async with asyncio.timeout(timeout_seconds):
                token, future = await self.start(subject, body, headers=headers)
                return await future
        except TimeoutError:
            raise BusUnknown(f"no answer to {subject} within {timeout_seconds:g} s") from None
        finally:
            self.forget(token)

    async def subscribe(self, subject: str, take: Taker, *, queue: str = "") -> Subscription:
        """Route messages of `subject` to `take`; restored by itself after a reconnect."""
        self.require()
        return await self._client.subscribe_direct(subject, take, queue)

    async def subscribe_surely(self, subject: str, take: Taker, *, queue: str = "") -> Subscription:
        """Subscribe and wait until the server has it. Raises BusDenied when it may not be, BusUnknown."""
        denied: list[str] = []
        forget = self.on_denial(lambda _kind, about: denied.append(about))
        try:
            subscription = await self.subscribe(subject, take, queue=queue)
            await self.flush()  # a denial arrives before the pong
        finally:
            forget()
        if subject.lower() in denied:
            await self.unsubscribe(subscription)
            raise BusDenied(
                f"{self.name} has no right to subscribe to {subject}; its credentials do not allow it"
            )
        return subscription

    async def unsubscribe(self, subscription: Subscription) -> None:
        """End a subscription, also when the connection is gone already."""
        try:
            await subscription.unsubscribe()
        except NatsError:
            log.debug("%s: unsubscribe on a connection that is gone", self.name)

    async def flush(self) -> None:
        """Wait until the server has taken everything sent so far. Raises BusUnknown."""
        self.require()
        try:
            await self._client.confirm()
        except (NatsError, OSError, TimeoutError) as error:
            raise BusUnknown(f"{self.server} did not confirm what was sent: {error}") from error

    async def close(self) -> None:
        """Send what is waiting (bounded), then hang up. Idempotent."""
        self._closing = True
        if self._client.is_closed or not self._client.has_begun:
            return
        if self.link is Link.CONNECTED and self._client.is_connected:
            try:
                await self._client.confirm()
            except (NatsError, OSError, TimeoutError):
                log.info("%s: closing without the server's last confirmation", self.name)
        await self._client.close()
        self._tell(Link.CLOSED, "closed by us")
        self._fail_calls("closed")

    # ---- what nats-py tells us -----------------------------------------------------------------------------

    def _on_reply(self, subject: bytes, _reply: bytes, body: bytes, headers: bytes | None) -> None:
        call = self._calls.pop(subject[subject.rfind(b".") + 1 :], None)
        if call is not None and not call.future.done():
            call.future.set_result(Reply(status_of(headers), headers or b"", body))

    async def _on_error(self, error: Exception) -> None:
        text = str(error) or type(error).__name__
        self._last_error = text
        lowered = text.lower()
        if "permissions violation" in lowered:
            log.warning("%s: %s", self.name, text)
            self._deny(lowered)
            return
        if self._refused is not None and not self._refused.done() and "authorization" in lowered:
            self._refused.set_result(text)
        log.debug("%s: %s", self.name, text)

    def _deny(self, text: str) -> None:
        # nats-py lower-cases the server's words, so subjects are compared in lower case.
        subject = text.partition('"')[2].partition('"')[0]
        kind = "subscription" if "for subscription" in text else "publish"
        for told in tuple(self._denial_listeners):
            told(kind, subject)
        refused = self._refused
        if kind == "subscription":
            if subject.startswith(self._inbox.lower()) and refused is not None and not refused.done():
                refused.set_result(text)
            return
        for call in self._calls.values():
            if call.subject.lower() == subject and not call.future.done():
                call.future.set_exception(
                    BusDenied(
                        f"{self.name} has no right to publish on {call.subject}; its credentials do not allow it"
                    )
                )

    async def _on_disconnected(self) -> None:
        self._client.forget_unsent()
        if not self._closing:
            self._tell(Link.AWAY, self._last_error or "connection lost")
        self._fail_calls("the connection broke before the answer")

    async def _on_reconnected(self) -> None:
        self._last_error = ""
        self._tell(Link.CONNECTED, f"connected to {self.server}")

    async def _on_closed(self) -> None:
        self._tell(Link.CLOSED, "closed by us" if self._closing else self._last_error or "closed by nats-py")
        self._fail_calls("closed")

    def _next_server(self, servers: list[Server], _info: dict[str, Any]) -> tuple[Server, float]:
        """The server with the fewest failed tries, after a jittered and bounded exponential wait."""
        server = min(servers, key=lambda one: one.reconnects)
        ceiling = min(RECONNECT_SECONDS_MAX, RECONNECT_SECONDS_MIN * 2 ** min(server.reconnects, 10))
        return server, random.uniform(ceiling / 2, ceiling)  # noqa: S311  # spreads a fleet, hides nothing

    def _fail_calls(self, why: str) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.future.done():
                call.future.set_exception(
                    BusUnknown(f"{call.subject}: {why}; it may or may not have been done")
                )

    def _tell(self, link: Link, why: str) -> None:
        if link is self.link or self.link is Link.CLOSED:
            return
        self.link = link
        log.info("%s: bus %s: %s", self.name, link.value, why)
        for told in tuple(self._listeners):
            try:
                told(link, why)
            except Exception:
                log.exception("%s: a listener of the link failed", self.name)


def status_of(headers: bytes | None) -> int:
    """The inline status of a NATS header block (`NATS/1.0 503`), 0 when it has none."""
    if headers is None or headers[8:9] != b" ":
        return 0
    digits = headers[9:12]
    return int(digits) if digits.isdigit() else 0


def header_of(headers: bytes, name: bytes) -> bytes:
    """The value of one header, empty when absent. Names as the server writes them."""
    _, found, rest = headers.partition(b"\r\n" + name + b":")
    return rest.partition(b"\r\n")[0].strip() if found else b""
