"""A session without Delta Lake: what needs it is refused before the start, with the reason; the rest runs.

So do sources of Delta tables: they need no JAR.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from flinkish_spark.jars import has_pinned_delta, running_minor

PROGRAM = """
import json, sys
from pathlib import Path
from pyspark.sql import SparkSession
from flinkish_spark import DeltaManifest, DeltaSink, MemorySink, StreamExecutionEnvironment
from flinkish_spark.core.errors import EnvironmentFault
from flinkish_spark.sources import CollectionSource, DeltaChanges, DeltaSource, DeltaTableSource
from deltalake import write_deltalake
import pyarrow as pa
from tests.conftest import spark_test_conf

root = Path(sys.argv[1])
spark = SparkSession.builder.master("local[2]").config(map=spark_test_conf(root / "scratch")).getOrCreate()
rows = CollectionSource([("ann", 1)], "user STRING, amount LONG")
says = {}
for name, source, sink, manifest in (
    ("sink", rows, DeltaSink("/lake/totals"), None),
    ("manifest", rows, MemorySink("orders"), DeltaManifest("/lake/checkpoints")),
):
    env = StreamExecutionEnvironment(spark, job="it", job_dir=str(root / name), manifest=manifest)
    env.from_source(source, uid="in").sink_to(sink, uid="out")
    try:
        env.execute()
    except EnvironmentFault as error:
        says[name] = [str(error), (root / name).exists()]
path, sinks = str(root / "table"), {}
feed = {"delta.enableChangeDataFeed": "true"}
write_deltalake(path, pa.table({"n": [1, 2]}), configuration=feed)
write_deltalake(path, pa.table({"n": [3]}), mode="append")
env = StreamExecutionEnvironment(spark, job="reads", job_dir=str(root / "reads"))
for uid, source in (
    ("table", DeltaTableSource(path)),
    ("rows", DeltaSource(path, ending_version=1)),
    ("feed", DeltaSource(path, DeltaChanges.FEED, starting_version=0, ending_version=1)),
):
    sinks[uid] = MemorySink(str(root / f"of-{uid}"))
    env.from_source(source, uid=uid).sink_to(sinks[uid], uid=f"{uid}-out")
env.execute()
read = {uid: sorted(row.n for row in sink.rows()) for uid, sink in sinks.items()}
print(json.dumps([says, read]))
spark.stop()
"""


def test_what_needs_delta_is_refused_before_the_start_and_sources_read(tmp_path: Path) -> None:
    """In a process of its own, whose session has no JAR at all."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    says, read = json.loads(done.stdout.splitlines()[-1])
    assert read == {uid: [1, 2, 3] for uid in ("table", "rows", "feed")}
    assert says.keys() == {"sink", "manifest"}
    minor = running_minor()
    for text, left_behind in says.values():
        assert "this Spark session has no Delta Lake" in text and not left_behind
        if has_pinned_delta(minor):
            assert "configure_spark_with_jars" in text
        else:
            assert f"for Spark {minor} none was served" in text and f"delta-spark_{minor}_2.13" in text
