"""The contract of a manifest: one record per confirmed checkpoint, outside, where readers find it.

Sinks show a decided checkpoint one after the other. A reader of several sinks who must not see one half of
it reads the manifest first, and from the sinks no more than its newest record names. The record is
written behind the last sink and before the group offsets and the receipt; again after a crash in between,
so writing must be idempotent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flinkish_spark.core.store import Store
from flinkish_spark.protocol.decisions import ManifestRecord
from flinkish_spark.protocol.ids import JobUuid, OwnerEpoch
from flinkish_spark.protocol.records import CommitAnswer, Outcome
from flinkish_spark.protocol.timeline import NO_TIMELINE, Mark, Timeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class ManifestContext:
    """Which job writes."""

    job: JobUuid
    owner_epoch: OwnerEpoch
    job_name: str
    #: Rooted at the job directory; a manifest keeps what it needs to be idempotent below ``manifest/``.
    store: Store
    #: Of the job directory: which records are its own.
    timeline: Timeline = NO_TIMELINE


class ManifestWriter(ABC):
    """Writes records; called by the coordinator or the recovery, one at a time."""

    @abstractmethod
    def write(self, record: ManifestRecord) -> CommitAnswer:
        """Write the record of a checkpoint that all sinks have committed, once however often it is called.

        Checkpoints come in order: of one before the last, every record is durable.
        """

    def newest_marks(self) -> Sequence[Mark]:
        return ()

    def close(self) -> None:
        """Release connections."""


class Manifest(ABC):
    """What a user gives to the environment: settings only, usable for several starts."""

    @abstractmethod
    def preflight(self, spark: SparkSession, context: ManifestContext) -> None:
        """Refuse what cannot work, with one clear error, before anything starts; nothing is written."""

    @abstractmethod
    def create_writer(self, spark: SparkSession, context: ManifestContext) -> ManifestWriter:
        """Return what writes the records."""


class _NoManifest(ManifestWriter):
    def write(self, record: ManifestRecord) -> CommitAnswer:
        return CommitAnswer(Outcome.ALREADY_COMMITTED, "the job has no manifest")


NO_MANIFEST: ManifestWriter = _NoManifest()
