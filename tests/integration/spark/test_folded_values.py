"""Values that a store takes for one another: kept apart, or refused by name before anything is staged."""

from __future__ import annotations

import datetime
from collections import Counter
from decimal import Decimal

import pytest
from pyspark.sql import types as T

from flinkish_spark import (
    Append,
    ColumnBuckets,
    ExpressionBuckets,
    FileFormat,
    FileSink,
    OverwritePartitions,
    Upsert,
)
from flinkish_spark.checkpoint.failures import classify
from flinkish_spark.connectors.files.sink import check_folders
from flinkish_spark.core.errors import BadRecordError, SchemaError
from flinkish_spark.protocol.records import Outcome
from flinkish_spark.testing.sink_contract import SinkUnderTest
from tests.support.delta_rig import DeltaRig, Way

BY_COUNTRY = Upsert(keys=("id", "country"), delete_when="v IS NULL")
ROW = "id BIGINT, country STRING, v STRING"
BERLIN = "Europe/Berlin"


@pytest.mark.parametrize(
    ("way", "mode", "value"),
    [
        (Way.DELTA_RS, BY_COUNTRY, ""),
        (Way.SPARK, BY_COUNTRY, "__HIVE_DEFAULT_PARTITION__"),
        pytest.param(Way.DELTA_RS, Append(), "__HIVE_DEFAULT_PARTITION__", marks=pytest.mark.nightly),
        pytest.param(Way.DELTA_RS, Append(), "", marks=pytest.mark.nightly),
        pytest.param(Way.SPARK, OverwritePartitions(), "", marks=pytest.mark.nightly),
    ],
)
def test_a_partition_that_would_be_null_is_refused(spark, tmp_path, way, mode, value) -> None:
    """(1,'',v1) and (1,'',v2) were two rows with NULL, and a delete found neither."""
    rig = DeltaRig(spark, tmp_path / "t", ROW, way=way, mode=mode, partition_by=("country",))
    rig.preflight()
    with pytest.raises(BadRecordError, match=r"The partition column country NOT IN .*\"v\":\"v1\""):
        rig.stage(0, [(2, "de", "v0"), (1, value, "v1")])
    if mode is BY_COUNTRY:
        with pytest.raises(BadRecordError, match="The partition column country NOT IN"):
            rig.stage(0, [(1, value, None)])
        with pytest.raises(BadRecordError, match="The key country IS NOT NULL"):
            rig.stage(0, [(1, None, "v1")])
        return
    assert rig.put(1, [(2, "de", "v0"), (1, None, "v1"), (3, " ", "v2")]).outcome is Outcome.COMMITTED
    assert rig.rows() == Counter([(2, "de", "v0"), (1, None, "v1"), (3, " ", "v2")])


def test_a_partition_of_a_table_that_is_there_counts(spark, tmp_path) -> None:
    """Not what the sink is told: a sink for a table that exists may leave its partitions out."""
    rig = DeltaRig(spark, tmp_path / "t", ROW, mode=BY_COUNTRY)
    rig.sql(f"CREATE TABLE {{t}} ({ROW}) USING delta PARTITIONED BY (country)")
    rig.preflight()
    with pytest.raises(BadRecordError, match="The partition column country NOT IN"):
        rig.stage(0, [(1, "", "v1")])


@pytest.mark.nightly
def test_an_empty_key_that_is_no_partition_is_a_key(spark, tmp_path) -> None:
    rig = DeltaRig(spark, tmp_path / "t", ROW, mode=BY_COUNTRY)
    rig.preflight()
    rig.put(1, [(1, "", "v1"), (1, " ", "w")])
    rig.put(2, [(1, "", "v2"), (1, " ", None)])
    assert rig.rows() == Counter([(1, "", "v2")])


