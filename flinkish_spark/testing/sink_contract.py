"""The contract of every exactly-once sink as test cases, for your own sinks and those of this package.

Each case is a function that takes a :class:`SinkUnderTest`; run them all with :func:`check_sink`, or one by
one with ``pytest.mark.parametrize("case", SINK_CASES)``.
"""

from __future__ import annotations

import itertools
import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from flinkish_spark.contracts.sink import CompletedCheckpoint, Sink, SinkContext, StageRequest
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.config import CheckpointConfig
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.core.validation import check_function
from flinkish_spark.protocol.ids import BatchId, CheckpointId, CheckpointPurpose, JobUuid, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import Committable, SinkAck
from flinkish_spark.transport import columns as C
from flinkish_spark.types.ddl import ddl_of
from flinkish_spark.types.schemas import output_schema

Rows = list[tuple[Any, ...]]
_CONTROL = f"{C.KIND} INT, {C.CHECKPOINT} LONG, {C.CHANNEL} LONG, {C.HASH} LONG"
#: Far above the ids of a short job, and not round, so that messages about it are recognised.
_FIRST_CHECKPOINT, _FIRST_BATCH = 1_001, 5_001


class SinkContractError(AssertionError):
    """A sink breaks its contract."""


@dataclass
class SinkUnderTest:
    """A sink under test, its external system, and the job of both.

    Parameters
    ----------
    make_sink
        Creates the sink, as a restarted job does; always for the same system.
    read_visible
        Returns the rows that a reader of the system sees now, in any order, each with its fields in order.
        Rows of other tests are allowed.
    spark
        With a master that retries tasks, such as ``local[2,4]``.
    folder
        An empty directory in place of the sink's part of the job directory.
    schema
        Schema of the records, as DDL.
    make_row
        Makes a record of that schema from a text and a number, which are new in every call.
    count_open
        Returns the number of the sink's external transactions or files that are neither committed nor
        aborted; None if that is unknown.
    """

    make_sink: Callable[[], Sink]
    read_visible: Callable[[], Iterable[Sequence[Any]]]
    spark: SparkSession
    folder: Path
    schema: str = "user STRING, amount LONG"
    make_row: Callable[[str, int], tuple[Any, ...]] = lambda name, number: (name, number)
    count_open: Callable[[], int] | None = None
    job: JobUuid = field(default_factory=lambda: JobUuid(uuid.uuid4().hex))

    def __post_init__(self) -> None:
        for name, takes in (("make_sink", 0), ("read_visible", 0), ("make_row", 2), ("count_open", 0)):
            if getattr(self, name) is not None:
                check_function(getattr(self, name), name, takes)
        self._epochs = itertools.count(1)
        self._checkpoints = itertools.count(_FIRST_CHECKPOINT)
        self._batches = itertools.count(_FIRST_BATCH)
        self._numbers = itertools.count(1)

    def start(self) -> SinkProcess:
        """Start or restart the job: a new owner with a new sink."""
        schema = output_schema(self.schema, "contract")
        epoch = OwnerEpoch(next(self._epochs))
        context = SinkContext(
            self.job,
            epoch,
            "contract",
            schema,
            CheckpointConfig(),
            "contract",
            StoreSpec(str(self.folder)),
            SystemClock(),
        )
        return SinkProcess(self, context, self.make_sink())

    def new_rows(self, count: int = 5) -> Rows:
        """Return records that no test has used before."""
        numbers = [next(self._numbers) for _ in range(count)]
        return [self.make_row(f"{uuid.uuid4().hex[:12]}-{n}", n) for n in numbers]

    def next_checkpoint(self) -> CheckpointId:
        """Return the id of the next checkpoint."""
        return CheckpointId(next(self._checkpoints))

    def next_batch(self) -> BatchId:
        """Return the id of the next micro-batch."""
        return BatchId(next(self._batches))

    def visible(self, *rows: Rows) -> Counter[tuple[Any, ...]]:
        """Count how often a reader sees each of these rows."""
        wanted = {row for one in rows for row in one}
        return Counter(row for row in map(tuple, self.read_visible()) if row in wanted)

    def expect_visible(self, *rows: Rows, when: str) -> None:
        """Raise SinkContractError unless each of these rows is visible once."""
        self._expect(Counter(row for one in rows for row in one), rows, when)

    def expect_hidden(self, *rows: Rows, when: str) -> None:
        """Raise SinkContractError if one of these rows is visible."""
        self._expect(Counter(), rows, when)

    def _expect(self, wanted: Counter[tuple[Any, ...]], rows: Sequence[Rows], when: str) -> None:
        found = self.visible(*rows)
        if found != wanted:
            missing, extra = list((wanted - found).elements()), list((found - wanted).elements())
            raise SinkContractError(f"{when}: missing {missing[:5]}, too many {extra[:5]}")


