"""Writers that stage in tasks; several of them can share one pass over a micro-batch."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from flinkish_spark.bridge.plans import Selection
from flinkish_spark.bridge.session import FROM_THE_JVM
from flinkish_spark.checkpoint.failures import add_place
from flinkish_spark.connectors.row_count import RowCount, begin_staging, collect_reports
from flinkish_spark.contracts.sink import SinkContext, SinkWriter, StageRequest, StageResult
from flinkish_spark.core.arrow_pass import ArrowPass, is_made_by_workers
from flinkish_spark.core.clock import SystemClock, span
from flinkish_spark.core.errors import raise_translated
from flinkish_spark.protocol.ids import BatchId
from flinkish_spark.protocol.records import TaskAck
from flinkish_spark.transport import columns as C
from flinkish_spark.types.ddl import quote_name

#: Time limit for giving up all that a failed task has staged.
ABANDON_MS = 3_000


class TaskStage(ABC):
    """The records that one attempt of a task stages for one sink."""

    #: Whether readers wait for what is staged until it is committed or aborted.
    holds_readers = False

    @abstractmethod
    def write(self, records: pa.RecordBatch) -> None:
        """Stage records; they have the control columns, too."""

    @abstractmethod
    def finish(self, ack: TaskAck) -> Mapping[str, Any]:
        """Make the records durable; return the task's report, with its ack, for JSON."""

    def abandon(self, within_ms: int) -> None:
        """Give up the records, since the task fails; a sweep finds what is left."""


class TaskWork(Protocol):
    """The work of every task for one sink; sent to the tasks."""

    def begin(self, task: TaskContext, sinks: int) -> TaskStage:
        """Begin one attempt, in which so many sinks do such work."""


@dataclass(frozen=True)
class StagePlan:
    """A writer's plan for one micro-batch."""

    work: TaskWork
    #: Makes the result of the tasks' reports.
    finish: Callable[[Sequence[Mapping[str, Any]]], StageResult]
    #: Prepares the rows by Spark; None if tasks can stage them as they are.
    select: Callable[[DataFrame], DataFrame] | None = None
    #: Returns the error for a record that the sink refused, from that of the pass; None if it is another one.
    translate: Callable[[Exception], Exception | None] = lambda error: None


class JoiningWriter(SinkWriter):
    """A writer that stages in tasks, alone or in one pass with others.

    A pass is a Spark job, whose fixed cost is so paid once.
    """

    _context: SinkContext

    @cached_property
    def columns(self) -> Mapping[str, Column]:
        """The columns that its tasks read, by name: expressions over the fields of the stream."""
        return {name: F.col(quote_name(name)) for name in self._context.schema.names}

    @abstractmethod
    def plan(self, request: StageRequest) -> StagePlan:
        """Plan the staging of a micro-batch, without looking at its rows."""

    def stage(self, request: StageRequest) -> StageResult:
        return self.stage_alone(request, self.plan(request))

    def stage_alone(self, request: StageRequest, plan: StagePlan) -> StageResult:
        rows = self.select_rows(request) if plan.select is None else plan.select(request.rows)
        (result,) = stage_together(rows, [plan])
        return result

    def select_rows(self, request: StageRequest) -> DataFrame | ArrowPass:
        """Return rows with the columns that the tasks read."""
        if self.reads_fields_alone and is_made_by_workers(request.source):
            return request.source
        return self._selection.of(request.rows)

    @property
    def reads_fields_alone(self) -> bool:
        """Return whether each column is a field of its name."""
        return True

    @cached_property
    def _selection(self) -> Selection:
        named = [column.alias(name) for name, column in self.columns.items()]
        return Selection([*map(F.col, C.SINK_CONTROL), *named])


