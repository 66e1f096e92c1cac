"""Base class of exactly-once sinks that users write, and how they run.

The lifecycle, the order of calls, and an example over SQLite are in `docs/two-phase-sinks.md`.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import json
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from flinkish_spark.checkpoint.failures import RepeatableUserError
from flinkish_spark.connectors.buffer import require_bufferable
from flinkish_spark.connectors.record_values import record_as_json, records_of, to_utc
from flinkish_spark.connectors.row_count import CONTROL_WIDTH, RowCount, begin_staging
from flinkish_spark.connectors.staged_ids import TransactionName
from flinkish_spark.contracts.sink import (
    Committer,
    CompletedCheckpoint,
    Sink,
    SinkContext,
    SinkWriter,
    StageRequest,
    StageResult,
)
from flinkish_spark.core.arrow_pass import map_in_arrow
from flinkish_spark.core.errors import (
    BAD_RECORD_MARKER,
    BadRecordError,
    ConfigError,
    CorruptObjectError,
    EnvironmentFault,
    FlinkishError,
    SchemaError,
    UnavailableError,
    UserFunctionError,
)
from flinkish_spark.core.foreign_errors import describe_error
from flinkish_spark.core.formats import OnBadRecord
from flinkish_spark.core.iterators import USER_ERRORS, pairs_of
from flinkish_spark.core.suggestions import closest
from flinkish_spark.core.validation import check_methods
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, OwnerEpoch
from flinkish_spark.protocol.records import CommitAnswer, Committable, Outcome, TaskAck

#: Result of a method that ends a transaction; None: it is done.
Answer = CommitAnswer | Outcome | None


class RefusedRecordError(Exception):
    """Raised by :meth:`TwoPhaseCommitSink.write` for a record that the system will never take.

    Nothing of the record may have been written when it is raised. :attr:`TwoPhaseCommitSink.on_refused`, or a
    :class:`SinkWithDeadLetters` around the sink, decides what happens to the record.

    Parameters
    ----------
    reason
        Shown in error messages and dead letters.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class SinkTransaction:
    """The transaction of one task attempt, an argument of :meth:`TwoPhaseCommitSink.begin`.

    Parameters
    ----------
    name
        Unique among all attempts of all tasks, micro-batches, starts and jobs. At most 130 lower-case
        letters, digits and dashes. Use it to name whatever is created outside, so that leftovers can be
        found.
    uid
        The sink's uid.
    batch
        Lineage and micro-batch as ``"<lineage>/<batch>"``; the same if the micro-batch is staged again.
    task
        Spark partition index.
    fields
        Names of the records' fields.
    """

    name: str
    uid: str
    batch: str
    task: int
    fields: tuple[str, ...]


