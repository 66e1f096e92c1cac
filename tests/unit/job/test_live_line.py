"""The line that a terminal shows while a job runs: what it says, where it is shown, and when it goes."""

from __future__ import annotations

import io
import json
import os
import pty
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, TextIO

import pytest

from flinkish_spark.contracts.source import Extent, SourceNode
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.terminal import can_show
from flinkish_spark.core.watchdog import Wait
from flinkish_spark.job.engine import JobProgress
from flinkish_spark.job.live_line import LiveLine
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.event_time import Valve
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose, OwnerEpoch
from flinkish_spark.protocol.job_status import JobStatus
from flinkish_spark.protocol.statistics import CheckpointDurations, CheckpointStatistics, StatisticsHistory
from flinkish_spark.protocol.watermarks import EventTime
from flinkish_spark.sources import CollectionSource, Counting, DataGeneratorSource, KafkaSource, SplitSource


class Clock:
    now_ms = 0

    def monotonic_ms(self) -> int:
        return self.now_ms


def logged(*sources: object) -> str:
    return "\n".join(['v1\n{"batchTimestampMs":0}', *map(json.dumps, sources)])


def of_splits(uid: str, **offsets: int) -> dict[str, Any]:
    return {"flinkish:source": uid, "flinkish:splits": [list(one) for one in offsets.items()]}


class Shown:
    """A line about a job that a test moves on."""

    def __init__(self, *sources: Any, out: TextIO | None = None) -> None:
        self.progress, self.clock = JobProgress(is_running=True, batches=1), Clock()
        self.client: Any = SimpleNamespace(
            progress=self.progress, status=JobStatus.RUNNING, statistics=StatisticsHistory()
        )
        nodes = [SourceNode(f"in{number}", one.bind(f"in{number}")) for number, one in enumerate(sources)]
        self.held = 0
        clock: Any = self.clock
        self.line = LiveLine("orders", self.client, nodes, out or io.StringIO(), self._hold, clock)

    def _hold(self) -> None:
        self.held += 1

    def parts(self, width: int = 200) -> list[str]:
        return self.line.text(width).split(" | ")


def generator(records: int, splits: int = 1) -> DataGeneratorSource:
    return DataGeneratorSource({"id": Counting()}, records=records, splits=splits)


def test_up_to_the_first_micro_batch_it_says_what_is_waited_for() -> None:
    shown = Shown(generator(1_000))
    shown.progress.batches, shown.progress.is_running = 0, False
    shown.client.status = JobStatus.CREATED
    shown.progress.start_waits_for = "Spark to plan the query"
    assert shown.parts()[:2] == ["orders CREATED", "waits for Spark to plan the query"]
    shown.progress.is_running, shown.client.status = True, JobStatus.RUNNING
    assert shown.parts()[:2] == ["orders RUNNING", "waits for the first micro-batch"]
    shown.progress.batches = 1
    assert shown.parts()[:2] == ["orders RUNNING", "0%"]


def test_a_job_that_has_ended_has_no_time_left() -> None:
    shown = Shown(generator(1_000))
    shown.parts()
    shown.clock.now_ms = 10_000
    shown.progress.offsets_text = logged(of_splits("in0", **{"0": 250}))
    assert shown.parts()[1] == "25%, 30.0 s left"
    shown.client.status = JobStatus.SUSPENDED
    assert shown.parts()[1] == "25%"


def test_it_says_what_went_in_and_out_up_to_the_newest_checkpoint() -> None:
    shown = Shown(generator(1_000, splits=2))
    assert shown.parts() == ["orders RUNNING", "0%", "in 0", "out 0", "restarts 0"]
    shown.clock.now_ms = 10_000
    shown.progress.offsets_text = logged(of_splits("in0", **{"0": 150, "1": 100}))
    shown.progress.rows_by_sink = {"a": 240, "b": 1_000}
    shown.progress.restarts, shown.progress.watermark_lag_ms = 2, 3_400
    begun = CheckpointStatistics.begin(CheckpointId(7), CheckpointPurpose.PERIODIC, 0)
    done = begun.complete(CheckpointDurations(end_to_end_ms=1_200), rows=1_240)
    shown.client.statistics = StatisticsHistory().add_ended(done)
    # 250 of 1,000 in 10 s: 30 s for the rest, of which 2 have passed since. A restart matters more.
    assert shown.parts()[1:3] == ["restarts 2", "25%, 30.0 s left"]
    shown.clock.now_ms = 12_000
    assert shown.parts() == [
        *("orders RUNNING", "restarts 2", "25%, 28.0 s left", "in 250", "out 1,240"),
        *("checkpoint 7 in 1.2 s", "lag 3.4 s"),
    ]
    shown.progress.offsets_text = logged(of_splits("in0", **{"0": 500, "1": 500}))
    assert shown.parts()[2:4] == ["100%", "in 1,000"]


def test_a_narrow_terminal_has_what_comes_first() -> None:
    shown = Shown(generator(1_000))
    assert shown.parts(25) == ["orders RUNNING", "0%"]
    assert shown.line.text(5) == "order" and shown.line.text(0) == ""


