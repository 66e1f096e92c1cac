"""Timers of a job, from elements to firings, over crashes: the time keeper and an operator, without Spark.

As in a job only key groups with records or with a call have their turn, and there is a micro-batch without
records only if the keeper wants one: a timer that nobody is woken for is lost.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark.core.elements import MIN_WATERMARK_MS, Progress, TimeDomain
from flinkish_spark.operators.process import Elements
from flinkish_spark.protocol.event_time import AssignerRules, BoundedOutOfOrderness
from flinkish_spark.protocol.ids import BatchId
from flinkish_spark.protocol.records import StagedBatch, TimeReport
from flinkish_spark.protocol.watermarks import EventTime
from flinkish_spark.state.key_group import GroupState
from flinkish_spark.testing import Output
from tests.crash.event_time_app import CALL, Timers
from tests.crash.event_time_updates import Reading
from tests.support.effort import seeds
from tests.support.operator_harness import OperatorHarness, Snapshot
from tests.unit.checkpoint.test_time_keeper import NEVER, Query, plan, seen, timers

CHANNELS, DISORDER_MS, LAST_MS = 2, 40, 1_000_000
RULES = AssignerRules(BoundedOutOfOrderness(DISORDER_MS), idleness_ms=3_000)


class Tasks(OperatorHarness):
    """The operator's tasks."""

    def micro_batch(self, given: list[Reading], called: set[int], progress: Progress) -> list[TimeReport]:
        """Run one; return what key groups report, as `worker/keyed_operator.py` does."""
        by_group: dict[int, list[Reading]] = {}
        for reading in given:
            by_group.setdefault(self.group_of(reading.user), []).append(reading)
        reports = []
        for group in sorted(by_group.keys() | called):
            own = by_group.get(group, [])
            before = self._due_ms(group)
            elements = Elements([one.user for one in own], own, [one.at for one in own])
            self._step(group, [elements] if own else [], progress)
            if (due := self._due_ms(group)) != before or due != (NEVER, NEVER):
                reports.append(timers(group, *due))
        return reports

    def _due_ms(self, group: int) -> tuple[int, int]:
        state = GroupState(self._layout, self._values.get(group), self.bases)
        event_ms, call_ms = (
            state.next_call_ms(one) for one in (TimeDomain.EVENT_TIME, TimeDomain.PROCESSING_TIME)
        )
        return NEVER if event_ms is None else event_ms, NEVER if call_ms is None else call_ms


@dataclass(frozen=True)
class Done:
    """A micro-batch: what was behind it, and what it emitted."""

    controls: tuple[dict[str, Any], ...]
    positions: tuple[int, ...]
    snapshot: Snapshot
    output: Output