class TwoPhaseCommitSink(Sink):
    """Base class of sinks that stage in Spark tasks and commit with the checkpoint.

    An object holds settings only: it is serialised and sent to the tasks, as functions are. Each task
    attempt, and the committer of each start of the job, has its own copy; attributes that a method sets are
    not visible in other copies. So open connections in :meth:`begin` and :meth:`commit`.

    A subclass defines :meth:`begin`, :meth:`write` or :meth:`write_batch`, :meth:`flush`, :meth:`commit` and
    :meth:`abort`, and :meth:`list_open` unless the system removes unfinished transactions by itself.
    """

    #: What happens to a record that :meth:`write` refuses: the job fails, or the record is dropped and
    #: counted.
    on_refused: OnBadRecord = OnBadRecord.FAIL
    #: Exceptions that mean that the system is unavailable now. If `commit` or `abort` raises one, it is
    #: called again; in a task, the micro-batch starts again, as the restart strategy says. Any other
    #: exception is treated as an error in the sink's code: the second one ends the job.
    retry_on: tuple[type[Exception], ...] = (OSError,)

    # In a task:
    @abstractmethod
    def begin(self, transaction: SinkTransaction) -> Any:
        """Open a transaction of this attempt under ``transaction.name``; return a handle.

        Called in a task before its first record; not called if the task has no records. The handle stays in
        this process.
        """

    def write(self, handle: Any, record: Row) -> None:
        """Write one record, invisibly.

        Parameters
        ----------
        record
            ``record.user``, ``record["user"]``, and a tuple in the order of the fields. TIMESTAMP
            fields are datetimes in UTC; structs and maps are dicts.

        Raises
        ------
        RefusedRecordError
            The system will never take this record; nothing of it was written.
        """
        raise NotImplementedError

    def write_batch(self, handle: Any, batch: pa.RecordBatch) -> Mapping[int, str]:
        """Write a batch of records, by default with :meth:`write`; override it if columns are faster.

        Parameters
        ----------
        batch
            The records, at least one; timestamps are in UTC.

        Returns
        -------
        mapping
            For each refused record its row in the batch and the reason; empty if all were written.
        """
        refused = {}
        for index, record in enumerate(records_of(batch)):
            try:
                self.write(handle, record)
            except RefusedRecordError as refusal:
                refused[index] = refusal.reason
        return refused

    @abstractmethod
    def flush(self, handle: Any) -> Any:
        """Pre-commit: make all written data durable, still invisible, and close the handle.

        Called once, after the last record.

        Returns
        -------
        JSON value
            The committable: all that a process on any machine of the job needs to commit or abort the
            transaction. No secrets: it is stored in the job directory.
        """

    def discard(self, handle: Any) -> None:
        """Undo an attempt that failed before its flush, as far as that is easy.

        Called in the task, but not if the task is killed: :meth:`list_open` must find such leftovers. The
        default does nothing.
        """

    # On the driver:
    @abstractmethod
    def commit(self, committable: Any, checkpoint: CheckpointId) -> Answer:
        """Make the data of a committable visible, all at once; its checkpoint is decided.

        Called any number of times for the same committable, also by another process and after a success;
        after the first successful call, further calls must change nothing.

        Parameters
        ----------
        checkpoint
            The same in every repetition.

        Returns
        -------
        CommitAnswer, Outcome or None
            None: it is committed. ``Outcome.ALREADY_COMMITTED`` if an earlier call has committed it, as far
            as the sink knows. LOST if the staged data is gone and was never committed: the job stops; or,
            with ``is_proven_aborted=True``, stages the rows again. The latter asserts that none of the data
            ever was or will be visible. FENCED if a newer process of the job has taken over.

        Raises
        ------
        Exception
            One of :attr:`retry_on`: the method is called again until it succeeds.
        """

    @abstractmethod
    def abort(self, committable: Any) -> Answer:
        """Remove staged data that belongs to no decided checkpoint.

        Called any number of times, also for data that is gone already and for transactions that
        :meth:`list_open` returned; never after a commit. The data must never become visible later.
        """

    def recover_and_commit(self, committable: Any, checkpoint: CheckpointId) -> Answer:
        """Commit a transaction that an earlier process of the job has staged.

        Override it if the system must first hand the transaction over. The default calls :meth:`commit`.
        """
        return self.commit(committable, checkpoint)

    def recover_and_abort(self, committable: Any) -> Answer:
        """Abort a transaction that an earlier process of the job has staged."""
        return self.abort(committable)

    def why_lost(self, committable: Any) -> str:
        """Return why a committable cannot be committed any more; empty if it can.

        Called right before the checkpoint is decided. If data is lost then, some micro-batches run again;
        after the decision, the job would fail. The default returns an empty text.
        """
        return ""

    def list_open(self, prefix: str) -> Mapping[str, Any]:
        """Return transactions that were begun and neither committed nor aborted.

        Called at every start and after every checkpoint, to find leftovers of failed, killed and speculative
        attempts. Names of other sinks, of running attempts and of undecided checkpoints may be among them;
        they are ignored. The default returns nothing: then leftovers stay until the system removes them.

        Parameters
        ----------
        prefix
            The names of this sink's transactions begin with it; other names may, too.

        Returns
        -------
        mapping
            From each transaction's name to the argument of :meth:`abort`.
        """
        return {}

    def checkpoint_complete(self, completed: CompletedCheckpoint) -> Answer:
        """Do work that is due once per checkpoint, not once per transaction.

        Called when all sinks have committed the checkpoint, also if this sink had no data in it; again after
        a crash. The default does nothing.
        """
        return Outcome.ALREADY_COMMITTED

    def close(self) -> None:
        """Close the connections of the committing side. Must not flush or commit."""

    def preflight(self, spark: SparkSession, context: SinkContext) -> None:
        """Refuse a sink that writes no records or cannot be sent to the tasks.

        A subclass that overrides it must call this method. It must change nothing outside.
        """
        own = type(self)
        if own.write is TwoPhaseCommitSink.write and own.write_batch is TwoPhaseCommitSink.write_batch:
            what = f"the class {own.__name__} of sink '{context.uid}' writes no records"
            raise ConfigError(what, what_to_do="define write(self, handle, record), or write_batch()")
        check_methods(self, TwoPhaseCommitSink, f"the class {own.__name__} of sink '{context.uid}'")
        if not isinstance(self.on_refused, OnBadRecord):
            raise ConfigError(
                f"on_refused of sink '{context.uid}' is {self.on_refused!r}",
                why=closest(str(self.on_refused), OnBadRecord.__members__),
                what_to_do="use OnBadRecord.FAIL or OnBadRecord.DROP, or SinkWithDeadLetters(sink, ...)",
            )
        given = self.retry_on if isinstance(self.retry_on, tuple) else (self.retry_on,)
        if not all(isinstance(one, type) and issubclass(one, Exception) for one in given):
            what = f"retry_on of sink '{context.uid}' is {self.retry_on!r}"
            raise ConfigError(what, what_to_do="give a tuple of exception classes, such as (OSError,)")
        if twice := {name for name in context.schema.names if context.schema.names.count(name) > 1}:
            what = f"sink '{context.uid}' gets two fields with the name '{min(twice)}'"
            raise SchemaError(what, what_to_do="rename one of them")
        require_bufferable(context, "hand Python")
        check_serialisable(self, context.uid)

    def create_writer(self, spark: SparkSession, context: SinkContext) -> SinkWriter:
        return TwoPhaseWriter(self, context)

    def create_committer(self, spark: SparkSession, context: SinkContext) -> Committer:
        return TwoPhaseCommitter(self, context)


