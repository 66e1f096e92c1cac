"""What tasks of the file sink write, held against what Spark's own writers write of the same records."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F

from flinkish_spark import ExpressionBuckets, FileFormat, FileSink, RollOnCheckpoint
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.testing.sink_contract import SinkUnderTest

SCHEMA = "user STRING, amount LONG"
ROWS = [
    ("plain", 1),
    ('say "x", y', 2),
    ("", 3),
    (None, 4),
    (" blanks ", None),
    ("\u00fc\u20ac\U0001f600", -(2**63)),
    ("long " * 40_000, 7),
    ("back\\slash\ttab", 8),
]
WHOLE = {"escape": '"', "ignoreLeadingWhiteSpace": "false", "ignoreTrailingWhiteSpace": "false"}


def staged_and_committed(spark, tmp_path: Path, sink: FileSink, *micro_batches, schema: str = SCHEMA) -> None:
    subject = SinkUnderTest(lambda: sink, lambda: (), spark, tmp_path / "folder", schema=schema)
    process, checkpoint = subject.start(), subject.next_checkpoint()
    process.commit(checkpoint, *(process.stage(rows, checkpoint=checkpoint) for rows in micro_batches))


def rows_in(spark, kind: FileFormat, path: object, options, schema: str = SCHEMA) -> list[str]:
    frame = spark.read.format(kind.value).options(**options).schema(schema).load(str(path))
    return sorted(map(repr, frame.collect()))


LINES = [{"compression": codec} for codec in ("gzip", "bzip2", "deflate", "snappy", "lz4", "NONE")]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(
            (FileFormat.PARQUET, {"compression": c})
            for c in ("none", "snappy", "gzip", "zstd", "lz4", "lz4_raw")
        ),
        (FileFormat.PARQUET, {"parquet.block.size": "1000", "parquet.enable.dictionary": "false"}),
        (FileFormat.PARQUET, {"parquet.writer.version": "v2", "parquet.page.size": "100"}),
        *(
            (FileFormat.AVRO, {"compression": c})
            for c in ("uncompressed", "snappy", "deflate", "bzip2", "xz")
        ),
        (FileFormat.AVRO, {"compression": "zstandard", "recordName": "Order", "recordNamespace": "a.b"}),
        *((FileFormat.JSON, one) for one in LINES),
        (
            FileFormat.JSON,
            {"compression": "org.apache.hadoop.io.compress.GzipCodec", "ignoreNullFields": "false"},
        ),
        (FileFormat.JSON, {"encoding": "UTF-16LE", "lineSep": "\x1e"}),
        (FileFormat.CSV, {"compression": "lz4", "header": "true", "sep": "::", "quoteAll": "true"}),
        (FileFormat.CSV, {"codec": "snappy", "nullValue": "\\N"}),
        (FileFormat.CSV, {"sep": "\t"}),
        (FileFormat.CSV, {"encoding": "utf-16", "header": "TRUE"}),
    ],
    ids=lambda one: one.value if isinstance(one, FileFormat) else "-".join(map(repr, one.values())),
)
def test_files_hold_what_those_of_spark_s_writer_hold(spark, tmp_path, kind, options) -> None:
    staged_and_committed(spark, tmp_path, FileSink(f"{tmp_path}/out", kind, options), ROWS)
    if kind is FileFormat.CSV:
        options = {**WHOLE, **options}
    frame = spark.createDataFrame(ROWS, SCHEMA).coalesce(1)
    frame.write.format(kind.value).options(**options).save(f"{tmp_path}/spark")
    wanted = rows_in(spark, kind, tmp_path / "spark", options)
    assert len(wanted) == len(ROWS)
    assert rows_in(spark, kind, tmp_path / "out", options) == wanted
    ours, theirs = (
        {one.name.partition(".")[2] for one in (tmp_path / folder).glob("part-*")}
        for folder in ("out", "spark")
    )
    # Of Hadoop's own LZ4 pyarrow writes none.
    assert ours == {one.replace("lz4hadoop", "lz4raw") for one in theirs}


@pytest.mark.parametrize("options", [{}, {"nullValue": "-"}, {"quote": "'", "escape": "'", "lineSep": "|"}])
def test_a_line_of_blanks_in_a_csv_is_a_record(spark, tmp_path, options) -> None:
    """Spark's own writer leaves a null out, and its reader a line of blanks."""
    sink = FileSink(f"{tmp_path}/out", FileFormat.CSV, {k: v for k, v in options.items() if k != "escape"})
    rows = [("a",), (None,), ("",), (" ",), ("\t",), ('it\'s "b"',)]
    staged_and_committed(spark, tmp_path, sink, rows, schema="user STRING")
    found = rows_in(spark, FileFormat.CSV, tmp_path / "out", {**WHOLE, **options}, "user STRING")
    has_empty = "nullValue" in options
    wanted = [(text or ("" if has_empty and text is not None else None),) for (text,) in rows]
    assert found == sorted(f"Row(user={text!r})" for (text,) in wanted)


def test_a_line_of_nothing_but_separators_in_a_csv_is_a_record(spark, tmp_path) -> None:
    sink = FileSink(f"{tmp_path}/out", FileFormat.CSV, {"sep": "\t"})
    staged_and_committed(spark, tmp_path, sink, [(None, None), ("a", 1)])
    assert len(rows_in(spark, FileFormat.CSV, tmp_path / "out", {"sep": "\t"})) == 2