class Job:
    """Micro-batches, decisions, and the three things that a crash may lead to."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self._chance = chance
        self.query = Query(folder, plan(RULES))
        self.query.channels = list(range(CHANNELS))
        self.tasks = self._made(None)
        first = Done(tuple(self.query.controls), (0,) * CHANNELS, self.tasks.snapshot(), Output())
        self.done, self.decided = [first], 0
        self.input: list[list[Reading]] = [[] for _ in range(CHANNELS)]
        self.crashes: Counter[str] = Counter()

    def _made(self, snapshot: Snapshot | None) -> Tasks:
        return Tasks(
            Timers(), key=lambda one: one.user, key_type="STRING", max_parallelism=128, restore=snapshot
        )

    def try_micro_batch(self, share_of_crashes: float) -> None:
        """Run a micro-batch if Spark would, and maybe crash somewhere in it or behind it."""
        start = self.done[-1].positions
        ends = tuple(
            min(len(own), at + self._chance.randrange(4)) for own, at in zip(self.input, start, strict=True)
        )
        if ends == start and not self.query.is_wanted:
            return
        before_ms = self.query.carried_ms if self.query.next else MIN_WATERMARK_MS
        (called,) = self.query.plan_next()
        progress = Progress(
            min(before_ms, self.query.carried_ms), self.query.carried_ms, self.query.clock.now_ms
        )
        pieces = [own[at:end] for own, at, end in zip(self.input, start, ends, strict=True)]
        while True:
            given = [reading for piece in pieces for reading in piece]
            reports = self.tasks.micro_batch(given, {group for _, group in called}, progress)
            if self._chance.random() >= share_of_crashes / 2:
                break
            # It is in Spark's log, and runs again as it was.
            self.crashes["cut off"] += 1
            self.tasks = self._made(self.done[-1].snapshot)
            self._start_again()
        told = [seen(max(r.at for r in piece), channel) for channel, piece in enumerate(pieces) if piece]
        self.query.stage(*reports, *told)
        self.done.append(Done(tuple(self.query.controls), ends, self.tasks.snapshot(), self.tasks.take()))
        if self._chance.random() < 0.3:
            self._decide()
        if self._chance.random() < share_of_crashes:
            self._chance.choice((self._keep, self._rewind))()

    def _decide(self) -> None:
        behind = self.query.keeper.find_event_time(BatchId(self.query.next - 1))
        assert behind is not None
        self.query.stored = EventTime.from_json(json.loads(json.dumps(behind.to_json())))
        self.decided = len(self.done) - 1

    def _start_again(self) -> None:
        kept = self.query.staged[self.decided :]
        self.query.start([StagedBatch.from_json(json.loads(json.dumps(one.to_json()))) for one in kept])

    def _keep(self) -> None:
        """Crash; what is staged and not decided stays."""
        self.crashes["kept"] += 1
        self.tasks = self._made(self.done[-1].snapshot)
        self._start_again()

    def _rewind(self) -> None:
        """Crash; what is not decided is given up, and its input is read again."""
        self.crashes["rewind"] += 1
        self.done = self.done[: self.decided + 1]
        self.query.staged = self.query.staged[: self.decided]
        self.query.next, self.query.controls = self.decided, list(self.done[-1].controls)
        self.tasks = self._made(self.done[-1].snapshot)
        self._start_again()

    @property
    def rows(self) -> Counter[Any]:
        """What has come out: alarms, and what timers of the wall clock said."""
        alarms = Counter(("alarm", *row) for one in self.done for row in one.output.rows)
        calls = Counter(row[:3] for one in self.done for row in one.output.side.get(CALL.name, ()))
        return alarms + calls


@pytest.mark.parametrize("seed", seeds(8))
def test_no_timer_is_lost_or_fires_twice_over_crashes_and_rewinds(tmp_path: Path, seed: int) -> None:
    """Behaviours 161, 162, 164: with restarts from what is stored, and streams that fall silent."""
    chance = random.Random(seed)
    job, at = Job(tmp_path, chance), 10_000
    for n in range(150):
        at += 2 * chance.randrange(20)
        own_at = at - 2 * chance.randrange(DISORDER_MS // 2)
        job.input[chance.randrange(CHANNELS)].append(Reading(f"u{chance.randrange(70)}", n, own_at))
        for _ in range(chance.randrange(3)):
            # A wall clock may be set back, too.
            job.query.clock.now_ms += chance.choice((1, 20, 150, 400, -250))
            job.query.keeper.wake()
            job.try_micro_batch(share_of_crashes=0.25)
    for channel in range(CHANNELS):
        job.input[channel].append(Reading("last", 1_000 + channel, LAST_MS))
    given = [reading for own in job.input for reading in own]
    for _ in range(120):
        job.query.clock.now_ms += 100
        job.query.keeper.wake()
        job.try_micro_batch(share_of_crashes=0.1)
    wanted = Counter(("call", one.user, one.n) for one in given)
    wanted += Counter(("alarm", one.user, one.n) for one in given if one.user != "last")
    assert (job.rows - wanted, wanted - job.rows) == (Counter(), Counter())
    assert all(job.crashes[kind] for kind in ("cut off", "kept", "rewind")), job.crashes
    assert not job.query.is_wanted
