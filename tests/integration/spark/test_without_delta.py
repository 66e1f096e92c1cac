"""A session without Delta Lake's JAR: what needs it is refused before the start; all else runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from flinkish_spark.jars import has_pinned_delta, running_minor

SCHEMA = {"user": "string", "amount": "long"}
PROGRAM = """
import json, sys
from pathlib import Path
from pyspark.sql import SparkSession
from flinkish_spark import DeltaManifest, DeltaSink, MemorySink, StreamExecutionEnvironment, Upsert
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
    ("feature", rows, DeltaSink(sys.argv[2]), None),
    ("upsert", rows, DeltaSink(sys.argv[3], mode=Upsert(("user",))), None),
    ("sink", rows, DeltaSink(str(root / "totals")), DeltaManifest(str(root / "checkpoints"))),
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


def table_of(folder: Path, protocol: dict[str, Any], **configuration: str) -> str:
    """Make an empty table with a log by hand."""
    fields = [{"name": n, "type": k, "nullable": True, "metadata": {}} for n, k in SCHEMA.items()]
    metadata = {
        "id": folder.name,
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": fields}),
        "partitionColumns": [],
        "configuration": configuration,
    }
    (folder / "_delta_log").mkdir(parents=True)
    lines = [{"protocol": protocol}, {"metaData": metadata}]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (folder / "_delta_log" / f"{0:020d}.json").write_text(text, encoding="utf-8")
    return str(folder)


def test_sinks_and_sources_need_no_jar_and_what_needs_one_is_refused_by_its_name(tmp_path: Path) -> None:
    """In a process of its own, whose session has no JAR at all."""
    tracked = {
        "minReaderVersion": 1,
        "minWriterVersion": 7,
        "writerFeatures": ["rowTracking", "domainMetadata"],
    }
    checked = {"minReaderVersion": 1, "minWriterVersion": 3}
    tables = [
        table_of(tmp_path / "tracked", tracked),
        table_of(tmp_path / "checked", checked, **{"delta.constraints.c": "amount > 0"}),
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), *tables],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    says, read = json.loads(done.stdout.splitlines()[-1])
    assert read == {uid: [1, 2, 3] for uid in ("table", "rows", "feed")}
    assert says.keys() == {"feature", "upsert"}
    minor = running_minor()
    for name, (text, left_behind) in says.items():
        wanted = {
            "feature": "elta-rs does not know the table feature domainMetadata",
            "upsert": "elta-rs does not know the table feature checkConstraints, where rows are merged",
        }
        assert wanted[name] in text and not left_behind
        if has_pinned_delta(minor):
            assert "configure_spark_with_jars" in text
        else:
            assert f"for Spark {minor} none was served" in text and f"delta-spark_{minor}_2.13" in text
    (row,) = DeltaTable(tmp_path / "totals").to_pyarrow_table().to_pylist()
    assert row == {"user": "ann", "amount": 1}
    assert DeltaTable(tmp_path / "checkpoints").to_pyarrow_table().num_rows >= 1