def test_partitions_of_numbers_are_the_numbers(spark, tmp_path) -> None:
    row = "d DOUBLE, n DECIMAL(10,2), day DATE, at TIMESTAMP_NTZ, i INT"
    rig = DeltaRig(spark, tmp_path / "t", row, partition_by=("d", "n", "day", "at"))
    rig.preflight()
    day, at = datetime.date(2026, 10, 25), datetime.datetime(2026, 10, 25, 2, 30, 0, 123456)
    rows = [
        (1e-7, Decimal("1.50"), day, at, 1),
        (float("inf"), Decimal("-0.01"), day, at, 2),
        (0.1 + 0.2, Decimal("99999999.99"), datetime.date(1, 1, 1), at, 3),
        (1e300, None, None, None, 4),
    ]
    rig.put(1, rows)
    assert rig.rows() == Counter(rows)


@pytest.mark.parametrize("way", [Way.DELTA_RS, pytest.param(Way.SPARK, marks=pytest.mark.nightly)])
def test_an_instant_whose_text_is_another_one_is_no_partition(spark, tmp_path, way) -> None:
    """02:30 of 2026-10-25 in Berlin is 00:30Z and 01:30Z."""
    rig = DeltaRig(spark, tmp_path / "t", "id INT, at TIMESTAMP", way=way, partition_by=("at",))
    first = datetime.datetime(2026, 10, 25, 0, 30, tzinfo=datetime.UTC)
    before = spark.conf.get("spark.sql.session.timeZone")
    try:
        spark.conf.set("spark.sql.session.timeZone", BERLIN)
        rig.preflight()
        rig.stage(0, [(1, first)])
        with pytest.raises(BadRecordError, match="The partition column at being the value of its text"):
            rig.stage(1, [(2, first + datetime.timedelta(hours=1))])
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)


def test_bytes_are_no_partition(spark, tmp_path) -> None:
    rig = DeltaRig(spark, tmp_path / "t", "id INT, b BINARY", partition_by=("b",))
    with pytest.raises(SchemaError, match=r"of sink 'table'. Its partition column 'b' is binary"):
        rig.preflight()


@pytest.mark.parametrize(
    ("way", "columns"),
    [(Way.DELTA_RS, "id CHAR(5), v STRING"), (Way.SPARK, "id STRING, v CHAR(5)")],
)
def test_an_upsert_into_a_table_with_char_is_refused(spark, tmp_path, way, columns) -> None:
    """Delta refuses the MERGE, after the decision."""
    rig = DeltaRig(spark, tmp_path / "t", "id STRING, v STRING", way=way, mode=Upsert(keys=("id",)))
    rig.sql(f"CREATE TABLE {{t}} ({columns}) USING delta")
    with pytest.raises(SchemaError, match=r"Its column \w+ is a CHAR"):
        rig.preflight()


def test_partitions_of_char_are_not_overwritten(spark, tmp_path) -> None:
    """'a' and 'a    ' are one value and two partitions."""
    rig = DeltaRig(spark, tmp_path / "t", "id INT, p STRING", mode=OverwritePartitions())
    rig.sql("CREATE TABLE {t} (id INT, p CHAR(5)) USING delta PARTITIONED BY (p)")
    with pytest.raises(SchemaError, match="Its column p is a CHAR"):
        rig.preflight()


@pytest.mark.nightly
def test_an_upsert_into_varchar_tells_blanks_apart(spark, tmp_path) -> None:
    rig = DeltaRig(spark, tmp_path / "t", "id STRING, v STRING", mode=Upsert(keys=("id",)))
    rig.sql("CREATE TABLE {t} (id VARCHAR(5), v VARCHAR(9)) USING delta")
    rig.preflight()
    rig.put(1, [("a", "1"), ("a ", "2"), ("A", "3")])
    rig.put(2, [("a ", "4")])
    assert rig.rows() == Counter([("a", "1"), ("a ", "4"), ("A", "3")])
    with pytest.raises(BadRecordError, match="The length 5 of column id"):
        rig.stage(3, [("abcde ", "5")])


#: What no folder can be called `country=...`, of which 247 bytes are left; and what one can just be called.
NO_FOLDERS = ["a\0b", "\0", "x" * 248, "\u00e9" * 124, "/" * 83]
FOLDERS = ["x" * 247, "\u00e9" * 123 + "x", "/" * 82 + "x", "=%:?\x7f\x01", ".", "..", "a\nb", " a. "]


