"""Latency markers from row to histogram, without Spark: operators, sinks' tasks, staging, the client."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from flinkish_spark import JobStatus, KeyedProcessFunction, MemorySink
from flinkish_spark.checkpoint.event_time import LatencyTracker, TrackedStaging
from flinkish_spark.connectors import row_count
from flinkish_spark.connectors.row_count import RowCount
from flinkish_spark.contracts.source import NO_JOB
from flinkish_spark.job.client import JobClient
from flinkish_spark.job.engine import JobProgress
from flinkish_spark.planning.optimizer import optimize
from flinkish_spark.planning.planner import Planner
from flinkish_spark.planning.sink_rows import TaggedStream
from flinkish_spark.planning.stream_graph import StreamGraph
from flinkish_spark.planning.times import SourceMarkers, find_reporters
from flinkish_spark.protocol.ids import BatchId, Lineage, OwnerEpoch
from flinkish_spark.protocol.latency import (
    FIRST_OPERATOR_REPORTER,
    SINK_REPORTER,
    Latencies,
    MeasuredAt,
    Measurement,
    place_of,
)
from flinkish_spark.protocol.plan_layout import Chain
from flinkish_spark.protocol.records import SinkAck, StagedBatch, TaskAck, TimeReport
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.blocks import EMITTED, PACKED, BlockPacker, BlockUnpacker
from flinkish_spark.types.rows import arrow_schema
from flinkish_spark.worker import keyed_operator
from tests.support.clocks import ManualClock
from tests.unit.core.test_arguments import SESSION, environment
from tests.unit.worker.test_keyed_operator import INPUT, State, operator

MARKER, BARRIER = int(C.Kind.MARKER), int(C.Kind.BARRIER)
UIDS = ("sums", "orders")


class Nothing(KeyedProcessFunction):
    """Emits nothing."""

    def process_element(self, value: Any, ctx: Any) -> tuple[()]:
        return ()


def control(*rows: tuple[int, int, int, int]) -> pd.DataFrame:
    """Control rows as they come to an operator: kind, checkpoint, channel, sequence."""
    content = [(99, *row, b"") for row in rows]
    return pd.DataFrame(content, columns=PACKED.names)


def emitted(rows: pd.DataFrame, known: Any = None) -> list[tuple[int, ...]]:
    """What the operator of partition 1 passes on."""
    runs = known or operator()
    columns = [C.KIND, C.CHECKPOINT, C.CHANNEL, C.SEQUENCE]
    out = list(runs((99,), [rows], State()))
    return [tuple(row) for frame in out for row in frame[columns].to_numpy().tolist()]


@pytest.fixture
def at_1400(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed_operator, "wall_ms", lambda: 1_400)
    monkeypatch.setattr(row_count, "wall_ms", lambda: 1_400)


@pytest.mark.usefixtures("at_1400")
def test_an_operator_reports_a_marker_and_passes_it_on() -> None:
    assert emitted(control((MARKER, 1_000, place_of(4, 0), 0))) == [
        (C.FIRST_LATENCY + 3, 1_000, place_of(4, 1), 1_400),
        (MARKER, 1_000, place_of(4, 1), 0),
    ]


@pytest.mark.usefixtures("at_1400")
def test_a_marker_changes_nothing_about_barriers_and_reports() -> None:
    others = [(BARRIER, 7, 0, 0), (C.FIRST_REPORT + 1, 61_000, 5, 40), (int(C.Kind.WAKE), 0, 9, 2)]
    before = emitted(control(*others))
    behind = emitted(control((MARKER, 1_000, place_of(4, 1), 0), *others))
    assert [row for row in behind if row[0] not in (MARKER, C.FIRST_LATENCY + 3)] == before
    assert (BARRIER, 7, 1, 7) in behind and len(behind) == len(before) + 2


@pytest.mark.usefixtures("at_1400")
def test_an_operator_passes_on_what_those_in_front_have_measured() -> None:
    other = (C.FIRST_LATENCY + 0, 1_000, place_of(4, 0), 1_100)
    assert emitted(control(other)) == [other]


def test_a_marker_of_each_source_is_reported() -> None:
    both = control((MARKER, 1_000, place_of(4, 1), 0), (MARKER, 1_000, place_of(5, 1), 0))
    found = [row[2] for row in emitted(both) if row[0] == MARKER]
    assert found == [place_of(4, 1), place_of(5, 1)]


def test_markers_travel_beside_blocks() -> None:
    """Through the packer of an operator behind another one, and out of the operator."""
    row = {
        C.ROUTE: pa.array([99], pa.int32()),
        C.KIND: pa.array([MARKER], pa.int32()),
        C.CHECKPOINT: pa.array([1_000], pa.int64()),
    }
    fields = arrow_schema(INPUT)
    rest = {f.name: pa.nulls(1, f.type) for f in fields if f.name not in (C.CHANNEL, C.SEQUENCE)}
    place = {C.CHANNEL: pa.array([place_of(4, 1)], pa.int64()), C.SEQUENCE: pa.array([0], pa.int64())}
    batch = pa.record_batch({**row, **{f.name: {**rest, **place}[f.name] for f in fields}})
    (packed,) = BlockPacker(fields)(iter([batch]))
    assert packed.to_pydict() == {
        C.ROUTE: [99],
        C.KIND: [MARKER],
        C.CHECKPOINT: [1_000],
        C.CHANNEL: [place_of(4, 1)],
        C.SEQUENCE: [0],
        C.BLOCK: [b""],
    }
    (frame,) = operator()((99,), [packed.to_pandas()], State())
    out = pa.RecordBatch.from_pandas(frame, arrow_schema(EMITTED), preserve_index=False)
    rows = list(BlockUnpacker(operator().spec.shape.outputs, (False,))(iter([out])))
    kinds = [kind for one in rows for kind in one.column(C.KIND).to_pylist()]
    assert kinds == [C.FIRST_LATENCY + 3, MARKER]


@pytest.mark.usefixtures("at_1400")
def test_a_sinks_task_says_when_a_marker_came() -> None:
    rows = pa.record_batch(
        {
            C.KIND: pa.array([0, C.FIRST_LATENCY + 3, MARKER, 17], pa.int32()),
            C.CHECKPOINT: pa.array([0, 1_000, 1_000, 61_000], pa.int64()),
            C.CHANNEL: pa.array([0, place_of(4, 1), place_of(4, 1), 5], pa.int64()),
            C.HASH: pa.array([10, 1_200, 0, 40], pa.int64()),
        }
    )
    count = RowCount(0)
    assert count.admit(rows).num_rows == 1
    assert count.finish().reports == (
        TimeReport(FIRST_OPERATOR_REPORTER + 3, place_of(4, 1), 1_000, 1_200),
        TimeReport(SINK_REPORTER, place_of(4, 1), 1_000, 1_400),
        TimeReport(1, 5, 61_000, 40),
    )
    assert (count.finish().rows, count.finish().digest) == (1, 10)


def test_the_sink_s_reporter_is_one_bit() -> None:
    assert SINK_REPORTER.bit_count() == 1


# -- in a plan ----------------------------------------------------------------------------------------


def test_markers_carry_the_numbers_of_the_sources_that_meet() -> None:
    env = environment()
    streams = [env.from_collection([("ann", 3)], "user STRING, n LONG", uid=uid) for uid in ("one", "two")]
    for stream in streams:
        keyed = stream.key_by("user").process(Nothing(), output="user STRING", uid=f"of-{stream._node.uid}")
        keyed.sink_to(MemorySink("plan"), uid=f"out-{stream._node.uid}")
    marked, unmarked = (planner_of(env.graph, marks_latency=marks) for marks in (True, False))
    assert [one.uid for one in find_reporters(env.graph)] == ["of-one", "of-two", "one", "two"]
    assert marked._make_markers(["two", "one"]) == SourceMarkers(SESSION, (3, 2))
    assert marked._make_markers([]) is None, "behind other operators they come with the rows"
    assert unmarked._make_markers(["two", "one"]) is None
    stream = TaggedStream(object(), object(), frozenset({0}))  # type: ignore[arg-type]
    assert unmarked._add_markers(stream, Chain(("two",), (), ("out",))) is stream


def planner_of(graph: StreamGraph, *, marks_latency: bool) -> Planner:
    planner = Planner(SESSION, NO_JOB, 4, marks_latency=marks_latency)
    planner._start(optimize(graph))
    return planner


# -- on the driver -------------------------------------------------------------------------------------


def measurement(marked_ms: int, latency_ms: int = 300) -> Measurement:
    return Measurement(MeasuredAt("sums", "orders", 0), marked_ms, marked_ms + latency_ms)


@pytest.mark.parametrize(
    ("marked", "counted"),
    [
        pytest.param([1_000, 1_500, 1_999], 1, id="too early"),
        pytest.param([1_000, 2_000, 3_000], 3, id="due"),
        pytest.param([1_000, 2_500, 3_400, 3_500], 3, id="behind the last that counted, not on a grid"),
        pytest.param([100_000, 1_000, 1_500], 2, id="the clock was set back"),
    ],
)
def test_markers_count_at_the_interval(marked: list[int], counted: int) -> None:
    tracker = LatencyTracker(1_000)
    for marked_ms in marked:
        if tracker.is_due(marked_ms):
            tracker.note(marked_ms, [measurement(marked_ms)])
    assert tracker.latencies.of("sums").count == counted


class Inner:
    """Stages what it is told to."""

    def __init__(self, *reports: TimeReport) -> None:
        task = TaskAck(0, 5, 6, reports=reports)
        acks = (SinkAck("out", (task,), 3),)
        self.staged = StagedBatch(Lineage(0), BatchId(7), OwnerEpoch(1), 1, acks, ())
        self.asked: list[Any] = []

    def stage(self, frame: Any, batch: BatchId, attempt: int) -> StagedBatch:
        self.asked.append((frame, batch, attempt))
        return self.staged

    def stage_only(self, frame: Any, batch: BatchId, attempt: int, sinks: frozenset[str]) -> StagedBatch:
        self.asked.append((frame, batch, attempt, sinks))
        return self.staged


def report(marked_ms: int) -> TimeReport:
    return TimeReport(SINK_REPORTER, place_of(1, 2), marked_ms, marked_ms + 300)


ABOUT_TIME = TimeReport(1, 5, 61_000, 40)


def test_nothing_of_markers_gets_into_the_staged_file() -> None:
    inner, tracker = Inner(report(5_000), ABOUT_TIME), LatencyTracker(1)
    staging = TrackedStaging(inner, tracker, UIDS, ManualClock(5_000))
    without = Inner(ABOUT_TIME).staged
    assert staging.stage("frame", BatchId(7), 4) == without
    assert tracker.latencies[MeasuredAt("out", "orders", 2)].max_ms == 300
    assert staging.stage_only("frame", BatchId(7), 5, frozenset({"out"})) == without
    assert tracker.latencies.of("out").count == 1, "a replay counts nowhere"
    assert inner.asked == [("frame", BatchId(7), 4), ("frame", BatchId(7), 5, frozenset({"out"}))]


def test_a_micro_batch_that_was_planned_before_the_start_does_not_count() -> None:
    """It is the one that a crash cut off: its latency is how long the job was down."""
    tracker = LatencyTracker(1)
    staging = TrackedStaging(Inner(report(4_999)), tracker, UIDS, ManualClock(5_000))
    staged = staging.stage(None, BatchId(7), 1)
    assert not tracker.latencies and staged == Inner().staged


def test_a_micro_batch_between_two_that_count_leaves_nothing_either() -> None:
    tracker = LatencyTracker(1_000)
    for marked_ms in (5_000, 5_999, 6_000):
        staging = TrackedStaging(Inner(report(marked_ms), ABOUT_TIME), tracker, UIDS, ManualClock(5_000))
        assert staging.stage(None, BatchId(7), 1) == Inner(ABOUT_TIME).staged
    assert tracker.latencies.of("out").count == 2


def test_a_micro_batch_without_markers_is_as_it_was() -> None:
    tracker = LatencyTracker(1)
    plain = Inner(ABOUT_TIME)
    assert TrackedStaging(plain, tracker, UIDS, ManualClock()).stage(None, BatchId(7), 1) == plain.staged
    assert not tracker.latencies


class Idle:
    """A supervisor whose job is over at once."""

    job_id = "idle"
    states = SimpleNamespace(status=JobStatus.FINISHED)
    progress = JobProgress()

    def run(self, on_left: Any) -> None:
        return None


def test_a_client_shows_what_was_measured() -> None:
    tracker = LatencyTracker(1)
    client, without = JobClient(Idle(), tracker), JobClient(Idle())  # type: ignore[arg-type]
    tracker.note(1_000, [measurement(1_000)])
    assert client.latencies.of("sums").quantile_ms(0.5) == 300
    assert without.latencies == Latencies()
