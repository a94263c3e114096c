"""Which bus a command talks to. Goal: the running Rigbook is found, one that is gone is not taken for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rigbook.context import (
    URL_DEFAULT,
    Context,
    default_data,
    find_url,
    process_start,
    read_context,
    remove_context,
    write_context,
)


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RIGBOOK_NATS", raising=False)
    monkeypatch.setenv("RIGBOOK_DATA", str(tmp_path / "default"))


def running(folder: Path, url: str, *, ticks: int | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    mine = process_start(os.getpid())
    assert mine is not None
    write_context(folder, Context(url=url, pid=os.getpid(), started_ticks=mine if ticks is None else ticks))


def test_the_order_of_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_url(None, None) == URL_DEFAULT
    running(default_data(), "nats://of-default")
    assert find_url(None, None) == "nats://of-default"
    running(tmp_path / "other", "nats://of-other")
    monkeypatch.setenv("RIGBOOK_NATS", "nats://of-env")
    assert find_url(None, None) == "nats://of-env"
    assert find_url(None, tmp_path / "other") == "nats://of-other"
    assert find_url("nats://said", tmp_path / "other") == "nats://said"


def test_one_that_is_gone_does_not_count(tmp_path: Path) -> None:
    running(
        default_data(), "nats://gone", ticks=1
    )  # the pid lives, and is another process than the one that wrote it
    context = read_context(default_data())
    assert context is not None
    assert not context.alive
    assert find_url(None, None) == URL_DEFAULT


def test_a_broken_file_is_no_context(tmp_path: Path) -> None:
    assert read_context(tmp_path) is None
    (tmp_path / "context.json").write_text("{")
    assert read_context(tmp_path) is None
    remove_context(tmp_path)
    remove_context(tmp_path)
    assert not (tmp_path / "context.json").exists()


def test_a_process_that_is_none() -> None:
    assert process_start(2**22 + 1) is None
