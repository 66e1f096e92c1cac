"""What a two-phase sink of the user's does in a Spark task: one transaction, or none without records."""

from __future__ import annotations

import enum
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark import TaskContext

from flinkish_spark.errors import BadRecordError, EnvironmentFault, FlinkishError, InternalError
from flinkish_spark.protocol.ids import JobUuid, OwnerEpoch
from flinkish_spark.runtime.worker_gc import freeze_modules
from flinkish_spark.sinks.python_tasks import RowCount
from flinkish_spark.sinks.two_phase import RecordRefused, SinkTransaction, TwoPhaseCommitSink
from flinkish_spark.sinks.two_phase_names import TransactionName
from flinkish_spark.sinks.two_phase_rows import in_utc, record_as_json, records_of
from flinkish_spark.user_iterators import USER_ERRORS, pairs_of

if TYPE_CHECKING:
    import pyarrow as pa

LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
#: Control columns in front of the fields, see StageRequest.
_CONTROL_WIDTH = 4
#: Columns of what a task yields: its report in one row; behind Refusals.KEEP a row per refused record.
REPORT, REASON, RECORD = "report", "reason", "record"
#: Longest reason in a dead letter; it is a user's text, and may quote the record.
_MOST_REASON = 1_000
TASK_SCHEMA = f"{REPORT} STRING, {REASON} STRING, {RECORD} STRING"


class Refusals(enum.Enum):
    """What a task does with records that the sink refuses."""

    #: Fail, with the reason.
    FAIL = "fail"
    #: Count them.
    DROP = "drop"
    #: Count them, and yield them with the reason.
    KEEP = "keep"


class SinkUnavailable(EnvironmentFault):
    """The system of a two-phase sink could not be used; the micro-batch is run again."""

    restartable = True


@dataclass(frozen=True)
class StageTransaction:
    """Callable for mapInArrow: stages the rows of one task, see :data:`TASK_SCHEMA`.

    Parameters
    ----------
    sink
        The user's; every task attempt gets a copy.
    job, uid, owner_epoch, block
        For the name of the transaction.
    batch
        Lineage and micro-batch, for :class:`SinkTransaction`.
    """

    sink: TwoPhaseCommitSink
    job: str
    uid: str
    owner_epoch: int
    block: int
    batch: str
    refusals: Refusals

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Stage one task's rows; called once per task attempt."""
        freeze_modules()
        task = TaskContext.get()
        if task is None:
            raise InternalError("rows are staged outside of a task")
        ack = RowCount(task.partitionId())
        with _OpenTransaction(self, task.partitionId(), task.taskAttemptId()) as transaction:
            for batch in batches:
                records = ack.admit(batch)
                if records.num_rows == 0:
                    continue
                fields = in_utc(records.select(range(_CONTROL_WIDTH, records.num_columns)))
                refused = transaction.write(fields)
                if refused and self.refusals is Refusals.KEEP:
                    yield _refused_rows(fields, refused)
            committable = transaction.flush()
        done = ack.done()
        if self.refusals is Refusals.KEEP:
            done = replace(done, dead_lettered=transaction.refused)
        else:
            done = replace(done, dropped=transaction.refused)
        yield _rows([json.dumps({**done.to_json(), "committable": committable})], [None], [None])