def own_copy(sink: TwoPhaseCommitSink) -> TwoPhaseCommitSink:
    """Return a copy that shares no mutable value with `sink`."""
    # Values that cannot be copied, such as modules, are shared. Connections are not among them: a sink with a
    # connection is refused before the job starts.
    try:
        return copy.deepcopy(sink)
    except Exception:
        copied = copy.copy(sink)
    for name, value in list(getattr(copied, "__dict__", {}).items()):
        with contextlib.suppress(Exception):
            # Not setattr, which a frozen dataclass refuses.
            copied.__dict__[name] = copy.deepcopy(value)
    return copied


def check_serialisable(sink: TwoPhaseCommitSink, uid: str) -> None:
    """Raise UserFunctionError, naming the attribute, if a sink cannot be sent to the tasks."""
    error = _why_not_serialisable(sink)
    if error is None:
        return
    slots = (one.__dict__.get("__slots__", ()) for one in type(sink).__mro__)
    own = (name for some in slots for name in ((some,) if isinstance(some, str) else some))
    names = [*getattr(sink, "__dict__", {}), *own]
    guilty = next((n for n in names if _why_not_serialisable(getattr(sink, n, None))), None)
    whose = "" if guilty is None else f"its attribute '{guilty}' ({type(getattr(sink, guilty)).__name__}): "
    raise UserFunctionError(
        f"the sink '{uid}' cannot be sent to the tasks",
        why=f"{whose}{type(error).__name__}: {error}",
        what_to_do="make sessions, locks and connections in begin() and commit(), not in __init__",
        uid=uid,
        attribute=guilty,
    )


def _why_not_serialisable(value: object) -> Exception | None:
    try:
        cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    except Exception as error:
        return error
    return None


