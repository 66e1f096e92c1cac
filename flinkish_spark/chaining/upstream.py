"""What a chained source is told about its upstream job, and how that travels to its planner."""

from __future__ import annotations

import json
from dataclasses import dataclass

from flinkish_spark.arguments import refused_as_config_errors
from flinkish_spark.protocol.codec import Stored
from flinkish_spark.protocol.gate_values import AlignmentMode, AlignmentSettings
from flinkish_spark.protocol.ids import JobUuid
from flinkish_spark.protocol.limits import UnusableValueError


@dataclass(frozen=True)
class UpstreamJob(Stored):
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
        From the first barrier on, 0 to 365 days; with ``ALIGNED_WITH_TIMEOUT`` and only there.
    job
        Uuid of the upstream job, as in its job.json; empty for the first one that is seen. Needed when
        the topics are written by several jobs, or by another one than before.

    Raises
    ------
    ConfigError
        A setting cannot be used, or has another type.

    Examples
    --------
    >>> UpstreamJob(mode=AlignmentMode.ALIGNED_WITH_TIMEOUT, alignment_timeout_ms=30_000).settings.mode
    <AlignmentMode.ALIGNED_WITH_TIMEOUT: 'ALIGNED_WITH_TIMEOUT'>
    """

    mode: AlignmentMode = AlignmentMode.ALIGNED
    alignment_timeout_ms: int | None = None
    job: str = ""

    def __post_init__(self) -> None:
        with refused_as_config_errors("describe the upstream job as flinkish_spark.UpstreamJob says"):
            _ = self.settings
            if not isinstance(self.job, str):
                raise UnusableValueError("job", self.job, "the uuid in the job.json of a job, as a str")
            if self.job:
                JobUuid(self.job)

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
        return json.dumps(self.to_json())

    @classmethod
    def from_option(cls, text: str) -> UpstreamJob:
        """Return what :meth:`to_option` wrote."""
        return cls.from_json(json.loads(text))
