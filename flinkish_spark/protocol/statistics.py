"""What one checkpoint cost: durations, rows, bytes, and why it failed if it did.

Written by the coordinator while a checkpoint runs, read by programs and by `flinkish checkpoints`.
Nothing here decides anything. All types are immutable and check themselves when they are made;
`to_json` and `from_json` are exact inverses, use JSON values only, and a value that does not fit
raises ValueError: a process that reads statistics runs no code from them.

`None` means that something was not measured or not reached; 0 means that it took no time.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields, replace
from typing import Any

from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.ids import CheckpointId, checked_name
from flinkish_spark.protocol.json_values import list_of, measured, member, object_of, text_of
from flinkish_spark.protocol.limits import checked_whole
from flinkish_spark.protocol.purpose import CheckpointPurpose


class CheckpointStatus(enum.Enum):
    """What has become of a checkpoint."""

    IN_PROGRESS = "IN_PROGRESS"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class CheckpointDurations:
    """How long the phases of a checkpoint took, in milliseconds.

    Parameters
    ----------
    trigger_ms
        From the request to the moment when the barrier is offered; waiting in the queue included.
    alignment_ms
        From the first barrier on a channel to the last.
    sync_ms
        From the start of foreachBatch to the staged file: the part that the stream waits for.
    async_ms
        From the staged file to the decision, while the next micro-batch runs.
    commit_ms
        From the decision to the receipt.
    end_to_end_ms
        From the request to the receipt, or to the failure.
    """

    trigger_ms: int | None = None
    alignment_ms: int | None = None
    sync_ms: int | None = None
    async_ms: int | None = None
    commit_ms: int | None = None
    end_to_end_ms: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            measured(field.name, getattr(self, field.name))

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_json(cls, value: Any) -> CheckpointDurations:
        """Read the stored form; raise ValueError if it is none."""
        stored = object_of(value, "durations")
        return cls(**{field.name: member(stored, field.name) for field in fields(cls)})


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """What one channel brought to a participant in one checkpoint.

    Parameters
    ----------
    channel
        Its name or number, as text.
    barriers
        Barriers of this checkpoint that came through it; 1 if all is well.
    rows, bytes
        What came through it; None where that is counted by participant only.
    alignment_ms
        How long it was blocked.
    """

    channel: str
    barriers: int
    rows: int | None = None
    bytes: int | None = None
    alignment_ms: int | None = None

    def __post_init__(self) -> None:
        text_of(self.channel, "channel")
        checked_whole("barriers", self.barriers, least=0)
        for name in ("rows", "bytes", "alignment_ms"):
            measured(name, getattr(self, name))

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_json(cls, value: Any) -> ChannelStatistics:
        """Read the stored form; raise ValueError if it is none."""
        stored = object_of(value, "a channel")
        return cls(**{field.name: member(stored, field.name) for field in fields(cls)})


@dataclass(frozen=True, slots=True)
class ParticipantStatistics:
    """What one operator or sink did for one checkpoint.

    Parameters
    ----------
    uid
        Of the operator or sink.
    rows, bytes
        What it staged; bytes are None where the system does not tell.
    sync_ms, commit_ms
        How long its staging and its commits took.
    channels
        One entry per channel.
    """

    uid: str
    rows: int
    bytes: int | None = None
    sync_ms: int | None = None
    commit_ms: int | None = None
    channels: tuple[ChannelStatistics, ...] = ()

    def __post_init__(self) -> None:
        checked_name(self.uid, "uid")
        checked_whole("rows", self.rows, least=0)
        for name in ("bytes", "sync_ms", "commit_ms"):
            measured(name, getattr(self, name))

    @property
    def barriers(self) -> int:
        """How many barriers it saw, over all channels."""
        return sum(channel.barriers for channel in self.channels)

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        return {
            "uid": self.uid,
            "rows": self.rows,
            "bytes": self.bytes,
            "sync_ms": self.sync_ms,
            "commit_ms": self.commit_ms,
            "channels": [channel.to_json() for channel in self.channels],
        }

    @classmethod
    def from_json(cls, value: Any) -> ParticipantStatistics:
        """Read the stored form; raise ValueError if it is none."""
        stored = object_of(value, "a participant")
        numbers = {name: member(stored, name) for name in ("rows", "bytes", "sync_ms", "commit_ms")}
        channels = list_of(member(stored, "channels"), "channels")
        return cls(
            member(stored, "uid"), **numbers, channels=tuple(ChannelStatistics.from_json(c) for c in channels)
        )


@dataclass(frozen=True, slots=True)
class CheckpointFailure:
    """Why a checkpoint failed: the reason for programs, the text for people."""

    reason: CheckpointFailureReason
    text: str = ""

    def __post_init__(self) -> None:
        text_of(self.text, "text")

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        return {"reason": self.reason.value, "text": self.text}

    @classmethod
    def from_json(cls, value: Any) -> CheckpointFailure:
        """Read the stored form; raise ValueError if it is none."""
        stored = object_of(value, "a failure")
        return cls(CheckpointFailureReason(member(stored, "reason")), member(stored, "text"))


@dataclass(frozen=True, slots=True)
class CheckpointStatistics:
    """One checkpoint, from its trigger to its end.

    Parameters
    ----------
    checkpoint
        Its id.
    purpose
        What it was taken for.
    status
        What has become of it.
    trigger_at_ms
        Wall clock time of the request, for people; durations are measured by another clock.
    durations
        See :class:`CheckpointDurations`.
    rows, bytes_staged
        What all sinks staged for it.
    participants
        One entry per operator and sink.
    failure
        Why it failed; there exactly when the status is FAILED.

    Raises
    ------
    ValueError
        A value is out of range, or status and failure contradict each other.

    Examples
    --------
    >>> begun = CheckpointStatistics.triggered(CheckpointId(7), CheckpointPurpose.USER, trigger_at_ms=1_000)
    >>> done = begun.completed(CheckpointDurations(sync_ms=20, end_to_end_ms=90), rows=12, bytes_staged=340)
    >>> done.status.value, done.durations.sync_ms, CheckpointStatistics.from_json(done.to_json()) == done
    ('COMPLETED', 20, True)
    """

    checkpoint: CheckpointId
    purpose: CheckpointPurpose
    status: CheckpointStatus
    trigger_at_ms: int
    durations: CheckpointDurations = CheckpointDurations()
    rows: int = 0
    bytes_staged: int = 0
    participants: tuple[ParticipantStatistics, ...] = ()
    failure: CheckpointFailure | None = None

    def __post_init__(self) -> None:
        for name in ("trigger_at_ms", "rows", "bytes_staged"):
            checked_whole(name, getattr(self, name), least=0)
        if (self.status is CheckpointStatus.FAILED) != (self.failure is not None):
            raise ValueError(
                f"checkpoint {self.checkpoint} is {self.status.value} with failure {self.failure}"
            )

    @classmethod
    def triggered(
        cls, checkpoint: CheckpointId, purpose: CheckpointPurpose, trigger_at_ms: int
    ) -> CheckpointStatistics:
        """Return the statistics of a checkpoint that has just got its id."""
        return cls(checkpoint, purpose, CheckpointStatus.IN_PROGRESS, trigger_at_ms)

    def completed(
        self,
        durations: CheckpointDurations,
        *,
        rows: int,
        bytes_staged: int,
        participants: tuple[ParticipantStatistics, ...] = (),
    ) -> CheckpointStatistics:
        """Return the statistics of the same checkpoint, confirmed; called after the receipt."""
        return replace(
            self,
            status=CheckpointStatus.COMPLETED,
            durations=durations,
            rows=rows,
            bytes_staged=bytes_staged,
            participants=participants,
        )

    def failed(
        self, reason: CheckpointFailureReason, text: str, durations: CheckpointDurations | None = None
    ) -> CheckpointStatistics:
        """Return the statistics of the same checkpoint, failed; durations only if there are new ones."""
        return replace(
            self,
            status=CheckpointStatus.FAILED,
            durations=durations or self.durations,
            failure=CheckpointFailure(reason, text),
        )

    @property
    def detail_count(self) -> int:
        """How many participants and channels are listed."""
        return len(self.participants) + sum(len(p.channels) for p in self.participants)

    def without_details(self) -> CheckpointStatistics:
        """Return the statistics of the checkpoint as a whole."""
        return replace(self, participants=())

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        return {
            "checkpoint": int(self.checkpoint),
            "purpose": self.purpose.value,
            "status": self.status.value,
            "trigger_at_ms": self.trigger_at_ms,
            "durations": self.durations.to_json(),
            "rows": self.rows,
            "bytes_staged": self.bytes_staged,
            "participants": [participant.to_json() for participant in self.participants],
            "failure": None if self.failure is None else self.failure.to_json(),
        }

    @classmethod
    def from_json(cls, value: Any) -> CheckpointStatistics:
        """Read the stored form; raise ValueError if it is none."""
        stored = object_of(value, "statistics of a checkpoint")
        failure = member(stored, "failure")
        participants = list_of(member(stored, "participants"), "participants")
        return cls(
            CheckpointId(member(stored, "checkpoint")),
            CheckpointPurpose(member(stored, "purpose")),
            CheckpointStatus(member(stored, "status")),
            member(stored, "trigger_at_ms"),
            CheckpointDurations.from_json(member(stored, "durations")),
            member(stored, "rows"),
            member(stored, "bytes_staged"),
            tuple(ParticipantStatistics.from_json(p) for p in participants),
            None if failure is None else CheckpointFailure.from_json(failure),
        )
