"""The threads of reporters, and logs for machines."""

from __future__ import annotations

import json
import logging
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import JsonFormatter, SparkMetricsReporter
from flinkish_spark.core.clock import SystemThreads
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.log_context import add_log_facts, log_facts
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job.face import ReportedJob, Reporter
from flinkish_spark.job.snapshot import JobSnapshot
from flinkish_spark.protocol.ids import CheckpointId, OwnerEpoch
from flinkish_spark.reporters import reporter, spark_metrics
from flinkish_spark.reporters.reporter import EndedCheckpoints, ReporterGroup
from tests.support.rest_rig import shown_job

JOB = ReportedJob("orders")


class Noting(Reporter):
    """Notes what it is asked for; may raise in it."""

    def __init__(self, fails_in: str = "") -> None:
        self.fails_in, self.calls = fails_in, list[str]()
        self.told = threading.Event()

    def open(self, job: ReportedJob) -> None:
        self._call("open")

    def report(self, snapshot: JobSnapshot) -> None:
        self._call(f"report {snapshot.job.name}")
        self.told.set()

    def close(self) -> None:
        self._call("close")

    def _call(self, what: str) -> None:
        self.calls.append(what)
        if self.fails_in and what.startswith(self.fails_in):
            self.told.set()
            raise ConfigError(f"{what} is refused")


@pytest.fixture
def place(tmp_path: Path) -> StoreSpec:
    return StoreSpec(str(shown_job(tmp_path / "orders", checkpoints=2).root))


def test_a_reporter_is_told_of_changes_and_of_the_end(place: StoreSpec) -> None:
    one = Noting()
    reporting = ReporterGroup(place, [one])
    reporting.begin(JOB)
    reporting.on_taken_over(OwnerEpoch(1))
    assert one.told.wait(20)
    one.told.clear()
    reporting.on_checkpoint_complete(CheckpointId(2))
    assert one.told.wait(20)
    reporting.on_job_executed(None, None)
    reporting.end()
    assert one.calls[0] == "open" and one.calls[-2:] == ["report orders", "close"]


def test_what_a_reporter_raises_changes_nothing(place: StoreSpec, caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Noting("report"), Noting()
    reporting = ReporterGroup(place, [bad, good])
    reporting.begin(JOB)
    reporting.on_checkpoint_aborted(CheckpointId(1), None)
    assert bad.told.wait(20) and good.told.wait(20)
    reporting.end()
    assert bad.calls[-1] == good.calls[-1] == "close"
    assert "Noting could not be told: report orders is refused" in caplog.text


def test_a_reporter_that_refuses_to_begin_refuses_the_job(place: StoreSpec) -> None:
    good, bad, never = Noting(), Noting("open"), Noting()
    reporting = ReporterGroup(place, [good, bad, never])
    with pytest.raises(ConfigError, match="open is refused"):
        reporting.begin(JOB)
    reporting.end()
    assert (good.calls[-1], bad.calls, never.calls) == ("close", ["open"], [])


def test_a_reporter_that_hangs_holds_up_nobody(
    place: StoreSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reporter, "_LAST_REPORT_MS", 300)
    go_on = threading.Event()

    class Hanging(Noting):
        def report(self, snapshot: JobSnapshot) -> None:
            super().report(snapshot)
            go_on.wait(60)

    hanging, good = Hanging(), Noting()
    reporting = ReporterGroup(place, [hanging, good])
    reporting.begin(JOB)
    reporting.on_taken_over(OwnerEpoch(1))
    assert hanging.told.wait(20) and good.told.wait(20)
    reporting.end()
    assert "Hanging does not end" in caplog.text and good.calls[-1] == "close"
    go_on.set()


def test_a_directory_that_holds_no_job_yet_is_waited_for(tmp_path: Path) -> None:
    one = Noting()
    reporting = ReporterGroup(StoreSpec(str(tmp_path / "nothing")), [one])
    reporting.begin(JOB)
    reporting.on_taken_over(OwnerEpoch(1))
    reporting.end()
    assert one.calls == ["open", "close"]


def test_a_checkpoint_is_told_of_once(tmp_path: Path) -> None:
    job = shown_job(tmp_path / "orders", checkpoints=2)
    ended = EndedCheckpoints()
    assert ended.new_in(job.history) == [], "another process began them"
    ended = EndedCheckpoints()
    ended._since_ms = 0
    assert [int(one.checkpoint) for one in ended.new_in(job.history)] == [1, 2]
    job.completed(9)
    assert [int(one.checkpoint) for one in ended.new_in(job.history)] == [9]


def test_spark_without_the_jar_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_metrics, "has_shim", lambda spark: False)
    session: Any = object()
    with pytest.raises(ConfigError, match="configure_spark_with_jars"):
        SparkMetricsReporter(session).open(JOB)


# -- logs -------------------------------------------------------------------------------------------


def line(text: str, *args: Any, exc_info: Any = None) -> dict[str, Any]:
    record = logging.LogRecord("flinkish_spark.x", logging.WARNING, "x.py", 1, text, args, exc_info)
    found: dict[str, Any] = json.loads(JsonFormatter().format(record))
    return found


def test_a_line_says_what_its_thread_works_for() -> None:
    seen: list[dict[str, Any]] = []
    with add_log_facts(job="orders", lineage=2):
        thread = SystemThreads().start("flinkish-x", lambda: seen.append(line("in a thread")))
        thread.join()
        with add_log_facts(checkpoint=7, micro_batch=12):
            seen.append(line("checkpoint %s\nis late", 7))
    assert [(one["job"], one["lineage"], one.get("checkpoint"), one.get("micro_batch")) for one in seen] == [
        ("orders", 2, None, None),
        ("orders", 2, 7, 12),
    ]
    assert seen[1]["message"] == "checkpoint 7\nis late" and seen[1]["level"] == "WARNING"
    assert seen[1]["time"].endswith("Z") and "job" not in line("outside") and not log_facts()


def test_secrets_are_hidden_in_lines() -> None:
    try:
        raise ValueError("jdbc:postgresql://ann:hunter2@db/orders")
    except ValueError:
        found = line("sasl.password=%s", "hunter2", exc_info=sys.exc_info())
    assert "hunter2" not in json.dumps(found)
    assert "ValueError" in found["exception"] and found["message"] == "sasl.password=***"