@pytest.mark.parametrize(
    ("way", "mode"),
    [
        (Way.DELTA_RS, Append()),
        (Way.DELTA_RS, BY_COUNTRY),
        pytest.param(Way.SPARK, OverwritePartitions(), marks=pytest.mark.nightly),
    ],
)
def test_a_partition_that_no_folder_can_be_called_is_refused(spark, tmp_path, way, mode) -> None:
    """By the record, before anything is decided: no disk is at fault, and none will take it later."""
    rig = DeltaRig(spark, tmp_path / "t", ROW, way=way, mode=mode, partition_by=("country",))
    rig.preflight()
    for value in NO_FOLDERS:
        with pytest.raises(BadRecordError, match=r"The partition column country .*\"v\":\"v1\"") as found:
            rig.stage(0, [(2, "de", "v0"), (1, value, "v1")])
        limit = "having at most 247 bytes in a folder's name"
        assert ("UTF-8 without NUL" if "\0" in value else limit) in str(found.value)
    broken = spark.sql("SELECT 1L AS id, CAST(X'6180' AS STRING) AS country, 'v1' AS v")
    with pytest.raises(BadRecordError, match="The partition column country being UTF-8"):
        rig.stage_frame(0, broken, 1)
    rows = [(n, value, "v") for n, value in enumerate([*FOLDERS, None])]
    rows = rows[:-1] if mode is BY_COUNTRY else rows
    assert rig.put(1, rows).outcome is Outcome.COMMITTED
    assert rig.rows() == Counter(rows)


@pytest.mark.parametrize(
    "bucket_by",
    [ColumnBuckets("user"), pytest.param(ExpressionBuckets("user2", "user"), marks=pytest.mark.nightly)],
)
def test_what_no_folder_can_be_called_is_a_bad_record_of_a_file_sink(spark, tmp_path, bucket_by) -> None:
    sink = FileSink(f"{tmp_path}/out", bucket_by=bucket_by)
    subject = SinkUnderTest(lambda: sink, lambda: (), spark, tmp_path / "folder")
    process = subject.start()
    (name,) = bucket_by.names
    left = 255 - len(f"{name}=")
    for value in ["a\0b", "x" * (left + 1), "/" * 84]:
        with pytest.raises(Exception, match="FLINKISH_BAD_RECORD") as found:
            process.stage([("ann", 1), (value, 2)], checkpoint=subject.next_checkpoint())
        error = classify(found.value)
        assert isinstance(error, BadRecordError), repr(error)
        assert f"the partition column {name} " in str(error) and '"amount":2' in str(error)
    process.stage(
        [("x" * left, 1), ("/" * 83, 2), ("..", 3), (None, 4)], checkpoint=subject.next_checkpoint()
    )


def test_keys_under_a_collation_are_refused(spark, tmp_path) -> None:
    """Of the stream: this Delta makes no table with a collation, which `TableInfo.is_collated` would find."""
    rig = DeltaRig(spark, tmp_path / "s", "id STRING COLLATE UTF8_LCASE", mode=Upsert(keys=("id",)))
    with pytest.raises(SchemaError, match="the key 'id' of sink 'table' is string collate UTF8_LCASE"):
        rig.preflight()


@pytest.mark.parametrize("value", ["", pytest.param("__HIVE_DEFAULT_PARTITION__", marks=pytest.mark.nightly)])
def test_a_folder_that_would_be_the_null_s_is_refused(spark, tmp_path, value) -> None:
    """The column is in no file: a reader would find NULL, and the folder is that of the NULLs."""
    sink = FileSink(f"{tmp_path}/out", bucket_by=ColumnBuckets("user"))
    subject = SinkUnderTest(lambda: sink, lambda: (), spark, tmp_path / "folder")
    process, checkpoint = subject.start(), subject.next_checkpoint()
    with pytest.raises(Exception, match="FLINKISH_BAD_RECORD") as found:
        process.stage([("ann", 1), (value, 2)], checkpoint=checkpoint)
    error = classify(found.value)
    assert isinstance(error, BadRecordError)
    assert "the partition column user NOT IN ('', '__HIVE_DEFAULT_PARTITION__')" in str(error)
    assert '"amount":2' in str(error)


