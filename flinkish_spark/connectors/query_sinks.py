"""The sinks of a plain Spark query, open in one process for the owner of their job directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flinkish_spark.checkpoint.micro_batch_commits import NAME, Lease, find_or_create_uuid, open_sinks_dir
from flinkish_spark.checkpoint.ownership import Ownership
from flinkish_spark.contracts.sink import Committer, Sink, SinkContext, SinkWriter, StageRequest
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.config import CheckpointConfig
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.ids import BatchId, JobUuid, OwnerEpoch
from flinkish_spark.protocol.lineage import FIRST_LINEAGE
from flinkish_spark.protocol.micro_batches import SINKS
from flinkish_spark.protocol.timeline import Timeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql import types as T

#: Owner of the contexts in which settings are checked, before the query has one.
_NOBODY = JobUuid("0" * 32)


class QuerySinks:
    """Opens the committers and writers of each owner; one of an earlier owner releases its connections."""

    def __init__(
        self,
        sinks: Mapping[str, Sink],
        schemas: Mapping[str, T.StructType],
        checkpoint_location: StoreSpec,
        spark: SparkSession,
    ) -> None:
        self._sinks, self._schemas, self._spark = sinks, schemas, spark
        self._place, self.dir = checkpoint_location, open_sinks_dir(checkpoint_location)
        #: Whose committers are open. A folder that was made again has an owner 1 again, with another
        #: token in its timeline.
        self._owner: tuple[OwnerEpoch, Timeline] | None = None
        self._committers: dict[str, Committer] = {}
        self._writers: dict[str, SinkWriter] = {}
        self._checked_for: JobUuid | None = None

    def preflight(self) -> None:
        """Check the settings of all sinks, once for each id of the query."""
        job = self.dir.find_uuid()
        if job is None or job != self._checked_for:
            nobody = Ownership(self.dir, OwnerEpoch(0))
            for uid, sink in self._sinks.items():
                sink.preflight(self._spark, self._make_context(uid, job or _NOBODY, nobody))
        self._checked_for = job

    def committers(self, ownership: Ownership) -> Mapping[str, Committer]:
        owner = ownership.epoch, ownership.timeline
        if self._owner != owner:
            self.close()
            for uid, sink in self._sinks.items():
                self._committers[uid] = sink.create_committer(self._spark, self._contexts(uid, ownership))
            self._owner = owner
        return self._committers

    def writers(self, owner: OwnerEpoch) -> Mapping[str, SinkWriter]:
        ownership = Ownership(self.dir, owner, self.dir.timeline())
        self.committers(ownership)
        if not self._writers:
            for uid, sink in self._sinks.items():
                self._writers[uid] = sink.create_writer(self._spark, self._contexts(uid, ownership))
        return self._writers

    def make_requests(self, batch: BatchId, lease: Lease) -> dict[str, StageRequest]:
        """Return the request of each sink to stage a micro-batch, without its rows."""
        nothing: Any = None
        return {
            uid: StageRequest(nothing, FIRST_LINEAGE, batch, block, lease.attempt, is_whole_checkpoint=True)
            for block, uid in enumerate(self._sinks, 1)
        }

    def close(self) -> None:
        """Release the connections of the sinks; the next call opens them again."""
        committers, self._committers, self._writers, self._owner = self._committers, {}, {}, None
        for committer in committers.values():
            committer.close()

    def _contexts(self, uid: str, ownership: Ownership) -> SinkContext:
        return self._make_context(uid, find_or_create_uuid(self.dir), ownership)

    def _make_context(self, uid: str, job: JobUuid, owner: Ownership) -> SinkContext:
        place = self._place.to_child(f"{SINKS}/sinks/{uid}")
        whose = (job, owner.epoch, uid, self._schemas[uid], CheckpointConfig(), NAME)
        return SinkContext(*whose, place, SystemClock(), owner.timeline)
