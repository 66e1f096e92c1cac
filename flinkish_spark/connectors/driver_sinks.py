"""Sinks on the driver: rows of completed checkpoints go to a function, to stdout, or to memory.

They deliver at least once: if the process dies between the call and the checkpoint's receipt, the next
process calls again with the same rows and the same checkpoint id.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pyspark.sql import Row, SparkSession

from flinkish_spark.checkpoint.failures import RepeatableUserError
from flinkish_spark.connectors.buffer import (
    ApplyStatus,
    BufferedCommitter,
    BufferedFileError,
    BufferedRows,
    BufferedSink,
)
from flinkish_spark.connectors.record_values import record_as_json, records_of, to_utc
from flinkish_spark.contracts.sink import Committer, SinkContext
from flinkish_spark.core.errors import FlinkishError
from flinkish_spark.core.fields import Name, check_fields
from flinkish_spark.core.foreign_errors import describe_error
from flinkish_spark.core.iterators import USER_ERRORS, refuse_not_run
from flinkish_spark.core.validation import check_function
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, Lineage
from flinkish_spark.protocol.records import CommitAnswer, Outcome

Rows = Iterator[Row]


class _CallingSink(BufferedSink):
    """Passes the rows of a checkpoint to the user's function, or to stdout."""

    @abstractmethod
    def call(self, rows: Rows, checkpoint: CheckpointId) -> None:
        """Take the rows of one checkpoint, by micro-batch and task."""

    def create_committer(self, spark: SparkSession, context: SinkContext) -> Committer:
        return _CallingCommitter(self, context)


@dataclass(frozen=True)
class ForeachSink(_CallingSink):
    """Calls a function with each row of completed checkpoints, on the driver.

    Parameters
    ----------
    function
        Gets a row and the checkpoint's id. Called by one thread at a time, in order of checkpoints,
        micro-batches and tasks. If the process dies between the call and the checkpoint's receipt, or the
        function raises at a later row, all rows of the checkpoint come again, in the same order and with
        the same id.

    Notes
    -----
    The function need not be serialisable. If it raises, the job is restarted and the checkpoint's rows
    come again; if it raises again, the job ends, and the next start begins with these rows. If it raises a
    restartable EnvironmentFault, it is called again soon, without a restart.

    Examples
    --------
    >>> ForeachSink(lambda row, checkpoint: print(checkpoint, row.user)).function is not None
    True
    """

    function: Callable[[Row, CheckpointId], object]

    def __post_init__(self) -> None:
        check_function(self.function, "the function of a ForeachSink", 2)

    def call(self, rows: Rows, checkpoint: CheckpointId) -> None:
        for row in rows:
            refuse_not_run(self.function(row, checkpoint), "the function of a ForeachSink")


@dataclass(frozen=True)
class ForeachCheckpointSink(_CallingSink):
    """Calls a function once per completed checkpoint, with all of its rows, on the driver.

    The function can make its effect exactly once: it writes the checkpoint's id in the same transaction
    as the rows, and does nothing for an id that it finds there.

    Parameters
    ----------
    function
        Gets an iterator over the rows and the checkpoint's id; otherwise as for :class:`ForeachSink`. Not
        called for checkpoints without rows.
    """

    function: Callable[[Rows, CheckpointId], object]

    def __post_init__(self) -> None:
        check_function(self.function, "the function of a ForeachCheckpointSink", 2)

    def call(self, rows: Rows, checkpoint: CheckpointId) -> None:
        refuse_not_run(self.function(rows, checkpoint), "the function of a ForeachCheckpointSink")


@dataclass(frozen=True)
class PrintSink(_CallingSink):
    """Prints the rows of completed checkpoints to stdout, each as one line of JSON; at least once.

    Parameters
    ----------
    prefix
        Printed before each row.

    Examples
    --------
    >>> PrintSink("totals> ").prefix
    'totals> '
    """

    prefix: str = ""

    def __post_init__(self) -> None:
        check_fields(self)

    def call(self, rows: Rows, checkpoint: CheckpointId) -> None:
        for row in rows:
            print(f"{self.prefix}{record_as_json(row)}", flush=True)


