"""What may be asked of a running job from outside, what it answers, and the files of both.

Shared by the asker (`cli/asking.py`) and the owner (`runtime/inbox.py`, which has the rules). All
values are immutable and check themselves; `to_json` and `from_json` are exact inverses, and a
stored value that does not fit raises ValueError: reading runs no code.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Any

from flinkish_spark.answers import CheckpointAnswer
from flinkish_spark.job_dir import JobDir
from flinkish_spark.protocol.codec import Stored
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.ids import CheckpointId, OwnerEpoch, checked_name
from flinkish_spark.protocol.json_values import member, object_of, text_of
from flinkish_spark.protocol.limits import checked_whole
from flinkish_spark.protocol.purpose import CheckpointPurpose
from flinkish_spark.sealed_objects import SealedObjects
from flinkish_spark.store import CreateResult

FOLDER = "requests"
_LONGEST_TARGET = 4_096
_NAME = re.compile(r"[0-9a-f]{32}")
_FILE = re.compile(r"([0-9a-f]{32})(\.claim|\.answer|)\.json")


class Part(enum.Enum):
    """The objects of one request; the values end their names. Deleted in this order.

    In another order a request that was carried out would look like a new one.
    """

    REQUEST = ".json"
    CLAIM = ".claim.json"
    ANSWER = ".answer.json"


def parse_file(file: str) -> tuple[str, Part] | None:
    """Return the request's name and the part that a file name stands for; None for other files.

    Examples
    --------
    >>> parse_file("0" * 32 + ".claim.json")[1].name, parse_file("notes.txt")
    ('CLAIM', None)
    """
    match = _FILE.fullmatch(file)
    return None if match is None else (match[1], Part(f"{match[2]}.json"))


class RequestKind(enum.Enum):
    """What may be asked of a running job."""

    #: A checkpoint now.
    CHECKPOINT = "CHECKPOINT"
    #: A savepoint at `target`.
    SAVEPOINT = "SAVEPOINT"
    #: A savepoint at `target`, and no micro-batch behind it.
    STOP_WITH_SAVEPOINT = "STOP_WITH_SAVEPOINT"
    #: End at once. Answered when the job has begun to.
    CANCEL = "CANCEL"
    #: Obey the order to go back whose id is `target`. Answered when the job has begun to: that the
    #: order is closed is seen in the job directory.
    REWIND = "REWIND"


class StopMode(enum.Enum):
    """How a job stops with a savepoint; named as in Flink."""

    #: It may be started again from the savepoint and goes on as if nothing had been.
    SUSPEND = "SUSPEND"
    #: It ends for good: before the savepoint, event time comes to its end.
    DRAIN = "DRAIN"

    @property
    def purpose(self) -> CheckpointPurpose:
        """What the checkpoint of such a stop is taken for."""
        is_drained = self is StopMode.DRAIN
        return CheckpointPurpose.DRAINED_SAVEPOINT if is_drained else CheckpointPurpose.FINAL_SAVEPOINT


#: Kinds whose target is the directory of a savepoint.
_TO_A_DIRECTORY = (RequestKind.SAVEPOINT, RequestKind.STOP_WITH_SAVEPOINT)
_PURPOSES = {
    RequestKind.CHECKPOINT: CheckpointPurpose.USER,
    RequestKind.SAVEPOINT: CheckpointPurpose.SAVEPOINT,
}


@dataclass(frozen=True, slots=True)
class OutsideRequest:
    """One request, as it is stored.

    Parameters
    ----------
    name
        32 hex digits by which it is answered.
    kind
        What is asked.
    owner_epoch
        The newest owner when it was asked.
    asked_at_ms
        Wall-clock time of the asker.
    target
        See :class:`RequestKind`; empty where nothing is said there.
    stop_mode
        Of a stop with savepoint; SUSPEND and without meaning for the others.

    Raises
    ------
    ValueError
        Name or target are not what they must be.

    Examples
    --------
    >>> OutsideRequest("0" * 32, RequestKind.SAVEPOINT, OwnerEpoch(3), 0, "/savepoints/a").kind.value
    'SAVEPOINT'
    """

    name: str
    kind: RequestKind
    owner_epoch: OwnerEpoch
    asked_at_ms: int
    target: str = ""
    stop_mode: StopMode = StopMode.SUSPEND

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"the name of a request is 32 hex digits, got {self.name!r}")
        checked_whole("asked_at_ms", self.asked_at_ms, least=0)
        if self.kind in _TO_A_DIRECTORY:
            is_usable = self.target.startswith("/") and len(self.target) <= _LONGEST_TARGET
            if not is_usable or "\0" in self.target:
                raise ValueError(f"the target must be an absolute path, got {self.target[:200]!r}")
        elif self.kind is RequestKind.REWIND:
            checked_name(self.target, "order id")
        elif self.target:
            raise ValueError(f"{self.kind.value} has no target, got {self.target[:200]!r}")

    @property
    def purpose(self) -> CheckpointPurpose | None:
        """What the checkpoint that is asked for is taken for; None if it asks for none."""
        if self.kind is RequestKind.STOP_WITH_SAVEPOINT:
            return self.stop_mode.purpose
        return _PURPOSES.get(self.kind)

    def to_json(self) -> dict[str, Any]:
        """Return the stored form; the name is the file's."""
        return {
            "kind": self.kind.value,
            "owner_epoch": int(self.owner_epoch),
            "asked_at_ms": self.asked_at_ms,
            "target": self.target,
            "stop_mode": self.stop_mode.value,
        }

    @classmethod
    def from_json(cls, name: str, value: Any) -> OutsideRequest:
        """Read the stored form; raise ValueError if it is none."""
        stored = object_of(value, "a request")
        return cls(
            name,
            RequestKind(member(stored, "kind")),
            OwnerEpoch(member(stored, "owner_epoch")),
            member(stored, "asked_at_ms"),
            text_of(member(stored, "target"), "target"),
            StopMode(member(stored, "stop_mode")),
        )


