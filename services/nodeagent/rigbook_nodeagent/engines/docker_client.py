"""The Docker Engine API with two kinds of failure: it said no, or it did not answer.

No answer is EngineError: what runs is then unknown, not absent.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import aiodocker
import aiohttp
import structlog

from rigbook_nodeagent.engines.protocol import EngineError, StartRefused

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

__all__ = ["SENSELESS", "DockerClient", "DockerRefusal", "PullProgress", "senseless"]

# What reading an answer of another shape than expected raises.
SENSELESS: Final = (KeyError, TypeError, ValueError, AttributeError, IndexError)

ANSWER_SECONDS: Final = 30.0  # creating a container on a busy disk takes several
CONNECT_SECONDS: Final = 5.0
NO_CONNECTION: Final = 900  # aiodocker's own status for it
LAST_WORDS_LINES: Final = 1000
PULL_ATTEMPTS_MAX: Final = 4
PULL_BACKOFF_SECONDS: Final = 1.0  # doubled each time
# A registry that says one of these will say it again.
PULL_HOPELESS: Final = (
    "not found",
    "manifest unknown",
    "denied",
    "unauthorized",
    "invalid reference",
    "no matching manifest",
)

_log = structlog.stdlib.get_logger(__name__)


class DockerRefusal(Exception):
    """Docker answered, and said no."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"[{status}] {text}")
        self.status = status
        self.text = text


class PullProgress:
    """A pull as it goes. `done_bytes` of `total_bytes` over all layers known so far."""

    def __init__(self, image: str) -> None:
        self.image = image
        self.text = ""
        self._layers: dict[str, tuple[int, int]] = {}

    @property
    def done_bytes(self) -> int:
        return sum(done for done, _ in self._layers.values())

    @property
    def total_bytes(self) -> int:
        return sum(total for _, total in self._layers.values())

    def take(self, line: Mapping[str, Any]) -> None:
        """One line of Docker's progress stream."""
        self.text = str(line.get("status", ""))
        layer = str(line.get("id", ""))
        detail = line.get("progressDetail") or {}
        total = detail.get("total")
        if isinstance(total, int) and self.text == "Downloading":
            self._layers[layer] = (int(detail.get("current", 0)), total)
        elif self.text in {"Download complete", "Pull complete"} and layer in self._layers:
            self._layers[layer] = (self._layers[layer][1], self._layers[layer][1])