@dataclass(frozen=True)
class StageInTasks:
    """Function for mapInArrow: stages the rows of one task and yields one report per sink, as JSON."""

    works: tuple[TaskWork, ...]
    #: By sink, the rows' column for each name that it reads; a row's column `C.SINK` is an index into these,
    #: and without it each row is one of all sinks. Empty for one sink, whose rows have these names.
    columns: tuple[Mapping[str, str], ...] = ()

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = begin_staging()
        stages: list[TaskStage] = []
        try:
            for work in self.works:
                stages.append(work.begin(task, sum(type(one) is type(work) for one in self.works)))
            counts = [RowCount(task.partitionId()) for _ in stages]
            for batch in batches:
                for place, (stage, count) in enumerate(zip(stages, counts, strict=True)):
                    records = count.admit(self._select(batch, place))
                    if records.num_rows:
                        stage.write(records)
            found = [""] * len(stages)
            # This order matters: if one cannot finish, no reader waits for another that nobody will commit.
            for place in sorted(range(len(stages)), key=lambda at: stages[at].holds_readers):
                found[place] = json.dumps(stages[place].finish(counts[place].finish()))
        except BaseException:
            abandon_all(stages)
            raise
        yield pa.record_batch([pa.array(found)], names=["report"])

    def _select(self, batch: pa.RecordBatch, place: int) -> pa.RecordBatch:
        """Return the rows of one sink, under the names that it reads."""
        if not self.columns:
            return batch
        own = batch
        if C.SINK in batch.schema.names:
            own = batch.filter(pc.equal(batch.column(C.SINK), place))
            if not own.num_rows:
                # A batch of another sink may lack the columns.
                return own
        names = dict(zip(C.SINK_CONTROL, C.SINK_CONTROL, strict=True)) | dict(self.columns[place])
        return pa.RecordBatch.from_arrays([own.column(one) for one in names.values()], names=[*names])


def abandon_all(stages: Sequence[TaskStage]) -> None:
    """Abandon what a task has staged, one sink after the other, all within the time limit of one."""
    clock = SystemClock()
    end_ms = clock.monotonic_ms() + ABANDON_MS
    for stage in stages:
        stage.abandon(max(0, end_ms - clock.monotonic_ms()))


@contextmanager
def name_sinks(uids: Sequence[str], batch: BatchId) -> Iterator[None]:
    """Add to an error which sinks were staging; show it as what the thread does."""
    place = f"in {'sink' if len(uids) == 1 else 'one of the sinks'} {', '.join(map(repr, uids))}"
    try:
        with span(f"micro-batch {batch} to be staged {place}"):
            yield
    except Exception as error:
        add_place(error, place)
        raise


def plan_writers(
    writers: Mapping[str, SinkWriter], requests: Mapping[str, StageRequest]
) -> dict[str, StagePlan]:
    """Return the plans of the writers that stage in tasks, by uid of the sink."""
    plans = dict[str, StagePlan]()
    for uid, writer in writers.items():
        if isinstance(writer, JoiningWriter):
            with name_sinks([uid], requests[uid].batch):
                plans[uid] = writer.plan(requests[uid])
    return plans


def stage_alone(writer: SinkWriter, request: StageRequest, plan: StagePlan | None) -> StageResult:
    """Stage the rows of one sink, by the plan of its writer if there is one."""
    if plan is None:
        return writer.stage(request)
    assert isinstance(writer, JoiningWriter)
    return writer.stage_alone(request, plan)


def stage_together(
    rows: DataFrame | ArrowPass, plans: Sequence[StagePlan], columns: Sequence[Mapping[str, str]] = ()
) -> list[StageResult]:
    """Stage the rows of sinks in one pass; return the result of each."""
    stage = StageInTasks(tuple(plan.work for plan in plans), tuple(columns))
    try:
        found = collect_reports(rows, stage)
    except FROM_THE_JVM as error:
        for plan in plans:
            if (refusal := plan.translate(error)) is not None:
                raise_translated(refusal, error)
        raise
    return [plan.finish(found[place :: len(plans)]) for place, plan in enumerate(plans)]
