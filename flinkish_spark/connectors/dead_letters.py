"""Dead letters of a two-phase sink: refused records go to another sink, in the same checkpoint."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.connectors.kafka.client.barriers import BarrierRecords
from flinkish_spark.connectors.two_phase import TwoPhaseCommitSink, TwoPhaseWriter, batch_label
from flinkish_spark.contracts.sink import (
    Committer,
    CompletedCheckpoint,
    Sink,
    SinkContext,
    SinkWriter,
    StageRequest,
    StageResult,
)
from flinkish_spark.core.errors import ConfigError, InternalError, RetriableError
from flinkish_spark.core.fields import check_fields
from flinkish_spark.core.formats import OnBadRecord
from flinkish_spark.core.store import SealedObjects
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.codec import StoredObject
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.ids import CheckpointId, Lineage, check_name
from flinkish_spark.protocol.records import CommitAnswer, Committable, Outcome
from flinkish_spark.protocol.timeline import Mark
from flinkish_spark.transport import columns as C

LOG = logging.getLogger(__name__)
_MARK, _MARKED, _BATCH = "flinkish_part", "dead-letters", "flinkish_batch"
_KIND = "visible-dead-letters"


def mark_dead_letter(payload: Mapping[str, Any], batch: str) -> dict[str, Any]:
    # The rest of the payload stays: other sinks of the job read it to see which data must be kept.
    return {**payload, _MARK: _MARKED, _BATCH: batch}


@dataclass(frozen=True, slots=True)
class VisibleLetters(StoredObject):
    #: Micro-batches whose dead letters are all visible, each with the digests of its committables.
    by_batch: Mapping[str, frozenset[str]] = field(default_factory=dict)
    #: The committer's facts about them, for the receipt.
    facts: Mapping[str, Any] = field(default_factory=dict)


class DeadLetterCommitter(Committer):
    """Splits committables between the committers of records and dead letters, and merges their answers."""

    # This order matters: dead letters commit first, and a note names the visible ones before the first record
    # is committed. If records are lost after that, their micro-batches are staged again, together with their
    # dead letters; the dead letters that the note names are neither committed a second time nor aborted.

    def __init__(self, main: Committer, dead: Committer, uid: str, dead_uid: str, place: StoreSpec) -> None:
        self._main, self._dead, self._uid, self._dead_uid = main, dead, uid, dead_uid
        self._store = place.to_child(_KIND).open()
        self._notes = SealedObjects(self._store, "the folder of a sink with dead letters")
        lifetimes = [one.staged_lifetime_ms for one in (main, dead)]
        self.staged_lifetime_ms = min((one for one in lifetimes if one is not None), default=None)
        self.shows_whole = main.shows_whole or dead.shows_whole

    def commit(self, checkpoint: CheckpointId, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Commit all dead letters, then the records up to the first dead letter that is not committed."""
        main, dead = self._split(committables)
        answers = self._commit_letters(checkpoint, dead)
        # Lost committables must be a suffix: no record after a lost dead letter is committed.
        end = min((i for i in dead if i not in answers or not answers[i].outcome.is_done), default=None)
        wanted = {i: c for i, c in main.items() if end is None or i < end}
        answers |= _commit(self._main, checkpoint, wanted)
        return _cut_at_failure(answers, len(committables))

    def _commit_letters(
        self, checkpoint: CheckpointId, dead: Mapping[int, Committable]
    ) -> dict[int, CommitAnswer]:
        """Commit dead letters and note which are visible; skip those of micro-batches noted already."""
        if not dead:
            return {}
        known = self._visible(int(checkpoint))
        batches: dict[str, dict[int, Committable]] = {}
        for place, one in dead.items():
            batches.setdefault(str(one.payload[_BATCH]), {})[place] = one
        digests = {batch: frozenset(map(_digest, some.values())) for batch, some in batches.items()}
        noted = {batch: found for batch, found in digests.items() if batch in known.by_batch}
        answers: dict[int, CommitAnswer] = {}
        if noted != known.by_batch:
            # These were staged again with their micro-batch. Unchanged ones are skipped too: a sink that
            # commits a checkpoint as a whole would take a part of it for another checkpoint. The sweep after
            # the receipt aborts the skipped ones.
            again = [place for batch in noted for place in batches[batch]]
            answers = {i: CommitAnswer(Outcome.ALREADY_COMMITTED, facts=known.facts) for i in again}
        asked = {i: self._unmark(c) for i, c in dead.items() if i not in answers}
        answers |= _commit(self._dead, checkpoint, asked)
        done = {
            batch: digests[batch]
            for batch, of_one in batches.items()
            if all(i in answers and answers[i].outcome.is_done for i in of_one)
        }
        if not done.keys() <= known.by_batch.keys():
            facts = {**known.facts, **_merge_facts(tuple(answers.values()))}
            visible = VisibleLetters({**done, **known.by_batch}, facts)
            self._store.put(_key(int(checkpoint)), seal(_KIND, visible.to_json()))
        return answers

    def _visible(self, checkpoint: int) -> VisibleLetters:
        return self._notes.optional(_key(checkpoint), _KIND, VisibleLetters.from_json) or VisibleLetters()

    def abort(self, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Abort records and dead letters, except visible dead letters: they stay if records are lost."""
        main, dead = self._split(committables)
        answers = dict(zip(main, self._main.abort(tuple(main.values())), strict=True)) if main else {}
        notes = map(self._visible, self._notes.numbers("checkpoints")) if dead else ()
        visible = {digest for note in notes for batch in note.by_batch.values() for digest in batch}
        hidden = {i: c for i, c in dead.items() if _digest(c) not in visible}
        stay = CommitAnswer(Outcome.ALREADY_COMMITTED, "visible dead letters stay")
        answers |= {i: stay for i in dead if i not in hidden}
        given = self._dead.abort(tuple(map(self._unmark, hidden.values()))) if hidden else ()
        for place, answer in zip(hidden, given, strict=True):
            answers[place] = answer
            if answer.outcome is Outcome.FENCED:
                LOG.warning("dead letters of '%s' stay, and may come again: %s", self._uid, answer.detail)
                answers[place] = CommitAnswer(Outcome.ALREADY_COMMITTED, answer.detail)
        return [answers[i] for i in range(len(committables))]

    def why_dead(self, committables: Sequence[Committable]) -> Mapping[int, str]:
        found: dict[int, str] = {}
        main, dead = self._split(committables)
        plain = {place: self._unmark(one) for place, one in dead.items()}
        for committer, part in ((self._main, main), (self._dead, plain)):
            places = list(part)
            reasons = committer.why_dead(tuple(part.values())) if part else {}
            found |= {places[index]: why for index, why in reasons.items()}
        return found

    def sweep(self, kept: Sequence[Committable], running_blocks: Callable[[], frozenset[int]]) -> int:
        wanted = [self._unmark(one) if self._is_dead_letter(one) else one for one in kept]
        return self._main.sweep(wanted, running_blocks) + self._dead.sweep(wanted, running_blocks)

    def checkpoint_complete(self, completed: CompletedCheckpoint) -> CommitAnswer:
        # Older checkpoints are confirmed or dead, so their notes are not needed.
        for older in self._notes.numbers("checkpoints"):
            if older < int(completed.checkpoint):
                self._store.delete(_key(older))
        return _both(lambda c: c.checkpoint_complete(completed), self._dead, self._main)

    def why_not_superseded(self, target: CheckpointId) -> str:
        return self._main.why_not_superseded(target) or self._dead.why_not_superseded(target)

    def supersede(self, target: CheckpointId, lineage: Lineage) -> CommitAnswer:
        return _both(lambda c: c.supersede(target, lineage), self._dead, self._main)

    def newest_marks(self) -> Sequence[Mark]:
        return (*self._main.newest_marks(), *self._dead.newest_marks())

    def task_of(self, committable: Committable) -> int | None:
        """Return the Spark partition; for dead letters a negative number, so that the two differ."""
        # Dead letters are selected from the output of the task that refused the records, without a shuffle,
        # so both have the same partition.
        if not self._is_dead_letter(committable):
            return self._main.task_of(committable)
        task = self._dead.task_of(self._unmark(committable))
        return None if task is None else -1 - task

    def close(self) -> None:
        try:
            self._main.close()
        finally:
            self._dead.close()

    def _split(
        self, committables: Sequence[Committable]
    ) -> tuple[dict[int, Committable], dict[int, Committable]]:
        main = {i: c for i, c in enumerate(committables) if not self._is_dead_letter(c)}
        dead = {i: c for i, c in enumerate(committables) if self._is_dead_letter(c)}
        return main, dead

    def _is_dead_letter(self, committable: Committable) -> bool:
        return committable.sink == self._uid and committable.payload.get(_MARK) == _MARKED

    def _unmark(self, committable: Committable) -> Committable:
        payload: dict[str, Any] = {k: v for k, v in committable.payload.items() if k not in (_MARK, _BATCH)}
        return Committable(self._dead_uid, payload)


def _key(checkpoint: int) -> str:
    return f"checkpoints/{checkpoint}.json"


def _digest(committable: Committable) -> str:
    text = json.dumps(committable.payload, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _commit(
    committer: Committer, checkpoint: CheckpointId, part: Mapping[int, Committable]
) -> dict[int, CommitAnswer]:
    if not part:
        return {}
    return dict(zip(part, committer.commit(checkpoint, tuple(part.values())), strict=False))


def _cut_at_failure(answers: Mapping[int, CommitAnswer], count: int) -> list[CommitAnswer]:
    """Return the answers in order, up to the first that is not done: LOST must come last."""
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
    answers: list[CommitAnswer] = []
    for committer in committers:
        answers.append(ask(committer))
        if not answers[-1].outcome.is_done:
            return answers[-1]
    is_new = any(answer.outcome is Outcome.COMMITTED for answer in answers)
    return CommitAnswer(
        Outcome.COMMITTED if is_new else Outcome.ALREADY_COMMITTED, facts=_merge_facts(answers)
    )


def _merge_facts(answers: Sequence[CommitAnswer]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for answer in answers:
        facts |= answer.facts
    return facts


DEAD_LETTER_SCHEMA = T.StructType(
    [T.StructField(name, T.StringType(), False) for name in ("uid", "reason", "record", "batch")]
)


@dataclass(frozen=True)
class SinkWithDeadLetters(Sink):
    """A two-phase sink, and another sink for the records that it refuses.

    A dead letter has the fields `uid` (of the sink that refused the record), `reason`, `record` (JSON) and
    `batch` (``"<lineage>/<batch>"``), all of type STRING. It becomes visible with the checkpoint of its
    micro-batch, and is counted as `dead_lettered`.

    Parameters
    ----------
    sink
        The sink that refuses records, by raising RefusedRecordError.
    dead_letters
        Any other sink; a KafkaSink without barrier records. Its uid is ``<uid>.dead-letters``.

    Notes
    -----
    Dead letters commit shortly before the records. If data that `sink` staged is lost after the decision and
    staged again, dead letters that are visible already stay, and are not written again.

    Examples
    --------
    >>> sink = SinkWithDeadLetters(ledger, DeltaSink("/lake/refused"))  # doctest: +SKIP
    >>> totals.sink_to(sink, uid="ledger")  # doctest: +SKIP
    """

    sink: TwoPhaseCommitSink
    dead_letters: Sink

    def __post_init__(self) -> None:
        check_fields(self)
        if getattr(self.dead_letters, "barriers", BarrierRecords.NONE) is not BarrierRecords.NONE:
            what = "the sink of dead letters writes barrier records"
            raise ConfigError(what, what_to_do="leave barriers out")
        if isinstance(self.dead_letters, SinkWithDeadLetters):
            what = "the sink of dead letters has dead letters itself"
            raise ConfigError(what, what_to_do="give it a sink that takes every text")

    @property
    def topics(self) -> tuple[str, ...]:
        return (*self.sink.topics, *self.dead_letters.topics)

    def parts(self, uid: str) -> tuple[tuple[str, Sink], ...]:
        return (*self.sink.parts(uid), *self.dead_letters.parts(_dead_uid(uid)))

    def preflight(self, spark: SparkSession, context: SinkContext) -> None:
        """Run the preflight of both sinks; refuse a sink that has an on_refused policy as well."""
        if self.sink.on_refused is not OnBadRecord.FAIL:
            what = f"the sink '{context.uid}' has dead letters and on_refused={self.sink.on_refused}"
            raise ConfigError(what, what_to_do="leave on_refused as it is")
        self.sink.preflight(spark, context)
        self.dead_letters.preflight(spark, _dead_context(context))

    def create_writer(self, spark: SparkSession, context: SinkContext) -> SinkWriter:
        dead = self.dead_letters.create_writer(spark, _dead_context(context))
        return _Writer(TwoPhaseWriter(self.sink, context), dead, context.uid)

    def create_committer(self, spark: SparkSession, context: SinkContext) -> Committer:
        dead_context = _dead_context(context)
        main = self.sink.create_committer(spark, context)
        dead = self.dead_letters.create_committer(spark, dead_context)
        return DeadLetterCommitter(main, dead, context.uid, dead_context.uid, context.place)


def _dead_uid(uid: str) -> str:
    try:
        return check_name(f"{uid}.dead-letters", "sink uid")
    except ValueError as error:
        what = f"the uid '{uid}' is too long for a sink with dead letters"
        raise ConfigError(what, why=str(error), what_to_do="choose a shorter one") from error


def _dead_context(context: SinkContext) -> SinkContext:
    place = context.place.to_child("dead-letters")
    return replace(context, uid=_dead_uid(context.uid), schema=DEAD_LETTER_SCHEMA, place=place)


class _Writer(SinkWriter):
    def __init__(self, main: TwoPhaseWriter, dead: SinkWriter, uid: str) -> None:
        self._main, self._dead, self._uid = main, dead, uid

    def stage(self, request: StageRequest) -> StageResult:
        with self._main.stage_with_refused(request) as (result, refused):
            count = sum(task.dead_lettered for task in result.tasks)
            if not count:
                return result
            rows = self._letters(request, refused)
            dead = self._dead.stage(replace(request, source=rows))
        written = sum(task.rows for task in dead.tasks)
        if written != count:
            raise RetriableError(
                f"the sink '{self._uid}' refused {count} records, and {written} dead letters were staged",
                why="a task was run again in between and refused other records",
                what_to_do="make the sink refuse by the record alone",
                kind="dead letters",
            )
        letters = tuple(mark_dead_letter(payload, batch_label(request)) for payload in dead.payloads)
        return replace(result, payloads=(*result.payloads, *letters))

    def _letters(self, request: StageRequest, refused: DataFrame) -> DataFrame:
        """Return dead letters as rows of a micro-batch, control columns first."""
        constant = {"uid": F.lit(self._uid), "batch": F.lit(batch_label(request))}
        fields = {name: constant.get(name, F.col(name)) for name in DEAD_LETTER_SCHEMA.names}
        return refused.select(
            F.lit(int(C.Kind.RECORD)).alias(C.KIND),
            F.lit(0).cast("long").alias(C.CHECKPOINT),
            F.lit(0).cast("long").alias(C.CHANNEL),
            F.xxhash64(*fields.values()).alias(C.HASH),
            *(field.alias(name) for name, field in fields.items()),
        )