class SinkProcess:
    """The process of one owner: stages, commits, aborts and sweeps as a job does."""

    def __init__(self, subject: SinkUnderTest, context: SinkContext, sink: Sink) -> None:
        self._subject, self._context = subject, context
        sink.preflight(subject.spark, context)
        self._writer = sink.create_writer(subject.spark, context)
        self.committer = sink.create_committer(subject.spark, context)
        self._blocks = itertools.count(1)

    def stage(self, rows: Rows, *, checkpoint: CheckpointId, change: _Change | None = None) -> StagedBlock:
        frame = self._frame(rows, checkpoint)
        block, batch = next(self._blocks), self._subject.next_batch()
        changed = frame if change is None else change(frame)
        request = StageRequest(changed, Lineage(0), batch, block, checkpoint)
        result = self._writer.stage(request)
        ack = SinkAck(self._context.uid, result.tasks)
        # As in a staged file, committables go through JSON.
        stored = [json.loads(json.dumps(dict(payload), allow_nan=False)) for payload in result.payloads]
        return StagedBlock(block, ack, tuple(Committable(self._context.uid, payload) for payload in stored))

    def _frame(self, rows: Rows, checkpoint: CheckpointId) -> DataFrame:
        spark, width = self._subject.spark, len(self._context.schema)
        control = [(int(C.Kind.RECORD), 0, 0, _hash(index)) for index in range(len(rows))]
        barrier = (int(C.Kind.BARRIER), int(checkpoint), 7, 0, *[None] * width)
        content = [*((*c, *row) for c, row in zip(control, rows, strict=True)), barrier]
        fields = f"{_CONTROL}, {ddl_of(self._context.schema)}"
        return spark.createDataFrame(content, fields).repartition(2)

    def commit(self, checkpoint: CheckpointId, *staged: StagedBlock) -> None:
        committables = [c for one in staged for c in one.committables]
        if committables:
            answers = self.committer.commit(checkpoint, committables)
            if len(answers) != len(committables) or not all(a.outcome.is_done for a in answers):
                raise SinkContractError(f"commit answered {[(a.outcome.name, a.detail) for a in answers]}")
        completed = CompletedCheckpoint(checkpoint, 1_700_000_000_000, CheckpointPurpose.PERIODIC)
        answer = self.committer.checkpoint_complete(completed)
        if not answer.outcome.is_done:
            raise SinkContractError(f"checkpoint_complete answered {answer.outcome.name}: {answer.detail}")

    def abort(self, staged: StagedBlock) -> None:
        answers = self.committer.abort(staged.committables)
        if len(answers) != len(staged.committables) or not all(a.outcome.is_done for a in answers):
            raise SinkContractError(f"abort answered {[(a.outcome.name, a.detail) for a in answers]}")

    def sweep(self, *kept: StagedBlock, running: Iterable[int] = ()) -> None:
        """Sweep leftovers, but keep these micro-batches and running blocks."""
        wanted = [c for one in kept for c in one.committables]
        self.committer.sweep(wanted, lambda: frozenset(running))


_Change = Callable[["DataFrame"], "DataFrame"]


@dataclass(frozen=True)
class StagedBlock:
    block: int
    ack: SinkAck
    committables: tuple[Committable, ...]


def _hash(index: int) -> int:
    return (index + 1) * 0x9E3779B97F4A7C15 % (1 << 63)