LOG = logging.getLogger(__name__)
#: Columns of a task's output: one row with its report; with Refusals.KEEP also a row per refused record.
REPORT, REASON, RECORD = "report", "reason", "record"
#: Longest reason in a dead letter; the text comes from the user's sink, and may quote the record.
_MOST_REASON = 1_000
#: What to do about a system that was unavailable.
_RUNS_AGAIN = "check that the sink's system can be reached; the micro-batch runs again"
TASK_SCHEMA = f"{REPORT} STRING, {REASON} STRING, {RECORD} STRING"


class Refusals(enum.Enum):
    #: Fail, with the reason.
    FAIL = "fail"
    #: Drop and count them.
    DROP = "drop"
    #: Count them, and yield them with the reason.
    KEEP = "keep"


@dataclass(frozen=True)
class StageTransaction:
    """Callable for mapInArrow: stages the rows of one task; its output has :data:`TASK_SCHEMA`."""

    #: The user's sink; every task attempt gets a copy.
    sink: TwoPhaseCommitSink
    #: Job, uid, owner epoch and block are parts of the transaction's name.
    job: str
    uid: str
    owner_epoch: int
    block: int
    #: Lineage and micro-batch, for :class:`SinkTransaction`.
    batch: str
    refusals: Refusals

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = begin_staging()
        ack = RowCount(task.partitionId())
        with _OpenTransaction(self, task.partitionId(), task.taskAttemptId()) as transaction:
            for batch in batches:
                records = ack.admit(batch)
                if records.num_rows == 0:
                    continue
                fields = to_utc(records.select(range(CONTROL_WIDTH, records.num_columns)))
                refused = transaction.write(fields)
                if refused and self.refusals is Refusals.KEEP:
                    chosen = fields.take(pa.array(sorted(refused), pa.int64()))
                    reasons = [str(refused[index])[:_MOST_REASON] for index in sorted(refused)]
                    found = [record_as_json(one) for one in records_of(chosen)]
                    yield _rows([None] * len(reasons), reasons, found)
            committable = transaction.flush()
        done = ack.finish()
        if self.refusals is Refusals.KEEP:
            done = replace(done, dead_lettered=transaction.refused)
        else:
            done = replace(done, dropped=transaction.refused)
        yield _rows([json.dumps({**done.to_json(), "committable": committable})], [None], [None])


class _OpenTransaction:
    """The transaction of one task attempt; begun at its first records, discarded on any failure."""

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
        uid = self._stage.uid
        if not self._is_open:
            fields = tuple(records.schema.names)
            transaction = SinkTransaction(self.name, uid, self._stage.batch, self._task, fields)
            with translate_failures(self._sink, uid, "begin"):
                self._handle = self._sink.begin(transaction)
            self._is_open = True
        with translate_failures(self._sink, uid, self._writing):
            refused = dict(pairs_of(self._sink.write_batch(self._handle, records) or {}))
            if not refused.keys() <= set(range(records.num_rows)):
                raise IndexError(f"it refused rows {sorted(refused)} of {records.num_rows}")
        if refused and self._stage.refusals is Refusals.FAIL:
            raise to_bad_record_error(uid, next(iter(refused.values())))
        self.refused += len(refused)
        return refused

    def flush(self) -> Mapping[str, Any] | None:
        """Pre-commit; return the committable's payload, None if the task had no records."""
        if not self._is_open:
            return None
        with translate_failures(self._sink, self._stage.uid, "flush"):
            committable = self._sink.flush(self._handle)
            self._is_open = False
            # Stored as it will be read back.
            try:
                stored = json.loads(json.dumps(committable, allow_nan=False))
            except (TypeError, ValueError) as error:
                raise TypeError(f"the committable is no JSON value: {error}") from error
            if stored != (list(committable) if isinstance(committable, tuple) else committable):
                raise TypeError("the committable changes when stored as JSON: use text as keys, and lists")
        return {"transaction": self.name, "committable": stored}

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or not self._is_open:
            return
        try:
            self._sink.discard(self._handle)
        except Exception as trouble:
            # The failure that led here is reported instead; the sweep finds the leftover.
            LOG.warning("discard() of the sink '%s' failed: %s", self._stage.uid, trouble)


