"""The committing half of a sink with dead letters: two committers that answer as one.

Dead letters commit first, and before the first record is tried it is written down which ones are
visible. If records are lost then and their micro-batches are staged again, so are the dead letters of
these; what the note names is neither committed a second time nor aborted.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flinkish_spark.errors import InternalError
from flinkish_spark.protocol.codec import Stored
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.ids import CheckpointId, Lineage
from flinkish_spark.protocol.outcomes import CommitAnswer, Outcome
from flinkish_spark.protocol.records import Committable
from flinkish_spark.protocol.timeline import Mark
from flinkish_spark.sealed_objects import SealedObjects
from flinkish_spark.sinks.base import Committer, CompletedCheckpoint
from flinkish_spark.store import LocalStore

LOG = logging.getLogger(__name__)
_MARK, _MARKED, _BATCH = "flinkish_part", "dead-letters", "flinkish_batch"
_KIND = "visible-dead-letters"


def marked(payload: Mapping[str, Any], batch: str) -> dict[str, Any]:
    """Return the payload of a committable of dead letters as the staged file names it.

    Everything else stays as it is: other sinks of the job look into it to see what must be kept.
    """
    return {**payload, _MARK: _MARKED, _BATCH: batch}


@dataclass(frozen=True, slots=True)
class VisibleLetters(Stored):
    """The dead letters of one checkpoint that are visible.

    Parameters
    ----------
    by_batch
        By micro-batch, as dead letters name it, a digest of each committable. Micro-batches of which all
        are visible.
    facts
        What the committer said about them, for the receipt.
    """

    by_batch: Mapping[str, frozenset[str]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digests(self) -> frozenset[str]:
        """All of them."""
        return frozenset[str]().union(*self.by_batch.values())


class VisibleNotes:
    """Keeps :class:`VisibleLetters` by checkpoint, below the sink's folder of the job directory.

    Parameters
    ----------
    folder
        The sink's.
    """

    def __init__(self, folder: Path) -> None:
        self._store = LocalStore(folder / _KIND)
        self._objects = SealedObjects(self._store, "the folder of a sink with dead letters")

    def of(self, checkpoint: int) -> VisibleLetters:
        """Return what is noted of a checkpoint."""
        found = self._objects.optional(_key(checkpoint), _KIND, VisibleLetters.from_json)
        return VisibleLetters() if found is None else found

    def write(self, checkpoint: int, letters: VisibleLetters) -> None:
        """Replace what is noted of a checkpoint, durably."""
        self._store.put(_key(checkpoint), seal(_KIND, letters.to_json()))

    def digests(self) -> frozenset[str]:
        """Return the committables that are visible, of all checkpoints that are noted."""
        return frozenset[str]().union(*(self.of(c).digests for c in self._objects.numbers("checkpoints")))

    def forget_before(self, checkpoint: int) -> None:
        """Delete the notes of older checkpoints: those are confirmed, or dead."""
        for older in self._objects.numbers("checkpoints"):
            if older < checkpoint:
                self._store.delete(_key(older))


def _key(checkpoint: int) -> str:
    return f"checkpoints/{checkpoint}.json"


class DeadLetterCommitter(Committer):
    """Splits committables between two committers and puts their answers together again.

    Parameters
    ----------
    main, dead
        Of the records and of the dead letters.
    uid, dead_uid
        Of the sink, and under which the dead letters' sink works.
    folder
        The sink's below the job directory.
    """

    def __init__(self, main: Committer, dead: Committer, uid: str, dead_uid: str, folder: Path) -> None:
        self._main, self._dead, self._uid, self._dead_uid = main, dead, uid, dead_uid
        self._notes = VisibleNotes(folder)
        lifetimes = [one.staged_lifetime_ms for one in (main, dead)]
        self.staged_lifetime_ms = min((one for one in lifetimes if one is not None), default=None)

    def commit(self, checkpoint: CheckpointId, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Commit all dead letters, then the records up to the first dead letter that is not committed."""
        main, dead = self._split(committables)
        answers = self._commit_letters(checkpoint, dead)
        # What is lost must be a suffix: no record behind a lost dead letter is committed.
        end = min((i for i in dead if i not in answers or not answers[i].outcome.is_done), default=None)
        wanted = {i: c for i, c in main.items() if end is None or i < end}
        answers |= _commit(self._main, checkpoint, wanted)
        return _up_to_a_gap(answers, len(committables))

    def _commit_letters(
        self, checkpoint: CheckpointId, dead: Mapping[int, Committable]
    ) -> dict[int, CommitAnswer]:
        """Commit dead letters and note which are visible; those that came in their place are passed over."""
        if not dead:
            return {}
        known = self._notes.of(int(checkpoint))
        batches = _by_batch(dead)
        noted = {batch: _digests(of_one) for batch, of_one in batches.items() if batch in known.by_batch}
        answers: dict[int, CommitAnswer] = {}
        if noted != known.by_batch:
            # Staged again with their micro-batch. Not even those that stayed the same are asked for: a
            # sink that commits a checkpoint as a whole takes a part of it for something else. The sweep
            # behind the receipt finds what is passed over.
            again = [place for batch in noted for place in batches[batch]]
            facts = known.facts
            answers = {i: CommitAnswer(Outcome.ALREADY_COMMITTED, facts=facts) for i in again}
        asked = {i: self._unmarked(c) for i, c in dead.items() if i not in answers}
        answers |= _commit(self._dead, checkpoint, asked)
        done = {
            batch: _digests(of_one)
            for batch, of_one in batches.items()
            if batch and all(i in answers and answers[i].outcome.is_done for i in of_one)
        }
        if not done.keys() <= known.by_batch.keys():
            facts = {**known.facts, **_merged(tuple(answers.values()))}
            self._notes.write(int(checkpoint), VisibleLetters({**done, **known.by_batch}, facts))
        return answers

    def abort(self, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Abort both, but for dead letters that are visible: they stay when records of theirs are lost."""
        main, dead = self._split(committables)
        answers = dict(zip(main, self._main.abort(tuple(main.values())), strict=True)) if main else {}
        visible = self._notes.digests() if dead else frozenset()
        hidden = {i: c for i, c in dead.items() if _digest(c) not in visible}
        stay = CommitAnswer(Outcome.ALREADY_COMMITTED, "visible dead letters stay")
        answers |= {i: stay for i in dead if i not in hidden}
        if hidden:
            plain = tuple(map(self._unmarked, hidden.values()))
            given = (self._left_visible(answer) for answer in self._dead.abort(plain))
            answers |= dict(zip(hidden, given, strict=True))
        return [answers[i] for i in range(len(committables))]

    def _left_visible(self, answer: CommitAnswer) -> CommitAnswer:
        """Let be what was committed of a micro-batch whose other dead letters are lost."""
        if answer.outcome is not Outcome.FENCED:
            return answer
        LOG.warning("dead letters of sink '%s' stay, and may come again: %s", self._uid, answer.detail)
        return CommitAnswer(Outcome.ALREADY_COMMITTED, answer.detail)

    def why_dead(self, committables: Sequence[Committable]) -> Mapping[int, str]:
        """Ask both."""
        found: dict[int, str] = {}
        main, dead = self._split(committables)
        plain = {place: self._unmarked(one) for place, one in dead.items()}
        for committer, part in ((self._main, main), (self._dead, plain)):
            places = list(part)
            reasons = committer.why_dead(tuple(part.values())) if part else {}
            found |= {places[index]: why for index, why in reasons.items()}
        return found

    def sweep(self, kept: Sequence[Committable], running_blocks: Callable[[], frozenset[int]]) -> int:
        """Sweep both."""
        wanted = [self._unmarked(one) if self._is_dead_letter(one) else one for one in kept]
        return self._main.sweep(wanted, running_blocks) + self._dead.sweep(wanted, running_blocks)

    def checkpoint_complete(self, completed: CompletedCheckpoint) -> CommitAnswer:
        """Complete both; forget what was noted of older checkpoints."""
        self._notes.forget_before(int(completed.checkpoint))
        return _both(lambda c: c.checkpoint_complete(completed), self._dead, self._main)

    def why_not_superseded(self, target: CheckpointId) -> str:
        """Ask both."""
        return self._main.why_not_superseded(target) or self._dead.why_not_superseded(target)

    def supersede(self, target: CheckpointId, lineage: Lineage) -> CommitAnswer:
        """Take back in both."""
        return _both(lambda c: c.supersede(target, lineage), self._dead, self._main)

    def newest_marks(self) -> Sequence[Mark]:
        """Ask both."""
        return (*self._main.newest_marks(), *self._dead.newest_marks())

    def task_of(self, committable: Committable) -> int | None:
        """Return the Spark partition; for dead letters a number below zero, so that the two differ.

        The dead letters of a partition are those of its records: they are selected from what its task
        reports, without a shuffle.
        """
        if not self._is_dead_letter(committable):
            return self._main.task_of(committable)
        task = self._dead.task_of(self._unmarked(committable))
        return None if task is None else -1 - task

    def close(self) -> None:
        """Close both."""
        try:
            self._main.close()
        finally:
            self._dead.close()

    def _split(
        self, committables: Sequence[Committable]
    ) -> tuple[dict[int, Committable], dict[int, Committable]]:
        """Return records and dead letters, by position; dead letters with their mark."""
        main = {i: c for i, c in enumerate(committables) if not self._is_dead_letter(c)}
        dead = {i: c for i, c in enumerate(committables) if self._is_dead_letter(c)}
        return main, dead

    def _is_dead_letter(self, committable: Committable) -> bool:
        return committable.sink == self._uid and committable.payload.get(_MARK) == _MARKED

    def _unmarked(self, committable: Committable) -> Committable:
        payload: dict[str, Any] = {k: v for k, v in committable.payload.items() if k not in (_MARK, _BATCH)}
        return Committable(self._dead_uid, payload)


def _by_batch(dead: Mapping[int, Committable]) -> dict[str, dict[int, Committable]]:
    """Return dead letters by micro-batch; under ``""`` those that do not name theirs."""
    found: dict[str, dict[int, Committable]] = {}
    for place, one in dead.items():
        found.setdefault(str(one.payload.get(_BATCH, "")), {})[place] = one
    return found


def _digests(of_one: Mapping[int, Committable]) -> frozenset[str]:
    return frozenset(map(_digest, of_one.values()))


def _digest(committable: Committable) -> str:
    text = json.dumps(committable.payload, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


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
