"""Memory as people write it. Goal: no amount is misread by a factor, and a wrong one says what was expected."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigbook.memory import GpuAsk, MemoryTextError, parse_gpu, parse_memory, parse_size

GIB = 1024**3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24", 24 * GIB),
        ("24GB", 24 * GIB),
        ("24GiB", 24 * GIB),
        ("24 gib", 24 * GIB),
        ("24g", 24 * GIB),
        ("24576MiB", 24 * GIB),
        ("24576MB", 24 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        ("0.5T", 512 * GIB),
        (" 80GB ", 80 * GIB),
        ("16MiB", 16 * 1024**2),
        ("16TiB", 16 * 1024 * GIB),
    ],
)
def test_memory(text: str, expected: int) -> None:
    assert parse_memory(text) == expected


def test_the_card_sold_as_24gb_has_what_24gb_asks_for() -> None:
    # a 4090's driver reports 24564 MiB of 24576; the book has the card's round 24 GiB
    assert parse_memory("24GB") == 24576 * 1024**2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not memory"),
        ("GB", "is not memory"),
        ("much", "is not memory"),
        ("-3", "cannot be negative"),
        ("-3GB", "cannot be negative"),
        ("3,5GB", "decimal point"),
        ("24XB", "unknown unit 'XB'"),
        ("24 bytes", "bytes are not written here"),
        ("24Gbit", "that is bits"),
        ("1e9", "is not memory"),
        ("0x10", "is not memory"),
        ("nan", "is not memory"),
        ("24 24", "is not memory"),
        ("0", "at least 16 MiB"),
        ("15MiB", "at least 16 MiB"),
        ("24576", "at most 16 TiB"),  # MiB without saying so
        ("17TiB", "at most 16 TiB"),
        ("0.3333", "whole number of bytes"),
        ("9" * 30, "is not memory"),
    ],
)
def test_wrong_memory_says_why(text: str, words: str) -> None:
    with pytest.raises(MemoryTextError, match=words):
        parse_memory(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GB", GpuAsk(24 * GIB)),
        ("24GB:2", GpuAsk(24 * GIB, 2)),
        ("A100:80GB", GpuAsk(80 * GIB, 1, "A100")),
        ("A100:80GB:2", GpuAsk(80 * GIB, 2, "A100")),
        ("RTX 4090:24", GpuAsk(24 * GIB, 1, "RTX 4090")),
        ("A100 : 80GB : 2", GpuAsk(80 * GIB, 2, "A100")),
    ],
)
def test_gpu(text: str, expected: GpuAsk) -> None:
    assert parse_gpu(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A100:", "expected MEMORY"),
        (":24GB", "expected MEMORY"),
        ("a:b:c:d", "expected MEMORY"),
        ("A100:80GB:0", "no number of cards"),
        ("A100:80GB:1025", "no number of cards"),
        ("24GB:-1", "no number of cards"),
        ("24GB:two", "no number of cards"),
        ("A100:lots", "is not memory"),
        ("4:5:6", "where the model belongs"),
        ("A100", "is not memory|unknown unit"),
        ("x" * 200 + ":24GB", "more than 128 characters"),
    ],
)
def test_wrong_gpu_says_why(text: str, words: str) -> None:
    with pytest.raises(MemoryTextError, match=words):
        parse_gpu(text)


@given(st.text(max_size=60))
def test_any_text_is_memory_or_refused(text: str) -> None:
    for parse in (parse_size, parse_memory, parse_gpu):
        with contextlib.suppress(MemoryTextError):
            parse(text)


@given(st.integers(1, 16 * 1024))
def test_gib_and_mib_say_the_same(gib: int) -> None:
    assert parse_memory(f"{gib}GiB") == parse_memory(f"{gib * 1024}MiB") == parse_memory(str(gib))
