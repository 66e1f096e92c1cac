"""Staging a micro-batch in every sink of the plan, over one evaluation of its rows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from flinkish_spark.errors import EnvironmentFault
from flinkish_spark.graph.sink_rows import PlannedSink, select_sink_rows
from flinkish_spark.protocol.ids import BatchId
from flinkish_spark.protocol.records import Committable, SinkAck, StagedBatch
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.engine import StagingContext
from flinkish_spark.runtime.failures import with_place
from flinkish_spark.sinks.base import SinkWriter, StageRequest
from flinkish_spark.spans import span


class StagingMismatchError(EnvironmentFault):
    """Two sinks saw different rows of one micro-batch; it is run again."""

    restartable = True
    ends_when_repeated = True


class SinkStaging:
    """A :class:`~flinkish_spark.runtime.engine.Staging` over Spark DataFrames.

    Parameters
    ----------
    sinks
        Of the plan, in the order in which they stage.
    writers
        By sink uid; they live as long as one start of the query.
    """

    def __init__(
        self, sinks: Sequence[PlannedSink], writers: Mapping[str, SinkWriter], context: StagingContext
    ) -> None:
        self._sinks, self._writers, self._context = tuple(sinks), writers, context
        self._streams = len({stream for sink in sinks for stream in sink.streams})

    def stage(self, frame: DataFrame, batch: BatchId, attempt: int) -> StagedBatch:
        """Stage `frame` in every sink; see :class:`~flinkish_spark.runtime.engine.Staging`."""
        staged = self.stage_only(frame, batch, attempt, frozenset(self._writers))
        self._check_digests(staged)
        return staged

    def stage_only(
        self, frame: DataFrame, batch: BatchId, attempt: int, sinks: frozenset[str]
    ) -> StagedBatch:
        """Stage `frame` in some sinks; see :class:`~flinkish_spark.runtime.engine.Staging`."""
        if not sinks:
            frame.write.format("noop").mode("overwrite").save()
        own = [sink for sink in self._sinks if sink.uid in sinks]
        readings = sum(self._writers[sink.uid].passes * sink.readings for sink in own)
        if readings > 1:
            # Otherwise each would run the operators again, and a task that is retried in between could
            # stage other rows for one sink, or another barrier for the same one.
            frame = frame.persist()
        try:
            return self._stage_sinks(frame, batch, attempt, sinks)
        finally:
            if readings > 1:
                frame.unpersist()

    def _stage_sinks(
        self, frame: DataFrame, batch: BatchId, attempt: int, sinks: frozenset[str]
    ) -> StagedBatch:
        context = self._context
        acks, committables, blocks = [], [], []
        began_at_ms = context.clock.wall_ms()
        checkpoint = context.checkpoint_of(batch)
        counted: dict[object, int] = {}
        for sink in self._sinks:
            if sink.uid not in sinks:
                continue
            block = context.blocks.lease()
            blocks.append(block)
            rows = select_sink_rows(frame, sink, self._streams)
            count = partial(self._count_records, rows)
            if sink.rows in counted:
                # A sink of the same rows has counted them; the digests must agree in the end.
                count = partial(counted.__getitem__, sink.rows)
            request = StageRequest(rows, context.lineage, batch, block, checkpoint, count)
            began_ms = context.clock.monotonic_ms()
            try:
                with span(f"micro-batch {batch} to be staged in sink '{sink.uid}'"):
                    result = self._writers[sink.uid].stage(request)
            except Exception as error:
                with_place(error, f"in sink '{sink.uid}'")
                raise
            took_ms = context.clock.monotonic_ms() - began_ms
            acks.append(SinkAck(sink.uid, result.tasks, took_ms, result.bytes))
            if sink.rows is not None:
                counted[sink.rows] = acks[-1].rows
            committables += [Committable(sink.uid, payload) for payload in result.payloads]
        epoch = context.ownership.epoch
        return StagedBatch(
            context.lineage,
            batch,
            epoch,
            attempt,
            tuple(acks),
            tuple(committables),
            tuple(blocks),
            began_at_ms,
        )

    @staticmethod
    def _count_records(rows: DataFrame) -> int:
        return rows.where(F.col(C.KIND) == int(C.Kind.RECORD)).count()

    def _check_digests(self, staged: StagedBatch) -> None:
        """Compare what the sinks of one stream saw; transforms make a stream of their own."""
        acks = {ack.sink: ack for ack in staged.acks}
        plain = [sink for sink in self._sinks if sink.rows is not None]
        for left, right in itertools.combinations(plain, 2):
            one, other = acks[left.uid], acks[right.uid]
            same = (one.rows, one.digest) == (other.rows, other.digest)
            if left.rows == right.rows and not same:
                raise StagingMismatchError(
                    f"in micro-batch {staged.batch} sink '{left.uid}' saw {one.rows} rows and "
                    f"sink '{right.uid}' {other.rows}, or other ones",
                    why="the micro-batch was evaluated twice with different results",
                    what_to_do="make functions deterministic: no clock, no unseeded random",
                )
