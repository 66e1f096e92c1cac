"""OpenLineage events of a job out of its directory, each held against the published schemas."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from jsonschema import ValidationError
from openlineage.client import OpenLineageClient
from pyspark.sql import types as T

from flinkish_spark import DeltaSink, JdbcSink, KafkaSink, OpenLineageReporter, Raw
from flinkish_spark.contracts.dataset import Dataset
from flinkish_spark.contracts.source import SourceNode
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job.face import ReportedJob
from flinkish_spark.job.snapshot import JobSnapshot
from flinkish_spark.job.stored_job import StoredJob
from flinkish_spark.planning.sink_rows import PlannedJob, PlannedSink
from flinkish_spark.protocol.job_status import JobEvent, JobStatus
from flinkish_spark.sources import FileSource, HybridSource, JsonLines, KafkaRecordsSource, KafkaSource
from tests.support.lineage_events import Events, check_event
from tests.support.rest_rig import ShownJob, shown_job

FIELDS = T.StructType([T.StructField("user", T.StringType()), T.StructField("total", T.LongType())])


def planned(*sinks: tuple[str, Any]) -> PlannedJob:
    """Return a plan of which nobody can ask Catalyst."""
    frame: Any = None
    return PlannedJob(frame, tuple(PlannedSink(uid, sink, FIELDS, ()) for uid, sink in sinks))


def snapshot_of(job: ShownJob) -> JobSnapshot:
    return JobSnapshot(str(job.uuid), StoredJob.read(StoreSpec(str(job.root))))


@dataclass
class Told:
    """A reporter, what it has sent, and the job it tells of."""

    reporter: OpenLineageReporter
    sent: list[dict[str, Any]]
    plan: PlannedJob | None = None


@pytest.fixture
def told() -> Told:
    events = Events()
    found = Told(OpenLineageReporter(OpenLineageClient(transport=events)), events.sent)
    source = KafkaSource("one:9092,two:9092", ["orders"], value=Raw())
    found.reporter.open(ReportedJob("orders", [SourceNode("orders", source)], lambda: found.plan))
    found.reporter._ended._since_ms = 0
    return found


def test_a_run_begins_goes_on_with_checkpoints_and_ends(tmp_path: Path, told: Told) -> None:
    job = shown_job(tmp_path / "orders")
    told.reporter.report(snapshot_of(job))
    assert not told.sent[:1] or told.sent[0]["eventType"] != "START", "it has not been checked yet"
    told.plan = planned(("table", DeltaSink("s3a://lake/totals")), ("topic", KafkaSink("one:9092", "totals")))
    told.sent.clear()
    told.reporter._ended._told.clear()
    told.reporter.report(snapshot_of(job))
    told.reporter.report(snapshot_of(job))
    job.change(JobStatus.FAILING, JobEvent.FAILURE, 200_000, "password=hunter2 was refused")
    job.change(JobStatus.FAILED, JobEvent.GIVE_UP, 200_100)
    told.reporter.close()
    kinds = [one["eventType"] for one in told.sent]
    # Checkpoint 4 was aborted: nobody sees its data.
    assert kinds == ["START", *["RUNNING"] * 5, "FAIL"]
    newest = told.sent[5]
    assert newest["run"]["facets"]["flinkish_checkpoint"] | {"_producer": 0, "_schemaURL": 0} == {
        "checkpoint": 6,
        "purpose": "PERIODIC",
        "lineage": 0,
        "durationMs": 6_000,
        "rows": 2_000,
        "_producer": 0,
        "_schemaURL": 0,
    }
    checkpoints = newest["run"]["facets"]["checkpoints"]
    assert (checkpoints["completed"], checkpoints["failed"], checkpoints["restored"]) == (5, 1, 1)
    assert newest["job"] | {"facets": 0} == {"namespace": "default", "name": "orders", "facets": 0}
    assert [(one["namespace"], one["name"]) for one in newest["inputs"]] == [("kafka://one:9092", "orders")]
    table, topic = newest["outputs"]
    assert (table["namespace"], table["name"]) == ("s3://lake", "totals")
    assert (topic["namespace"], topic["name"]) == ("kafka://one:9092", "totals")
    assert table["outputFacets"]["outputStatistics"]["rowCount"] == 1_000
    assert [one["type"] for one in table["facets"]["schema"]["fields"]] == ["string", "bigint"]
    failed = told.sent[-1]["run"]["facets"]
    assert failed["errorMessage"]["message"] == "password=*** was refused"
    assert "hunter2" not in str(told.sent) and "secret" not in str(told.sent)
    assert str(tmp_path) not in str(told.sent)


@pytest.mark.parametrize(
    ("status", "event", "kind"),
    [(JobStatus.FINISHED, JobEvent.FINISH, "COMPLETE"), (JobStatus.CANCELED, JobEvent.ALL_ENDED, "ABORT")],
)
def test_how_a_run_ends(status: JobStatus, event: JobEvent, kind: str, tmp_path: Path, told: Told) -> None:
    job = shown_job(tmp_path / "orders", checkpoints=1)
    told.plan = planned()
    told.reporter.report(snapshot_of(job))
    job.change(status, event, 200_000)
    told.reporter.close()
    assert [one["eventType"] for one in told.sent] == ["START", "RUNNING", kind]


def test_a_job_that_was_refused_tells_nothing(told: Told) -> None:
    told.reporter.close()
    assert told.sent == []


def test_the_schemas_refuse_what_does_not_fit(tmp_path: Path, told: Told) -> None:
    told.plan = planned(("table", DeltaSink("/lake/totals")))
    told.reporter.report(snapshot_of(shown_job(tmp_path / "orders", checkpoints=1)))
    event = told.sent[0]
    for damage in (
        {**event, "eventTime": "yesterday"},
        {**event, "run": {"runId": "seven"}},
        {**event, "job": {"name": "orders"}},
        {**event, "outputs": [{**event["outputs"][0], "facets": {"schema": {}}}]},
    ):
        with pytest.raises((ValidationError, KeyError)):
            check_event(damage)


def test_names_of_data_sets() -> None:
    from_path = Dataset.from_path
    assert from_path("/lake/orders") == Dataset("file", "/lake/orders")
    assert from_path("abfss://data@lake.dfs.core.windows.net/orders") == Dataset(
        "abfss://data@lake.dfs.core.windows.net", "orders"
    )
    assert from_path("hdfs://name:8020/lake/orders?x=1") == Dataset("hdfs://name:8020", "lake/orders")
    assert from_path("s3://ann:hunter2@lake/orders") == Dataset("s3://lake", "orders")
    named = {
        "jdbc:postgresql://db/shop": Dataset("postgres://db:5432", "shop.public.totals"),
        "jdbc:mysql://db:3307/shop": Dataset("mysql://db:3307", "shop.totals"),
        "jdbc:sqlite:/data/shop.db": Dataset("sqlite", "/data/shop.db/totals"),
    }
    for url, wanted in named.items():
        assert JdbcSink(url, "totals", user="ann", password="env:PW").datasets() == (wanted,)
    in_schema = JdbcSink("jdbc:postgresql://db/shop", "sales.totals", user="ann", password="env:PW")
    assert in_schema.datasets() == (Dataset("postgres://db:5432", "shop.sales.totals"),)
    files = FileSource("/lake/in", JsonLines(), "user STRING")
    assert files.datasets() == (Dataset("file", "/lake/in"),)
    topics = KafkaRecordsSource("one:9092", ["a", "b"], schema="value STRING")
    assert [one.name for one in topics.datasets()] == ["a", "b"]
    assert HybridSource(FileSource("/old", JsonLines(), "value STRING"), topics).datasets() == (
        Dataset("file", "/old"),
        Dataset("kafka://one:9092", "a"),
        Dataset("kafka://one:9092", "b"),
    )
