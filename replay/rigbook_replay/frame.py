"""Frames: the pieces a journal file is made of, each found and checked by itself. Bytes in, bytes out.

A frame is a head of fixed size and a body. The head begins with a mark that can be searched for, says
what the body holds (sequences, receive times), carries the checksums of both, and the running hash of
everything before it: damage is found where it is, what lies behind it is found again, and a frame that
was taken out, added or exchanged breaks the chain.

All numbers are little-endian. Checksums are CRC-32 (damage), the chain is BLAKE2b with 16 bytes (intent).
"""

from __future__ import annotations

import struct
import zlib
from hashlib import blake2b
from typing import Final

import msgspec
import zstandard

__all__ = [
    "BODY_BYTES_MAX",
    "HEAD_BYTES",
    "MARK",
    "NO_CHAIN",
    "Contents",
    "Damaged",
    "Frame",
    "link",
    "pack",
    "search",
    "unpack_body",
    "unpack_head",
]

# The first byte is no text, and the line ends tell a transfer that took the file for one (as PNG's do).
MARK: Final = b"\x93RIGJ\r\n\x1a"
NO_CHAIN: Final = bytes(16)
# A block is cut near 1 MiB before compression; a single event has at most 1 MiB. More is not ours.
BODY_BYTES_MAX: Final = 64 * 1024**2
LEVEL: Final = 3

# mark, contents, codec, zero, number, body bytes, raw bytes, count, first/last sequence,
# earliest/latest receive time, chain before this frame, CRC of the body
_HEAD: Final = struct.Struct("<8sBBHIIIIQQqq16sI")
_CRC: Final = struct.Struct("<I")
HEAD_BYTES: Final = _HEAD.size + _CRC.size
_PLAIN, _ZSTD = 0, 1
_packer: Final = zstandard.ZstdCompressor(level=LEVEL)
_unpacker: Final = zstandard.ZstdDecompressor()


class Contents:
    """What a frame holds."""

    HEADER: Final = 1  # what this journal is of; JSON, readable with the eye
    EVENTS: Final = 2  # a block of the ledger stream
    HEARTBEATS: Final = 3  # a block of the heartbeat stream, kept as evidence
    INDEX: Final = 4  # where the frames begin; the last frame of a finished journal
    SNAPSHOT: Final = 5  # of the fold: never in a journal, only in the cache beside it


class Damaged(Exception):
    """A part of the file is not what was written there; the text says what."""

    code = "journal_damaged"


class Frame(msgspec.Struct, frozen=True, gc=False):
    """The head of a frame, and where it stands."""

    offset: int
    contents: int
    codec: int
    number: int  # counts from 0 within the file
    body_bytes: int
    raw_bytes: int
    count: int  # events inside
    first_seq: int
    last_seq: int
    earliest_ns: int  # receive times; the server's clock may step back, so these are bounds, not ends
    latest_ns: int
    chain: bytes  # over all frames before this one
    body_crc: int

    @property
    def end(self) -> int:
        return self.offset + HEAD_BYTES + self.body_bytes


def pack(
    contents: int,
    raw: bytes,
    *,
    number: int,
    chain: bytes,
    count: int = 0,
    first_seq: int = 0,
    last_seq: int = 0,
    earliest_ns: int = 0,
    latest_ns: int = 0,
) -> bytes:
    """A whole frame. Bodies are compressed, but for the header, which a person may want to read."""
    codec = _PLAIN if contents == Contents.HEADER else _ZSTD
    body = raw if codec == _PLAIN else _packer.compress(raw)
    head = _HEAD.pack(
        MARK, contents, codec, 0, number, len(body), len(raw), count, first_seq, last_seq,
        earliest_ns, latest_ns, chain, zlib.crc32(body),
    )  # fmt: skip
    return head + _CRC.pack(zlib.crc32(head)) + body


def link(chain: bytes, frame: bytes) -> bytes:
    """The running hash after `frame` (head and body as they stand in the file)."""
    return blake2b(chain + frame, digest_size=16).digest()


def unpack_head(data: bytes, offset: int) -> Frame:
    """The head at the beginning of `data`. Raises Damaged."""
    if len(data) < HEAD_BYTES:
        raise Damaged(f"the file ends within the head of a frame, at byte {offset + len(data)}")
    fields = _HEAD.unpack_from(data)
    (crc,) = _CRC.unpack_from(data, _HEAD.size)
    if fields[0] != MARK:
        raise Damaged(f"no frame begins at byte {offset}")
    if zlib.crc32(data[: _HEAD.size]) != crc:
        raise Damaged(f"the head of the frame at byte {offset} has a wrong checksum")
    frame = Frame(offset, *fields[1:3], *fields[4:])
    if frame.body_bytes > BODY_BYTES_MAX or frame.raw_bytes > BODY_BYTES_MAX:
        raise Damaged(
            f"the frame at byte {offset} claims {frame.body_bytes} bytes, more than any of ours has"
        )
    return frame


def unpack_body(frame: Frame, stored: bytes) -> bytes:
    """The body as it was given to `pack`. Raises Damaged."""
    if len(stored) < frame.body_bytes:
        raise Damaged(
            f"the file ends within frame {frame.number}, at byte {frame.offset + HEAD_BYTES + len(stored)}"
        )
    if zlib.crc32(stored) != frame.body_crc:
        raise Damaged(f"frame {frame.number} at byte {frame.offset} has a wrong checksum")
    if frame.codec == _PLAIN:
        return stored
    if frame.codec != _ZSTD:
        raise Damaged(
            f"frame {frame.number} at byte {frame.offset} is packed in a way this version does not know"
        )
    try:
        # told before anything is unpacked: a small body must not claim gigabytes
        claimed = zstandard.get_frame_parameters(stored).content_size
        raw = _unpacker.decompress(stored) if claimed == frame.raw_bytes else b""
    except zstandard.ZstdError as error:
        raise Damaged(f"frame {frame.number} at byte {frame.offset} cannot be unpacked: {error}") from error
    if len(raw) != frame.raw_bytes:
        raise Damaged(
            f"frame {frame.number} at byte {frame.offset} has {len(raw)} bytes, {frame.raw_bytes} told"
        )
    return raw


def search(data: bytes, start: int = 0) -> int:
    """Where the next mark stands in `data`, -1 when none does."""
    return data.find(MARK, start)
