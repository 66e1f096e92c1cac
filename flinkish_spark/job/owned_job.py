"""What one ownership of a job directory has: made at the takeover, used by every start of the query."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from flinkish_spark.bridge.session import said
from flinkish_spark.checkpoint.hooks import MasterHooks
from flinkish_spark.checkpoint.ownership import Ownership
from flinkish_spark.checkpoint.retention import CheckpointPins
from flinkish_spark.checkpoint.spark_log import SparkLog
from flinkish_spark.checkpoint.statistics import CheckpointTracker
from flinkish_spark.contracts.manifest import ManifestWriter
from flinkish_spark.contracts.sink import Committer
from flinkish_spark.job.engine import RestoredFrom
from flinkish_spark.job.inputs import Inputs
from flinkish_spark.protocol.decisions import Decision
from flinkish_spark.protocol.ids import JobUuid
from flinkish_spark.protocol.watermarks import EventTime

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class OwnedJob:
    """A job that this process owns.

    Parameters
    ----------
    committers
        By sink uid, in the order in which sinks commit.
    manifest
        Of the job; one that writes nothing if it has none.
    """

    job: JobUuid
    ownership: Ownership
    log: SparkLog
    pins: CheckpointPins
    inputs: Inputs
    committers: Mapping[str, Committer]
    tracker: CheckpointTracker
    manifest: ManifestWriter

    def interrupt(self) -> None:
        """Let calls to sinks that do not return fail, where that can be done; called by another thread."""
        for name, committer in self.committers.items():
            try:
                committer.interrupt()
            except Exception as error:
                LOG.warning("interrupting '%s' failed: %s: %s", name, type(error).__name__, error)

    def close(self) -> None:
        """Release connections; what raises is logged, since everything that counts is done by now."""
        closing = {name: committer.close for name, committer in self.committers.items()}
        for name, close in (*closing.items(), ("manifest", self.manifest.close)):
            try:
                close()
            except Exception as error:
                LOG.warning("closing '%s' failed: %s", name, said(error))

    def restore(
        self, newest: Decision | None, savepoint: RestoredFrom | None, hooks: MasterHooks
    ) -> EventTime | None:
        """Tell hooks and statistics what the next start of the query goes on from; return where time stood.

        Parameters
        ----------
        newest
            The last checkpoint; None before the first.
        savepoint
            What a lineage without checkpoints began with; None if it began with nothing.
        """
        self.tracker.settle()
        if newest is not None:
            hooks.restore(newest.checkpoint, newest.hook_states)
            self.tracker.restored(newest.checkpoint)
            return newest.times
        if savepoint is not None:
            hooks.restore(savepoint.checkpoint, savepoint.hooks)
            self.tracker.restored(savepoint.checkpoint, savepoint.path)
            return savepoint.times
        hooks.restore(None, {})
        return None
