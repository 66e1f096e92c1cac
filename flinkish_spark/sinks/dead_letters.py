"""Dead letters of a two-phase sink: records it refuses go to another sink, in the same checkpoint.

Both are staged in one step, so a refused record is durable when the micro-batch is. How they are committed:
:mod:`flinkish_spark.sinks.dead_letters_committer`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.errors import ConfigError, EnvironmentFault
from flinkish_spark.formats import OnBadRecord
from flinkish_spark.kafka.barrier_records import BarrierRecords
from flinkish_spark.protocol.ids import checked_name
from flinkish_spark.runtime import columns as C
from flinkish_spark.sinks.base import (
    Committer,
    Sink,
    SinkContext,
    SinkWriter,
    StageRequest,
    StageResult,
)
from flinkish_spark.sinks.dead_letters_committer import DeadLetterCommitter, marked
from flinkish_spark.sinks.two_phase import TwoPhaseCommitSink
from flinkish_spark.sinks.two_phase_writer import StagedWithRefused, TwoPhaseWriter, batch_label

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LOG = logging.getLogger(__name__)
#: What a dead letter consists of.
DEAD_LETTER_SCHEMA = T.StructType(
    [
        T.StructField("uid", T.StringType(), False),
        T.StructField("reason", T.StringType(), False),
        T.StructField("record", T.StringType(), False),
        T.StructField("batch", T.StringType(), False),
    ]
)


class DeadLettersDiffer(EnvironmentFault):
    """Another number of dead letters was staged than records were refused; the micro-batch is run again."""

    restartable = True
    ends_when_repeated = True


@dataclass(frozen=True)
class WithDeadLetters(Sink):
    """A two-phase sink, and another sink for the records that it refuses.

    A dead letter has the fields `uid` (of the sink that refused it), `reason`, `record` (JSON) and
    `batch` (``"<lineage>/<batch>"``), all of type STRING. It becomes visible with the checkpoint of the
    micro-batch that it was in, and is counted as `dead_lettered`.

    Parameters
    ----------
    sink
        What refuses records by raising RecordRefused.
    dead_letters
        Any other sink; a KafkaSink without barrier records. Works under the uid ``<uid>.dead-letters``.

    Notes
    -----
    Dead letters commit shortly before the records. If what `sink` staged is lost behind the decision and
    staged again, dead letters that are visible by then stay as they are, and do not come again.

    Examples
    --------
    >>> totals.sink_to(WithDeadLetters(ledger, DeltaSink("/lake/refused")), uid="ledger")  # doctest: +SKIP
    """

    sink: TwoPhaseCommitSink
    dead_letters: Sink

    def __post_init__(self) -> None:
        for name, wanted in (("sink", TwoPhaseCommitSink), ("dead_letters", Sink)):
            given = getattr(self, name)
            if not isinstance(given, wanted):
                raise ConfigError(
                    f"{name} is a {type(given).__name__}",
                    why="only what refuses records by RecordRefused has dead letters"
                    if name == "sink"
                    else "",
                    what_to_do=f"give an instance of a {wanted.__name__}",
                )
        if getattr(self.dead_letters, "barriers", BarrierRecords.NONE) is not BarrierRecords.NONE:
            raise ConfigError(
                "the sink of dead letters writes barrier records",
                why="most micro-batches have no dead letters, and nothing would be written for them",
                what_to_do="leave barriers out",
            )

        if isinstance(self.dead_letters, WithDeadLetters):
            raise ConfigError(
                "the sink of dead letters has dead letters itself",
                why="its records are texts that any system takes; who refuses those, too, has lost them",
                what_to_do="give it a sink that takes every text",
            )

    @property
    def topics(self) -> tuple[str, ...]:
        """Topics of both."""
        return (*self.sink.topics, *self.dead_letters.topics)

    @property
    def needs_shim(self) -> bool:
        """Whether one of both does."""
        return self.sink.needs_shim or self.dead_letters.needs_shim

    def parts(self, uid: str) -> tuple[tuple[str, Sink], ...]:
        """Return both, each under its uid."""
        return (*self.sink.parts(uid), *self.dead_letters.parts(_dead_uid(uid)))

    def preflight(self, spark: SparkSession, context: SinkContext) -> None:
        """Refuse what either refuses, and a policy beside the dead letters."""
        if self.sink.on_refused is not OnBadRecord.FAIL:
            raise ConfigError(
                f"the sink '{context.uid}' has dead letters and on_refused={self.sink.on_refused}",
                why="a refused record cannot both be kept and be left out",
                what_to_do="leave on_refused as it is",
            )
        self.sink.preflight(spark, context)
        self.dead_letters.preflight(spark, _dead_context(context))

    def create_writer(self, spark: SparkSession, context: SinkContext) -> SinkWriter:
        """Return the staging half of both."""
        dead = self.dead_letters.create_writer(spark, _dead_context(context))
        return _Writer(TwoPhaseWriter(self.sink, context), dead, context.uid)

    def create_committer(self, spark: SparkSession, context: SinkContext) -> Committer:
        """Return the committing half of both."""
        dead_context = _dead_context(context)
        main = self.sink.create_committer(spark, context)
        dead = self.dead_letters.create_committer(spark, dead_context)
        return DeadLetterCommitter(main, dead, context.uid, dead_context.uid, context.folder)


def _dead_uid(uid: str) -> str:
    """Return the uid of the dead letters of a sink; raise ConfigError if that is too long for one."""
    try:
        return checked_name(f"{uid}.dead-letters", "sink uid")
    except ValueError as error:
        raise ConfigError(
            f"the uid '{uid}' is too long for a sink with dead letters",
            why=str(error),
            what_to_do="choose a shorter one",
        ) from error


def _dead_context(context: SinkContext) -> SinkContext:
    folder = context.folder / "dead-letters"
    return replace(context, uid=_dead_uid(context.uid), schema=DEAD_LETTER_SCHEMA, folder=folder)


class _Writer(SinkWriter):
    def __init__(self, main: TwoPhaseWriter, dead: SinkWriter, uid: str) -> None:
        self._main, self._dead, self._uid = main, dead, uid

    def stage(self, request: StageRequest) -> StageResult:
        """Stage the records, then what was refused of them."""
        with self._main.staging_with_refused(request) as staged:
            if not staged.refused_count:
                return staged.result
            dead = self._stage_refused(request, staged)
        letters = tuple(marked(payload, batch_label(request)) for payload in dead.payloads)
        return replace(staged.result, payloads=(*staged.result.payloads, *letters))

    def _stage_refused(self, request: StageRequest, staged: StagedWithRefused) -> StageResult:
        rows = self._letters(request, staged.refused)
        count = staged.refused_count
        dead = self._dead.stage(replace(request, rows=rows, count_records=lambda: count))
        written = sum(task.rows for task in dead.tasks)
        if written != count:
            raise DeadLettersDiffer(
                f"the sink '{self._uid}' refused {count} records, and {written} dead letters were staged",
                why="a task was run again in between and refused other records",
                what_to_do="make the sink refuse by the record alone",
            )
        return dead

    def _letters(self, request: StageRequest, refused: DataFrame) -> DataFrame:
        """Return dead letters as a micro-batch of their own, control columns first."""
        constant = {"uid": self._uid, "batch": batch_label(request)}
        names = DEAD_LETTER_SCHEMA.names
        fields = [F.lit(constant[n]).alias(n) if n in constant else F.col(n) for n in names]
        return refused.select(
            F.lit(int(C.Kind.RECORD)).alias(C.KIND),
            F.lit(0).cast("long").alias(C.CHECKPOINT),
            F.lit(0).cast("long").alias(C.CHANNEL),
            F.xxhash64(*[F.lit(constant[n]) if n in constant else F.col(n) for n in names]).alias(C.HASH),
            *fields,
        )
