"""What a chained source is told about its upstream job, and how that travels to its planner."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from flinkish_spark.errors import ConfigError
from flinkish_spark.protocol.gate_values import AlignmentMode, AlignmentSettings
from flinkish_spark.protocol.ids import JobUuid


@dataclass(frozen=True)
class UpstreamJob:
    """The job that writes the topics of a source, and how the source follows its checkpoints.

    The upstream job's Kafka sinks need ``barriers=BarrierRecords.EACH_CHECKPOINT``. Every checkpoint
    of the job that has this source is then drawn at a checkpoint of the upstream job, so that the
    two are one consistent cut. See `docs/chained-jobs.md`.

    Parameters
    ----------
    mode
        ``AlignmentMode.ALIGNED``: a partition waits at the barrier of an upstream checkpoint until all
        partitions have come to theirs. ``UNALIGNED``: the checkpoint is drawn at the first of these
        barriers, and the offsets up to the others are part of it. ``ALIGNED_WITH_TIMEOUT``: the first,
        and the second if it takes too long. ``AT_LEAST_ONCE``: nothing waits.
    alignment_timeout_ms
        From the first barrier on; with ``ALIGNED_WITH_TIMEOUT`` and only there.
    job
        Uuid of the upstream job, as in its job.json; empty for the first one that is seen. Needed when
        the topics are written by several jobs, or by another one than before.

    Raises
    ------
    ConfigError
        A setting cannot be used.

    Examples
    --------
    >>> UpstreamJob(mode=AlignmentMode.ALIGNED_WITH_TIMEOUT, alignment_timeout_ms=30_000).settings.mode
    <AlignmentMode.ALIGNED_WITH_TIMEOUT: 'ALIGNED_WITH_TIMEOUT'>
    """

    mode: AlignmentMode = AlignmentMode.ALIGNED
    alignment_timeout_ms: int | None = None
    job: str = ""

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "mode", AlignmentMode(self.mode))
            _ = self.settings
            if self.job:
                JobUuid(self.job)
        except ValueError as wrong:
            raise ConfigError(f"the upstream job cannot be described so: {wrong}") from None

    @property
    def settings(self) -> AlignmentSettings:
        """How the gate aligns."""
        return AlignmentSettings(self.mode, alignment_timeout_ms=self.alignment_timeout_ms)

    @property
    def wanted(self) -> JobUuid | None:
        """The job whose barriers count; None for the first one that is seen."""
        return JobUuid(self.job) if self.job else None

    def to_option(self) -> str:
        """Return the value of the source option."""
        timeout_ms = self.alignment_timeout_ms
        return json.dumps({"mode": self.mode.value, "alignment_timeout_ms": timeout_ms, "job": self.job})

    @classmethod
    def from_option(cls, text: str) -> UpstreamJob:
        """Return what :meth:`to_option` wrote."""
        value: dict[str, Any] = json.loads(text)
        return cls(AlignmentMode(value["mode"]), value["alignment_timeout_ms"], value["job"])
