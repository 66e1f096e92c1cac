"""Writer of formats whose sinks commit together: tasks stage, the driver records the decision and commits.

For every micro-batch Spark makes a writer in a Python process on the driver, which has no session, and
pickles it into the tasks; after them it makes a new one, in another call, and commits. The life of a
micro-batch, in order:

1. *plan*, when the writer is pickled: it seals earlier attempts, finishes the micro-batch that they decided,
   aborts what else they staged, numbers this attempt, and plans the work of the tasks.
2. *stage*, in each task: all sinks in one pass, by the code of a job's sinks. The message of the first task
   brings back how the driver makes committables of the reports.
3. *commit*: the committables are stored (the decision), then committed, then confirmed by a receipt. Spark
   writes commits/N when this returns.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyspark.sql import types as T
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from flinkish_spark.bridge.no_session import pretend_session
from flinkish_spark.checkpoint.micro_batch_commits import (
    Lease,
    MicroBatchCommits,
    open_sinks_dir,
    to_checkpoint_place,
)
from flinkish_spark.checkpoint.ownership import process_key
from flinkish_spark.connectors.query_sinks import QuerySinks
from flinkish_spark.connectors.task_staging import (
    JoiningWriter,
    StageInTasks,
    StagePlan,
    TaskWork,
    name_sinks,
)
from flinkish_spark.contracts.sink import Sink, SinkWriter, StageRequest, StageResult
from flinkish_spark.core.errors import ConfigError, FlinkishError, InternalError, JobDirError
from flinkish_spark.core.steps import Observer
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.ids import BatchId
from flinkish_spark.protocol.records import StagedBatch
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.key_hash import can_hash, hash_keys
from flinkish_spark.types.exact_text import JsonWriter
from flinkish_spark.worker.daemon import freeze_modules

if TYPE_CHECKING:
    import pyarrow as pa

LOG = logging.getLogger(__name__)
#: Prefix of the options of the bucket in which the checkpoint is.
STORE = "flinkish.store."
#: Folder with the checkpoints of a Spark pipeline's flows: <sink>/<flow>/<number of full refreshes>.
_PIPELINE_CHECKPOINTS = "_checkpoints"
#: The open sinks of all queries that use this process, the last used ones last.
_SINKS: dict[tuple[QueryOutput, StoreSpec], QuerySinks] = {}
_MOST_OPEN = 32
#: Makes the result of a sink of its tasks' reports.
Finish = Callable[[Sequence[Mapping[str, Any]]], StageResult]


def find_checkpoint_place(options: Mapping[str, str]) -> StoreSpec:
    """Return the place of the option checkpointLocation, with the options of its bucket."""
    given = {name.lower(): value.strip() for name, value in options.items()}
    store = {name.removeprefix(STORE): value for name, value in given.items() if name.startswith(STORE)}
    return to_checkpoint_place(given.get("checkpointlocation", ""), store)


def find_refreshed_checkpoints(checkpoint_location: StoreSpec) -> list[StoreSpec]:
    """Return earlier checkpoints of a pipeline's flow, before its full refreshes, that a sink used."""
    flow, number = checkpoint_location.to_parent(1), checkpoint_location.url.rpartition("/")[2]
    if _PIPELINE_CHECKPOINTS not in flow.url.split("/") or not number.isdecimal():
        return []
    earlier = (flow.to_child(str(one)) for one in range(int(number)))
    return [one for one in earlier if open_sinks_dir(one).find_uuid() is not None]


@dataclass(frozen=True, slots=True)
class SinkRows:
    """The rows that one sink gets."""

    fields: T.StructType
    #: The BOOLEAN column that is true in them; empty for all rows.
    where: str = ""


@dataclass(frozen=True)
class QueryOutput:
    """The sinks of a query, and where it keeps its decisions; it may hold secrets."""

    sinks: Mapping[str, Sink] = field(compare=False)
    rows: Mapping[str, SinkRows] = field(compare=False)
    checkpoint_location: StoreSpec
    #: Distinguishes it from all outputs with other sinks or rows.
    key: str = field(repr=False)
    patience_ms: int = 0


