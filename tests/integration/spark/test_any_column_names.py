"""Names of columns that SQL would read as something else go through a job as they are, or are refused."""

from __future__ import annotations

import json

import pytest
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark import (
    ColumnBuckets,
    DeltaSink,
    FileFormat,
    FileSink,
    KeyedProcessFunction,
    MemorySink,
    NoRestart,
    Upsert,
    ValueStateDescriptor,
)
from flinkish_spark.core.errors import SchemaError
from tests.support.jobs import environment, running

pytestmark = pytest.mark.timeout(600)

NAMES = [
    "a.b", "a", "c`d", "e f", "g,h", 'i"j', "k;l", "m{n}", "o(p)", "q\nr", "s\tt", "u=v", "w'x", "ä%", "kind",
    "value", "*", "a.*", "back\\slash", "-", "count(1)", "0",
]  # fmt: skip
SCHEMA = T.StructType(
    [*(T.StructField(name, T.StringType()) for name in NAMES), T.StructField("id.x", T.LongType())]
)
ROWS = [(*(f"{name}-{number}" for name in NAMES), number) for number in range(3)]


class Echo(KeyedProcessFunction):
    """Emits the record out of its state."""

    def open(self, context):
        self.last = context.get_state(ValueStateDescriptor("last.`one`", SCHEMA))

    def process_element(self, record, ctx):
        self.last.update(tuple(record))
        yield tuple(self.last.value())


def test_names_go_through_operators_and_sinks(spark, tmp_path) -> None:
    """`a.b` into MemorySink restarted for ever, and was a GraphError behind filter()."""
    memory, plain = MemorySink(f"{tmp_path}/behind"), MemorySink(f"{tmp_path}/plain")
    env = environment(spark, tmp_path / "job", trigger_interval_ms=100, restart_strategy=NoRestart())
    stream = env.from_collection(ROWS, SCHEMA, uid="in")
    stream.sink_to(plain, uid="plain")
    kept = stream.filter(lambda record: getattr(record, "a.b") != "no").rebalance()
    made = kept.map(lambda record: tuple(record), output=SCHEMA)
    keyed = made.key_by("id.x", "a.b", "c`d").process(Echo(), output=SCHEMA, uid="echo")
    behind = keyed.filter(lambda record: getattr(record, "id.x") >= 0)
    behind.transform(lambda frame: frame.where("`a.b` IS NOT NULL")).sink_to(memory, uid="memory")
    delta, parts, files = (str(tmp_path / name) for name in ("delta", "parts", "files"))
    by = Upsert(keys=("id.x", "a.b"), sequence_by="id.x", delete_when="`a.*` = 'no'")
    # Delta takes the others with column mapping only, and is asked before the start.
    taken = [name for name in SCHEMA.names if not set(name) & set(" ,;{}()\n\t=")]
    columns = [F.col("`" + name.replace("`", "``") + "`") for name in taken]
    for_delta = behind.transform(lambda frame: frame.select(*columns))
    for_delta.sink_to(DeltaSink(delta, mode=by), uid="delta")
    for_delta.sink_to(DeltaSink(parts, partition_by=("a.b", "w'x")), uid="parts")
    behind.sink_to(FileSink(files, FileFormat.JSON, bucket_by=ColumnBuckets("a.b")), uid="files")
    with running(env) as client:
        assert client.wait(timeout_ms=400_000), client.progress
    for sink in (memory, plain):
        assert sorted(map(tuple, sink.rows())) == ROWS
        assert all(list(row.__fields__) == SCHEMA.names for row in sink.rows())
    for path in (delta, parts):
        table = spark.read.format("delta").load(path)
        assert sorted(table.columns) == sorted(taken)
        wanted = [
            tuple(value for name, value in zip(SCHEMA.names, row, strict=True) if name in taken)
            for row in ROWS
        ]
        assert sorted(map(tuple, table.select(*columns).collect())) == wanted
    lines = [
        json.loads(line) for path in sorted((tmp_path / "files").glob("*/*.json")) for line in path.open()
    ]
    wanted = [
        {name: value for name, value in zip(SCHEMA.names, row, strict=True) if name != "a.b"} for row in ROWS
    ]
    assert sorted(lines, key=lambda one: one["id.x"]) == wanted


@pytest.mark.parametrize(
    ("names", "said"), [(("a", "A"), "has the field 'A' twice"), (("_FS_Kind",), "_FS_Kind")]
)
def test_names_that_cannot_be_told_apart_are_refused(spark, tmp_path, names, said) -> None:
    """Spark itself makes such a DataFrame, and says AMBIGUOUS_REFERENCE where it is read."""
    rate = spark.readStream.format("rate").load()
    frame = rate.select(*[F.lit(1).alias(name) for name in names])
    with pytest.raises(SchemaError, match=said):
        environment(spark, tmp_path / "job").from_dataframe(frame, uid="frame")
