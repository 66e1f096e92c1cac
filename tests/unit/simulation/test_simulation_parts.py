"""The simulator's parts: its scheduler, its disk, its brokers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from flinkish_spark.core.store import CreateResult, LocalStore, ObjectMissing, Store
from flinkish_spark.protocol.ids import JobUuid, OwnerEpoch, TransactionalId
from tests.simulation.clock import SimClock
from tests.simulation.faults import FaultKind, FaultPlan
from tests.simulation.input_topic import Row
from tests.simulation.memory_store import MemoryStore
from tests.simulation.outputs import Broker, MicroBatch, Table, TransactionState
from tests.simulation.scheduler import Process, ProcessDied, Scheduler
from tests.simulation.worker_pool import WorkerPool

POOL = WorkerPool()
ORIGIN = MicroBatch(0, 3)


def scheduler(seed: int = 1) -> Scheduler:
    return Scheduler(random.Random(seed), POOL)


# -- the scheduler ------------------------------------------------------------------------------------


def test_threads_run_in_the_order_in_which_they_are_due() -> None:
    time, process, seen = scheduler(), Process("p"), list[str]()

    def run(name: str, pause_us: int) -> Callable[[], None]:
        def target() -> None:
            time.pause(pause_us)
            seen.append(f"{name} at {time.now_us}")

        return target

    time.spawn(process, "late", run("late", 20))
    time.spawn(process, "early", run("early", 10))
    time.run()
    assert seen == ["early at 10", "late at 20"]


def test_the_order_of_what_is_due_at_once_comes_from_the_seed() -> None:
    def order(seed: int) -> list[int]:
        time, process, seen = scheduler(seed), Process("p"), list[int]()
        for number in range(6):
            time.spawn(process, str(number), lambda n=number: seen.append(n))  # type: ignore[misc]
        time.run()
        return seen

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(10)}) > 5


def test_a_dead_process_unwinds_and_reaches_nothing() -> None:
    time, victim, other, seen = scheduler(), Process("victim"), Process("other"), list[str]()

    def waits() -> None:
        try:
            time.pause(1_000_000)
        except ProcessDied:
            seen.append(f"unwinds at {time.now_us}")
            time.pause(1)
            seen.append("never")

    time.spawn(victim, "waits", waits)
    time.spawn(other, "kills", lambda: time.kill(victim), delay_us=5)
    time.run()
    assert seen == ["unwinds at 5"]


def test_a_suspended_process_stands_still_while_others_go_on() -> None:
    time, slow, quick, seen = scheduler(), Process("slow"), Process("quick"), list[str]()
    slow.stopped_until_us = 100
    time.spawn(slow, "slow", lambda: seen.append(f"slow at {time.now_us}"))
    time.spawn(quick, "quick", lambda: seen.append(f"quick at {time.now_us}"), delay_us=50)
    time.run()
    assert seen == ["quick at 50", "slow at 100"]


def test_an_error_of_a_thread_ends_the_run_and_is_kept() -> None:
    time = scheduler()

    def fails() -> None:
        raise ValueError("broken")

    time.spawn(Process("p"), "fails", fails)
    time.spawn(Process("p"), "waits", lambda: time.pause(10**9))
    time.run()
    assert str(time.failure) == "broken"


def test_waits_last_at_least_as_long_as_asked_for() -> None:
    time, seen = scheduler(), list[int]()
    clock = SimClock(time, random.Random(2))

    def sleeps() -> None:
        clock.sleep_ms(10)
        seen.append(clock.monotonic_ms())

    time.spawn(Process("p"), "sleeps", sleeps)
    time.run()
    assert 10 <= seen[0] < 40


# -- the disk -----------------------------------------------------------------------------------------


def operations(store: Store) -> list[object]:
    seen: list[object] = [
        store.create_if_absent("a/b/1.json", b"one"),
        store.create_if_absent("a/b/1.json", b"two"),
        store.read("a/b/1.json"),
        store.list("a"),
    ]
    store.put("a/b/1.json", b"three")
    store.put("a/c.json", b"four")
    store.put("a/.hidden", b"five")
    seen += [store.read("a/b/1.json"), store.list("a"), store.list("a/b"), store.list("nothing")]
    store.delete("a/b/1.json")
    store.delete("a/b/1.json")
    seen += [store.list("a"), store.list("a/b"), store.read("a/.hidden")]
    return seen


def test_the_disk_in_memory_answers_like_the_one_on_a_disk(tmp_path: Path) -> None:
    assert operations(MemoryStore()) == operations(LocalStore(tmp_path))


def test_a_missing_object_is_said_to_be_missing() -> None:
    with pytest.raises(ObjectMissing):
        MemoryStore().read("nothing")


def test_a_folder_is_renamed_at_once_and_its_old_name_is_free() -> None:
    store = MemoryStore()
    store.put("spark/1/offsets/0", b"x")
    store.rename_folder("spark/1", "spark/2")
    assert store.list("spark") == ("spark/2",)
    assert store.create_if_absent("spark/1/offsets/0", b"y") is CreateResult.CREATED
    assert store.read("spark/2/offsets/0") == b"x"


# -- the brokers --------------------------------------------------------------------------------------


def test_an_id_that_is_used_again_aborts_what_is_open_under_it() -> None:
    broker, name = Broker(), TransactionalId(JobUuid("5" * 32), OwnerEpoch(1), 1, 0, 0)
    first = broker.begin(name, "sink", ORIGIN, 0)
    second = broker.begin(name, "sink", ORIGIN, 1)
    assert (first.state, second.state) == (TransactionState.ABORTED, TransactionState.OPEN)
    assert (first.epoch, second.epoch) == (0, 1)


def test_an_ended_transaction_stays_as_it_is() -> None:
    broker, name = Broker(), TransactionalId(JobUuid("5" * 32), OwnerEpoch(1), 1, 0, 0)
    one = broker.begin(name, "sink", ORIGIN, 0)
    broker.end(one, TransactionState.COMMITTED, "test")
    broker.end(one, TransactionState.ABORTED, "test")
    assert one.state is TransactionState.COMMITTED
    assert broker.open_ones() == []


def test_a_table_shows_what_was_committed_and_can_go_back() -> None:
    table = Table()
    first, second = (table.stage(ORIGIN, [Row(0, offset, 0, 1)]) for offset in (0, 1))
    assert table.content == ()
    table.commit([first.name], "app", 1, "")
    table.commit([second.name], "app", 2, "")
    assert table.content == (first, second)
    table.restore(0, "note")
    assert table.content == (first,)
    assert table.committed_epoch("app") == 2


# -- faults -------------------------------------------------------------------------------------------


def test_an_armed_fault_strikes_once_and_is_counted() -> None:
    plan = FaultPlan(random.Random(1), {FaultKind.LOST_REPLY: 1}, mean_gap=1)
    while plan.any_of(FaultKind.LOST_REPLY) is None:
        plan.step()
    assert plan.counts[FaultKind.LOST_REPLY] == 1
    assert plan.any_of(FaultKind.LOST_REPLY) is None


def test_no_fault_strikes_after_the_end() -> None:
    plan = FaultPlan(random.Random(1), {FaultKind.LOST_REPLY: 1, FaultKind.ZOMBIE: 1}, mean_gap=1)
    for _ in range(20):
        plan.step()
    plan.end()
    assert [plan.step() for _ in range(100)] == [None] * 100
    assert plan.any_of(*FaultKind) is None