@contextmanager
def translate_failures(sink: TwoPhaseCommitSink, uid: str, method: str) -> Iterator[None]:
    """Turn exceptions of the user's code in a task into errors that name the sink and the method."""
    try:
        yield
    except FlinkishError:
        raise
    except RefusedRecordError as refusal:
        raise to_bad_record_error(uid, refusal.reason) from refusal
    except sink.retry_on as error:
        text = f"{method}() of the sink '{uid}': {type(error).__name__}: {error}"
        raise UnavailableError(_one_line(text), what_to_do=_RUNS_AGAIN) from error
    except USER_ERRORS as error:
        # Imported here since it imports pandas, which a successful task does not need.
        from flinkish_spark.worker.keyed_operator import OperatorError

        what, said = f"{method}() of the sink '{uid}'", f"{type(error).__name__}: {error}"
        raise OperatorError.from_facts(uid=uid, error=said, what=what) from error


def to_bad_record_error(uid: str, reason: str) -> BadRecordError:
    return BadRecordError(_one_line(f"{BAD_RECORD_MARKER} the sink '{uid}' refuses it: {reason}"))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _rows(*columns: Sequence[str | None]) -> pa.RecordBatch:
    arrays = [pa.array(column, pa.string()) for column in columns]
    return pa.record_batch(arrays, names=[REPORT, REASON, RECORD])


