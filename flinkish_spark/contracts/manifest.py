"""The interface of a manifest: one record per confirmed checkpoint in an external system.

Sinks commit a decided checkpoint one after the other. A reader of several sinks that must not see a part of
it reads the manifest first, and from the sinks only the data of checkpoints in the manifest. The record is
written after the last sink and before the group offsets and the receipt; again after a crash in between, so
writing must be idempotent.
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
    job: JobUuid
    owner_epoch: OwnerEpoch
    job_name: str
    #: The job directory; a manifest may store objects below ``manifest/``, for example to be idempotent.
    store: Store
    #: Timeline of the job directory, which tells its own records from those of other copies.
    timeline: Timeline = NO_TIMELINE


class ManifestWriter(ABC):
    """Writes records; called by the coordinator or the recovery, never concurrently."""

    @abstractmethod
    def write(self, record: ManifestRecord) -> CommitAnswer:
        """Write the record of a checkpoint that all sinks have committed; must be idempotent.

        Checkpoints come in order: the records of all earlier ones are durable.
        """

    def newest_marks(self) -> Sequence[Mark]:
        return ()

    def close(self) -> None: ...


class Manifest(ABC):
    """Settings of a manifest, which a user passes to the environment; reusable for several starts."""

    @abstractmethod
    def preflight(self, spark: SparkSession, context: ManifestContext) -> None:
        """Check the settings before anything starts and raise one clear error; write nothing."""

    @abstractmethod
    def create_writer(self, spark: SparkSession, context: ManifestContext) -> ManifestWriter:
        """Return the writer of records."""


class _NoManifest(ManifestWriter):
    def write(self, record: ManifestRecord) -> CommitAnswer:
        return CommitAnswer(Outcome.ALREADY_COMMITTED, "the job has no manifest")


NO_MANIFEST: ManifestWriter = _NoManifest()
