"""A job on a small cluster whose functions say how many cores their tasks have."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from pyspark import TaskContext
from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests
from pyspark.sql import SparkSession

from flinkish_spark import CheckpointConfig, KeyedProcessFunction, MemorySink, StreamExecutionEnvironment
from flinkish_spark.bridge.session import configure_spark_with_jars
from tests.conftest import spark_test_conf
from tests.support.services import BUILD

GIVEN = "user STRING, plain LONG"
SCORED = f"{GIVEN}, in_front LONG"
KEPT = f"{SCORED}, state LONG"
SEEN = f"{KEPT}, behind LONG"


def cores() -> int:
    task = TaskContext.get()
    assert task is not None
    return int(task.cpus())


def plain(row: Any) -> Any:
    return row.user, cores()


def in_front(row: Any) -> Any:
    return (*row, cores())


class Kept(KeyedProcessFunction):
    def process_element(self, row: Any, ctx: Any) -> Any:
        yield (*row, cores())


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        builder = SparkSession.builder.master("local-cluster[1,2,1024]")
        builder = builder.config(map=spark_test_conf(Path(scratch)))
        spark = configure_spark_with_jars(builder, BUILD / "jars").getOrCreate()
        two = ResourceProfileBuilder().require(TaskResourceRequests().cpus(2)).build
        checkpoint = CheckpointConfig(interval_ms=500)
        env = StreamExecutionEnvironment(spark, "resourceful", str(folder / "job"), checkpoint=checkpoint)
        users = [(f"user{number}",) for number in range(40)]
        rows = env.from_collection(users, "user STRING", uid="users").map(plain, output=GIVEN)
        scored = rows.map(in_front, output=SCORED, name="in front").set_resources(two)
        kept = scored.key_by("user").process(Kept(), output=KEPT, uid="kept")
        seen = kept.map(in_front, output=SEEN, name="behind").set_resources(two)
        sink = MemorySink("resourceful")
        seen.sink_to(sink, uid="out")
        env.execute()
        found = [row.asDict() for row in sink.rows()]
        names = {"plain": "plain", "in_front": "in front", "state": "state", "behind": "behind"}
        told: dict[str, Any] = {
            name: sorted({row[column] for row in found}) for column, name in names.items()
        }
        print(json.dumps({**told, "rows": len(found)}), flush=True)
        spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
