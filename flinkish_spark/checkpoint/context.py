"""The parts that are shared under one ownership of a job directory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flinkish_spark.checkpoint.hooks import MasterHooks
from flinkish_spark.checkpoint.ownership import Ownership
from flinkish_spark.checkpoint.retention import CheckpointPins
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
    """One ownership of a job directory, and what everything that works under it shares, over all starts."""

    #: Whose mark sources and sinks keep.
    job: JobUuid
    #: The directory, who owns it, and Spark's log in it.
    job_dir: JobDir
    ownership: Ownership
    log: SparkLog
    #: What retained checkpoints need of Spark's files.
    pins: CheckpointPins
    #: By sink uid, in the order in which sinks commit.
    committers: Mapping[str, Committer]
    sources: Sequence[SourceNode]
    tracker: CheckpointTracker
    #: Called when checkpoints are drawn and restored.
    hooks: MasterHooks
    #: Numbers of transactions, which no two micro-batches have at a time.
    blocks: BlockPool
    config: CheckpointConfig
    clock: Clock
    threads: Threads
    observer: Observer
    #: Whether what waits for an outside system has to give up, asked in every such wait; and whether the job
    #: is told to end at once.
    must_give_up: Callable[[], bool]
    is_cancelled: Callable[[], bool]
    #: Of everything that has a uid, and of the keyed operators.
    uids: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    #: Told of every checkpoint that all sinks have committed; one that writes nothing if there is none.
    manifest: ManifestWriter = NO_MANIFEST
    #: Notes what threads wait for.
    waiting: Waiting = skip_watch

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
                LOG.warning("closing '%s' failed: %s", name, describe_error(error))
