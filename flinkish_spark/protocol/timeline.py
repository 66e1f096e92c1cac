"""Timelines tell if the history of *this* job directory has committed the data in a sink.

Checkpoint ids alone do not tell. A directory that is restored from a backup gives out the same ids again, and
so does a copy of it that runs elsewhere: then an id that a sink knows belongs to other rows.

Rules:

1. Each takeover begins a *stretch* of the timeline with a random token, after the last id that was given out
   before. Every id belongs to one stretch, so it has one token.
2. A committer leaves a *mark* with id and token of the checkpoint: in the same transaction if the system has
   transactions, else before the first record is visible.
3. A mark is *ours* if its token is that of its id, and its id was not given up here. Any other mark was left
   by another timeline: then nothing is committed to the sink.
4. A mark whose token cannot be read any more is judged by its id alone.
5. A user may accept the data in a sink: all marks up to an id are then valid, and ids continue above it.
6. A stretch lists the ids of earlier owners that a later owner gave up. In a copy of the directory that was
   made before, such an id may be open with the same token, and can still be committed; here its rows come
   with a later id. So no mark of such an id is ours.
7. An id that its own owner gave up is not listed: that owner commits it nowhere. Its mark may come with a
   later id of that owner, if a sink had been told of its barrier, and is ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from flinkish_spark.protocol.codec import LEFT_OUT, StoredObject
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, OwnerEpoch

_TOKEN = re.compile(r"[0-9a-f]{16}")
_WORD = "flinkish"
_NOTHING = CheckpointId(0)


@dataclass(frozen=True, slots=True)
class Mark:
    """Mark in a sink's system of the last checkpoint that was committed to it."""

    checkpoint: CheckpointId
    #: Token of the timeline; None if it is unknown.
    token: str | None = None
    #: Owner epoch of the process that wrote it; None if the system does not tell.
    owner_epoch: OwnerEpoch | None = None

    def to_text(self, job: JobUuid) -> str:
        return " ".join([_WORD, str(job), str(self.checkpoint), *([self.token] if self.token else [])])

    @classmethod
    def parse(cls, text: str, job: JobUuid) -> Mark | None:
        word, *rest = text.split(" ")
        if word != _WORD or len(rest) not in (2, 3) or rest[0] != str(job) or not rest[1].isdecimal():
            return None
        return cls(CheckpointId(int(rest[1])), find_token(rest[2:]))


def find_token(words: Iterable[str]) -> str | None:
    return next((word for word in words if _TOKEN.fullmatch(word)), None)


@dataclass(frozen=True, slots=True)
class Stretch(StoredObject):
    """Part of a timeline: the ids of one owner of the directory."""

    #: The lowest id that the owner may give out: above every id that was decided before.
    first: CheckpointId
    #: 16 random hex digits.
    token: str
    #: Ids of earlier owners that this owner gave up, without those that an earlier stretch lists. Stored here
    #: since their decisions are deleted with old checkpoints, while the mark in an idle sink stays.
    given_up: tuple[CheckpointId, ...] = field(default=(), metadata=LEFT_OUT)

    def __post_init__(self) -> None:
        if self.first < CheckpointId(1):
            raise ValueError("the first checkpoint of all is 1")
        if not isinstance(self.token, str) or not _TOKEN.fullmatch(self.token):
            raise ValueError(f"a token of a timeline is 16 lower-case hex digits, got {self.token!r}")


@dataclass(frozen=True, slots=True)
class Timeline:
    """History of one job directory, as its present owner knows it."""

    #: In order; the last one is the owner's. Without any, every mark is ours.
    stretches: tuple[Stretch, ...] = ()
    #: Marks up to this id are valid, since a user accepted them.
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
        """Return why a mark is not ours; empty if it is."""
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


#: Timeline without a job directory: every mark is ours.
NO_TIMELINE = Timeline()