@pytest.mark.parametrize(
    ("options", "refused", "kept"),
    [
        ({}, ["a\nb", "a\r", "a\rb", "\n", "\ufeffa"], ["a", "", None, "a\u2028b", "a\ufeff"]),
        ({"lineSep": "\n"}, ["a\nb", "a\r", "\r"], ["a\rb", "", None]),
        # Of "xaaa" the first two are the end.
        ({"linesep": "aa"}, ["xaay", "xa", "\ufeff"], ["a\nb", "x\r", "ax"]),
    ],
)
def test_a_text_that_would_be_two_lines_is_refused(spark, tmp_path, options, refused, kept) -> None:
    """It was two records when it was read back."""
    sink = FileSink(f"{tmp_path}/out", FileFormat.TEXT, options, bucket_by=ColumnBuckets("amount"))
    subject = SinkUnderTest(lambda: sink, lambda: (), spark, tmp_path / "folder")
    process = subject.start()
    for value in refused:
        with pytest.raises(Exception, match="FLINKISH_BAD_RECORD") as found:
            process.stage([("ann", 1), (value, 2)], checkpoint=subject.next_checkpoint())
        error = classify(found.value)
        assert isinstance(error, BadRecordError), repr(error)
        assert "the text user being one line" in str(error) and '"amount":2' in str(error)
    process.stage([(value, 1) for value in kept], checkpoint=subject.next_checkpoint())


def test_a_value_with_the_text_of_a_null_in_a_csv_is_refused(spark, tmp_path) -> None:
    """Quotes do not help: Spark compares what is in them."""
    sink = FileSink(f"{tmp_path}/out", FileFormat.CSV, {"nullValue": "NULL"})
    subject = SinkUnderTest(lambda: sink, lambda: (), spark, tmp_path / "folder")
    process, checkpoint = subject.start(), subject.next_checkpoint()
    with pytest.raises(Exception, match="FLINKISH_BAD_RECORD") as found:
        process.stage([("ann", 1), ("NULL", 2)], checkpoint=checkpoint)
    error = classify(found.value)
    assert isinstance(error, BadRecordError), repr(error)
    assert "the text of user not being nullValue, 'NULL'" in str(error) and "'amount': 2" in str(error)
    assert error.what_to_do == "give another nullValue, or write FileFormat.JSON"
    kept = [("NULL ", 1), ("null", 2), (None, 3)]
    process.commit(checkpoint, process.stage(kept, checkpoint=checkpoint))
    frame = spark.read.csv(f"{tmp_path}/out", "user STRING, amount LONG", nullValue="NULL", escape='"')
    assert sorted(map(tuple, frame.collect()), key=lambda row: row[1]) == kept
    (tmp_path / "by_hand.csv").write_text('"NULL",1\n')
    assert spark.read.csv(f"{tmp_path}/by_hand.csv", nullValue="NULL").first()[0] is None


def test_folders_of_instants_and_bytes_are_refused(spark) -> None:
    """A TIMESTAMP's folder is in the session's zone: an hour comes twice, and readers may have another."""
    before = spark.conf.get("spark.sql.session.timeZone")
    for zone, kind, message in (
        (BERLIN, "TIMESTAMP", "it would be a time of the session's zone, Europe/Berlin"),
        ("UTC", "BINARY", "bytes are no text"),
        ("UTC", "STRING COLLATE UTF8_LCASE", "its collation UTF8_LCASE takes different texts for equal"),
        ("UTC", "TIMESTAMP", ""),
        (BERLIN, "TIMESTAMP_NTZ", ""),
    ):
        fields = T.StructType.fromDDL(f"id INT, at {kind}")
        spark.conf.set("spark.sql.session.timeZone", zone)
        try:
            if message:
                with pytest.raises(SchemaError, match="cannot give sink") as found:
                    check_folders((ColumnBuckets("at"),), fields, spark, "out")
                assert message in found.value.why
            else:
                check_folders((ColumnBuckets("at"),), fields, spark, "out")
        finally:
            spark.conf.set("spark.sql.session.timeZone", before)
