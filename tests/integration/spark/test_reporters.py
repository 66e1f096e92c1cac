"""Reporters of a job that runs: metrics of functions, Spark's metric system, columns by Catalyst, logs."""

from __future__ import annotations

import json
import logging
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openlineage.client import OpenLineageClient
from pyspark.sql import functions as F

from flinkish_spark import (
    FileFormat,
    FileSink,
    FlatMapFunction,
    JsonFormatter,
    OpenLineageReporter,
    PrometheusReporter,
    SparkMetricsReporter,
)
from flinkish_spark.job.face import Reporter
from flinkish_spark.job.snapshot import JobSnapshot
from flinkish_spark.protocol.user_metrics import UserMetric, UserMetricKind
from flinkish_spark.sources import FileSource, JsonLines
from tests.support.jobs import ORDER, TOTAL, RunningTotal, environment
from tests.support.lineage_events import Events

ORDERS = [(f"user{number % 7}", number % 5) for number in range(200)]


class Parse(FlatMapFunction):
    def open(self, context: Any) -> None:
        group = context.get_metrics_group().add_group("parser")
        self.small, self.amounts = group.counter("small"), group.distribution("amounts")

    def flat_map(self, order: Any) -> Iterator[Any]:
        self.amounts.update(order.amount)
        if order.amount < 2:
            self.small.inc()
        yield order


class Totals(RunningTotal):
    def open(self, context: Any) -> None:
        super().open(context)
        self.users: set[str] = set()
        context.get_metrics_group().gauge("users", lambda: len(self.users))

    def process_element(self, order: Any, ctx: Any) -> Iterator[Any]:
        self.users.add(order.user)
        yield from super().process_element(order, ctx)


class Asking(Reporter):
    """Looks what others show while the job runs."""

    def __init__(self, spark: Any, served: PrometheusReporter) -> None:
        self.spark, self.served = spark, served
        self.snapshot: JobSnapshot | None = None
        self.page, self.in_spark = "", dict[str, float]()

    def report(self, snapshot: JobSnapshot) -> None:
        self.snapshot = snapshot
        url = f"http://127.0.0.1:{self.served.port}/metrics"
        self.page = urllib.request.urlopen(url, timeout=10).read().decode() or self.page
        self.in_spark |= shown_by_spark(self.spark)


def shown_by_spark(spark: Any) -> dict[str, float]:
    """Return our gauges in the registry that Spark's sinks read."""
    system = spark._jvm.org.apache.spark.SparkEnv.get().metricsSystem()
    field = system.getClass().getDeclaredField("registry")
    field.setAccessible(True)
    gauges = field.get(system).getGauges()
    names = [name for name in gauges.keySet() if ".driver.flinkish." in name]
    return {name.partition(".driver.flinkish.")[2]: gauges.get(name).getValue() for name in names}


def test_what_a_job_tells_other_systems(spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    events, lines = Events(), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(JsonFormatter().format(record))  # type: ignore[method-assign]
    logging.getLogger("flinkish_spark").addHandler(handler)
    caplog.set_level(logging.INFO, "flinkish_spark")
    env = environment(spark, tmp_path / "job")
    served = PrometheusReporter(port=0)
    asking = Asking(spark, served)
    for reporter in (
        SparkMetricsReporter(spark),
        served,
        OpenLineageReporter(OpenLineageClient(transport=events)),
    ):
        env.add_reporter(reporter)
    env.add_reporter(asking)
    orders = env.from_collection(ORDERS, ORDER, uid="orders").flat_map(Parse(), output=ORDER, name="parse")
    totals = orders.key_by("user").process(Totals(), output=TOTAL, uid="totals")
    totals.sink_to(FileSink(str(tmp_path / "totals"), FileFormat.JSON), uid="totals-out")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.json").write_text('{"user": "ann", "amount": 1}\n{"user": "bob", "amount": 2}\n')
    plain = env.from_source(FileSource(str(tmp_path / "in"), JsonLines(), ORDER), uid="plain")
    named = plain.transform(lambda frame: frame.select(F.upper("user").alias("name"), F.lit(1).alias("one")))
    named.sink_to(FileSink(str(tmp_path / "named"), FileFormat.JSON), uid="named-out")
    try:
        result = env.execute()
    finally:
        logging.getLogger("flinkish_spark").removeHandler(handler)
    _metrics(JobSnapshot(result.job_id, asking.snapshot.job) if asking.snapshot else None)
    _lineage(events.sent, tmp_path)
    assert asking.in_spark["orders.operator.totals-out.numRecordsOut"] > 0
    assert asking.in_spark["orders.job.numRestarts"] == 0
    assert shown_by_spark(spark) == {}, "the job has ended"
    assert 'numberOfCompletedCheckpoints{job_id="' in asking.page
    _logs(lines)


def _metrics(snapshot: JobSnapshot | None) -> None:
    assert snapshot is not None
    history = snapshot.history
    assert history.totals["orders"]["numRecordsIn"] == history.totals["totals-out"]["numRecordsOut"] == 200
    assert history.totals["totals-out"]["successfulCommittables"] > 0
    of_parse = history.user_metrics["parse"]
    assert of_parse["parser.small"] == UserMetric(UserMetricKind.COUNTER, 80)
    assert of_parse["parser.amounts"] == UserMetric(UserMetricKind.DISTRIBUTION, 200, 400.0, 0.0, 4.0)
    # In the last micro-batches nobody came.
    assert history.user_metrics["totals"]["users"].kind is UserMetricKind.GAUGE


def _lineage(sent: list[dict[str, Any]], tmp_path: Path) -> None:
    kinds = [one["eventType"] for one in sent]
    assert (kinds[0], set(kinds[1:-1]), kinds[-1]) == ("START", {"RUNNING"}, "COMPLETE")
    assert len({one["run"]["runId"] for one in sent}) == 1
    outputs = {one["name"]: one for one in sent[1]["outputs"]}
    named = outputs[f"{tmp_path}/named"]
    assert named["namespace"] == "file"
    assert [(one["name"], one["type"]) for one in named["facets"]["schema"]["fields"]] == [
        ("name", "string"),
        ("one", "int"),
    ]
    assert [one["name"] for one in sent[0]["inputs"]] == [f"{tmp_path}/in"]
    (of_name,) = named["facets"]["columnLineage"]["fields"]["name"]["inputFields"]
    assert (of_name["name"], of_name["field"]) == (f"{tmp_path}/in", "user")
    assert "one" not in named["facets"]["columnLineage"]["fields"], "it comes from nowhere"
    written = [one for event in sent for one in event["outputs"] if one["name"] == f"{tmp_path}/totals"]
    rows = [one["outputFacets"]["outputStatistics"]["rowCount"] for one in written if one.get("outputFacets")]
    assert sum(rows) == 200
    assert "secret" not in json.dumps(sent)


def _logs(lines: list[str]) -> None:
    found = [json.loads(line) for line in lines]
    assert found and all({"time", "level", "logger", "message"} <= one.keys() for one in found)
    known = [one for one in found if "job" in one]
    assert known and {one["job"] for one in known} == {"orders"}