class TwoPhaseCommitter(Committer):
    def __init__(self, sink: TwoPhaseCommitSink, context: SinkContext) -> None:
        # A copy, so that connections which the sink keeps are not pickled and sent to tasks.
        self._sink, self._context = own_copy(sink), context

    def commit(self, checkpoint: CheckpointId, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        answers: list[CommitAnswer] = []
        for committable in committables:
            name, stored = self._parts_of(committable)
            ours = name.owner_epoch == self._context.owner_epoch
            method = "commit" if ours else "recover_and_commit"
            answers.append(self._ask(method, stored, checkpoint))
            if not answers[-1].outcome.is_done:
                # Lost committables must be a suffix: nothing is committed after them.
                break
        return answers

    def abort(self, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        return [self._abort(*self._parts_of(committable)) for committable in committables]

    def _abort(self, name: TransactionName, stored: Any) -> CommitAnswer:
        ours = name.owner_epoch == self._context.owner_epoch
        answer = self._ask("abort" if ours else "recover_and_abort", stored)
        if answer.outcome is Outcome.LOST:
            # Lost data needs no abort.
            return CommitAnswer(Outcome.ALREADY_COMMITTED, answer.detail)
        return answer

    def why_dead(self, committables: Sequence[Committable]) -> Mapping[int, str]:
        dead = {}
        for index, (name, stored) in enumerate(map(self._parts_of, committables)):
            if why := self._call("why_lost", stored):
                dead[index] = f"sink '{self._context.uid}', {name}: {why}"
        return dead

    def sweep(self, kept: Sequence[Committable], running_blocks: Callable[[], frozenset[int]]) -> int:
        """Abort open transactions that no checkpoint will decide."""
        job, mark = self._context.job, TransactionName.mark_of(self._context.uid)
        listed = self._call("list_open", TransactionName.prefix(job, mark))
        if not (isinstance(listed, Mapping) and all(isinstance(name, str) for name in listed)):
            raise RepeatableUserError(
                f"list_open() of the sink '{self._context.uid}' returned a {type(listed).__name__}",
                what_to_do="return a dict from each transaction's name to the argument of abort()",
                uid=self._context.uid,
            )
        if not listed:
            return 0
        # This order matters: a block that is leased after the listing has no transaction in the list.
        running = running_blocks()
        names = {str(c.payload.get("transaction", "")) for c in kept}
        aborted = 0
        for text, stored in listed.items():
            name = TransactionName.parse(text)
            # Names of other jobs and sinks may have the same prefix.
            if name is None or (name.job, name.sink) != (job, mark) or text in names:
                continue
            if not self._context.is_left_over(name.owner_epoch, name.block, running):
                continue
            answer = self._abort(name, stored)
            if answer.outcome.is_done:
                aborted += 1
            else:
                LOG.warning(
                    "sink '%s' keeps the leftover %s for now: %s", self._context.uid, name, answer.detail
                )
        return aborted

    def checkpoint_complete(self, completed: CompletedCheckpoint) -> CommitAnswer:
        return self._ask("checkpoint_complete", completed)

    def task_of(self, committable: Committable) -> int | None:
        return self._parts_of(committable)[0].task

    def close(self) -> None:
        self._sink.close()

    def _parts_of(self, committable: Committable) -> tuple[TransactionName, Any]:
        name = TransactionName.parse(str(committable.payload.get("transaction", "")))
        if name is None or "committable" not in committable.payload:
            raise CorruptObjectError(
                f"a committable of sink '{self._context.uid}' was not written by a two-phase sink",
                what_to_do="start the job once with the sink that wrote it, then change it",
                uid=self._context.uid,
            )
        return name, committable.payload["committable"]

    def _ask(self, method: str, *arguments: Any) -> CommitAnswer:
        """Call a method that ends a transaction; an outage becomes the answer RETRY."""
        try:
            answer: Answer = self._call(method, *arguments)
        except EnvironmentFault as fault:
            if not fault.restartable:
                raise
            return CommitAnswer(Outcome.RETRY, str(fault))
        if answer is None:
            return CommitAnswer(Outcome.COMMITTED)
        if isinstance(answer, Outcome):
            said = f"{method}() answered {answer.name}"
            return CommitAnswer(answer, "" if answer.is_done else said)
        if isinstance(answer, CommitAnswer):
            return answer
        raise RepeatableUserError(
            f"{method}() of the sink '{self._context.uid}' returned a {type(answer).__name__}",
            what_to_do="return None, an Outcome or a CommitAnswer",
            uid=self._context.uid,
        )

    def _call(self, method: str, *arguments: Any) -> Any:
        what = f"{method}() of the sink '{self._context.uid}'"
        try:
            return getattr(self._sink, method)(*arguments)
        except FlinkishError:
            raise
        except self._sink.retry_on as error:
            raise UnavailableError(f"{what}: {describe_error(error)}", what_to_do=_RUNS_AGAIN) from error
        except USER_ERRORS as error:
            raise RepeatableUserError(
                f"{what} failed",
                why=describe_error(error),
                what_to_do="correct the sink and start the job again; what was decided is committed then",
                uid=self._context.uid,
            ) from error


class TwoPhaseWriter(SinkWriter):
    def __init__(self, sink: TwoPhaseCommitSink, context: SinkContext) -> None:
        self._sink, self._context = sink, context

    def stage(self, request: StageRequest) -> StageResult:
        is_dropped = self._sink.on_refused is OnBadRecord.DROP
        rows = self._stage_rows(request, Refusals.DROP if is_dropped else Refusals.FAIL)
        return _result(rows.collect())

    @contextmanager
    def stage_with_refused(self, request: StageRequest) -> Iterator[tuple[StageResult, DataFrame]]:
        """Stage rows; yield the result and the refused records (REASON and RECORD, as JSON)."""
        # Persisted while the block runs, since computing the rows again would stage them again.
        rows = self._stage_rows(request, Refusals.KEEP).persist()
        try:
            found = rows.where(F.col(REPORT).isNotNull()).collect()
            refused = rows.where(F.col(REASON).isNotNull()).select(REASON, RECORD)
            yield _result(found), refused
        finally:
            rows.unpersist()

    def _stage_rows(self, request: StageRequest, refusals: Refusals) -> DataFrame:
        context = self._context
        stage = StageTransaction(
            sink=self._sink,
            job=str(context.job),
            uid=context.uid,
            owner_epoch=int(context.owner_epoch),
            block=request.block,
            batch=batch_label(request),
            refusals=refusals,
        )
        return map_in_arrow(request.source, stage, TASK_SCHEMA)


def batch_label(request: StageRequest) -> str:
    return f"{request.lineage}/{request.batch}"


def _result(rows: Sequence[Row]) -> StageResult:
    reports = sorted((json.loads(row.report) for row in rows), key=lambda one: int(one["partition"]))
    payloads = tuple(one["committable"] for one in reports if one["committable"] is not None)
    return StageResult(tuple(TaskAck.from_json(one) for one in reports), payloads)
