"""The bus within one process: a whole implementation for tests and simulation, not a mock.

`MemoryServer` is the server, each `MemoryBus` one connection to it; both may be cut, restored and made to misbehave.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rigbook_bus.memory_reader import MemoryDelivery, MemoryReader
from rigbook_bus.memory_server import Faults, Line, MemoryServer, Peer
from rigbook_bus.memory_tail import MemoryTail
from rigbook_bus.protocol import (
    Appended,
    BusDenied,
    BusError,
    BusUnavailable,
    BusUnknown,
    ConsumerSpec,
    Expect,
    Link,
    Message,
    StreamFacts,
    StreamSpec,
)
from rigbook_bus.subject import check_filter, check_message_id, check_subject

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

__all__ = ["Faults", "MemoryBus", "MemoryDelivery", "MemoryReader", "MemoryServer", "MemoryTail"]

log = logging.getLogger("rigbook_bus")

PAYLOAD_BYTES_MAX = 1024 * 1024 - 1024  # the server's default, less room for headers
API_SECONDS = 5.0
HINTS_KEPT_MAX = 1024

T = TypeVar("T")


class MemoryBus:
    """One connection to a `MemoryServer`."""

    def __init__(self, server: MemoryServer, *, name: str) -> None:
        self.server = server
        self.name = name
        self.is_cut = False
        self.up = Line()
        self.down = Line()
        self._link = Link.CONNECTED if server.running else Link.AWAY
        self._told: list[Callable[[Link, str], None]] = []
        self._calls: dict[asyncio.Future[Any], str] = {}  # a dict: iteration order must not depend on hashes
        self._tails: list[MemoryTail] = []
        self._readers: list[MemoryReader] = []
        self._subscribers: list[_Subscriber] = []
        self._answering: dict[asyncio.Task[None], None] = {}
        server.admit(self)

    @classmethod
    async def connect(cls, server: MemoryServer, *, name: str) -> MemoryBus:
        """Connect. Raises BusUnavailable when the server is stopped."""
        await asyncio.sleep(0)
        if not server.running:
            raise BusUnavailable("no answer from the in-memory server: it is stopped")
        return cls(server, name=name)

    # ---- the link ------------------------------------------------------------------------------------------

    @property
    def link(self) -> Link:
        return self._link

    def on_link(self, told: Callable[[Link, str], None]) -> None:
        self._told.append(told)

    def cut(self, why: str = "the line was cut") -> None:
        """Break this connection only; what was under way in either direction is lost."""
        self.is_cut = True
        self.lose(why)

    def restore(self) -> None:
        """Undo `cut`; the connection comes back if the server runs."""
        self.is_cut = False
        if self.server.running:
            self.regain()

    def lose(self, why: str) -> None:
        if self._link is Link.CONNECTED:
            self._link = Link.AWAY
            self._drop(why)
            self._tell(why)

    def _drop(self, why: str) -> None:
        self.up.cut()
        self.down.cut()
        for subscriber in self._subscribers:
            self.server.unsubscribe(subscriber)
        calls, self._calls = self._calls, {}
        for future, subject in calls.items():
            if not future.done():
                future.set_exception(BusUnknown(f"{subject}: {why}; it may or may not have been done"))
        for reader in self._readers:
            reader.lose()
        for tail in self._tails:
            tail.lose()

    def regain(self) -> None:
        if self._link is not Link.AWAY:
            return
        self._link = Link.CONNECTED
        for subscriber in self._subscribers:
            self.server.subscribe(subscriber)
        for tail in self._tails:
            tail.regain()
        for reader in self._readers:
            reader.wake()
        self._tell("connected again")

    def _tell(self, why: str) -> None:
        for told in tuple(self._told):
            told(self._link, why)

    def require(self) -> None:
        if self._link is not Link.CONNECTED:
            raise BusUnavailable(f"{self.name} is not connected ({self._link.value}); nothing was sent")

    def send(self, subject: str, at_server: Callable[[], None]) -> None:
        """Hand something to the line. Raises BusUnavailable."""
        self.require()
        seconds = self.server.faults.request_seconds(self.name, subject)
        if seconds is not None:
            self.up.send(at_server, seconds)

    def send_down(self, subject: str, at_client: Callable[[], None]) -> None:
        """An answer on its way back; may be lost."""
        seconds = self.server.faults.answer_seconds(self.name, subject)
        if seconds is not None and self._link is Link.CONNECTED:
            self.down.send(at_client, seconds)

    def start(self, subject: str, ask: Callable[[], T]) -> asyncio.Future[T]:
        """Send a question; `ask` runs at the server, its result or BusError comes back."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def at_server() -> None:
            try:
                result = ask()
            except BusError as error:
                self.send_down(subject, partial(_settle, future, None, error))
            else:
                self.send_down(subject, partial(_settle, future, result, None))

        self.send(subject, at_server)
        self._calls[future] = subject
        return future

    async def call(self, subject: str, ask: Callable[[], T], *, timeout_seconds: float = API_SECONDS) -> T:
        future = self.start(subject, ask)
        try:
            async with asyncio.timeout(timeout_seconds):
                return await future
        except TimeoutError:
            raise BusUnknown(f"no answer to {subject} within {timeout_seconds:g} s") from None
        finally:
            self._calls.pop(future, None)

    async def _api(self, what: str, ask: Callable[[], T]) -> T:
        try:
            return await self.call(f"$JS.API.{what}", ask)
        except BusUnknown as error:
            raise BusUnavailable(str(error)) from error  # may be repeated without harm

    # ---- appending -----------------------------------------------------------------------------------------

    async def append(
        self,
        subject: str,
        body: bytes,
        *,
        message_id: str,
        expect: Expect | None = None,
        timeout_seconds: float = 5.0,
    ) -> Appended:
        _check(subject, body, message_id, expect)
        return await self.call(
            subject,
            partial(self.server.append, subject, body, message_id, expect),
            timeout_seconds=timeout_seconds,
        )

    async def append_many(
        self, messages: Sequence[tuple[str, bytes, str]], *, timeout_seconds: float = 30.0
    ) -> list[Appended | BusError]:
        started: list[tuple[str, asyncio.Future[Appended] | BusError]] = []
        for subject, body, message_id in messages:
            try:
                _check(subject, body, message_id, None)
                started.append(
                    (
                        subject,
                        self.start(subject, partial(self.server.append, subject, body, message_id, None)),
                    )
                )
            except BusError as error:
                started.append((subject, error))
        results: list[Appended | BusError] = []
        futures = [one for _, one in started if not isinstance(one, BusError)]
        try:
            if futures:
                await asyncio.wait(futures, timeout=timeout_seconds)
            for subject, one in started:
                if isinstance(one, BusError):
                    results.append(one)
                elif not one.done():
                    results.append(
                        BusUnknown(f"no acknowledgement for {subject} within {timeout_seconds:g} s")
                    )
                else:
                    failure = one.exception()
                    results.append(failure if isinstance(failure, BusError) else one.result())
        finally:
            for future in futures:
                self._calls.pop(future, None)
                if not future.cancel() and not future.cancelled():
                    future.exception()
        return results

    # ---- streams and consumers -----------------------------------------------------------------------------

    async def ensure_stream(self, spec: StreamSpec) -> StreamFacts:
        return await self._api(f"STREAM.CREATE.{spec.name}", lambda: self.server.ensure_stream(spec))

    async def stream(self, name: str) -> StreamFacts | None:
        def ask() -> StreamFacts | None:
            found = self.server.streams.get(name)
            return found.facts(self.server.clock.monotonic()) if found is not None else None

        return await self._api(f"STREAM.INFO.{name}", ask)

    async def message(self, stream: str, seq: int) -> Message | None:
        return await self._api(
            f"STREAM.MSG.GET.{stream}",
            lambda: self.server.stream(stream, f"stream {stream}").records.get(seq),
        )

    async def last(self, stream: str, subject_filter: str) -> Message | None:
        check_filter(subject_filter)

        def ask() -> Message | None:
            found = self.server.stream(stream, f"stream {stream}")
            return found.records.get(found.last_seq_of(subject_filter))

        return await self._api(f"STREAM.MSG.GET.{stream}", ask)

    async def tail(self, stream: str, *, start_seq: int = 1, filters: Sequence[str] = ()) -> MemoryTail:
        for one in filters:
            check_filter(one)
        tail = MemoryTail(self, stream, start_seq=start_seq, filters=filters)
        await tail.start()
        return tail

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        for one in spec.filters:
            check_filter(one)
        await self._api(
            f"CONSUMER.CREATE.{spec.stream}.{spec.name}", lambda: self.server.ensure_consumer(spec)
        )

    async def delete_consumer(self, stream: str, name: str) -> bool:
        return await self._api(
            f"CONSUMER.DELETE.{stream}.{name}", lambda: self.server.delete_consumer(stream, name)
        )

    async def reader(self, stream: str, name: str) -> MemoryReader:
        await self._api(f"CONSUMER.MSG.NEXT.{stream}.{name}", lambda: self.server.consumer(stream, name))
        reader = MemoryReader(self, stream, name)
        self._readers.append(reader)
        return reader

    # ---- core NATS -----------------------------------------------------------------------------------------

    async def publish(self, subject: str, body: bytes) -> None:
        check_subject(subject)
        _check_size(subject, body)
        self.send(subject, partial(self.server.publish, subject, body))
        await asyncio.sleep(0)

    async def request(self, subject: str, body: bytes, *, timeout_seconds: float = 5.0) -> bytes:
        check_subject(subject)
        _check_size(subject, body)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def answer(response: bytes, error: str) -> None:
            failure = BusDenied(f"{subject}: {error}") if error else None
            self.send_down(subject, partial(_settle, future, response, failure))

        def ask() -> None:
            if not self.server.request(subject, body, answer):
                nobody = BusUnavailable(f"nobody serves {subject}; is the service running?")
                self.send_down(subject, partial(_settle, future, None, nobody))

        self.send(subject, ask)
        self._calls[future] = subject
        try:
            async with asyncio.timeout(timeout_seconds):
                return await future
        except TimeoutError:
            raise BusUnknown(f"no answer to {subject} within {timeout_seconds:g} s") from None
        finally:
            self._calls.pop(future, None)

    async def serve(
        self, subject: str, answer: Callable[[str, bytes], Awaitable[bytes]], *, queue: str = ""
    ) -> Callable[[], Awaitable[None]]:
        check_filter(subject)

        async def respond(asked: str, body: bytes, reply: Callable[[bytes, str], None]) -> None:
            response, failure = b"", ""
            try:
                response = await answer(asked, body)
            except Exception as error:
                log.exception("%s: answering %s failed", self.name, asked)
                failure = f"{type(error).__name__}: {error}"
            try:
                self.send(asked, partial(reply, response, failure))
            except BusError as error:
                log.warning("%s: the answer to %s was not sent: %s", self.name, asked, error)

        def arrive(asked: str, body: bytes, reply: Callable[[bytes, str], None] | None) -> None:
            if reply is not None:
                task = asyncio.get_running_loop().create_task(respond(asked, body, reply))
                self._answering[task] = None
                task.add_done_callback(lambda done: self._answering.pop(done, None))

        return await self._subscribe(subject, queue, arrive)

    async def listen(self, subject: str) -> AsyncGenerator[tuple[str, bytes], None]:
        check_filter(subject)
        kept: deque[tuple[str, bytes]] = deque(maxlen=HINTS_KEPT_MAX)
        arrived = asyncio.Event()

        def arrive(about: str, body: bytes, _answer: object) -> None:
            kept.append((about, body))
            arrived.set()

        stop = await self._subscribe(subject, "", arrive)
        try:
            while True:
                while kept:
                    yield kept.popleft()
                arrived.clear()
                await arrived.wait()
        finally:
            await stop()

    async def _subscribe(
        self,
        subject: str,
        queue: str,
        arrive: Callable[[str, bytes, Callable[[bytes, str], None] | None], None],
    ) -> Callable[[], Awaitable[None]]:
        subscriber = _Subscriber(subject, queue, self, arrive)
        await self.call(subject, lambda: self.server.subscribe(subscriber))
        self._subscribers.append(subscriber)

        async def stop() -> None:
            if subscriber in self._subscribers:
                self._subscribers.remove(subscriber)
            self.server.unsubscribe(subscriber)
            await asyncio.sleep(0)

        return stop

    async def close(self) -> None:
        """Close tails and readers, stop answering, hang up. Idempotent."""
        if self._link is Link.CLOSED:
            return
        for tail in tuple(self._tails):
            await tail.close()
        for reader in tuple(self._readers):
            await reader.close()
        for task in tuple(self._answering):
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        await asyncio.sleep(0)  # what was handed over leaves first, as with the real one
        self._link = Link.CLOSED
        self._drop("closed by us")
        self.server.dismiss(self)
        self._tell("closed by us")

    # ---- for the server and our readers --------------------------------------------------------------------

    def stored(self, stream: str, seq: int, subject: str) -> None:
        for tail in self._tails:
            tail.stored(stream, seq, subject)

    def attach(self, tail: MemoryTail) -> None:
        self._tails.append(tail)

    def detach(self, one: MemoryTail | MemoryReader) -> None:
        if isinstance(one, MemoryTail):
            if one in self._tails:
                self._tails.remove(one)
        elif one in self._readers:
            self._readers.remove(one)


class _Subscriber:
    def __init__(
        self,
        subject: str,
        queue: str,
        peer: Peer,
        arrive: Callable[[str, bytes, Callable[[bytes, str], None] | None], None],
    ) -> None:
        self.subject = subject
        self.queue = queue
        self.peer = peer
        self._arrive = arrive

    def arrive(self, subject: str, body: bytes, answer: Callable[[bytes, str], None] | None) -> None:
        self._arrive(subject, body, answer)


def _settle(future: asyncio.Future[T], result: T | None, error: BusError | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)  # type: ignore[arg-type]  # None is a result when T says so


def _check(subject: str, body: bytes, message_id: str, expect: Expect | None) -> None:
    check_subject(subject)
    check_message_id(message_id)
    _check_size(subject, body)
    if expect is not None:
        check_filter(expect.filter)


def _check_size(subject: str, body: bytes) -> None:
    if len(body) > PAYLOAD_BYTES_MAX:
        raise BusDenied(
            f"{len(body)} bytes for {subject}: the server takes {PAYLOAD_BYTES_MAX} at most; "
            "send less, or raise max_payload in the server's configuration"
        )
