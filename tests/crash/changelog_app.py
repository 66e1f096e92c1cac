"""A job that keeps copies of a table by its changes, in every form in which they come; it may kill itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from flinkish_spark import (
    AggregateColumn,
    CanalJson,
    DataStream,
    DebeziumAvro,
    DebeziumJson,
    DeltaSink,
    Fold,
    Json,
    KafkaSink,
    KafkaSource,
    MaxwellJson,
    OnTombstone,
    RecordHeaders,
    SchemaRegistry,
    StreamExecutionEnvironment,
    Upsert,
)
from flinkish_spark.core.steps import SilentObserver
from flinkish_spark.testing.crash_points import KillAt, KillPoint, kill_process_group
from tests.support.jobs import environment, read_committed, run_until

ACCOUNT = "id INT, city STRING, balance DECIMAL(12,2)"
KEY = Json("id INT")
#: In which the changes come.
FORMS = ("debezium", "debezium-avro", "canal", "maxwell", "compacted")


class Copy(NamedTuple):
    """The changes of a table in one form, and the topic that is to have its rows by their keys.

    Parameters
    ----------
    wanted
        The job stops when the topic has so many records; 0: it does not stop.
    """

    form: str
    changes: str
    rows: str
    wanted: int = 0


def read_as(form: str, registry: str) -> dict[str, Any]:
    """Return what a source is told."""
    match form:
        case "debezium":
            return {"value": DebeziumJson(ACCOUNT)}
        case "debezium-avro":
            return {"value": DebeziumAvro(registry=SchemaRegistry(registry))}
        case "canal":
            return {"value": CanalJson(ACCOUNT, table="accounts")}
        case "maxwell":
            return {"value": MaxwellJson(ACCOUNT, table="accounts")}
    return {"value": Json(ACCOUNT), "key": KEY, "tombstones": OnTombstone.DELETE}


def keep_totals(accounts: DataStream, table: Path) -> None:
    """Keep a table of the cities: how many accounts each has, what they come to, and the greatest."""
    totals = accounts.key_by("city").fold(
        AggregateColumn("n", Fold.COUNT),
        AggregateColumn("total", Fold.SUM, "balance"),
        AggregateColumn("greatest", Fold.MAX, "balance"),
        row_kind="_row_kind",
        uid="cities",
    )
    by_city = Upsert(keys=("city",), row_kind="_row_kind")
    totals.sink_to(DeltaSink(str(table), mode=by_city), uid="totals")


def job(
    spark: Any, root: Path, servers: str, registry: str, engine: str, copies: list[Copy]
) -> StreamExecutionEnvironment:
    """Keep a Delta table and a compacted topic for each form; of one form totals by city, too."""
    env = environment(spark, root / "job", job="copies")
    for form, changes, rows, _ in copies:
        read = {"reader": engine, "max_offsets_per_trigger": 30, **read_as(form, registry)}
        stream = env.from_source(KafkaSource(servers, [changes], **read), uid=form)
        by_id = Upsert(keys=("id",), row_kind="_row_kind")
        stream.sink_to(DeltaSink(str(root / form), mode=by_id), uid=f"{form}-table")
        topic = KafkaSink(
            servers,
            rows,
            key=KEY,
            row_kind="_row_kind",
            # Which micro-batch a record is of.
            record_headers=RecordHeaders.BATCH,
        )
        stream.sink_to(topic, uid=f"{form}-topic")
        if form == "debezium":
            keep_totals(stream, root / "totals")
    return env


def main(root: Path, servers: str, registry: str, engine: str, copies: list[Copy], kill: str) -> None:
    from pyspark.sql import SparkSession

    from flinkish_spark.bridge.session import configure_spark_with_jars
    from tests.conftest import spark_test_conf
    from tests.support.services import BUILD

    builder = SparkSession.builder.master("local[2,4]").config(map={**spark_test_conf(root / "scratch")})
    spark = configure_spark_with_jars(builder, BUILD / "jars").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    env = job(spark, root, servers, registry, engine, copies)
    env.observe(KillAt(KillPoint.parse(kill), kill=kill_process_group) if kill else SilentObserver())
    run_until(env, lambda _: all(0 < c.wanted <= len(read_committed(servers, c.rows)) for c in copies))
    spark.stop()


if __name__ == "__main__":
    root, servers, registry, engine, copies, kill = sys.argv[1:]
    main(Path(root), servers, registry, engine, [Copy(*one) for one in json.loads(copies)], kill)