class _CallingCommitter(BufferedCommitter):
    def __init__(self, sink: _CallingSink, context: SinkContext) -> None:
        super().__init__(context)
        self._sink = sink

    def apply(self, checkpoint: CheckpointId, rows: BufferedRows) -> CommitAnswer:
        try:
            self._sink.call(_rows_of(rows), checkpoint)
        except (FlinkishError, BufferedFileError):
            raise
        except USER_ERRORS as error:
            raise RepeatableUserError(
                f"the function of sink '{self._context.uid}' failed at checkpoint {checkpoint}",
                why=describe_error(error),
                what_to_do="correct the function and start the job again; it is called again with the "
                "rows of this checkpoint",
                uid=self._context.uid,
                checkpoint=checkpoint,
            ) from error
        return CommitAnswer(Outcome.COMMITTED)


def _rows_of(rows: BufferedRows) -> Rows:
    for batch in rows.batches():
        yield from records_of(to_utc(batch))


#: Job, sink uid and checkpoint: identify a checkpoint that is committed again.
_Key = tuple[JobUuid, str, CheckpointId]


#: Rows of this process's memory sinks, by sink name.
_ROOMS: defaultdict[str, dict[_Key, list[Row]]] = defaultdict(dict)
_LOCK = threading.Lock()


@dataclass(frozen=True)
class MemorySink(BufferedSink):
    """Keeps the rows of completed checkpoints in this process, for tests.

    Each row is kept once, even if a checkpoint is committed again by this start of the job or another one in
    the same process. The rows end with the process: a job that goes on in a new process adds the rows of
    later checkpoints only.

    Parameters
    ----------
    name
        Name of the rows that :meth:`rows` returns. Sinks and jobs with the same name share them.

    Examples
    --------
    >>> MemorySink("totals").rows()
    []
    """

    name: Name

    def __post_init__(self) -> None:
        check_fields(self, name='give a text: "totals"')

    def rows(self) -> list[Row]:
        """Return the rows of all completed checkpoints, in order of checkpoint."""
        return [row for rows in self.rows_by_checkpoint().values() for row in rows]

    def rows_by_checkpoint(self) -> dict[int, list[Row]]:
        """Return the rows of each completed checkpoint that had any, in order."""
        found: dict[int, list[Row]] = {}
        with _LOCK:
            room = dict(_ROOMS[self.name])
        for (_, _, checkpoint), rows in sorted(room.items(), key=lambda one: one[0]):
            found.setdefault(int(checkpoint), []).extend(rows)
        return dict(sorted(found.items()))

    def clear(self) -> None:
        """Forget the rows of this name."""
        with _LOCK:
            _ROOMS.pop(self.name, None)

    def create_committer(self, spark: SparkSession, context: SinkContext) -> Committer:
        return _MemoryCommitter(self.name, context)


class _MemoryCommitter(BufferedCommitter):
    def __init__(self, name: str, context: SinkContext) -> None:
        super().__init__(context)
        self._name = name

    def _key(self, checkpoint: CheckpointId) -> _Key:
        return (self._context.job, self._context.uid, checkpoint)

    def apply(self, checkpoint: CheckpointId, rows: BufferedRows) -> CommitAnswer:
        read = list(_rows_of(rows))
        with _LOCK:
            is_new = _ROOMS[self._name].setdefault(self._key(checkpoint), read) is read
        return CommitAnswer(Outcome.COMMITTED if is_new else Outcome.ALREADY_COMMITTED)

    def has_applied(self, checkpoint: CheckpointId) -> ApplyStatus:
        # Another process may have committed them.
        with _LOCK:
            return ApplyStatus.YES if self._key(checkpoint) in _ROOMS[self._name] else ApplyStatus.UNKNOWN

    def supersede(self, target: CheckpointId, lineage: Lineage) -> CommitAnswer:
        own = self._key(target)
        with _LOCK:
            room = _ROOMS[self._name]
            gone = [one for one in room if one[:2] == own[:2] and one[2] > own[2]]
            for one in gone:
                del room[one]
        return CommitAnswer(Outcome.COMMITTED if gone else Outcome.ALREADY_COMMITTED)
