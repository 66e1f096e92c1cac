"""A sink of your own that commits exactly once: what to write for a system that this package has none for.

The lifecycle, who calls what, and a whole example over SQLite are in `docs/two-phase-sinks.md`.
"""

from __future__ import annotations

import contextlib
import copy
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flinkish_spark.arguments import refuse_if_never_run
from flinkish_spark.errors import ConfigError, SchemaError, UserFunctionError
from flinkish_spark.formats import OnBadRecord
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.outcomes import CommitAnswer, Outcome
from flinkish_spark.sinks.base import Committer, CompletedCheckpoint, Sink, SinkContext, SinkWriter

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Row, SparkSession

#: What this package calls, and nobody awaits.
_METHODS = (
    *("begin", "write", "write_batch", "flush", "discard", "commit", "abort", "recover_and_commit"),
    *("recover_and_abort", "why_lost", "list_open", "checkpoint_complete", "close"),
)
#: What a method that ends something may answer; None: it is done.
Answer = CommitAnswer | Outcome | None


class RecordRefused(Exception):
    """Raised by :meth:`TwoPhaseCommitSink.write` for a record that the system will never take.

    Nothing of the record may have been written when it is raised. What becomes of it says
    :attr:`TwoPhaseCommitSink.on_refused`, or a :class:`WithDeadLetters` around the sink.

    Parameters
    ----------
    reason
        Why, for people; goes into error messages and dead letters.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class SinkTransaction:
    """What one task attempt is about to stage; given to :meth:`TwoPhaseCommitSink.begin`.

    Parameters
    ----------
    name
        No other attempt of any task, micro-batch, start or job has it. At most 130 lower-case letters,
        digits and dashes. Name by it whatever is created outside, so that leftovers can be found.
    uid
        The sink's uid.
    batch
        Lineage and micro-batch as ``"<lineage>/<batch>"``; the rows of a micro-batch that is staged again
        have the same.
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

    An object holds settings only: it is serialised and sent to the tasks, as functions are. Every task
    attempt, and the committing side of every start of the job, has a copy of its own; what a method keeps
    in attributes is seen by nobody else. So make connections in :meth:`begin` and :meth:`commit`.

    A subclass writes :meth:`begin`, :meth:`write` or :meth:`write_batch`, :meth:`flush`, :meth:`commit`
    and :meth:`abort`, and :meth:`list_open` unless the system clears unfinished things away by itself.
    """

    #: What happens to a record that :meth:`write` refuses: the job fails, or it is left out and counted.
    on_refused: OnBadRecord = OnBadRecord.FAIL
    #: Exceptions that say that the system cannot be asked now. Raised by `commit` or `abort` they mean: call
    #: again; raised in a task: start the micro-batch again, as the restart strategy says. Any other
    #: exception is taken for an error of the sink's code and ends the job when it comes a second time.
    retry_on: tuple[type[Exception], ...] = (OSError,)

    # -- in a task ----------------------------------------------------------------------------------
    @abstractmethod
    def begin(self, transaction: SinkTransaction) -> Any:
        """Open something of this attempt's own under ``transaction.name``; return a handle.

        Called in a task, before its first record; not at all by a task without records.
        The handle stays in this process.
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
        RecordRefused
            The system will never take this record; nothing of it was written.
        """
        raise NotImplementedError

    def write_batch(self, handle: Any, batch: pa.RecordBatch) -> Mapping[int, str]:
        """Write many records; the default calls :meth:`write` for each. For where columns are faster.

        Parameters
        ----------
        batch
            The records, at least one; timestamps are in UTC.

        Returns
        -------
        mapping
            For each refused record its row in the batch and the reason; empty if all were written.
        """
        from flinkish_spark.sinks.two_phase_rows import records_of

        refused = {}
        for index, record in enumerate(records_of(batch)):
            try:
                self.write(handle, record)
            except RecordRefused as refusal:
                refused[index] = refusal.reason
        return refused

    @abstractmethod
    def flush(self, handle: Any) -> Any:
        """Pre-commit: make everything durable, still invisible, and let go of the handle.

        Called once, behind the last record.

        Returns
        -------
        JSON value
            The committable: all that any process, on any machine of the job, needs to commit or abort
            this. No secrets: it is stored in the job directory.
        """

    def discard(self, handle: Any) -> None:
        """Undo an attempt that failed before it was flushed, as far as that is easy.

        Called in the task, if it can still be called: a task that is killed says nothing, so
        :meth:`list_open` has to find what is left. The default leaves it to that.
        """

    # -- on the driver ------------------------------------------------------------------------------
    @abstractmethod
    def commit(self, committable: Any, checkpoint: CheckpointId) -> Answer:
        """Make visible what a decided checkpoint names, all at once.

        Called any number of times for the same committable, also by another process and behind a
        success; every call but the first that succeeds must change nothing.

        Parameters
        ----------
        checkpoint
            The same in every repetition.

        Returns
        -------
        CommitAnswer, Outcome or None
            None: it is committed. ``Outcome.ALREADY_COMMITTED`` for a repetition, if it is known to be
            one. LOST if the staged data is gone and was not committed before: the job stops; or, with
            ``is_proven_aborted=True``, stages these rows again. That says that nothing of it ever was or
            will be visible. FENCED if a newer process of the job has taken over.

        Raises
        ------
        Exception
            One of :attr:`retry_on`: it is called again, however long that takes.
        """

    @abstractmethod
    def abort(self, committable: Any) -> Answer:
        """Remove what was staged and is in no decided checkpoint.

        Called any number of times, also for what is gone already and for what :meth:`list_open` found,
        never for what was committed. Nothing of it may become visible later.
        """

    def recover_and_commit(self, committable: Any, checkpoint: CheckpointId) -> Answer:
        """Do what :meth:`commit` does, for what an earlier process of the job has staged.

        For systems where a connection has to be taken over first. The default is :meth:`commit`.
        """
        return self.commit(committable, checkpoint)

    def recover_and_abort(self, committable: Any) -> Answer:
        """Do what :meth:`abort` does, for what an earlier process of the job has staged."""
        return self.abort(committable)

    def why_lost(self, committable: Any) -> str:
        """Return why a committable cannot be committed any more; empty if it can.

        Asked right before the checkpoint is decided, where giving up costs a repetition of some
        micro-batches; behind the decision it would cost the job. The default believes that it can.
        """
        return ""

    def list_open(self, prefix: str) -> Mapping[str, Any]:
        """Find what was begun and neither committed nor aborted.

        Called at every start and behind every checkpoint, to find what failed, killed and speculative
        attempts left. Names that are none of ours are passed over; those of attempts that still run or
        will still be decided too. The default finds nothing: then leftovers stay until the system
        removes them.

        Parameters
        ----------
        prefix
            The names of this sink's transactions begin with it; so may others.

        Returns
        -------
        mapping
            For each transaction's name what :meth:`abort` takes.
        """
        return {}

    def checkpoint_complete(self, completed: CompletedCheckpoint) -> Answer:
        """Do what goes by checkpoints and not by transactions.

        Called when all sinks have committed the checkpoint, also if this one had nothing in it; again
        after a crash. The default does nothing.
        """
        return Outcome.ALREADY_COMMITTED

    def close(self) -> None:
        """Release the connections of the committing side. Nothing is flushed or committed here."""

    # -- what Sink asks for -------------------------------------------------------------------------
    def preflight(self, spark: SparkSession, context: SinkContext) -> None:
        """Refuse a sink that writes no records or cannot be sent to the tasks.

        A subclass that checks more calls this too. Nothing may be changed outside.
        """
        from flinkish_spark.sinks.buffer import require_bufferable

        own = type(self)
        if own.write is TwoPhaseCommitSink.write and own.write_batch is TwoPhaseCommitSink.write_batch:
            raise ConfigError(
                f"the class {own.__name__} of sink '{context.uid}' writes no records",
                why="it has neither write() nor write_batch()",
                what_to_do="define write(self, handle, record)",
            )
        for name in _METHODS:
            what = f"{name}() of the class {own.__name__} of sink '{context.uid}'"
            refuse_if_never_run(getattr(own, name), what)
        if not isinstance(self.on_refused, OnBadRecord):
            raise ConfigError(
                f"on_refused of sink '{context.uid}' is {self.on_refused!r}",
                what_to_do="use OnBadRecord.FAIL or OnBadRecord.DROP, or WithDeadLetters(sink, ...)",
            )
        given = self.retry_on if isinstance(self.retry_on, tuple) else (self.retry_on,)
        if not all(isinstance(one, type) and issubclass(one, Exception) for one in given):
            raise ConfigError(
                f"retry_on of sink '{context.uid}' is {self.retry_on!r}",
                why="it names the exceptions that mean: call again",
                what_to_do="give a tuple of exception classes, such as (OSError,)",
            )
        twice = {name for name in context.schema.names if context.schema.names.count(name) > 1}
        if twice:
            raise SchemaError(
                f"sink '{context.uid}' gets two fields with the name '{min(twice)}'",
                what_to_do="rename one of them",
            )
        require_bufferable(context, "hand Python")
        check_serialisable(self, context.uid)

    def create_writer(self, spark: SparkSession, context: SinkContext) -> SinkWriter:
        """Return the staging half."""
        from flinkish_spark.sinks.two_phase_writer import TwoPhaseWriter

        return TwoPhaseWriter(self, context)

    def create_committer(self, spark: SparkSession, context: SinkContext) -> Committer:
        """Return the committing half, with a copy of this object."""
        from flinkish_spark.sinks.two_phase_committer import TwoPhaseCommitter

        return TwoPhaseCommitter(self, context)


def own_copy(sink: TwoPhaseCommitSink) -> TwoPhaseCommitSink:
    """Return a copy that shares nothing with `sink` that can be changed.

    What cannot be copied, such as a module, is shared; a connection is not among it, since a sink with
    one is refused before the job starts.
    """
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
    names = [*getattr(sink, "__dict__", {}), *(n for c in type(sink).__mro__ for n in _slots_of(c))]
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
    from pyspark import cloudpickle

    try:
        cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    except Exception as error:
        return error
    return None


def _slots_of(one: type) -> tuple[str, ...]:
    slots = one.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