def nothing_is_visible_before_the_commit(subject: SinkUnderTest) -> None:
    """Check that staged rows are hidden and alive, and that the commit shows each of them once."""
    process, rows, checkpoint = subject.start(), subject.new_rows(), subject.next_checkpoint()
    staged = process.stage(rows, checkpoint=checkpoint)
    subject.expect_hidden(rows, when="before the commit")
    dead = process.committer.why_dead(staged.committables)
    if dead:
        raise SinkContractError(f"what was just staged is dead: {dead}")
    process.commit(checkpoint, staged)
    subject.expect_visible(rows, when="behind the commit")


def every_row_and_barrier_is_acknowledged(subject: SinkUnderTest) -> None:
    """Check that tasks report all rows and barriers, and that barriers are no rows."""
    process, rows, checkpoint = subject.start(), subject.new_rows(), subject.next_checkpoint()
    ack = process.stage(rows, checkpoint=checkpoint).ack
    wanted = (len(rows), sum(map(_hash, range(len(rows)))) % (1 << 64), [(checkpoint, 7)])
    found = (ack.rows, ack.digest, [(b.checkpoint, b.channel) for b in ack.barriers])
    if found != wanted:
        raise SinkContractError(f"rows, digest, barriers: {found} instead of {wanted}")


def a_commit_may_be_repeated(subject: SinkUnderTest) -> None:
    """Check repeated commits by the same process, also after a later checkpoint's commit."""
    process, rows, checkpoint = subject.start(), subject.new_rows(), subject.next_checkpoint()
    staged = process.stage(rows, checkpoint=checkpoint)
    process.commit(checkpoint, staged)
    process.commit(checkpoint, staged)
    subject.expect_visible(rows, when="after the second commit")


def another_process_can_commit(subject: SinkUnderTest) -> None:
    """Check a commit from the committable alone, also after a crash between commit and receipt."""
    first, rows, checkpoint = subject.start(), subject.new_rows(), subject.next_checkpoint()
    staged = first.stage(rows, checkpoint=checkpoint)
    first.committer.close()
    second = subject.start()
    subject.expect_hidden(rows, when="behind a restart")
    second.commit(checkpoint, staged)
    second.committer.close()
    subject.start().commit(checkpoint, staged)
    subject.expect_visible(rows, when="after the commits of two processes")


def an_abort_may_be_repeated_and_shows_nothing(subject: SinkUnderTest) -> None:
    """Check repeated aborts, by this process and another one, which leave later staged data alone."""
    process, rows, later = subject.start(), subject.new_rows(), subject.new_rows()
    aborted = process.stage(rows, checkpoint=subject.next_checkpoint())
    checkpoint = subject.next_checkpoint()
    staged = process.stage(later, checkpoint=checkpoint)
    process.abort(aborted)
    process.abort(aborted)
    subject.start().abort(aborted)
    process.commit(checkpoint, staged)
    subject.expect_hidden(rows, when="behind the aborts")
    subject.expect_visible(later, when="after the commit of another micro-batch")


def a_failed_attempt_is_staged_again(subject: SinkUnderTest) -> None:
    """Check that rows staged twice are visible once: those of the committed attempt."""
    process, rows, checkpoint = subject.start(), subject.new_rows(), subject.next_checkpoint()
    process.stage(rows, checkpoint=checkpoint)
    counts = process.stage(rows, checkpoint=checkpoint)
    process.commit(checkpoint, counts)
    process.sweep()
    subject.expect_visible(rows, when="after the commit of the second attempt")


def a_task_that_is_tried_again_writes_once(subject: SinkUnderTest) -> None:
    """Check a job in which the first attempt of every task fails after its last row."""
    process, rows, checkpoint = subject.start(), subject.new_rows(), subject.next_checkpoint()
    staged = process.stage(
        rows, checkpoint=checkpoint, change=lambda frame: frame.mapInArrow(_fail_at_first, frame.schema)
    )
    process.commit(checkpoint, staged)
    process.sweep()
    subject.expect_visible(rows, when="after a failed attempt of each task")


def micro_batches_of_one_checkpoint_come_together(subject: SinkUnderTest) -> None:
    """Check that two micro-batches become visible with one commit."""
    process, one, two = subject.start(), subject.new_rows(), subject.new_rows()
    checkpoint = subject.next_checkpoint()
    first = process.stage(one, checkpoint=checkpoint)
    second = process.stage(two, checkpoint=checkpoint)
    process.commit(checkpoint, first, second)
    process.commit(checkpoint, first, second)
    subject.expect_visible(one, two, when="after the commit of two micro-batches")