class OutsideOutcome(enum.Enum):
    """What became of a request; all but the last as in `answers.AnswerKind`."""

    #: It is done; of CANCEL and REWIND: it has begun.
    COMPLETED = "COMPLETED"
    #: Nothing was done.
    REFUSED = "REFUSED"
    #: There was a checkpoint, and it was aborted.
    ABORTED = "ABORTED"
    #: The checkpoint is confirmed, its savepoint could not be written.
    SAVEPOINT_FAILED = "SAVEPOINT_FAILED"
    #: It was being decided when the job ended; the next start finishes it if it is.
    LEFT_TO_NEXT_START = "LEFT_TO_NEXT_START"
    #: The process that took the request ended before it answered.
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class OutsideAnswer(Stored):
    """The answer to a request, as it is stored; see :class:`~flinkish_spark.answers.CheckpointAnswer`."""

    outcome: OutsideOutcome
    checkpoint: CheckpointId | None = None
    reason: CheckpointFailureReason | None = None
    text: str = ""

    @classmethod
    def of(cls, answer: CheckpointAnswer) -> OutsideAnswer:
        """Return the stored form of what the coordinator answered."""
        return cls(OutsideOutcome(answer.kind.value), answer.checkpoint, answer.reason, answer.text)


class Claimant(enum.Enum):
    """Who settles a request."""

    #: An owner carries it out or refuses it.
    OWNER = "OWNER"
    #: The asker has taken it back.
    ASKER = "ASKER"


@dataclass(frozen=True, slots=True)
class Claim(Stored):
    """Created once per request, before it is carried out or taken back."""

    by: Claimant
    owner_epoch: OwnerEpoch


class RequestFiles:
    """Typed access to the objects of one request, for both sides."""

    def __init__(self, job_dir: JobDir, name: str) -> None:
        self._store, self._name = job_dir.store, name
        self._objects = SealedObjects(job_dir.store, "the job directory")

    def create(self, request: OutsideRequest) -> None:
        """Ask. The name is new by construction."""
        self._store.create_if_absent(self._key(Part.REQUEST), seal("request", request.to_json()))

    def request(self) -> OutsideRequest | None:
        """Return the request; None if its asker has deleted it."""
        return self._objects.optional(
            self._key(Part.REQUEST), "request", lambda value: OutsideRequest.from_json(self._name, value)
        )

    def claim(self, claim: Claim) -> Claim:
        """Claim the request; return the claim that holds, which may be somebody else's."""
        while True:
            created = self._store.create_if_absent(self._key(Part.CLAIM), seal("claim", claim.to_json()))
            holds = claim if created is CreateResult.CREATED else self.claimed()
            if holds is not None:
                return holds

    def claimed(self) -> Claim | None:
        """Return the claim, if there is one."""
        return self._objects.optional(self._key(Part.CLAIM), "claim", Claim.from_json)

    def give_answer(self, answer: OutsideAnswer) -> None:
        """Answer; the first answer stays."""
        self._store.create_if_absent(self._key(Part.ANSWER), seal("answer", answer.to_json()))

    def answer(self) -> OutsideAnswer | None:
        """Return the answer, if there is one."""
        return self._objects.optional(self._key(Part.ANSWER), "answer", OutsideAnswer.from_json)

    def delete(self) -> None:
        """Delete all of it."""
        for part in Part:
            self._store.delete(self._key(part))

    def delete_claim(self) -> None:
        """Delete the claim of a request that is gone."""
        self._store.delete(self._key(Part.CLAIM))

    def _key(self, part: Part) -> str:
        return f"{FOLDER}/{self._name}{part.value}"
