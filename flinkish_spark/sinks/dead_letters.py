"""Dead letters of a two-phase sink: records it refuses go to another sink, in the same checkpoint.

Both are staged in one step, so a refused record is durable when the micro-batch is. Committables of the
dead letters carry a mark and everything else of theirs unchanged: other sinks of the job look into
committables to see what must be kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge import probe
from flinkish_spark.bridge.delta_probe import has_delta_format
from flinkish_spark.errors import ConfigError, EnvironmentFault, InternalError
from flinkish_spark.formats import OnBadRecord
from flinkish_spark.kafka.barrier_records import BarrierRecords
from flinkish_spark.protocol.ids import CheckpointId, Lineage, checked_name
from flinkish_spark.protocol.outcomes import CommitAnswer, Outcome
from flinkish_spark.protocol.records import Committable
from flinkish_spark.runtime import columns as C
from flinkish_spark.sinks.base import (
    Committer,
    CompletedCheckpoint,
    Sink,
    SinkContext,
    SinkWriter,
    StageRequest,
    StageResult,
)
from flinkish_spark.sinks.delta import DeltaSink, require_delta
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
_MARK, _MARKED = "flinkish_part", "dead-letters"


class DeadLettersDiffer(EnvironmentFault):
    """Another number of dead letters was staged than records were refused; the micro-batch is run again."""

    restartable = True


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
    Dead letters commit before the records. If what `sink` staged is lost behind the decision and
    replayed, dead letters of the replayed micro-batches may be there twice; records never are.

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

    @property
    def topics(self) -> tuple[str, ...]:
        """Topics of both."""
        return (*self.sink.topics, *self.dead_letters.topics)

    @property
    def needs_shim(self) -> bool:
        """Whether one of both does."""
        return self.sink.needs_shim or self.dead_letters.needs_shim

    def preflight(self, spark: SparkSession, context: SinkContext) -> None:
        """Refuse what either refuses, and a policy beside the dead letters."""
        if self.sink.on_refused is not OnBadRecord.FAIL:
            raise ConfigError(
                f"the sink '{context.uid}' has dead letters and on_refused={self.sink.on_refused}",
                why="a refused record cannot both be kept and be left out",
                what_to_do="leave on_refused as it is",
            )
        if isinstance(self.dead_letters, DeltaSink):
            require_delta(probe(spark).has_delta or has_delta_format(spark))
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
        return _Committer(main, dead, context.uid, dead_context.uid)


def _dead_context(context: SinkContext) -> SinkContext:
    try:
        uid = checked_name(f"{context.uid}.dead-letters", "sink uid")
    except ValueError as error:
        raise ConfigError(
            f"the uid '{context.uid}' is too long for a sink with dead letters",
            why=str(error),
            what_to_do="choose a shorter one",
        ) from error
    folder = context.folder / "dead-letters"
    return replace(context, uid=uid, schema=DEAD_LETTER_SCHEMA, folder=folder)


class _Writer(SinkWriter):
    def __init__(self, main: TwoPhaseWriter, dead: SinkWriter, uid: str) -> None:
        self._main, self._dead, self._uid = main, dead, uid

    def stage(self, request: StageRequest) -> StageResult:
        """Stage the records, then what was refused of them."""
        with self._main.staging_with_refused(request) as staged:
            if not staged.refused_count:
                return staged.result
            dead = self._stage_refused(request, staged)
        marked = tuple({**payload, _MARK: _MARKED} for payload in dead.payloads)
        return replace(staged.result, payloads=(*staged.result.payloads, *marked))

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


class _Committer(Committer):
    """Splits committables between two committers and puts their answers together again."""

    def __init__(self, main: Committer, dead: Committer, uid: str, dead_uid: str) -> None:
        self._main, self._dead, self._uid, self._dead_uid = main, dead, uid, dead_uid
        lifetimes = [one.staged_lifetime_ms for one in (main, dead)]
        self.staged_lifetime_ms = min((one for one in lifetimes if one is not None), default=None)

    def commit(self, checkpoint: CheckpointId, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Commit all dead letters, then the records up to the first dead letter that is not committed."""
        main, dead = self._split(committables)
        answers: dict[int, CommitAnswer] = _commit(self._dead, checkpoint, dead)
        # What is lost must be a suffix: no record behind a lost dead letter is committed.
        end = min((i for i in dead if i not in answers or not answers[i].outcome.is_done), default=None)
        wanted = {i: c for i, c in main.items() if end is None or i < end}
        answers |= _commit(self._main, checkpoint, wanted)
        return _up_to_a_gap(answers, len(committables))

    def abort(self, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Abort both."""
        main, dead = self._split(committables)
        answers = dict(zip(main, self._main.abort(tuple(main.values())), strict=True)) if main else {}
        if dead:
            given = (self._left_visible(answer) for answer in self._dead.abort(tuple(dead.values())))
            answers |= dict(zip(dead, given, strict=True))
        return [answers[i] for i in range(len(committables))]

    def _left_visible(self, answer: CommitAnswer) -> CommitAnswer:
        """Let dead letters be that were committed before records of their micro-batch were lost."""
        if answer.outcome is not Outcome.FENCED:
            return answer
        LOG.warning("dead letters of sink '%s' stay, and may come again: %s", self._uid, answer.detail)
        return CommitAnswer(Outcome.ALREADY_COMMITTED, answer.detail)

    def why_dead(self, committables: Sequence[Committable]) -> Mapping[int, str]:
        """Ask both."""
        found: dict[int, str] = {}
        for committer, part in zip((self._main, self._dead), self._split(committables), strict=True):
            places = list(part)
            reasons = committer.why_dead(tuple(part.values())) if part else {}
            found |= {places[index]: why for index, why in reasons.items()}
        return found

    def sweep(self, kept: Sequence[Committable], running_blocks: Callable[[], frozenset[int]]) -> int:
        """Sweep both."""
        wanted = [self._unmarked(one) if self._is_dead_letter(one) else one for one in kept]
        return self._main.sweep(wanted, running_blocks) + self._dead.sweep(wanted, running_blocks)

    def checkpoint_complete(self, completed: CompletedCheckpoint) -> CommitAnswer:
        """Complete both."""
        return _both(lambda c: c.checkpoint_complete(completed), self._dead, self._main)

    def why_not_superseded(self, target: CheckpointId) -> str:
        """Ask both."""
        return self._main.why_not_superseded(target) or self._dead.why_not_superseded(target)

    def supersede(self, target: CheckpointId, lineage: Lineage) -> CommitAnswer:
        """Take back in both."""
        return _both(lambda c: c.supersede(target, lineage), self._dead, self._main)

    def close(self) -> None:
        """Close both."""
        try:
            self._main.close()
        finally:
            self._dead.close()

    def _split(
        self, committables: Sequence[Committable]
    ) -> tuple[dict[int, Committable], dict[int, Committable]]:
        """Return records and dead letters, by position."""
        main = {i: c for i, c in enumerate(committables) if not self._is_dead_letter(c)}
        dead = {i: self._unmarked(c) for i, c in enumerate(committables) if self._is_dead_letter(c)}
        return main, dead

    def _is_dead_letter(self, committable: Committable) -> bool:
        return committable.sink == self._uid and committable.payload.get(_MARK) == _MARKED

    def _unmarked(self, committable: Committable) -> Committable:
        payload: dict[str, Any] = {k: v for k, v in committable.payload.items() if k != _MARK}
        return Committable(self._dead_uid, payload)


def _commit(
    committer: Committer, checkpoint: CheckpointId, part: Mapping[int, Committable]
) -> dict[int, CommitAnswer]:
    if not part:
        return {}
    return dict(zip(part, committer.commit(checkpoint, tuple(part.values())), strict=False))


def _up_to_a_gap(answers: Mapping[int, CommitAnswer], count: int) -> list[CommitAnswer]:
    """Return the answers in order, ending with the first that is not done; LOST must come last."""
    found: list[CommitAnswer] = []
    for index in range(count):
        if index not in answers:
            break
        found.append(answers[index])
        if not found[-1].outcome.is_done:
            break
    if not found and count:
        raise InternalError("a committer answered for none of its committables")
    return found


def _both(ask: Callable[[Committer], CommitAnswer], *committers: Committer) -> CommitAnswer:
    """Ask one after the other while each is done; put their answers together."""
    answers: list[CommitAnswer] = []
    for committer in committers:
        answers.append(ask(committer))
        if not answers[-1].outcome.is_done:
            return answers[-1]
    return CommitAnswer(_newest(a.outcome for a in answers), facts=_merged(answers))


def _newest(outcomes: Iterable[Outcome]) -> Outcome:
    """Return COMMITTED if any call did something."""
    return Outcome.COMMITTED if Outcome.COMMITTED in set(outcomes) else Outcome.ALREADY_COMMITTED


def _merged(answers: Sequence[CommitAnswer]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for answer in answers:
        facts |= answer.facts
    return facts