def what_an_aborted_checkpoint_staged_passes_to_the_next(subject: SinkUnderTest) -> None:
    """Check a commit under another checkpoint id than the one at staging."""
    process, rows = subject.start(), subject.new_rows()
    staged = process.stage(rows, checkpoint=subject.next_checkpoint())
    later = subject.next_checkpoint()
    process.commit(later, staged)
    subject.expect_visible(rows, when="after the commit under a later id")


def an_empty_micro_batch_shows_nothing(subject: SinkUnderTest) -> None:
    """Check barriers without rows, between checkpoints with rows."""
    process, before, after = subject.start(), subject.new_rows(), subject.new_rows()
    for rows in (before, [], after):
        checkpoint = subject.next_checkpoint()
        staged = process.stage(rows, checkpoint=checkpoint)
        if len(staged.ack.barriers) != 1 or staged.ack.rows != len(rows):
            raise SinkContractError(f"{staged.ack.rows} rows and {staged.ack.barriers}")
        process.commit(checkpoint, staged)
    subject.expect_visible(before, after, when="after an empty micro-batch")


def a_sweep_removes_leftovers_and_nothing_else(subject: SinkUnderTest) -> None:
    """Check that a sweep deletes unnamed data, and that kept data can be committed after it."""
    first, wanted, forgotten = subject.start(), subject.new_rows(), subject.new_rows()
    checkpoint = subject.next_checkpoint()
    kept = first.stage(wanted, checkpoint=checkpoint)
    first.stage(forgotten, checkpoint=checkpoint)
    second = subject.start()
    second.sweep(kept)
    second.commit(checkpoint, kept)
    second.sweep()
    subject.expect_visible(wanted, when="behind the sweep")
    subject.expect_hidden(forgotten, when="behind the sweep")
    left = subject.count_open() if subject.count_open else 0
    if left:
        raise SinkContractError(f"{left} leftovers are still open after the sweep")


def a_sweep_leaves_running_and_newer_work_alone(subject: SinkUnderTest) -> None:
    """Check that a sweep keeps a micro-batch that is being staged, and all data of a newer owner."""
    old, new = subject.start(), subject.start()
    running, newer = subject.new_rows(), subject.new_rows()
    checkpoint = subject.next_checkpoint()
    first = new.stage(running, checkpoint=checkpoint)
    new.sweep(running=[first.block])
    second = new.stage(newer, checkpoint=checkpoint)
    old.sweep()
    new.commit(checkpoint, first, second)
    subject.expect_visible(running, newer, when="behind two sweeps")


Case = Callable[[SinkUnderTest], None]
#: All cases; each may run alone, in any order, any number of times on one system.
SINK_CASES: tuple[Case, ...] = (
    nothing_is_visible_before_the_commit,
    every_row_and_barrier_is_acknowledged,
    a_commit_may_be_repeated,
    another_process_can_commit,
    an_abort_may_be_repeated_and_shows_nothing,
    a_failed_attempt_is_staged_again,
    a_task_that_is_tried_again_writes_once,
    micro_batches_of_one_checkpoint_come_together,
    what_an_aborted_checkpoint_staged_passes_to_the_next,
    an_empty_micro_batch_shows_nothing,
    a_sweep_removes_leftovers_and_nothing_else,
    a_sweep_leaves_running_and_newer_work_alone,
)


def check_sink(subject: SinkUnderTest, cases: Sequence[Case] = SINK_CASES) -> None:
    """Run all cases.

    Raises
    ------
    SinkContractError
        The message names every failed case. Other errors of the sink are raised unchanged.
    """
    broken = []
    for case in cases:
        try:
            case(subject)
        except SinkContractError as error:
            broken.append(f"{case.__name__}: {error}")
    if broken:
        raise SinkContractError("\n".join(broken))


def _fail_at_first(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    from pyspark import TaskContext

    yield from batches
    task = TaskContext.get()
    if task is not None and task.attemptNumber() == 0:
        raise RuntimeError("the first attempt of this task fails, as the test wants")
