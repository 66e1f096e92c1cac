"""Timelines: whether what a sink holds was committed by the past of *this* job directory.

Checkpoint ids alone do not say it. A directory that is put back from a backup counts its ids again, and so
does a copy of it that runs elsewhere: then an id that a sink knows belongs to other rows.

Rules:

1. Each takeover begins a *stretch* of the timeline with a token that nobody can guess, behind the last id
   that was given out before. Every id has one stretch, so one token.
2. Whoever makes a checkpoint visible leaves a *mark* with its id and its token, in the same transaction where
   the system has one, else before the first record can be seen.
3. A mark is *ours* if its token is that of its id, and its id was not given up here. One that is not was
   left by another timeline: nothing is committed beside it.
4. A mark whose token cannot be read any more is judged by its id alone.
5. A user may accept what is there: marks up to an id are then taken as they are, and ids go on above it.
6. A stretch lists the ids that were given up for their owners, by owners that came later. One of them may
   be open in a copy that was made then, has the same token there, and can still be committed there; here
   its rows come with a later id. No later owner leaves its mark.
7. An id that its own owner gave up is not listed: who gives it up commits it nowhere. Its mark may come with
   a later id of that owner, whose barrier a sink was told before, and is ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from flinkish_spark.protocol.codec import LEFT_OUT, Stored
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, OwnerEpoch

_TOKEN = re.compile(r"[0-9a-f]{16}")
_WORD = "flinkish"
_NOTHING = CheckpointId(0)


@dataclass(frozen=True, slots=True)
class Mark:
    """What a system says about the last checkpoint that was committed to it."""

    checkpoint: CheckpointId
    #: Of the timeline; None where it is not known.
    token: str | None = None
    #: Of the process that wrote it, where the system says it.
    owner_epoch: OwnerEpoch | None = None

    def to_text(self, job: JobUuid) -> str:
        return " ".join([_WORD, str(job), str(self.checkpoint), *([self.token] if self.token else [])])

    @classmethod
    def parse(cls, text: str, job: JobUuid) -> Mark | None:
        word, *rest = text.split(" ")
        if word != _WORD or len(rest) not in (2, 3) or rest[0] != str(job) or not rest[1].isdecimal():
            return None
        return cls(CheckpointId(int(rest[1])), token_in(rest[2:]))


def token_in(words: Iterable[str]) -> str | None:
    return next((word for word in words if _TOKEN.fullmatch(word)), None)


@dataclass(frozen=True, slots=True)
class Stretch(Stored):
    """The part of a timeline that one owner of the directory decides."""

    #: The lowest id that it may give out: above every id that was decided before.
    first: CheckpointId
    #: 16 hex digits by chance.
    token: str
    #: Ids below that were given up for their owners; those that an earlier stretch lists are left out. Kept
    #: here since their decisions are deleted with old checkpoints, while the mark of a sink that gets
    #: nothing stays.
    given_up: tuple[CheckpointId, ...] = field(default=(), metadata=LEFT_OUT)

    def __post_init__(self) -> None:
        if self.first < CheckpointId(1):
            raise ValueError("the first checkpoint of all is 1")
        if not isinstance(self.token, str) or not _TOKEN.fullmatch(self.token):
            raise ValueError(f"a token of a timeline is 16 lower-case hex digits, got {self.token!r}")


@dataclass(frozen=True, slots=True)
class Timeline:
    """The past of one job directory, as its present owner knows it."""

    #: In order; the last one is the owner's. Without any, every mark is taken for ours.
    stretches: tuple[Stretch, ...] = ()
    #: Marks up to this id are taken as they are, since somebody said so.
    accepted: CheckpointId = _NOTHING

    @property
    def newest(self) -> CheckpointId:
        return CheckpointId(self.stretches[-1].first.value - 1) if self.stretches else _NOTHING

    def mark_of(self, checkpoint: CheckpointId) -> Mark:
        tokens = [one.token for one in self.stretches if one.first <= checkpoint]
        return Mark(checkpoint, tokens[-1] if tokens else None)

    def has_given_up(self, checkpoint: CheckpointId) -> bool:
        return any(checkpoint in one.given_up for one in self.stretches)

    def why_not_ours(self, mark: Mark, upto: CheckpointId) -> str:
        """Return why a mark was left by another timeline; empty if it is ours."""
        if not self.stretches or mark.checkpoint <= self.accepted:
            return ""
        if mark.checkpoint > upto:
            return f"the directory knows no checkpoint above {upto}"
        if mark.token is not None and mark.token not in {one.token for one in self.stretches}:
            return "the directory does not know the process that committed it"
        if mark.token not in (None, self.mark_of(mark.checkpoint).token):
            return "it was committed after another process had taken the job over"
        if self.has_given_up(mark.checkpoint):
            return f"checkpoint {mark.checkpoint} was given up here, and committed elsewhere"
        return ""


#: Of whoever has no job directory: every mark is taken for ours.
NO_TIMELINE = Timeline()
