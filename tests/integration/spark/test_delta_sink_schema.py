"""The Delta sink and its table's schema: new columns, wider types, rules, refusals."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest

from flinkish_spark import Append, CheckpointConfig, OverwritePartitions, SchemaEvolution, Upsert
from flinkish_spark.connectors.delta.table import TableInfo
from flinkish_spark.core.errors import BadRecordError, ConfigError, FlinkishError, SchemaError
from flinkish_spark.protocol.records import Outcome
from tests.support.delta_rig import DeltaRig, Way

OLD, NEW = "id BIGINT, v STRING", "id BIGINT, v STRING, n INT, s STRUCT<a: INT>"
BOTH = pytest.mark.parametrize("way", [Way.DELTA_RS, Way.SPARK])
NATIVE = pytest.mark.parametrize("way", [Way.DELTA_RS, pytest.param(Way.SPARK, marks=pytest.mark.nightly)])
ADD, WIDEN = SchemaEvolution.ADD_COLUMNS, SchemaEvolution.WIDEN_TYPES
BY_ID = Upsert(keys=("id",))
MAPPED = "TBLPROPERTIES ('delta.columnMapping.mode' = 'name')"


@pytest.mark.parametrize(
    ("way", "mode"),
    [(Way.DELTA_RS, None), pytest.param(Way.SPARK, BY_ID, marks=pytest.mark.nightly)],
)
def test_new_columns_come_with_the_checkpoint(spark, tmp_path, way, mode) -> None:
    """Another way may add the same column in between, under another physical name."""
    settings = {} if mode is None else {"mode": mode}
    rig = DeltaRig(spark, tmp_path / "t", NEW, way=way, schema_evolution=ADD, **settings)
    rig.sql(f"CREATE TABLE {{t}} ({OLD}) USING delta {MAPPED}")
    rig.sql("INSERT INTO {t} VALUES (0, 'theirs')")
    rig.preflight()
    staged = rig.stage(0, [(1, "a", 1, (1,))]) + rig.stage(1, [(2, "b", None, None)])
    rig.sql("ALTER TABLE {t} ADD COLUMNS (n INT)")
    assert not rig.committer.why_dead(staged)
    versions = rig.versions
    assert rig.commit(1, staged).outcome is Outcome.COMMITTED
    assert rig.versions == versions + 1
    # From here on the table has all columns.
    assert rig.put(2, [(3, "c", 3, (3,))]).outcome is Outcome.COMMITTED
    expected = [(0, "theirs", None, None), (1, "a", 1, (1,)), (2, "b", None, None), (3, "c", 3, (3,))]
    assert rig.rows("id", "v", "n", "s") == Counter(expected)


def test_a_decided_checkpoint_survives_what_others_do_to_the_table(spark, tmp_path) -> None:
    """Data files that no longer fit go in as rows: renamed and added again, NOT NULL, partitioned."""
    rig = DeltaRig(spark, tmp_path / "t", OLD, schema_evolution=ADD)
    rig.sql(f"CREATE TABLE {{t}} ({OLD}) USING delta {MAPPED}")
    staged = rig.stage(0, [(1, "a")])
    assert staged[0].payload["form"] == "FILES"
    rig.sql("ALTER TABLE {t} DROP COLUMN v")
    rig.sql("ALTER TABLE {t} ADD COLUMN v STRING")
    rig.sql("ALTER TABLE {t} ADD CONSTRAINT positive CHECK (id > 0)")
    assert "got the constraint positive" in rig.committer.why_dead(staged)[0]
    assert rig.commit(1, staged).outcome is Outcome.COMMITTED
    staged = rig.stage(1, [(2, "b")])
    rig.sql("ALTER TABLE {t} DROP COLUMN v")
    assert not rig.committer.why_dead(staged)
    assert rig.commit(2, staged).outcome is Outcome.COMMITTED
    assert rig.rows("id", "v") == Counter([(1, None), (2, "b")])


def test_rows_that_the_table_can_never_take_are_lost_with_proof(spark, tmp_path) -> None:
    rig = DeltaRig(spark, tmp_path / "t", OLD, schema_evolution=ADD)
    rig.sql(f"CREATE TABLE {{t}} ({OLD}) USING delta {MAPPED}")
    staged = rig.stage(0, [(1, "a")])
    rig.sql("ALTER TABLE {t} DROP COLUMN v")
    rig.sql("ALTER TABLE {t} ADD COLUMN v ARRAY<INT>")
    assert "another type" in rig.committer.why_dead(staged)[0]
    lost = rig.commit(1, staged)
    assert lost.outcome is Outcome.LOST and lost.is_proven_aborted, lost
    with pytest.raises(SchemaError, match="v"):
        rig.stage(1, [(2, "b")])


@NATIVE
@pytest.mark.nightly
def test_types_are_widened_where_the_table_allows_it(spark, tmp_path, way) -> None:
    rig = DeltaRig(spark, tmp_path / "t", "id BIGINT, n BIGINT", way=way, schema_evolution=WIDEN)
    rig.sql("CREATE TABLE {t} (id BIGINT, n INT) USING delta")
    with pytest.raises(SchemaError, match=r"does not have delta\.enableTypeWidening"):
        rig.preflight()
    rig.sql("ALTER TABLE {t} SET TBLPROPERTIES ('delta.enableTypeWidening' = 'true')")
    rig.preflight()
    with pytest.raises(SchemaError, match=r"column n is integer"):
        rig.other(schema_evolution=ADD).preflight()
    narrow = rig.other(schema="id BIGINT, n SMALLINT", schema_evolution=SchemaEvolution.NONE)
    narrow.preflight()
    staged = narrow.stage(0, [(1, 1)])
    assert rig.put(1, [(2, 1 << 40)]).outcome is Outcome.COMMITTED
    # Staged for INT, committed to BIGINT.
    assert not narrow.committer.why_dead(staged)
    assert narrow.commit(2, staged).outcome is Outcome.COMMITTED
    assert rig.rows() == Counter([(1, 1), (2, 1 << 40)])


RULES = "id BIGINT, n INT NOT NULL, twice INT GENERATED ALWAYS AS (n * 2)"


BROKEN = [
    ("id BIGINT, n INT", (1, -1), r"CHECK constraint positive \(n > 0\).*-1"),
    # Delta says whichever of the two rules it looks at first.
    ("id BIGINT, n INT", (1, None), "(?i)not null|n : null"),
    ("id BIGINT, n INT, twice INT", (1, 2, 5), '(?i)generated column.* 5|"twice":5'),
]


@pytest.mark.nightly
@pytest.mark.parametrize("mode", [Append(), BY_ID])
def test_a_row_that_breaks_a_rule_fails_when_it_is_staged(spark, tmp_path, mode) -> None:
    rig = DeltaRig(spark, tmp_path / "t", "id BIGINT, n INT", mode=mode)
    rig.sql(f"CREATE TABLE {{t}} ({RULES}) USING delta")
    rig.sql("ALTER TABLE {t} ADD CONSTRAINT positive CHECK (n > 0)")
    for schema, row, message in BROKEN:
        given = rig.other(schema=schema)
        given.preflight()
        with pytest.raises(BadRecordError, match=message):
            given.stage(0, [(7, 1, 2)[: len(row)], row])
    assert rig.put(1, [(7, 1)]).outcome is Outcome.COMMITTED
    assert rig.rows() == Counter([(7, 1, 2)])


def test_a_rule_that_staging_does_not_see_stops_the_job(spark, tmp_path) -> None:
    """Whatever it is. Proven lost, the checkpoint would be replayed for ever."""
    rig = DeltaRig(spark, tmp_path / "t", "id BIGINT, g BIGINT", way=Way.SPARK)
    rig.sql("CREATE TABLE {t} (id BIGINT, g BIGINT GENERATED ALWAYS AS (id * 2)) USING delta")
    rig.preflight()
    with pytest.raises(BadRecordError, match="The generated column g = "):
        rig.stage(0, [(1, 5)])
    with patch.object(TableInfo, "generated", {}):
        staged = rig.stage(0, [(1, 5)])
        assert not rig.committer.why_dead(staged)
        lost = rig.commit(1, staged)
    assert lost.outcome is Outcome.LOST and not lost.is_proven_aborted and "enerated" in lost.detail


DEEP = (
    "id BIGINT, s STRUCT<a: VARCHAR(3), n: STRUCT<bc: VARCHAR(2)>>, l ARRAY<VARCHAR(2)>, "
    "m MAP<VARCHAR(2), ARRAY<STRUCT<x: VARCHAR(1)>>>, c STRUCT<k: CHAR(2)>"
)
GOOD = (1, ("abc", ("de",)), ["fg", None], {"hi": [("j",), (None,)]}, ("k",))
TOO_LONG = [
    (1, ("abcd", None)),
    (1, ("a", ("def",))),
    (2, ["a", "abc"]),
    (3, {"abc": None}),
    (3, {"a": [("b",), ("cd",)]}),
    (4, ("abc",)),
]


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": BY_ID},
        pytest.param({}, marks=pytest.mark.nightly),
        pytest.param({"way": Way.SPARK}, marks=pytest.mark.nightly),
    ],
)
def test_rules_within_values_are_checked_when_rows_are_staged(spark, tmp_path, settings) -> None:
    schema = "id BIGINT, s STRUCT<a: STRING, n: STRUCT<bc: STRING>>, l ARRAY<STRING>, "
    schema += "m MAP<STRING, ARRAY<STRUCT<x: STRING>>>, c STRUCT<k: STRING>"
    rig = DeltaRig(spark, tmp_path / "t", schema, **settings)
    rig.sql(f"CREATE TABLE {{t}} ({DEEP}) USING delta")
    rig.sql("ALTER TABLE {t} ADD CONSTRAINT inner CHECK (s.a IS NULL OR s.a <> 'no')")
    rig.preflight()
    if settings:
        with pytest.raises(SchemaError, match=r"constraint inner .* is about columns that the stream lacks"):
            rig.other(schema="id BIGINT, s STRUCT<n: STRUCT<bc: STRING>>").preflight()
    for place, value in TOO_LONG:
        bad = (77, *(value if at == place else GOOD[at] for at in range(1, len(GOOD))))
        with pytest.raises(BadRecordError, match=r'The length in .* of column .*"id":77'):
            rig.stage(0, [GOOD, bad])
    with pytest.raises(BadRecordError, match="inner"):
        rig.stage(0, [(77, ("no", None), *GOOD[2:])])
    assert rig.put(1, [GOOD, (2, None, None, None, None)]).outcome is Outcome.COMMITTED
    first, second = spark.read.format("delta").load(str(rig.table)).orderBy("id").collect()
    assert first.asDict(recursive=True) == {
        "id": 1,
        "s": {"a": "abc", "n": {"bc": "de"}},
        "l": ["fg", None],
        "m": {"hi": [{"x": "j"}, {"x": None}]},
        "c": {"k": "k "},
    }
    assert second == (2, None, None, None, None)


def test_not_null_within_a_value_is_checked_or_refused_before_the_start(spark, tmp_path) -> None:
    rig = DeltaRig(spark, tmp_path / "t", "id BIGINT, s STRUCT<a: INT>", way=Way.SPARK)
    rig.sql("CREATE TABLE {t} (id BIGINT, s STRUCT<a: INT NOT NULL>) USING delta")
    # Delta has no MERGE of what might be null there, whatever the rows are.
    with pytest.raises(
        SchemaError, match=r"Delta has no MERGE for it: .*cannot cast .*STRUCT<a: INT NOT NULL>"
    ):
        rig.other(mode=BY_ID).preflight()
    with pytest.raises(SchemaError, match=r"lacks the column s\.a, which is NOT NULL"):
        rig.other(schema="id BIGINT").preflight()
    rig.preflight()
    for row in [(7, (None,)), (7, None)]:
        with pytest.raises(BadRecordError, match=r'The column s\.a NOT NULL .*"id":7'):
            rig.stage(0, [(1, (1,)), row])
    assert rig.put(1, [(1, (2,))]).outcome is Outcome.COMMITTED
    assert rig.rows() == Counter([(1, (2,))])


PAIR = "STRUCT<a: STRING, b: INT>"
NESTED = f"id BIGINT, s {PAIR}, l ARRAY<{PAIR}>, m MAP<STRING, {PAIR}>"
FEWER = "id BIGINT, s STRUCT<b: INT>, l ARRAY<STRUCT<b: INT, a: STRING>>, m MAP<STRING, STRUCT<B: INT>>"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "settings",
    [
        {"mode": BY_ID},
        {"mode": BY_ID, "schema_evolution": ADD, "way": Way.SPARK},
        {},
    ],
)
def test_structs_of_the_stream_may_lack_fields_of_the_table_s(spark, tmp_path, settings) -> None:
    """And have them in another order; the rows are whole, as if null had been given."""
    rig = DeltaRig(spark, tmp_path / "t", FEWER, **settings)
    rig.sql(f"CREATE TABLE {{t}} ({NESTED}) USING delta")
    rig.sql("INSERT INTO {t} VALUES (1, named_struct('a', 'old', 'b', 0), null, null)")
    rig.preflight()
    assert (
        rig.put(1, [(1, (2,), [(3, "x")], {"k": (4,)}), (5, None, None, None)]).outcome is Outcome.COMMITTED
    )
    found = spark.read.format("delta").load(str(rig.table)).where("s.a IS NULL").orderBy("id").collect()
    first, second = (row.asDict(recursive=True) for row in found)
    assert first == {
        "id": 1,
        "s": {"a": None, "b": 2},
        "l": [{"a": "x", "b": 3}],
        "m": {"k": {"a": None, "b": 4}},
    }
    assert second == {"id": 5, "s": None, "l": None, "m": None}


@pytest.mark.nightly
def test_rows_of_a_table_that_numbers_them_get_numbers_with_the_commit(spark, tmp_path) -> None:
    rig = DeltaRig(spark, tmp_path / "t", "v STRING")
    rig.sql("CREATE TABLE {t} (no BIGINT GENERATED ALWAYS AS IDENTITY, v STRING) USING delta")
    rig.preflight()
    staged = rig.stage(0, [("a",)])
    assert staged[0].payload["form"] == "ROWS"
    rig.stage(0, [("a",)])
    rig.put(1, [("b",), ("c",)])
    rig.commit(2, staged)
    numbers = [no for (no,) in rig.rows("no")]
    assert len(set(numbers)) == 3
    with pytest.raises(SchemaError, match="numbers its column no by itself"):
        rig.other(schema="no BIGINT, v STRING").preflight()


TABLE = "id BIGINT NOT NULL, v STRING, p STRING"
FULL = "id BIGINT, v STRING, p STRING"


#: What both writers refuse by the same code: `make test` shows the first one with both.
UNFIT = [
    (f"{FULL}, n INT", {}, SchemaError, "no column n"),
    (
        "id BIGINT, v DOUBLE, p STRING",
        {"schema_evolution": WIDEN},
        SchemaError,
        "v is string in the table",
    ),
    ("id BIGINT, v STRING", {}, SchemaError, "lacks the partition column p"),
    ("v STRING, p STRING", {}, SchemaError, "lacks the column id, which is NOT NULL"),
    (FULL, {"partition_by": ("v",)}, SchemaError, "[Ii]t is partitioned by p"),
    (FULL, {"mode": Upsert(keys=("x",))}, SchemaError, "keys of .* column 'x', which"),
    (
        FULL,
        {"mode": Upsert(keys=("id",), sequence_by="x")},
        SchemaError,
        "sequence_by of .* column 'x', which",
    ),
    (
        FULL,
        {"mode": Upsert(keys=("id",), not_stored=("x",))},
        SchemaError,
        "not_stored of .* column 'x', which",
    ),
    (FULL, {"mode": Upsert(keys=("id",), delete_when="op = 1")}, SchemaError, "no condition"),
    (FULL, {"mode": Upsert(keys=("id",), delete_when="v")}, SchemaError, "type string"),
    (f"{FULL}, a ARRAY<INT>", {"mode": Upsert(keys=("a",))}, SchemaError, "simple values"),
]


@pytest.mark.parametrize(
    "way,schema,settings,error,message",
    [
        *((Way.DELTA_RS, *case) for case in UNFIT),
        (Way.SPARK, *UNFIT[0]),
        *(pytest.param(Way.SPARK, *case, marks=pytest.mark.nightly) for case in UNFIT[1:]),
    ],
)
def test_what_does_not_fit_is_refused_before_the_start(
    spark, tmp_path_factory, way, schema, settings, error, message
) -> None:
    table = tmp_path_factory.getbasetemp() / "refusing"
    rig = DeltaRig(spark, table, schema, way=way, **settings)
    if not table.exists():
        rig.sql(f"CREATE TABLE {{t}} ({TABLE}) USING delta PARTITIONED BY (p)")
    with pytest.raises(error, match=message) as caught:
        rig.preflight()
    assert isinstance(caught.value, FlinkishError) and caught.value.what_to_do


@pytest.mark.parametrize("settings", [{"mode": BY_ID}, {"way": Way.SPARK}, {}])
def test_a_table_that_delta_would_not_make_is_refused_before_the_start(spark, tmp_path, settings) -> None:
    """Not by the commit of a checkpoint that is decided."""
    for schema, partition_by in [("id BIGINT, `a b` STRING", ()), ("id BIGINT, p STRING", ("id", "p"))]:
        with pytest.raises(SchemaError, match=r"refuses the stream"):
            DeltaRig(spark, tmp_path / "t", schema, partition_by=partition_by, **settings).preflight()
    mode = Upsert(keys=("id",), delete_when="op", not_stored=("op x",))
    DeltaRig(spark, tmp_path / "t", "id BIGINT, op BOOLEAN, `op x` INT", mode=mode).preflight()
    with pytest.raises(SchemaError, match="no condition"):
        DeltaRig(spark, tmp_path / "t", OLD, mode=Upsert(keys=("id",), delete_when="max(id) > 1")).preflight()


def test_a_path_that_spark_looks_for_elsewhere_is_refused_before_the_start(spark, tmp_path) -> None:
    """Tasks would write to their disks, and Spark would read from HDFS."""
    rig = DeltaRig(spark, tmp_path / "t", OLD)
    conf = spark.sparkContext._jsc.hadoopConfiguration()
    before = conf.get("fs.defaultFS")
    conf.set("fs.defaultFS", "hdfs://nobody.invalid:8020")
    try:
        with pytest.raises(ConfigError, match="has no scheme") as caught:
            rig.preflight()
    finally:
        conf.set("fs.defaultFS", before)
    assert f"hdfs://nobody.invalid:8020{tmp_path}/t, or file://{tmp_path}/t" in caught.value.what_to_do
    rig.preflight()


def test_modes_that_a_table_does_not_allow_are_refused_before_the_start(spark, tmp_path) -> None:
    rig = DeltaRig(spark, tmp_path / "t", OLD, mode=OverwritePartitions())
    with pytest.raises(SchemaError, match=r"It has no partitions.*give DeltaSink partition_by"):
        rig.preflight()
    rig.sql(f"CREATE TABLE {{t}} ({OLD}) USING delta TBLPROPERTIES ('delta.appendOnly' = 'true')")
    for mode in (OverwritePartitions(), BY_ID):
        with pytest.raises(SchemaError, match=r"delta\.appendOnly.*use Append\(\), or ALTER TABLE"):
            rig.other(mode=mode).preflight()
    rig.sql("ALTER TABLE {t} UNSET TBLPROPERTIES ('delta.appendOnly')")
    with pytest.raises(SchemaError, match="It has no partitions"):
        rig.preflight()
    rig.sql("ALTER TABLE {t} ADD CONSTRAINT c CHECK (v <> '')")
    rig.sql("ALTER TABLE {t} ADD COLUMNS (k STRING)")
    with pytest.raises(SchemaError, match="no column other, which is a key"):
        mode = Upsert(keys=("other",))
        rig.other(schema=f"{OLD}, other INT", mode=mode, schema_evolution=ADD).preflight()
    with pytest.raises(SchemaError, match=r"constraint c .* columns that the stream lacks"):
        rig.other(schema="id BIGINT", mode=BY_ID).preflight()


@BOTH
def test_a_retention_shorter_than_interval_and_restart_budget_is_refused(spark, tmp_path, way) -> None:
    rig = DeltaRig(spark, tmp_path / "t", OLD, way=way)
    longer = CheckpointConfig(interval_ms=3_600_000, restart_budget_ms=3_600_001)
    name = "spark.databricks.delta.properties.defaults.deletedFileRetentionDuration"
    spark.conf.set(name, "interval 2 hours")
    try:
        if way is Way.DELTA_RS:
            with pytest.raises(ConfigError, match=r"7200000 ms, shorter than .* 7200001 ms"):
                rig.preflight(longer)
        rig.preflight(CheckpointConfig())
    finally:
        spark.conf.unset(name)
    kept = "deletedFileRetentionDuration"
    rig.sql(f"CREATE TABLE {{t}} ({OLD}) USING delta TBLPROPERTIES ('delta.{kept}' = 'interval 2 hours')")
    if way is Way.SPARK:
        # Its rows wait where VACUUM does not look.
        rig.preflight(longer)
    else:
        with pytest.raises(ConfigError, match=kept):
            rig.preflight(longer)
    both = f"'delta.{kept}' = 'interval 1 week', 'delta.setTransactionRetentionDuration' = 'interval 2 hours'"
    rig.sql(f"ALTER TABLE {{t}} SET TBLPROPERTIES ({both})")
    with pytest.raises(ConfigError, match="setTransactionRetentionDuration"):
        rig.preflight(longer)