@dataclass
class StagedMessage(WriterCommitMessage):
    lease: Lease
    batch: BatchId
    #: The task's report for each sink: its ack and what it has staged.
    reports: list[dict[str, Any]]
    #: From the first task, what makes the result of each sink.
    finishes: tuple[Finish, ...]


@dataclass(frozen=True)
class StagingPass:
    """The work of every task in one micro-batch."""

    lease: Lease
    batch: BatchId
    works: tuple[TaskWork, ...]
    rows: tuple[SinkRows, ...]
    finishes: tuple[Finish, ...]

    def stage(self, batches: Iterator[pa.RecordBatch]) -> StagedMessage:
        columns = tuple({name: name for name in one.fields.names} for one in self.rows)
        given = (rows for batch in batches if batch.num_rows for rows in self._to_sink_rows(batch))
        (found,) = StageInTasks(self.works, columns)(given)
        reports = [json.loads(text) for text in found.column("report").to_pylist()]
        is_first = reports[0]["partition"] == 0
        return StagedMessage(self.lease, self.batch, reports, self.finishes if is_first else ())

    def _to_sink_rows(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        count = rows.num_rows
        hashed = [_to_hashable(one, rows.column(one.name)) for one in self._fields]
        nothing = pa.repeat(0, count)
        control = [nothing, nothing, nothing, pa.array(hash_keys(hashed, count))]
        names = [*C.SINK_CONTROL, *rows.schema.names]
        whole = pa.RecordBatch.from_arrays([*control, *rows.columns], names=names)
        if not any(one.where for one in self.rows):
            yield whole
            return
        for place, one in enumerate(self.rows):
            own = whole.filter(rows.column(one.where)) if one.where else whole
            if own.num_rows:
                yield own.append_column(C.SINK, pa.repeat(place, own.num_rows))

    @cached_property
    def _fields(self) -> list[T.StructField]:
        return [*{part.name: part for one in self.rows for part in one.fields}.values()]


def _to_hashable(part: T.StructField, column: pa.Array) -> pa.Array:
    is_text = not can_hash(part.dataType)
    # As Spark's to_json in a SinkGroup: a query may go from one to the other.
    writer = JsonWriter(T.StructType([part]), null_fields=False)
    return writer.write([column], len(column)) if is_text else column


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes micro-batches exactly once, into all sinks together."""

    def __init__(self, output: QueryOutput, make_observer: Callable[[], Observer]) -> None:
        self._output, self._make_observer = output, make_observer
        self._pass: StagingPass | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Spark pickles a writer exactly before it runs the tasks of a micro-batch. At no other moment before
        # the tasks does this code run on the driver.
        if self._pass is None:
            self._pass = self._plan()
        return {"_pass": self._pass}

    def _plan(self) -> StagingPass:
        output, place = self._output, self._output.checkpoint_location
        if not open_sinks_dir(place).list_checkpoint_ids():
            for earlier in find_refreshed_checkpoints(place):
                self._give_up(earlier)
        sinks = _open(output, place)
        sinks.preflight()
        commits = self._commits(place)
        batch, lease = commits.find_running(), commits.plan()
        writers, requests = sinks.writers(lease.owner), sinks.make_requests(batch, lease)
        plans = {uid: _plan_for_tasks(uid, writers[uid], request) for uid, request in requests.items()}
        works, rows = tuple(one.work for one in plans.values()), tuple(output.rows[uid] for uid in plans)
        return StagingPass(lease, batch, works, rows, tuple(one.finish for one in plans.values()))

    def _commits(self, place: StoreSpec) -> MicroBatchCommits:
        freeze_modules()
        sinks, patience_ms = _open(self._output, place), self._output.patience_ms
        return MicroBatchCommits(
            place, sinks.committers, self._make_observer(), _identify_driver(), patience_ms
        )

    def _give_up(self, earlier: StoreSpec) -> None:
        try:
            self._commits(earlier).give_up()
        except FlinkishError as error:
            if error.restartable:
                raise
            # A full refresh must also work if the old checkpoint is damaged or a copy.
            LOG.warning("what %s has left open ends by its timeout: %s", earlier.url, error)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedMessage:
        """Stage one task's rows; on return all are durable and none is visible."""
        if self._pass is None:
            raise InternalError("a task of a sink runs without a lease")
        return self._pass.stage(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Commit a micro-batch, or finish the commit of an earlier attempt of it."""
        found = [message for message in messages if isinstance(message, StagedMessage)]
        if len(found) < len(messages):
            raise InternalError("Spark commits a micro-batch of which a task reported nothing")
        if not found:
            # A micro-batch without tasks has nothing to commit and no attempt.
            return
        commits = self._commits(self._output.checkpoint_location)
        commits.commit(_to_staged_batch(found, BatchId(batchId), tuple(self._output.sinks)))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        found = [message for message in messages if isinstance(message, StagedMessage)]
        staged = _find_lease(found).to_staged_batch(BatchId(batchId), {}) if found else None
        self._commits(self._output.checkpoint_location).abort(staged)


def _to_staged_batch(found: Sequence[StagedMessage], batch: BatchId, uids: Sequence[str]) -> StagedBatch:
    planned = {message.batch for message in found}
    if planned != {batch}:
        raise JobDirError(
            f"Spark commits batch {batch}, and the newest offsets in its checkpoint are of {planned.pop()}",
            why="the checkpointLocation of the sinks is not where Spark keeps its checkpoint",
            what_to_do="give the query's own checkpointLocation, and stop others that use it",
        )
    by_task = sorted((message.reports for message in found), key=lambda one: int(one[0]["partition"]))
    finishes = next(message.finishes for message in found if message.finishes)
    results = {
        uid: finish([reports[place] for reports in by_task])
        for place, (uid, finish) in enumerate(zip(uids, finishes, strict=True))
    }
    return _find_lease(found).to_staged_batch(batch, results)


def _find_lease(found: Sequence[StagedMessage]) -> Lease:
    leases = {message.lease for message in found}
    if len(leases) > 1:
        raise InternalError(f"the tasks of one micro-batch belong to several attempts: {leases}")
    return leases.pop()


def _open(output: QueryOutput, place: StoreSpec) -> QuerySinks:
    # Opening connections takes as long as a small micro-batch, and Spark uses a process again.
    key = output, place
    if (found := _SINKS.pop(key, None)) is None:
        schemas = {uid: one.fields for uid, one in output.rows.items()}
        found = QuerySinks(output.sinks, schemas, place, pretend_session())
    _SINKS[key] = found
    if len(_SINKS) > _MOST_OPEN:
        _SINKS.pop(next(iter(_SINKS))).close()
    return found


def _plan_for_tasks(uid: str, writer: SinkWriter, request: StageRequest) -> StagePlan:
    if isinstance(writer, JoiningWriter) and writer.reads_fields_alone:
        with name_sinks([uid], request.batch):
            plan = writer.plan(request)
        if plan.select is None:
            return plan
    raise ConfigError(
        f"the sink '{uid}' cannot stage in the tasks of this format",
        why="Spark has to cast, check or sort its rows for its table or format as it is",
        what_to_do="write with foreachBatch(SinkGroup({...})), which takes every sink",
        uid=uid,
    )


def _identify_driver() -> str:
    """Return an id that all processes of this driver share, and no other driver on any machine."""
    # Planning and committing are different processes, forked by the same daemon of the same JVM. Host and
    # process id do not identify it: a restarted container gives both to the next daemon.
    daemon = os.getppid()
    return process_key(daemon) or f"{socket.gethostname()}-{daemon}"
