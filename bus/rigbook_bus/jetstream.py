"""The bus over a real nats-server with JetStream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import TYPE_CHECKING
from weakref import WeakSet

from rigbook_bus import jetstream_api as api
from rigbook_bus.connection import NO_RESPONDERS, Connection, Reply, header_of
from rigbook_bus.jetstream_reader import JetStreamReader
from rigbook_bus.jetstream_tail import JetStreamTail
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
    import ssl
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
    from pathlib import Path

__all__ = ["JetStreamBus"]

log = logging.getLogger("rigbook_bus")

# Messages on their way without an acknowledgement, in `append_many`. More does not go faster (the server syncs one
# by one), fewer leaves the line idle; bounded in bytes too, because nats-py stalls when its own buffer fills.
WINDOW_MESSAGES = 512
WINDOW_BYTES = 4 * 1024 * 1024
HINTS_KEPT_MAX = 1024
# The NATS convention for services (ADR-32): an answer that is an error.
SERVICE_ERROR = "Nats-Service-Error"
SERVICE_ERROR_CODE = "Nats-Service-Error-Code"


class JetStreamBus:
    """A `Bus` on a nats-server. Make one with `await JetStreamBus.connect(url, name=...)`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._open: WeakSet[JetStreamTail | JetStreamReader] = WeakSet()
        self._answering: set[asyncio.Task[None]] = set()

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        credentials: str | Path | None = None,
        tls: ssl.SSLContext | None = None,
        inbox_prefix: str = "_INBOX",
        wait_seconds: float | None = 10.0,
    ) -> JetStreamBus:
        """Connect to `url` (several servers: comma-separated) under `name`.

        credentials: a NATS .creds file (needs the PyPI package `nkeys`). inbox_prefix: where answers arrive; each
        user has its own, so that none can read another's. wait_seconds: bound of the first connect, None = for ever.

        Raises: BusUnavailable when nothing answers in time, BusDenied when the credentials are refused.
        """
        return cls(
            await Connection.open(
                url,
                name=name,
                credentials=credentials,
                tls=tls,
                inbox_prefix=inbox_prefix,
                wait_seconds=wait_seconds,
            )
        )

    @property
    def link(self) -> Link:
        return self._connection.link

    def on_link(self, told: Callable[[Link, str], None]) -> None:
        self._connection.on_link(told)

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
        headers = _headers(subject, message_id, expect)
        reply = await self._connection.call(subject, body, headers=headers, timeout_seconds=timeout_seconds)
        if reply.status == NO_RESPONDERS:
            raise await self._no_stream(subject)
        return _appended(subject, reply)

    async def append_many(
        self, messages: Sequence[tuple[str, bytes, str]], *, timeout_seconds: float = 30.0
    ) -> list[Appended | BusError]:
        results: list[Appended | BusError] = []
        waiting: deque[tuple[bytes, asyncio.Future[Reply], str, int]] = deque()
        bytes_waiting = 0
        sent = 0

        async def settle_oldest() -> int:
            token, future, subject, size = waiting[0]
            try:
                reply = future.result() if future.done() else await asyncio.shield(future)
                if reply.status == NO_RESPONDERS:
                    results.append(await self._no_stream(subject))
                else:
                    results.append(_appended(subject, reply))
            except BusError as error:
                results.append(error)
            self._connection.forget(token)
            waiting.popleft()
            return size

        try:
            async with asyncio.timeout(timeout_seconds):
                for subject, body, message_id in messages:
                    while len(waiting) >= WINDOW_MESSAGES or (
                        waiting and bytes_waiting + len(body) > WINDOW_BYTES
                    ):
                        bytes_waiting -= await settle_oldest()
                    try:
                        token, future = await self._connection.start(
                            subject, body, headers=_headers(subject, message_id, None)
                        )
                    except BusError as error:
                        # Its place in the answer is kept by a future that is done already.
                        token, future = b"", asyncio.get_running_loop().create_future()
                        future.set_exception(error)
                    waiting.append((token, future, subject, len(body)))
                    bytes_waiting += len(body)
                    sent += 1
                while waiting:
                    bytes_waiting -= await settle_oldest()
        except TimeoutError:
            for _, future, subject, _ in waiting:
                results.append(_outcome(subject, future, timeout_seconds))
            results.extend(
                BusUnavailable(f"{subject}: the {timeout_seconds:g} s were over before it was sent")
                for subject, _, _ in messages[sent:]
            )
        finally:
            for token, future, _, _ in waiting:
                self._connection.forget(token)
                if not future.cancel() and not future.cancelled():
                    future.exception()  # seen: asyncio would complain about it otherwise
        return results

    async def _no_stream(self, subject: str) -> BusError:
        """Nobody took the message: no stream has this subject, or the one that has is without a leader now."""
        try:
            answer = await self._api("$JS.API.STREAM.NAMES", {"subject": subject}, api.StreamNames)
        except BusError:
            return BusUnavailable(
                f"nobody stores {subject}: no stream takes it, or it has no leader now; nothing was stored"
            )
        if answer.streams:
            return BusUnavailable(
                f"{answer.streams[0]} has no leader now; {subject} was not stored, try again"
            )
        return BusDenied(f"no stream takes {subject}; {api.REMEDIES[api.STREAM_NOT_FOUND]}")

    # ---- streams -------------------------------------------------------------------------------------------

    async def ensure_stream(self, spec: StreamSpec) -> StreamFacts:
        wanted = api.stream_config(spec)
        answer = await self._api(f"$JS.API.STREAM.INFO.{spec.name}", {}, api.StreamAnswer)
        if answer.error is not None and answer.error.err_code == api.STREAM_NOT_FOUND:
            answer = await self._api(f"$JS.API.STREAM.CREATE.{spec.name}", wanted, api.StreamAnswer)
            if answer.error is not None and answer.error.err_code == api.STREAM_NAME_IN_USE:
                # somebody made it in between: compare with theirs
                answer = await self._api(f"$JS.API.STREAM.INFO.{spec.name}", {}, api.StreamAnswer)
        if answer.error is not None:
            raise api.refusal(answer.error, f"stream {spec.name}")
        if wrong := api.differences(wanted, answer.config):
            raise BusDenied(f"stream {spec.name} is there with other settings: {'; '.join(wrong)}")
        return api.facts_of(spec.name, answer)

    async def stream(self, name: str) -> StreamFacts | None:
        answer = await self._api(f"$JS.API.STREAM.INFO.{name}", {}, api.StreamAnswer)
        if answer.error is None:
            return api.facts_of(name, answer)
        if answer.error.err_code == api.STREAM_NOT_FOUND:
            return None
        raise api.refusal(answer.error, f"stream {name}")

    async def message(self, stream: str, seq: int) -> Message | None:
        return await self._message(stream, {"seq": seq}) if seq > 0 else None

    async def last(self, stream: str, subject_filter: str) -> Message | None:
        check_filter(subject_filter)
        return await self._message(stream, {"last_by_subj": subject_filter})

    async def _message(self, stream: str, which: dict[str, int] | dict[str, str]) -> Message | None:
        answer = await self._api(f"$JS.API.STREAM.MSG.GET.{stream}", which, api.MessageAnswer)
        if answer.message is not None:
            return api.message_of(answer.message)
        if answer.error is None or answer.error.err_code == api.NO_MESSAGE:
            return None
        raise api.refusal(answer.error, f"stream {stream}")

    async def tail(self, stream: str, *, start_seq: int = 1, filters: Sequence[str] = ()) -> JetStreamTail:
        for one in filters:
            check_filter(one)
        tail = JetStreamTail(self._connection, stream, start_seq=start_seq, filters=filters)
        await tail.start()
        self._open.add(tail)
        return tail

    # ---- consumers -----------------------------------------------------------------------------------------

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        for one in spec.filters:
            check_filter(one)
        answer = await api.create_consumer(self._connection, spec.stream, api.consumer_config(spec))
        if answer.error is None or answer.error.err_code in (api.CONSUMER_EXISTS, api.CONSUMER_NAME_IN_USE):
            return
        raise api.refusal(answer.error, f"consumer {spec.name} of stream {spec.stream}")

    async def delete_consumer(self, stream: str, name: str) -> bool:
        answer = await self._api(f"$JS.API.CONSUMER.DELETE.{stream}.{name}", {}, api.DeleteAnswer)
        if answer.error is None:
            return True
        if answer.error.err_code == api.CONSUMER_NOT_FOUND:
            return False
        raise api.refusal(answer.error, f"consumer {name} of stream {stream}")

    async def reader(self, stream: str, name: str) -> JetStreamReader:
        reader = JetStreamReader(self._connection, stream, name)
        await reader.start()
        self._open.add(reader)
        return reader

    # ---- core NATS -----------------------------------------------------------------------------------------

    async def publish(self, subject: str, body: bytes) -> None:
        check_subject(subject)
        await self._connection.publish(subject, body)

    async def request(self, subject: str, body: bytes, *, timeout_seconds: float = 5.0) -> bytes:
        check_subject(subject)
        reply = await self._connection.call(subject, body, timeout_seconds=timeout_seconds)
        if reply.status == NO_RESPONDERS:
            raise BusUnavailable(f"nobody serves {subject}; is the service running?")
        if error := header_of(reply.headers, SERVICE_ERROR.encode()):
            raise BusDenied(f"{subject}: {error.decode(errors='replace')}")
        return reply.body

    async def serve(
        self, subject: str, answer: Callable[[str, bytes], Awaitable[bytes]], *, queue: str = ""
    ) -> Callable[[], Awaitable[None]]:
        check_filter(subject)

        async def respond(asked: str, reply: str, body: bytes) -> None:
            headers = None
            try:
                response = await answer(asked, body)
            except Exception as error:
                # the service lives on, and the asker learns at once instead of waiting for its time-out
                log.exception("%s: answering %s failed", self._connection.name, asked)
                response = b""
                headers = {SERVICE_ERROR: f"{type(error).__name__}: {error}", SERVICE_ERROR_CODE: "500"}
            try:
                await self._connection.publish(reply, response, headers=headers)
            except BusError as error:
                log.warning("%s: the answer to %s was not sent: %s", self._connection.name, asked, error)

        def take(asked: bytes, reply: bytes, body: bytes, _headers: bytes | None) -> None:
            if not reply:
                return
            task = asyncio.get_running_loop().create_task(respond(asked.decode(), reply.decode(), body))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

        subscription = await self._connection.subscribe_surely(subject, take, queue=queue)

        async def stop() -> None:
            await self._connection.unsubscribe(subscription)
            with contextlib.suppress(BusError):
                await self._connection.flush()  # from here on nobody is sent to us

        return stop

    async def listen(self, subject: str) -> AsyncGenerator[tuple[str, bytes], None]:
        check_filter(subject)
        kept: deque[tuple[str, bytes]] = deque(maxlen=HINTS_KEPT_MAX)
        arrived = asyncio.Event()

        def take(about: bytes, _reply: bytes, body: bytes, _headers: bytes | None) -> None:
            kept.append((about.decode(), body))
            arrived.set()

        subscription = await self._connection.subscribe_surely(subject, take)
        try:
            while True:
                while kept:
                    yield kept.popleft()
                arrived.clear()
                await arrived.wait()
        finally:
            await self._connection.unsubscribe(subscription)

    # ---- the rest ------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Close every tail and reader, stop answering, send what is waiting, hang up."""
        for one in tuple(self._open):
            await one.close()
        for task in tuple(self._answering):
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        await self._connection.close()

    async def _api(self, subject: str, question: object, shape: type[api.Answer]) -> api.Answer:
        return await api.call(self._connection, subject, question, shape)


def _headers(subject: str, message_id: str, expect: Expect | None) -> dict[str, str]:
    """Only these travel as headers: each stored header slows every later read of the log."""
    check_subject(subject)
    check_message_id(message_id)
    headers = {"Nats-Msg-Id": message_id}
    if expect is not None:
        headers["Nats-Expected-Last-Subject-Sequence"] = str(expect.last_seq)
        if expect.filter != subject:
            check_filter(expect.filter)
            headers["Nats-Expected-Last-Subject-Sequence-Subject"] = expect.filter
    return headers


def _appended(subject: str, reply: Reply) -> Appended:
    ack = api.read_answer(reply.body, api.PubAck, subject)
    if ack.error is not None:
        raise api.refusal(ack.error, subject)
    return Appended(seq=ack.seq, duplicate=ack.duplicate)


def _outcome(subject: str, future: asyncio.Future[Reply], timeout_seconds: float) -> Appended | BusError:
    """What is known of a message when the time is over."""
    if not future.done():
        return BusUnknown(f"no acknowledgement for {subject} within {timeout_seconds:g} s")
    try:
        return _appended(subject, future.result())
    except BusError as error:
        return error