def test_a_job_that_goes_on_counts_from_there_and_its_share_is_of_the_whole() -> None:
    shown = Shown(generator(1_000))
    shown.progress.is_running = False
    assert shown.parts() == ["orders RUNNING", "out 0", "restarts 0"]
    shown.progress.is_running, shown.progress.offsets_text = True, logged(of_splits("in0", **{"0": 600}))
    assert shown.parts()[1:3] == ["60%", "in 0"]
    shown.clock.now_ms, shown.progress.offsets_text = 1_000, logged(of_splits("in0", **{"0": 700}))
    assert shown.parts()[1:3] == ["70%, 3.0 s left", "in 100"]


def test_an_end_is_told_only_if_every_source_has_one() -> None:
    endless = DataGeneratorSource({"id": Counting()})
    shown = Shown(CollectionSource([(1,), (2,)], "n LONG"), endless)
    assert shown.parts() == ["orders RUNNING", "in 0", "out 0", "restarts 0"]
    shown.progress.offsets_text = logged(of_splits("in0", all=2), of_splits("in1", **{"0": 5}))
    assert shown.parts()[1] == "in 7"


def test_what_is_damaged_is_left_out() -> None:
    shown = Shown(generator(10))
    assert shown.parts()[1] == "0%"
    shown.progress.offsets_text = "of another version"
    assert shown.parts()[1] == "0%"


class Named(SplitSource):
    """Offsets that are no numbers, and a beginning that is asked for."""

    schema = "n LONG"

    def splits(self) -> list[str]:
        return ["all"]

    def first(self, split: str) -> str:
        raise AssertionError("a system would be asked")

    def latest(self, split: str, start: Any, limit: int | None) -> str:
        return "end"

    def read(self, split: str, start: Any, end: Any) -> Iterator[tuple[int]]:
        yield (1,)


def test_sources_say_what_they_know_without_asking_anybody() -> None:
    named = Named().bind("in")
    assert named.extent(None) is None
    assert named.extent(LoggedOffsets.parse(logged(of_splits("in", all="end")))) is None  # type: ignore[arg-type]
    topics = KafkaSource("nowhere:1", ["orders"]).bind("in")
    assert topics.extent(None) is None
    # Scanned twice: what both have read.
    position = LoggedOffsets.parse(logged({"orders": {"0": 9, "1": 4}}, {"orders": {"0": 7, "1": 4}}))
    assert topics.extent(position) == Extent(11)


def test_the_lag_is_that_of_the_newest_checkpoint() -> None:
    def decision(times: EventTime | None) -> Decision:
        return Decision(CheckpointId(1), Verdict.COMMIT, OwnerEpoch(1), 10_000, offsets_text="o", times=times)

    progress = JobProgress()
    progress.record_position(decision(EventTime(valve=Valve({}, 7_000))))
    assert (progress.watermark_lag_ms, progress.offsets_text) == (3_000, "o")
    progress.record_position(decision(EventTime()))
    assert progress.watermark_lag_ms is None
    progress.record_position(decision(None))
    assert progress.watermark_lag_ms is None


# -- drawing ----------------------------------------------------------------------------------------
def test_it_is_overwritten_and_its_last_state_stays() -> None:
    out = io.StringIO()
    shown = Shown(generator(10), out=out)
    with shown.line:
        deadline = time.monotonic() + 20
        while shown.held < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        shown.client.status = JobStatus.FINISHED
    drawn = out.getvalue().split("\r\x1b[K")
    assert drawn[1] == "orders RUNNING | 0% | in 0 | out 0 | restarts 0\r"
    assert drawn[-1] == "orders FINISHED | 0% | in 0 | out 0 | restarts 0\n"


def test_behind_an_error_nothing_of_it_is_left() -> None:
    out = io.StringIO()
    with pytest.raises(KeyError), Shown(generator(10), out=out).line:
        raise KeyError("of the job")
    assert out.getvalue().endswith("\r\x1b[K")


def test_a_terminal_that_is_gone_does_not_matter() -> None:
    out = io.StringIO()
    with Shown(generator(10), out=out).line:
        out.close()


def test_it_is_shown_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    file, other = pty.openpty()
    with os.fdopen(other, "w") as terminal:
        assert can_show(terminal) and not can_show(io.StringIO())
        with monkeypatch.context() as notebook:
            notebook.setitem(sys.modules, "ipykernel", SimpleNamespace())
            assert not can_show(terminal)
        monkeypatch.setenv("TERM", "dumb")
        assert not can_show(terminal)
    assert not can_show(terminal)
    os.close(file)


def test_what_holds_the_job_back_is_in_the_line_and_an_error_comes_first() -> None:
    shown = Shown(generator(1_000))
    shown.progress.waits = (
        Wait("checkpoint 1", "its commit", 9_000),
        Wait("the thread 'complete-1'", "sink 'db' to commit", 8_000, "no route"),
    )
    assert shown.parts()[:3] == [
        *("orders RUNNING", "the thread 'complete-1' has waited 8 s for sink 'db' to commit: no route", "0%")
    ]