class DockerClient:
    """One connection pool to one daemon. `url` is `unix:///...` or `tcp://...`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client: aiodocker.Docker | None = None
        self._pulls: dict[str, asyncio.Lock] = {}

    def open(self) -> None:
        """Connects only when asked something."""
        if self._client is None:
            timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS, sock_connect=CONNECT_SECONDS)
            self._client = aiodocker.Docker(url=self.url, timeout=timeout)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    @property
    def api(self) -> aiodocker.Docker:
        if self._client is None:
            raise EngineError("the Docker engine is not open")
        return self._client

    async def ask(self, question: Awaitable[Any], *, seconds: float = ANSWER_SECONDS) -> Any:
        """The answer. Raises DockerRefusal when Docker says no, EngineError when there is no answer."""
        try:
            async with asyncio.timeout(seconds):
                return await question
        except aiodocker.DockerError as error:
            raise told(error) from error
        except TimeoutError as error:
            raise EngineError(f"Docker Engine did not answer within {seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"Docker Engine does not answer: {error}") from error
        except SENSELESS as error:
            raise senseless(error) from error

    async def demand(self, question: Awaitable[Any], what: str) -> Any:
        """The answer to what Docker has no reason to refuse. Raises EngineError only."""
        try:
            return await self.ask(question)
        except DockerRefusal as refusal:
            raise EngineError(f"Docker Engine cannot {what}: {refusal.text}") from refusal

    async def show(self, identity: str) -> dict[str, Any] | None:
        """Inspection of a container, by id or name; None when there is none."""
        try:
            shown: dict[str, Any] = await self.ask(self.api.containers.container(identity).show())
        except DockerRefusal as refusal:
            if refusal.status == 404:
                return None
            raise EngineError(f"container {identity}: {refusal.text}") from refusal
        return shown

    async def output(self, identity: str, *, follow: bool, lines_max: int) -> AsyncIterator[bytes]:
        """Lines of standard output and error, newline included."""
        rest, last = "", ""
        try:
            async for stamp, text in self._frames(identity, follow=follow, tail=lines_max):
                *lines, rest = (rest + text).split("\n")
                for line in lines:
                    yield f"{line}\n".encode()
                last = stamp
            if follow:
                # Docker ends a followed stream when the container ends, and may leave out its last words.
                async for stamp, text in self._frames(identity, follow=False, tail=LAST_WORDS_LINES):
                    if stamp > last:
                        *lines, rest = (rest + text).split("\n")
                        for line in lines:
                            yield f"{line}\n".encode()
        except aiodocker.DockerError as error:
            raise EngineError(f"no output of container {identity[:12]}: {error.message}") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(f"output of container {identity[:12]} broke off: {error}") from error
        if rest:
            yield rest.encode()

    async def _frames(self, identity: str, *, follow: bool, tail: int) -> AsyncIterator[tuple[str, str]]:
        """(time in a fixed width, text) of each message, which may be a part of a long line."""
        container = self.api.containers.container(identity)
        if follow:
            async for frame in container.log(
                stdout=True, stderr=True, follow=True, tail=tail, timestamps=True
            ):
                stamp, _, text = frame.partition(" ")
                yield stamp, text
        else:
            for frame in await container.log(stdout=True, stderr=True, tail=tail, timestamps=True):
                stamp, _, text = frame.partition(" ")
                yield stamp, text

    async def have_image(
        self,
        image: str,
        *,
        on_pull: Callable[[PullProgress], None] | None,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        """Pull it when it is missing; one pull of an image at a time.

        Raises StartRefused (`image_pull`) at once when the registry will never give it, else after some
        attempts, and EngineError.
        """
        async with self._pulls.setdefault(image, asyncio.Lock()):
            backoff = PULL_BACKOFF_SECONDS
            for attempt in range(1, PULL_ATTEMPTS_MAX + 1):
                if await self._has_image(image):
                    return
                try:
                    await self._pull(image, on_pull)
                except DockerRefusal as refusal:
                    hopeless = any(word in refusal.text.lower() for word in PULL_HOPELESS)
                    if hopeless or attempt == PULL_ATTEMPTS_MAX:
                        raise StartRefused(
                            "image_pull", f"cannot pull {image} (attempt {attempt}): {refusal.text}"
                        ) from refusal
                    _log.warning("image_pull_failed", image=image, attempt=attempt, why=refusal.text)
                    await sleep(backoff)
                    backoff *= 2

    async def _has_image(self, image: str) -> bool:
        try:
            await self.ask(self.api.images.inspect(image))
        except DockerRefusal as refusal:
            if refusal.status == 404:
                return False
            raise StartRefused("image_pull", f"image {image}: {refusal.text}") from refusal
        return True

    async def _pull(self, image: str, on_pull: Callable[[PullProgress], None] | None) -> None:
        progress = PullProgress(image)
        try:
            # No limit on the whole: 20 GB over a slow line take an hour. Docker ends a stalled one itself.
            async for line in self.api.images.pull(image, stream=True):
                if "error" in line:  # older aiodocker passes it on as a line
                    raise DockerRefusal(500, str(line["error"]))
                progress.take(line)
                if on_pull is not None:
                    on_pull(progress)
        except aiodocker.DockerError as error:
            raise told(error) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(f"pull of {image} broke off: {error}") from error


def senseless(error: Exception) -> EngineError:
    return EngineError(
        f"the Docker Engine gave an answer that makes no sense: {type(error).__name__}: {error}"
    )


def told(error: aiodocker.DockerError) -> DockerRefusal | EngineError:
    """Which of the two kinds it is."""
    if error.status == NO_CONNECTION:
        return EngineError(f"Docker Engine does not answer: {error.message}")
    return DockerRefusal(error.status, str(error.message))
