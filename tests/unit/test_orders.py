"""The agent's order book: what it is told once, it does once, also over restarts and damaged lines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from rigbook_nodeagent.orders import Order, OrderBook, Stop
from rigbook_schemas import events as e
from rigbook_schemas.values import Allotment, Component, EvictionReason, Mode, NodeShare, StopScope
from rigbook_schemas.wire import Record

if TYPE_CHECKING:
    from collections.abc import Iterator


def bound(seq: int, *nodes: str) -> Record:
    shares = tuple(
        NodeShare(
            node=node,
            allotments=(Allotment(card=f"GPU-{node}", memory_bytes=1, mode=Mode.EXCLUSIVE),),
            components=(Component(command=("true",)),),
        )
        for node in nodes or ("a",)
    )
    data = e.Bound(demand=f"d-{seq}", project="p", shares=shares, policy="pack")
    return Record(seq, "rig.own.bind.a", 0, f"id-{seq}", "bound", "placer", "", data)


def evict(
    seq: int, epoch: int, *, scope: StopScope = StopScope.COMPONENTS, nodes: tuple[str, ...] = ("a",)
) -> Record:
    data = e.EvictionOrdered(
        demand=f"d-{epoch}", epoch=epoch, nodes=nodes, reason=EvictionReason.WITHDRAWN, scope=scope
    )
    return Record(seq, "rig.evict.a", 0, f"id-{seq}", "eviction.ordered", "placer", "", data)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "orders.jsonl"


_open: list[OrderBook] = []


@pytest.fixture(autouse=True)
def close_books() -> Iterator[None]:
    yield
    while _open:
        _open.pop().close()


def book(path: Path) -> OrderBook:
    opened = OrderBook("a", path)
    opened.open()
    _open.append(opened)
    return opened


def test_an_order_survives_a_restart_until_it_is_closed(path: Path) -> None:
    first = book(path)
    assert isinstance(first.take(bound(5)), Order)
    first.mark_started(5)
    assert isinstance(first.take(evict(6, 5)), Stop)
    first.flush()  # and the agent dies
    second = book(path)
    assert second.open_orders[5].started
    assert second.open_orders[5].stop is not None
    second.close_order(5)
    second.close()
    third = book(path)
    assert third.open_orders == {}
    assert third.position == 6


def test_a_second_delivery_changes_nothing(path: Path) -> None:
    opened = book(path)
    opened.take(bound(5))
    opened.mark_started(5)
    assert opened.take(bound(5)) is None
    assert opened.open_orders[5].started
    opened.close_order(5)
    assert opened.take(bound(5)) is None
    assert opened.open_orders == {}


def test_a_closed_epoch_is_not_adopted_from_a_ledger_that_lags(path: Path) -> None:
    opened = book(path)
    order = opened.take(bound(5))
    assert isinstance(order, Order)
    opened.close_order(5)
    assert opened.reconcile(5, [order]) == []
    opened.close()
    assert book(path).reconcile(5, [order]) == []


def test_an_order_that_the_book_lost_is_adopted(path: Path) -> None:
    lost = book(path).take(bound(5))
    assert isinstance(lost, Order)
    path.unlink()
    fresh = book(path)
    assert fresh.reconcile(5, [lost]) == [lost]
    assert fresh.reconcile(5, [lost]) == []
    assert 5 in fresh.open_orders


def test_only_this_nodes_share_of_a_gang_is_taken(path: Path) -> None:
    opened = book(path)
    order = opened.take(bound(5, "b", "a"))
    assert isinstance(order, Order)
    assert order.share.node == "a"
    assert opened.take(bound(6, "b", "c")) is None
    assert opened.take(evict(7, 6, nodes=("b", "c"))) is None
    assert opened.position == 7


def test_the_latest_stop_order_counts(path: Path) -> None:
    opened = book(path)
    opened.take(bound(5))
    opened.take(evict(8, 5, scope=StopScope.EVERYTHING))
    opened.take(evict(6, 5))
    stop = opened.open_orders[5].stop
    assert stop is not None
    assert stop.scope is StopScope.EVERYTHING


@pytest.mark.parametrize("restarted", [False, True])
def test_a_stop_that_comes_before_its_binding_is_kept_for_it(path: Path, restarted: bool) -> None:
    """The delivery of `bound` was lost and comes again after the stop. Found by the simulation (seed 18)."""
    first = book(path)
    first.take(evict(7, 5))
    first.flush()
    if restarted:
        book(path)
        first = book(path)
    assert isinstance(first.take(bound(5)), Order)
    order = first.open_orders[5]
    assert order.stop is not None
    assert order.stop.seq == 7


def test_an_early_stop_of_another_log_does_not_stop_a_binding_of_this_one(path: Path) -> None:
    first = book(path)
    first.take(evict(7, 5))
    record = bound(5)
    other = Record(5, record.subject, 0, "id", "bound", "placer", "", bound(6).data)
    first.take(other)
    assert first.open_orders[5].stop is None


def test_a_half_written_last_line_costs_that_line_only(path: Path) -> None:
    opened = book(path)
    opened.take(bound(5))
    opened.take(bound(6))
    opened.close()
    path.write_bytes(path.read_bytes() + b'{"order": {"epoch"')
    again = book(path)
    assert set(again.open_orders) == {5, 6}
    assert again.damaged_lines == 1


def test_what_comes_late_is_taken_all_the_same(path: Path) -> None:
    """An agent died with 5 and 6 read and not acknowledged; the next one reads 7 before they come again."""
    opened = book(path)
    assert isinstance(opened.take(bound(7)), Order)
    opened.close_order(7)
    assert isinstance(opened.take(bound(5)), Order)
    assert isinstance(opened.take(bound(6)), Order)
    assert set(opened.open_orders) == {5, 6}


def test_a_consumer_made_anew_begins_nothing_old_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rigbook_nodeagent.orders.CLOSED_KEPT", 10)
    opened = book(path)
    opened.take(bound(1))
    for seq in range(2, 40):
        opened.take(bound(seq))
        opened.close_order(seq)
    opened.close()
    again = book(path)
    assert [again.take(bound(seq)) for seq in range(1, 40)] == [None] * 39
    assert set(again.open_orders) == {1}
    assert isinstance(again.take(bound(40)), Order)


def test_the_file_is_written_anew_when_much_is_closed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rigbook_nodeagent.orders.COMPACT_AFTER", 10)
    opened = book(path)
    for seq in range(1, 40):
        opened.take(bound(seq))
        opened.close_order(seq)
    opened.take(bound(50))
    opened.flush()
    assert len(path.read_bytes().splitlines()) < 80
    assert set(book(path).open_orders) == {50}


def test_a_book_of_another_boot_waits_for_the_ledgers_word(path: Path) -> None:
    """After a power cut lines may be missing: what the ledger does not hold any more must not be begun again."""
    first = OrderBook("a", path)
    first.open("boot-1")
    assert not first.trusted
    first.begin_anew(2, [], boot="boot-1")
    for seq in (3, 4, 6):
        first.take(bound(seq))
    first.take(evict(7, 4))
    first.mark_started(3)
    first.close()
    again = OrderBook("a", path)
    again.open("boot-1")
    assert again.trusted
    again.close()
    after = OrderBook("a", path)
    after.open("boot-2")
    assert not after.trusted
    after.close()
    after.open("boot-2")  # killed before the ledger answered
    assert not after.trusted
    _open.append(after)
    after.begin_anew(9, [after.open_orders[3], after.open_orders[4]], boot="boot-2")
    assert after.trusted
    assert {epoch: (o.started, o.stop is not None) for epoch, o in after.open_orders.items()} == {
        3: (True, False),
        4: (False, True),
    }
    assert after.take(bound(6)) is None  # released meanwhile, and delivered again
    assert isinstance(after.take(bound(10)), Order)


def test_what_the_ledger_does_not_hold_any_more_is_never_begun(path: Path) -> None:
    """Both deliveries were lost, the binding was released by force, and then `bound` comes. Simulation, seed 240."""
    first = book(path)
    first.take(bound(5))
    assert first.reconcile(9, list(first.open_orders.values())) == []
    assert first.known_to == 9
    assert first.take(bound(7)) is None
    assert list(first.open_orders) == [5]
    assert book(path).known_to == 9


def test_a_stop_that_did_not_reach_us_is_learnt_from_the_ledger(path: Path) -> None:
    first = book(path)
    first.take(bound(5))
    stop = Stop(epoch=5, demand="d-5", seq=0, event_id="", reason=EvictionReason.WITHDRAWN)
    (new,) = first.reconcile(9, [msgspec.structs.replace(first.open_orders[5], stop=stop)])
    assert new == stop
    assert book(path).open_orders[5].stop == stop


def test_the_count_of_attempts_survives_a_restart(path: Path) -> None:
    """Else the end of the second attempt is told under the id of the first one, and lost. Simulation, seed 127."""
    first = book(path)
    first.take(bound(5))
    first.mark_started(5)
    first.mark_attempt(5, 2)
    second = book(path)
    assert (second.open_orders[5].started, second.open_orders[5].attempt) == (False, 2)
    second.mark_started(5)
    third = book(path)
    assert (third.open_orders[5].started, third.open_orders[5].attempt) == (True, 2)


def test_after_a_power_cut_the_later_of_two_views_of_an_attempt_counts(path: Path) -> None:
    """The ledger had heard of the second attempt, the disk had not. Simulation, seed 1261."""
    first = OrderBook("a", path)
    _open.append(first)
    first.open("boot-1")
    first.begin_anew(2, [], boot="boot-1")
    first.take(bound(5))
    first.mark_started(5)
    told = msgspec.structs.replace(first.open_orders[5], started=True, attempt=2)
    first.close()
    first.open("boot-2")
    first.begin_anew(9, [told], boot="boot-2")
    assert (first.open_orders[5].started, first.open_orders[5].attempt) == (True, 2)