class _OpenTransaction:
    """The user's sink in one task attempt; begun with the first records, discarded on any failure."""

    def __init__(self, stage: StageTransaction, task: int, attempt: int) -> None:
        self._stage, self._sink, self._task = stage, stage.sink, task
        epoch, mark = OwnerEpoch(stage.owner_epoch), TransactionName.mark_of(stage.uid)
        self.name = str(TransactionName(JobUuid(stage.job), mark, epoch, stage.block, task, attempt))
        self.refused = 0
        by_record = type(self._sink).write_batch is TwoPhaseCommitSink.write_batch
        self._writing = "write" if by_record else "write_batch"
        self._is_open = False
        self._handle: Any = None

    def __enter__(self) -> _OpenTransaction:
        return self

    def write(self, records: pa.RecordBatch) -> Mapping[int, str]:
        """Write; return the refused records' rows and reasons."""
        if not self._is_open:
            stage = self._stage
            fields = tuple(records.schema.names)
            transaction = SinkTransaction(self.name, stage.uid, stage.batch, self._task, fields)
            self._handle = self._call("begin", self._sink.begin, transaction)
            self._is_open = True
        refused = self._call(self._writing, self._written, records)
        if refused and self._stage.refusals is Refusals.FAIL:
            raise refused_record(self._stage.uid, next(iter(refused.values())))
        self.refused += len(refused)
        return refused

    def _written(self, records: pa.RecordBatch) -> Mapping[int, str]:
        refused = dict(pairs_of(self._sink.write_batch(self._handle, records) or {}))
        if not refused.keys() <= set(range(records.num_rows)):
            raise IndexError(f"it refused rows {sorted(refused)} of {records.num_rows}")
        return refused

    def flush(self) -> Mapping[str, Any] | None:
        """Pre-commit; return the committable's payload, None if nothing was begun."""
        if not self._is_open:
            return None
        committable = self._call("flush", self._sink.flush, self._handle)
        self._is_open = False
        return {"transaction": self.name, "committable": self._checked(committable)}

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or not self._is_open:
            return
        try:
            self._sink.discard(self._handle)
        except Exception as trouble:
            # The failure that led here is the one to report; the sweep finds what is left.
            LOG.warning("discard() of the sink '%s' failed: %s", self._stage.uid, trouble)

    def _call(self, name: str, method: Callable[..., _T], *arguments: Any) -> _T:
        with blaming(self._sink, self._stage.uid, name):
            return method(*arguments)

    def _checked(self, committable: Any) -> Any:
        """Return the committable as it will be read back, or refuse it."""
        with blaming(self._sink, self._stage.uid, "flush"):
            try:
                stored = json.loads(json.dumps(committable, allow_nan=False))
            except (TypeError, ValueError) as error:
                raise TypeError(f"the committable is no JSON value: {error}") from error
            if stored != (list(committable) if isinstance(committable, tuple) else committable):
                raise TypeError(
                    "the committable changes when it is stored as JSON: use text as keys, and lists"
                )
            return stored


@contextmanager
def blaming(sink: TwoPhaseCommitSink, uid: str, method: str) -> Iterator[None]:
    """Turn what the user's code raises in a task into an error that names it on the driver."""
    try:
        yield
    except FlinkishError:
        raise
    except RecordRefused as refusal:
        raise refused_record(uid, refusal.reason) from refusal
    except sink.retry_on as error:
        text = f"{method}() of the sink '{uid}': {type(error).__name__}: {error}"
        raise SinkUnavailable(_one_line(text)) from error
    except USER_ERRORS as error:
        # Imported here: it brings pandas, which a task that goes well does not need.
        from flinkish_spark.runtime.keyed_operator import USER_FUNCTION_MARKER, OperatorFailed

        facts = {"uid": uid, "error": f"{type(error).__name__}: {error}"}
        facts["what"] = f"{method}() of the sink '{uid}'"
        raise OperatorFailed(f"{USER_FUNCTION_MARKER} {json.dumps(facts)}") from error


def refused_record(uid: str, reason: str) -> BadRecordError:
    """Return the error of a record that a sink refuses; the driver knows it by its marker."""
    from flinkish_spark.sources.json_records import BAD_RECORD_MARKER

    return BadRecordError(_one_line(f"{BAD_RECORD_MARKER} the sink '{uid}' refuses it: {reason}"))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _refused_rows(records: pa.RecordBatch, refused: Mapping[int, str]) -> pa.RecordBatch:
    import pyarrow as pa

    chosen = records.take(pa.array(sorted(refused), pa.int64()))
    reasons = [str(refused[index])[:_MOST_REASON] for index in sorted(refused)]
    return _rows([None] * len(reasons), reasons, [record_as_json(one) for one in records_of(chosen)])


def _rows(*columns: list[str | None] | list[str] | list[None]) -> pa.RecordBatch:
    import pyarrow as pa

    arrays = [pa.array(column, pa.string()) for column in columns]
    return pa.record_batch(arrays, names=[REPORT, REASON, RECORD])
