"""The objects that all parts of a job share under one ownership of its directory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flinkish_spark.checkpoint.hooks import MasterHooks
from flinkish_spark.checkpoint.ownership import Ownership
from flinkish_spark.checkpoint.pins import CheckpointPins
from flinkish_spark.checkpoint.spark_log import SparkLog
from flinkish_spark.checkpoint.statistics import CheckpointTracker
from flinkish_spark.checkpoint.transactional_ids import BlockPool
from flinkish_spark.contracts.manifest import NO_MANIFEST, ManifestWriter
from flinkish_spark.contracts.sink import Committer
from flinkish_spark.contracts.source import SourceNode
from flinkish_spark.core.clock import Clock, Threads
from flinkish_spark.core.config import CheckpointConfig
from flinkish_spark.core.foreign_errors import describe_error
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.steps import Observer
from flinkish_spark.core.watchdog import Waiting, skip_watch
from flinkish_spark.protocol.ids import JobUuid

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobContext:
    """The objects shared under one ownership of a job directory, over all starts of the query."""

    #: The id that sources and sinks keep in their marks.
    job: JobUuid
    #: The directory, who owns it, and Spark's log in it.
    job_dir: JobDir
    ownership: Ownership
    log: SparkLog
    #: Spark's files that retained checkpoints need.
    pins: CheckpointPins
    #: By sink uid, in the order in which sinks commit.
    committers: Mapping[str, Committer]
    sources: Sequence[SourceNode]
    tracker: CheckpointTracker
    #: Called when checkpoints are drawn and restored.
    hooks: MasterHooks
    #: Leases the numbers in transactional ids.
    blocks: BlockPool
    config: CheckpointConfig
    clock: Clock
    threads: Threads
    observer: Observer
    #: Whether a wait for an outside system has to give up, polled in each of them; and whether the job was
    #: cancelled.
    must_give_up: Callable[[], bool]
    is_cancelled: Callable[[], bool]
    #: Uids of all sources, operators and sinks; and of the keyed operators.
    uids: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    #: Writes each checkpoint that all sinks have committed; NO_MANIFEST writes nothing.
    manifest: ManifestWriter = NO_MANIFEST
    #: Tells the watchdog what threads wait for.
    waiting: Waiting = skip_watch

    def interrupt(self) -> None:
        """Make hanging calls to sinks fail, where a sink can do that; called by another thread."""
        for name, committer in self.committers.items():
            try:
                committer.interrupt()
            except Exception as error:
                LOG.warning("interrupting '%s' failed: %s: %s", name, type(error).__name__, error)

    def close(self) -> None:
        """Release connections; errors are only logged, since all commits are done by now."""
        closing = {name: committer.close for name, committer in self.committers.items()}
        for name, close in (*closing.items(), ("manifest", self.manifest.close)):
            try:
                close()
            except Exception as error:
                LOG.warning("closing '%s' failed: %s", name, describe_error(error))
