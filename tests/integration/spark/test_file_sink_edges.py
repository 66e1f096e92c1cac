"""The file sink, and values, paths and assigners that somebody will come with."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import functions as F

from flinkish_spark import (
    BucketAssigner,
    ColumnBuckets,
    Compaction,
    ExpressionBuckets,
    FileFormat,
    FileSink,
    MetastorePartition,
    PartitionCommit,
    PartitionPolicy,
    ProcessTime,
    SuccessFile,
)
from flinkish_spark.core.errors import SchemaError, UserFunctionError
from flinkish_spark.testing.sink_contract import SinkUnderTest

SCHEMA = "user STRING, amount LONG"
STRANGE = [
    "plain", "a/b", "..", "a=b", "ü%41é", "it's", " lead ", "new\nline", "*?[{}", "_#a:b", "back\\slash",
    "x" * 200, None,
]  # fmt: skip


@dataclass(frozen=True)
class Noting(PartitionPolicy):
    """Notes the values that it was given, in a file."""

    notes: Path

    def commit(self, partition, spark):
        with self.notes.open("a", encoding="utf-8") as notes:
            notes.write(repr(partition.values["user"]) + "\n")
        assert any(partition.path.glob("part-*")), "behind the files"


def under_test(spark, tmp_path, make_sink) -> SinkUnderTest:
    return SinkUnderTest(make_sink, lambda: (), spark, tmp_path / "folder", schema=SCHEMA)


def test_strange_values_below_a_strange_path_reach_files_and_catalog(spark, tmp_path) -> None:
    root, notes = tmp_path / "a [b]{c}*?#%20é" / "out", tmp_path / "notes"
    spark.sql("DROP TABLE IF EXISTS strange_users")
    # At the place itself a reader lists the folders; this table has nothing but what is announced.
    spark.sql(
        f"CREATE TABLE strange_users (amount BIGINT, user STRING) USING parquet PARTITIONED BY (user) "
        f"LOCATION '{tmp_path}/elsewhere'"
    )
    policies = (SuccessFile(), MetastorePartition("strange_users"), Noting(notes))
    commit = PartitionCommit(ProcessTime(), policies)
    sink = FileSink(
        str(root), bucket_by=ColumnBuckets("user"), compaction=Compaction(), partition_commit=commit
    )
    subject = under_test(spark, tmp_path, lambda: sink)
    process, checkpoint = subject.start(), subject.next_checkpoint()
    rows = [(user, number) for number, user in enumerate(STRANGE)]
    staged = [process.stage(part, checkpoint=checkpoint) for part in (rows, [(u, n + 100) for u, n in rows])]
    hidden = spark.read.option("__globPaths__", "false").schema(SCHEMA).parquet(f"file://{root}")
    assert hidden.count() == 0, "what is pending is not seen"
    process.commit(checkpoint, *staged)
    wanted = sorted((user or "-", n + more) for n, user in enumerate(STRANGE) for more in (0, 100))
    read = spark.read.option("__globPaths__", "false").schema(SCHEMA).parquet(f"file://{root}")
    assert sorted((row.user or "-", row.amount) for row in read.collect()) == wanted
    table = spark.table("strange_users").collect()
    assert sorted((row.user or "-", row.amount) for row in table) == wanted
    assert sorted(notes.read_text(encoding="utf-8").splitlines()) == sorted(
        {repr(user or None) for user in STRANGE}
    )
    assert len(list(root.glob("*/_SUCCESS"))) == len(list(root.glob("user=*"))) == len(STRANGE)
    spark.sql("DROP TABLE strange_users")


#: As the sink writes by itself: quotes are doubled, blanks and line ends at the end of a text stay.
WHOLE = {"escape": '"', "ignoreLeadingWhiteSpace": "false", "ignoreTrailingWhiteSpace": "false"}


def test_values_with_line_ends_quotes_and_nulls_are_read_back(spark, tmp_path) -> None:
    """Small files are put one behind the other by bytes: a record may go over several lines.

    What a format makes of nulls and empty strings is Spark's business, and so the measure.
    """
    rows = [("a\nb", 1), ("c\nd\n", 2), ('say "x", y', 3), (None, 4), ("", 5), ("ü,;", None)]
    for number, (kind, options) in enumerate(
        [
            (FileFormat.CSV, {"header": "true"}),
            (FileFormat.CSV, {"compression": "gzip"}),
            (FileFormat.JSON, {"ignoreNullFields": "false"}),
            (FileFormat.AVRO, {}),
        ]
    ):
        root = tmp_path / f"{kind.value}-{number}"
        sink = FileSink(str(root), kind, options, compaction=Compaction())
        subject = under_test(spark, tmp_path / root.name, lambda sink=sink: sink)
        process, checkpoint = subject.start(), subject.next_checkpoint()
        process.commit(checkpoint, *(process.stage(rows, checkpoint=checkpoint) for _ in range(2)))
        assert len(list(root.glob("part-*"))) == 1
        if kind is FileFormat.CSV:
            options = {**options, "multiLine": "true", **WHOLE}
        reader = spark.read.format(kind.value).options(**options).schema(SCHEMA)
        plain = spark.createDataFrame(rows * 2, SCHEMA).write.format(kind.value).options(**options)
        plain.save(f"{root}-plain")
        wanted = [tuple(row) for row in reader.load(f"{root}-plain").collect()]
        found = [tuple(row) for row in reader.load(str(root)).collect()]
        assert sorted(map(repr, found)) == sorted(map(repr, wanted)), kind
        assert Counter(amount for _, amount in found) == Counter(amount for _, amount in rows * 2)


class Own(BucketAssigner):
    """As a user writes one."""

    def __init__(self, make, *names):
        self._make, self._names = make, names or ("first",)

    @property
    def names(self):
        return self._names

    def check(self, schema, uid):
        pass

    def columns(self, now_ms):
        return self._make()


@pytest.mark.parametrize(
    ("assigner", "error", "message"),
    [
        (Own(lambda: 1 / 0), UserFunctionError, r"columns\(\) of the Own of sink 'contract' failed.*Zero"),
        (Own(dict), SchemaError, "folder 'first' of sink 'contract' is a column"),
        (Own(lambda: {"first": 5}), SchemaError, "do not fit its stream"),
        (Own(lambda: {"amount": F.lit(5)}, "amount"), SchemaError, "so has a field of its stream"),
        (Own(lambda: {"first": F.array(F.lit(5))}), SchemaError, r"array<int> cannot be part"),
        (ExpressionBuckets("first", "map('a', user)"), SchemaError, "cannot be part of a folder's name"),
        (ExpressionBuckets("first", "count(user)"), SchemaError, "do not fit its stream"),
        (ExpressionBuckets("first", "nobody + 1"), SchemaError, "do not fit its stream"),
    ],
)
def test_buckets_that_cannot_work_are_refused_before_anything_starts(
    spark, tmp_path, assigner, error, message
) -> None:
    sink = FileSink(str(tmp_path / "out"), bucket_by=assigner)
    with pytest.raises(error, match=message):
        under_test(spark, tmp_path, lambda: sink).start()
    assert not (tmp_path / "out").exists()