@pytest.mark.parametrize("options", [{}, {"header": "true"}, {"encoding": "utf-8", "quote": "'"}])
def test_a_text_that_begins_a_csv_keeps_a_byte_order_mark(spark, tmp_path, options) -> None:
    """Readers, Spark's and this package's, pass over one where a file begins."""
    schema = "`\ufeffuser` STRING, amount LONG"
    sink = FileSink(f"{tmp_path}/out", FileFormat.CSV, options)
    staged_and_committed(spark, tmp_path, sink, [("\ufeffann", 1)], schema=schema)
    assert rows_in(spark, FileFormat.CSV, tmp_path / "out", options, "user STRING, amount LONG") == [
        repr(spark.createDataFrame([("\ufeffann", 1)], "user STRING, amount LONG").first())
    ]
    if options.get("header"):
        read = spark.read.csv(f"{tmp_path}/out", **options)
        assert read.columns == ["\ufeffuser", "amount"]


def test_a_parquet_file_is_one_of_spark_s_by_its_footer(spark, tmp_path) -> None:
    """Types that Parquet lacks are said there, and the calendar is."""
    schema = "at TIMESTAMP, length INTERVAL DAY TO SECOND, d DECIMAL(9,2)"
    query = (
        "SELECT TIMESTAMP'0003-01-01 00:00:00.000001Z' AS at, "
        "INTERVAL '-1 02:03:04.000005' DAY TO SECOND AS length, "
        "CAST(-1.25 AS DECIMAL(9,2)) AS d"
    )
    rows = [tuple(row) for row in spark.sql(query).collect()]
    staged_and_committed(spark, tmp_path, FileSink(f"{tmp_path}/out"), rows, schema=schema)
    [path] = (tmp_path / "out").glob("part-*")
    footer = pq.ParquetFile(path)
    assert b"org.apache.spark.version" in footer.metadata.metadata
    assert [footer.schema.column(at).physical_type for at in range(3)] == ["INT64", "INT64", "INT32"]
    found = spark.read.parquet(str(tmp_path / "out"))
    assert found.schema["length"].dataType.simpleString() == "interval day to second"
    assert [tuple(row) for row in found.collect()] == rows


def test_many_rows_go_into_row_groups_and_parts(spark, tmp_path) -> None:
    rows = [(f"user-{n}", n) for n in range(30_000)]
    options = {"parquet.block.size": "200000"}
    staged_and_committed(spark, tmp_path, FileSink(f"{tmp_path}/groups", options=options), rows)
    files = [pq.ParquetFile(path) for path in (tmp_path / "groups").glob("part-*")]
    assert len(files) <= 4 and sum(file.metadata.num_rows for file in files) == len(rows)
    assert all(file.num_row_groups > 1 for file in files)
    for kind in (FileFormat.PARQUET, FileFormat.AVRO, FileFormat.CSV):
        path = tmp_path / kind.value
        sink = FileSink(str(path), kind, rolling=RollOnCheckpoint(part_bytes=30_000))
        staged_and_committed(spark, tmp_path / f"of-{kind.value}", sink, rows)
        sizes = [one.stat().st_size for one in path.glob("part-*")]
        assert max(sizes) <= 45_000 and len(sizes) > 3, kind
        frame = spark.read.format(kind.value).schema(SCHEMA).load(str(path))
        assert sorted(row.amount for row in frame.collect()) == list(range(len(rows)))


def test_an_expression_of_the_user_s_sees_records_only(spark, tmp_path) -> None:
    """Barriers are among the rows, and have no values: a function of Python's would fail at them."""
    first = F.udf(lambda user: user[0], "string")
    for number, expression in enumerate(
        [lambda: first("user"), "IF(user IS NULL, raise_error('no user'), substr(user, 1, 1))"]
    ):
        path = tmp_path / str(number)
        sink = FileSink(str(path), FileFormat.JSON, bucket_by=ExpressionBuckets("first", expression))
        subject = SinkUnderTest(lambda sink=sink: sink, lambda: (), spark, tmp_path / f"f{number}")
        process, checkpoint = subject.start(), subject.next_checkpoint()
        staged = process.stage([("ann", 1), ("bob", 2)], checkpoint=checkpoint)
        process.commit(checkpoint, staged)
        assert sorted(one.name for one in path.glob("first=*")) == ["first=a", "first=b"]


@pytest.mark.parametrize(
    ("kind", "setting", "value", "message"),
    [
        (FileFormat.AVRO, "spark.sql.avro.datetimeRebaseModeInWrite", "LEGACY", "is Avro with times"),
        (
            FileFormat.PARQUET,
            "spark.sql.parquet.compression.codec",
            "lzo",
            "the codec 'lzo', which the session",
        ),
    ],
)
def test_a_session_whose_settings_change_files_is_refused(
    spark, tmp_path, kind, setting, value, message
) -> None:
    before = spark.conf.get(setting)
    spark.conf.set(setting, value)
    try:
        with pytest.raises(ConfigError, match=message):
            staged_and_committed(
                spark, tmp_path, FileSink(f"{tmp_path}/out", kind), [], schema="at TIMESTAMP"
            )
    finally:
        spark.conf.set(setting, before)
