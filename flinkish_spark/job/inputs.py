"""The inputs of a job: lost ranges, unreadable records, dropped records."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql.streaming.query import StreamingQuery

from flinkish_spark.checkpoint.commit import FIRST_PAUSE_MS, LONGEST_PAUSE_MS
from flinkish_spark.checkpoint.failures import is_outage
from flinkish_spark.checkpoint.spark_log import SparkLog
from flinkish_spark.checkpoint.statistics import PendingRecords
from flinkish_spark.connectors.bad_records import DROPPED_METRIC
from flinkish_spark.contracts.source import SourceNode
from flinkish_spark.core.clock import Clock, backoff_ms
from flinkish_spark.core.errors import FlinkishError, InputLostError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.watchdog import note_failure
from flinkish_spark.protocol.ids import BatchId
from flinkish_spark.protocol.micro_batches import COMMITS, OFFSETS

LOG = logging.getLogger(__name__)
#: Number of micro-batches that a rewind may run again; counts of older ones are final.
_MOST_OPEN_BATCHES = 200


@dataclass(frozen=True)
class Inputs:
    """The sources of a job, and their positions in Spark's log; used while no Spark query runs."""

    sources: Sequence[SourceNode]
    job_dir: JobDir
    log: SparkLog

    def position(self) -> LoggedOffsets | None:
        committed = self.log.batches(COMMITS)
        text = self.log.read(OFFSETS, max(committed)) if committed else None
        return None if text is None else LoggedOffsets.parse(text)

    def read_by(self, batch: BatchId) -> LoggedOffsets:
        text = self.log.read(OFFSETS, batch)
        assert text is not None
        return LoggedOffsets.parse(text)

    def check(self) -> bool:
        position = self.position()
        return self.ask(lambda node: node.source.check_input(self.job_dir, node.uid, position))

    def check_identity(self) -> bool:
        return self.ask(lambda node: node.source.check_identity(self.job_dir, node.uid))

    def why_lost(self, position: LoggedOffsets) -> str:
        """Return why the input from `position` on cannot be read again; empty if it can."""
        try:
            for node in self.sources:
                node.source.check_input(self.job_dir, node.uid, position)
        except InputLostError as lost:
            return str(lost)
        return ""

    def lower(self, position: LoggedOffsets) -> None:
        for node in self.sources:
            node.source.lower_offsets(position)

    def ask(self, question: Callable[[SourceNode], None]) -> bool:
        """Ask each source; return whether all have answered."""
        could_ask = True
        for node in self.sources:
            try:
                question(node)
            except FlinkishError as error:
                if not is_outage(error):
                    raise
                LOG.warning("the input of '%s' cannot be checked now: %s", node.uid, error)
                note_failure(f"source '{node.uid}': {error}")
                could_ask = False
        return could_ask


class DroppedRecords:
    """Counts the records dropped by the policy DROP, from Spark's progress reports."""

    def __init__(self) -> None:
        self._final = 0
        self._open: dict[int, int] = {}
        self._newest = -1

    @property
    def total(self) -> int:
        return self._final + sum(self._open.values())

    def read(self, query: StreamingQuery) -> None:
        """Add the micro-batches reported since the last call; a repeated one counts once."""
        last = query.lastProgress
        if last is None:
            return
        # A rewind sets the ids back.
        missed = last.batchId not in (self._newest, self._newest + 1)
        for progress in query.recentProgress if missed else [last]:
            metrics = progress.observedMetrics or {}
            self._open[progress.batchId] = sum(
                row["dropped"] for name, row in metrics.items() if name.startswith(DROPPED_METRIC)
            )
        self._newest = last.batchId
        while len(self._open) > _MOST_OPEN_BATCHES:
            self._final += self._open.pop(min(self._open))


def pending_records(sources: Sequence[SourceNode], query: StreamingQuery) -> PendingRecords:
    """Return the Kafka records after the newest micro-batch, as of the last progress report."""
    last = query.lastProgress
    if last is None:
        return PendingRecords()
    found, lags = dict[str, int](), list[int]()
    read, there = (
        LoggedOffsets(tuple(_offsets(getattr(one, name)) for one in last.sources))
        for name in ("endOffset", "latestOffset")
    )
    for node in sources:
        end, newest = node.source.extent(read), node.source.extent(there)
        if end is None or newest is None:
            continue
        if end.all_records is None:
            found[node.uid] = max(0, newest.records - end.records)
        # Where the records of a new partition begin nobody has asked.
        lags += [max(0, at - end.partitions.get(place, at)) for place, at in newest.partitions.items()]
    return PendingRecords(found, max(lags, default=None))


def _offsets(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return None


def ask_until_answered(ask: Callable[[], bool], is_stopping: Callable[[], bool], clock: Clock) -> bool:
    """Ask with growing pauses until every source answers: an outage must not use up a restart."""
    pauses_ms = backoff_ms(FIRST_PAUSE_MS, LONGEST_PAUSE_MS)
    while not ask():
        # Sleep in short steps, so that a stop does not wait.
        for _ in range(0, next(pauses_ms), FIRST_PAUSE_MS):
            if is_stopping():
                return False
            clock.sleep_ms(FIRST_PAUSE_MS)
    return True
