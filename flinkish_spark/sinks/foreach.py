"""Sinks that hand completed checkpoints to a function on the driver, or print them.

At least once: between the call and the receipt of the checkpoint the process may die, and the next one
calls again with the same rows. The checkpoint's id tells a repetition from something new.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flinkish_spark.arguments import refuse_if_never_run
from flinkish_spark.bridge import said
from flinkish_spark.errors import ConfigError, FlinkishError
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.outcomes import CommitAnswer, Outcome
from flinkish_spark.runtime.failures import RepeatableUserError
from flinkish_spark.sinks.base import Committer, SinkContext
from flinkish_spark.sinks.buffer import BufferedCommitter, BufferedRows, BufferedSink
from flinkish_spark.sinks.buffer_files import BufferedFileGone
from flinkish_spark.sinks.two_phase_rows import in_utc, record_as_json, records_of
from flinkish_spark.user_iterators import USER_ERRORS

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

    Rows = Iterator[Row]


class _CallingSink(BufferedSink):
    """Gives the rows of a checkpoint to something of the user's."""

    @abstractmethod
    def call(self, rows: Rows, checkpoint: CheckpointId) -> None:
        """Take the rows of one checkpoint, by micro-batch and task."""

    def create_committer(self, spark: SparkSession, context: SinkContext) -> Committer:
        """Return the committing half."""
        return _CallingCommitter(self, context)


@dataclass(frozen=True)
class ForeachSink(_CallingSink):
    """Calls a function with each row of completed checkpoints, on the driver.

    Parameters
    ----------
    function
        Gets a row and the checkpoint's id. Called by one thread at a time, in order of checkpoints,
        micro-batches and tasks. A row is seen again if the process dies between the call and the
        checkpoint's receipt, or if the function raises at a later row: what repeats is always the whole
        checkpoint, in the same order and with the same id.

    Notes
    -----
    The function need not be serialisable. If it raises, the job is restarted and the checkpoint's rows
    come again; if it raises again, the job ends, and the next start begins with them. An
    EnvironmentFault that is restartable means: call again soon, without a restart.

    Examples
    --------
    >>> ForeachSink(lambda row, checkpoint: print(checkpoint, row.user)).function is not None
    True
    """

    function: Callable[[Row, CheckpointId], object]

    def __post_init__(self) -> None:
        _check_callable(self, "lambda row, checkpoint: ...")

    def call(self, rows: Rows, checkpoint: CheckpointId) -> None:
        """Call the function with each row."""
        for row in rows:
            self.function(row, checkpoint)


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
        _check_callable(self, "lambda rows, checkpoint: ...")

    def call(self, rows: Rows, checkpoint: CheckpointId) -> None:
        """Call the function."""
        self.function(rows, checkpoint)


@dataclass(frozen=True)
class PrintSink(_CallingSink):
    """Prints the rows of completed checkpoints to stdout, each as one line of JSON; at least once.

    Parameters
    ----------
    prefix
        Printed in front of each row.

    Examples
    --------
    >>> PrintSink("totals> ").prefix
    'totals> '
    """

    prefix: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.prefix, str):
            raise ConfigError(f"prefix is {self.prefix!r}", what_to_do='give a text: PrintSink("totals> ")')

    def call(self, rows: Rows, checkpoint: CheckpointId) -> None:
        """Print each row."""
        for row in rows:
            print(f"{self.prefix}{record_as_json(row)}", flush=True)


class _CallingCommitter(BufferedCommitter):
    def __init__(self, sink: _CallingSink, context: SinkContext) -> None:
        super().__init__(context)
        self._sink = sink

    def apply(self, checkpoint: CheckpointId, rows: BufferedRows) -> CommitAnswer:
        """Call with the rows; whatever the user's code raises names the sink."""
        try:
            self._sink.call(_rows_of(rows), checkpoint)
        except (FlinkishError, BufferedFileGone):
            raise
        except USER_ERRORS as error:
            raise RepeatableUserError(
                f"the function of sink '{self._context.uid}' failed at checkpoint {checkpoint}",
                why=said(error),
                what_to_do="correct the function and start the job again; it is called again with the "
                "rows of this checkpoint",
                uid=self._context.uid,
                checkpoint=checkpoint,
            ) from error
        return CommitAnswer(Outcome.COMMITTED)


def _rows_of(rows: BufferedRows) -> Rows:
    for batch in rows.batches():
        yield from records_of(in_utc(batch))


def _check_callable(sink: ForeachSink | ForeachCheckpointSink, example: str) -> None:
    if not callable(sink.function):
        raise ConfigError(
            f"a {type(sink).__name__} got a {type(sink.function).__name__}",
            why="it takes a function",
            what_to_do=f"give it one: {type(sink).__name__}({example})",
        )
    refuse_if_never_run(sink.function, f"the function of a {type(sink).__name__}")
