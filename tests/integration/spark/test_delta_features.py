"""Tables with each feature of Delta, written by delta-spark: read as Spark reads them, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark.core.errors import ConfigError
from flinkish_spark.sources import DeltaChanges, DeltaSource, DeltaTableSource
from tests.unit.connectors.delta.test_delta_table_source import Table
from tests.unit.connectors.files.test_file_source import reader_of
from tests.unit.connectors.test_split_source import step

pytestmark = pytest.mark.timeout(600)

FEED, VECTORS = "'delta.enableChangeDataFeed'='true'", "'delta.enableDeletionVectors'='true'"
PLAIN, BY_NAME = "'delta.enableDeletionVectors'='false'", "'delta.columnMapping.mode'='name'"
BY_ID = "'delta.columnMapping.mode'='id'"
ROWS = "INSERT INTO {t} SELECT id, 'a' || id FROM range(10)"
MERGE = (
    "MERGE INTO {t} t USING (SELECT explode(array(1L, 2L, 99L)) id) s ON t.id = s.id "
    "WHEN MATCHED AND s.id = 1 THEN DELETE WHEN MATCHED THEN UPDATE SET v = 'm' "
    "WHEN NOT MATCHED THEN INSERT (id, v) VALUES (99, 'n')"
)
CHANGES = (ROWS, "UPDATE {t} SET v = 'u' WHERE id = 3", "DELETE FROM {t} WHERE id IN (5, 6)", MERGE)
NESTED = "id LONG, s STRUCT<a: INT, b: ARRAY<STRUCT<c: INT, d: STRING>>>, m MAP<STRING, STRUCT<e: INT>>"
VALUES = "array(named_struct('c', 2, 'd', 'x')), {zz}), map('k', named_struct('e', 5))"


@dataclass(frozen=True)
class Case:
    """A table, and why it is refused: whole, or as a feed; empty if it is not."""

    fields: str
    properties: str
    statements: tuple[str, ...]
    refused: str = ""
    feed_refused: str = ""
    more: str = ""
    settings: dict[str, str] = field(default_factory=dict)


def simple(properties: str, *statements: str, **more: Any) -> Case:
    return Case("id LONG, v STRING", f"{FEED}, {properties}", statements, **more)


RENAMED = "another type or name of"
CASES = {
    "plain": simple(PLAIN, *CHANGES),
    "deletion vectors": simple(VECTORS, *CHANGES),
    "deletion vectors, and files that go whole": simple(
        VECTORS,
        *(ROWS, "DELETE FROM {t} WHERE id = 3", "DELETE FROM {t} WHERE id >= 0"),
        *(ROWS, "DELETE FROM {t} WHERE id = 4", "OPTIMIZE {t}"),
    ),
    "deletion vectors that are taken back": simple(
        VECTORS,
        *(ROWS, "DELETE FROM {t} WHERE id = 3", "DELETE FROM {t} WHERE id = 4"),
        *("RESTORE TABLE {t} TO VERSION AS OF 2", "DELETE FROM {t} WHERE id < 8"),
        *("RESTORE TABLE {t} TO VERSION AS OF 1", "INSERT OVERWRITE {t} SELECT 7, 'x'"),
    ),
    "deletion vectors that are purged": simple(
        VECTORS, ROWS, "DELETE FROM {t} WHERE id = 3", "REORG TABLE {t} APPLY (PURGE)"
    ),
    "deletion vectors of partitions": Case(
        "id LONG, p STRING",
        f"{FEED}, {VECTORS}",
        (
            "INSERT INTO {t} SELECT /*+ COALESCE(1) */ id, v FROM "
            "(SELECT explode(array('a b/c=%20\u00fc?#', '', null, 'x')) v), range(3)",
            "DELETE FROM {t} WHERE id = 1",
            "UPDATE {t} SET id = 9 WHERE id = 2 AND p = 'x'",
            "DELETE FROM {t} WHERE p = 'x'",
        ),
        more="PARTITIONED BY (p)",
    ),
    "column mapping by name": simple(
        f"{PLAIN}, {BY_NAME}",
        *(*CHANGES, "ALTER TABLE {t} RENAME COLUMN v TO `w x`", "INSERT INTO {t} VALUES (200, 'z')"),
        feed_refused=RENAMED,
    ),
    "column mapping, a column that went and came": simple(
        BY_NAME,
        *(ROWS, "ALTER TABLE {t} DROP COLUMN v", "ALTER TABLE {t} ADD COLUMN v STRING"),
        "INSERT INTO {t} VALUES (200, 'z')",
        feed_refused=RENAMED,
    ),
    "column mapping by name, with a feed": simple(f"{VECTORS}, {BY_NAME}", *CHANGES),
    "column mapping by number, with a feed": simple(f"{PLAIN}, {BY_ID}", *CHANGES),
    "column mapping that came later": simple(
        PLAIN,
        *(ROWS, f"ALTER TABLE {{t}} SET TBLPROPERTIES ({BY_NAME})"),
        *("ALTER TABLE {t} RENAME COLUMN v TO w", "INSERT INTO {t} VALUES (200, 'z')"),
        feed_refused=RENAMED,
    ),
    "column mapping of partitions": Case(
        "id LONG, p STRING, q INT",
        f"{FEED}, {VECTORS}, {BY_NAME}",
        (
            "INSERT INTO {t} SELECT id, 'p ' || (id % 2), id % 3 FROM range(10)",
            "DELETE FROM {t} WHERE id = 3",
            "ALTER TABLE {t} RENAME COLUMN p TO pp",
        ),
        feed_refused=RENAMED,
        more="PARTITIONED BY (p, q)",
    ),
    **{
        f"column mapping within columns, by {name}": Case(
            NESTED,
            f"{FEED}, {mapping}",
            (
                f"INSERT INTO {{t}} SELECT 1, named_struct('a', 1, 'b', {VALUES.replace(', {zz}', '')}",
                "ALTER TABLE {t} RENAME COLUMN s.a TO aa",
                "ALTER TABLE {t} ADD COLUMN s.zz STRING",
                f"INSERT INTO {{t}} SELECT 2, named_struct('aa', 1, 'b', {VALUES.replace('{zz}', quoted)}",
            ),
            feed_refused=RENAMED,
        )
        for name, mapping in (("name", BY_NAME), ("number", BY_ID))
        for quoted in ("'zz', 'z'",)
    },
    "names that need column mapping": Case(
        "`id ` LONG, `a.b` STRING, `\u00dc,;=` INT",
        f"{FEED}, {BY_NAME}",
        ("INSERT INTO {t} VALUES (1, 'x', 2)",),
    ),
    "V2 checkpoints": simple(
        f"{VECTORS}, 'delta.checkpointPolicy'='v2', 'delta.checkpointInterval'='3'", *CHANGES, ROWS, ROWS
    ),
    "type widening": Case(
        "id SMALLINT, p INT, f FLOAT, w INT, n INT, d DECIMAL(5,2), s STRUCT<a: TINYINT>, day DATE",
        f"{FEED}, 'delta.enableTypeWidening'='true', 'delta.feature.timestampNtz'='supported'",
        (
            "INSERT INTO {t} SELECT id, id, 0.1, -2147483648, 2147483647, 999.99, named_struct('a', -128), "
            "date'9999-12-31' FROM range(3)",
            "INSERT INTO {t} VALUES (null, null, null, null, null, null, named_struct('a', null), null)",
            *(
                f"ALTER TABLE {{t}} ALTER COLUMN {name} TYPE {kind}"
                for name, kind in {
                    **{"id": "LONG", "p": "LONG", "f": "DOUBLE", "w": "DOUBLE", "n": "DECIMAL(12,2)"},
                    **{"d": "DECIMAL(12,4)", "s.a": "INT", "day": "TIMESTAMP_NTZ"},
                }.items()
            ),
            "INSERT INTO {t} VALUES (9223372036854775807, 9223372036854775807, 0.1D, 0.1D, 0.01, 0.0001, "
            "named_struct('a', 2147483647), timestamp_ntz'2026-01-31 00:00:00.000001')",
        ),
        feed_refused=RENAMED,
        more="PARTITIONED BY (p)",
    ),
    "variants": Case(
        "id LONG, v VARIANT", FEED, ("INSERT INTO {t} SELECT 1, parse_json('1')",), refused="'variantType'"
    ),
    "TIMESTAMP_NTZ, and old times": Case(
        "id LONG, at TIMESTAMP_NTZ, z TIMESTAMP, d DATE",
        FEED,
        (
            "INSERT INTO {t} VALUES (1, timestamp_ntz'0001-01-02 00:00:00', timestamp'0001-01-02 00:00:00', "
            "date'0001-01-02'), (2, timestamp_ntz'9999-12-30 23:59:59.999999', "
            "timestamp'9999-12-30 23:59:59.999999', date'9999-12-31')",
            "UPDATE {t} SET id = 3 WHERE id = 1",
        ),
    ),
    "the calendar before": Case(
        "id LONG, d DATE, z TIMESTAMP",
        FEED,
        ("INSERT INTO {t} VALUES (1, date'1000-01-01', timestamp'1000-01-01 00:00:00')",),
        refused="of the old calendar",
        settings={f"spark.sql.parquet.{name}RebaseModeInWrite": "LEGACY" for name in ("datetime", "int96")},
    ),
    "row tracking": simple("'delta.enableRowTracking'='true'", *CHANGES),
    "clustering": Case("id LONG, v STRING", FEED, (*CHANGES, "OPTIMIZE {t}"), more="CLUSTER BY (id)"),
    "times in commits": simple("'delta.enableInCommitTimestamps'='true'", *CHANGES),
    "Iceberg's compatibility": simple(f"{PLAIN}, {BY_NAME}, 'delta.enableIcebergCompatV2'='true'", ROWS),
    "partitions that are in files, too": Case(
        "id LONG, p STRING",
        f"{FEED}, 'delta.feature.materializePartitionColumns'='supported'",
        ("INSERT INTO {t} SELECT id, 'p' || (id % 2) FROM range(4)", "DELETE FROM {t} WHERE id = 1"),
        more="PARTITIONED BY (p)",
    ),
    "values of partitions": Case(
        "id LONG, d DATE, n INT, b BOOLEAN, dc DECIMAL(5,2), db DOUBLE",
        FEED,
        (
            "INSERT INTO {t} VALUES (1, date'2020-01-01', 1, true, 1.50, 0.1D), "
            "(2, null, null, null, null, null), (3, date'1500-01-01', -1, false, -1.5, double('Infinity')), "
            "(4, date'2020-01-01', 1, true, 100, double('-Infinity')), "
            "(5, date'2020-01-01', 1, true, 1, 1e20D)",
            "DELETE FROM {t} WHERE id = 1",
        ),
        more="PARTITIONED BY (d, n, b, dc, db)",
    ),
    "partitions by a time": Case(
        "id LONG, ts TIMESTAMP", FEED, (), refused="is partitioned by 'ts'", more="PARTITIONED BY (ts)"
    ),
    "columns of CHAR": Case("id LONG, c CHAR(4)", FEED, ("INSERT INTO {t} VALUES (1, 'ab'), (2, null)",)),
    "CHAR within columns": Case(
        "id LONG, s STRUCT<x: CHAR(3)>", FEED, (), refused="CHAR within the column 's'"
    ),
    "columns with defaults": Case(
        "id LONG, v STRING DEFAULT 'd'",
        f"{FEED}, 'delta.feature.allowColumnDefaults'='supported'",
        (
            *("INSERT INTO {t} (id) VALUES (1)", "ALTER TABLE {t} ADD COLUMN w INT"),
            *("INSERT INTO {t} VALUES (2, 'x', 5)", "UPDATE {t} SET v = 'q' WHERE id = 1"),
        ),
    ),
    "generated columns and identities": Case(
        "id BIGINT GENERATED ALWAYS AS IDENTITY, v STRING, d STRING GENERATED ALWAYS AS (v || 'x')",
        FEED,
        ("INSERT INTO {t} (v) VALUES ('a'), ('b')", "DELETE FROM {t} WHERE v = 'a'"),
    ),
    "a check of VACUUM": simple(f"{PLAIN}, 'delta.feature.vacuumProtocolCheck'='supported'", *CHANGES),
    "overwritten and restored": simple(
        PLAIN,
        *(ROWS, "INSERT OVERWRITE {t} SELECT id, 'o' FROM range(3)"),
        *("RESTORE TABLE {t} TO VERSION AS OF 1", "TRUNCATE TABLE {t}", ROWS),
    ),
}


def texts(rows: Any) -> list[str]:
    return sorted(repr([_plain(value) for value in row]) for row in rows)


def _plain(value: Any) -> Any:
    """Return a value as both ways give it: maps, rows and times."""
    if hasattr(value, "asDict"):
        value = value.asDict()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list) and value and all(type(one) is tuple for one in value):
        return _plain(dict(value))
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value.replace(tzinfo=None) if hasattr(value, "tzinfo") else value


def ours(source: Any, folder: Path) -> list[tuple[Any, ...]]:
    reader, rows = reader_of(source, folder), []
    end = reader.initialOffset()
    while True:
        at, found = step(reader, end)
        if at == end:
            return [row[:-2] for row in rows]
        end, rows = at, rows + found


def make(spark: Any, path: Path, case: Case) -> None:
    table = f"delta.`{path}`"
    before = {name: spark.conf.get(name, None) for name in case.settings}
    try:
        for name, value in case.settings.items():
            spark.conf.set(name, value)
        create = f"CREATE TABLE {table} ({case.fields}) USING delta {case.more}"
        spark.sql(f"{create} TBLPROPERTIES ({case.properties})")
        for statement in case.statements:
            spark.sql(statement.replace("{t}", table))
    finally:
        for name, value in before.items():
            spark.conf.unset(name) if value is None else spark.conf.set(name, value)


def refused(message: str, read: Callable[[], Any]) -> None:
    with pytest.raises((ConfigError, RuntimeError), match=message):
        read()


#: The other cases are nightly: a table costs seconds.
BY_DAY = frozenset(
    {
        *("deletion vectors, and files that go whole", "column mapping by name, with a feed"),
        *("column mapping within columns, by number", "TIMESTAMP_NTZ, and old times", "V2 checkpoints"),
    }
)


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in BY_DAY else pytest.mark.nightly) for one in CASES]
)
def test_a_table_is_read_as_spark_reads_it_or_refused(spark: Any, tmp_path: Path, name: str) -> None:
    case, path = CASES[name], tmp_path / "table"
    make(spark, path, case)
    table = lambda: ours(DeltaTableSource(path), tmp_path / "rows")  # noqa: E731
    feed = lambda: ours(  # noqa: E731
        DeltaSource(path, DeltaChanges.FEED, starting_version=0, max_files_per_trigger=3),
        tmp_path / "feed",
    )
    if case.refused:
        refused(case.refused, table)
        refused(case.refused, feed)
        return
    wanted = texts(spark.read.format("delta").load(str(path)).collect())
    assert texts(table()) == wanted
    (tmp_path / "a link").symlink_to(path)
    assert texts(ours(DeltaTableSource(tmp_path / "a link"), tmp_path / "by link")) == wanted
    if case.feed_refused:
        refused(case.feed_refused, feed)
        return
    changes = spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", "0")
    found, wanted = feed(), changes.load(str(path)).collect()
    assert texts(found) == texts(wanted)
    # Of each version, what is gone comes first.
    kinds = [(row[-2], row[-3] not in ("delete", "update_preimage")) for row in found]
    assert kinds == sorted(kinds)


def test_a_shallow_clone_is_read_with_the_files_of_the_other_table(spark: Any, tmp_path: Path) -> None:
    whole, clone = tmp_path / "a whole", tmp_path / "clone"
    make(spark, whole, CASES["deletion vectors"])
    spark.sql(f"CREATE TABLE delta.`{clone}` SHALLOW CLONE delta.`{whole}`")
    spark.sql(f"INSERT INTO delta.`{clone}` VALUES (500, 'c')")
    spark.sql(f"DELETE FROM delta.`{clone}` WHERE id IN (0, 500)")
    link = tmp_path / "link"
    link.symlink_to(clone)
    rows = spark.read.format("delta").load(str(clone)).collect()
    assert texts(ours(DeltaTableSource(link), tmp_path / "by link")) == texts(rows)
    assert texts(ours(DeltaTableSource(clone), tmp_path / "rows")) == texts(rows)
    source = DeltaSource(clone, DeltaChanges.FEED, starting_version=0)
    changes = spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", "0")
    assert texts(ours(source, tmp_path / "feed")) == texts(changes.load(str(clone)).collect())


def test_a_table_that_was_converted_is_read_as_its_log_says(spark: Any, tmp_path: Path) -> None:
    path = tmp_path / "table"
    spark.sql("SELECT id, 'x' || id v, id % 2 AS p FROM range(6)").write.partitionBy("p").parquet(str(path))
    spark.sql(f"CONVERT TO DELTA parquet.`{path}` PARTITIONED BY (p LONG)")
    spark.sql(f"INSERT INTO delta.`{path}` VALUES (500, 'c', 1)")
    rows = spark.read.format("delta").load(str(path)).collect()
    assert texts(ours(DeltaTableSource(path), tmp_path / "rows")) == texts(rows)


def test_a_partition_whose_value_is_an_empty_text_is_null_also_where_spark_reads_the_text(
    spark: Any, tmp_path: Path
) -> None:
    """Spark writes none, and others do. Delta's protocol says null; deltalake cannot tell them apart."""
    path, feed = tmp_path / "table", {"delta.enableChangeDataFeed": "true"}
    table = Table(path, partition=["p"], configuration=feed, n="long", p="string")
    for name, value in (("a.parquet", ""), ("b.parquet", "x")):
        added = table.add(name, {"n": [1]}, partitionValues={"p": value})
        added["add"]["size"] = (path / name).stat().st_size
        table.commit(added)
    rows = spark.read.format("delta").load(str(path)).collect()
    assert texts(rows) == ["[1, '']", "[1, 'x']"]
    assert texts(ours(DeltaTableSource(path), tmp_path / "rows")) == ["[1, 'x']", "[1, None]"]
    source = DeltaSource(path, DeltaChanges.FEED, starting_version=0)
    assert [row[:2] for row in ours(source, tmp_path / "feed")] == [(1, None), (1, "x")]
