"""Names that are made of others, and names of fields: two that differ stay two, or are refused."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from flinkish_spark import AggregateColumn, Emit, Fold, KafkaSource
from flinkish_spark.connectors.bad_records import DROPPED_METRIC, name_drop_metric
from flinkish_spark.connectors.collection import CollectionSource
from flinkish_spark.connectors.delta.table import TableInfo
from flinkish_spark.connectors.formats.avro_format import derive_schema
from flinkish_spark.connectors.hybrid import HybridSource
from flinkish_spark.connectors.partition_values import why_no_partition
from flinkish_spark.contracts.source import SourceNode
from flinkish_spark.core.arrow_pass import _ColumnRenamer
from flinkish_spark.core.errors import GraphError, SchemaError
from flinkish_spark.job.preflight import check_source_names
from flinkish_spark.joins import JoinType
from flinkish_spark.planning.declare import refuse_unfit_key
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.types.schemas import check_field_names
from flinkish_spark.windows import TumblingEventTimeWindows

Named = tuple[str, Any]


def numbers() -> CollectionSource:
    return CollectionSource([1], "n LONG")


def hybrid_of(parts: int) -> HybridSource:
    return HybridSource(*(numbers() for _ in range(parts)))


def of(*names: str) -> T.StructType:
    return T.StructType([T.StructField(name, T.LongType()) for name in names])


def test_what_scans_drop_is_counted_under_names_of_their_own() -> None:
    """["a_b"] and ["a", "b"] were one metric, and the job could not start."""
    scans = [
        ("", "topics", "a_b"),
        ("", "topics", "a", "b"),
        ("", "topics", "a", "b_c"),
        ("", "topics", "a_b", "c"),
        ("", "pattern", "a_b"),
        ("", "uid", "a_b"),
        ("b", "uid", "a"),
        ("", "uid", 'a", "b'),
    ]
    names = {name_drop_metric(scan) for scan in scans}
    assert len(names) == len(scans) and all(name.startswith(DROPPED_METRIC) for name in names)


def test_nested_avro_records_have_names_of_their_own() -> None:
    """An Avro schema defines a name once: a.b_c and a_b.c are both Record_a_b_c."""
    inner = T.StructType().add("n", "long")
    schema = (
        T.StructType()
        .add("a", T.StructType().add("b_c", inner))
        .add("a_b", T.StructType().add("c", T.ArrayType(inner)))
    )
    names: list[str] = []

    def note(found: dict[str, object]) -> dict[str, object]:
        if found.get("type") == "record":
            names.append(str(found["name"]))
        return found

    json.loads(json.dumps(derive_schema(schema)), object_hook=note)
    assert sorted(names) == ["Record", "Record_a", "Record_a_b", "Record_a_b_c", "Record_a_b_c_"]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("a", "A"), "has the field 'A' twice. For Spark it is the same as 'a'"),
        (("a", "a"), "has the field 'a' twice"),
        (("s", "\u017f"), "For Spark it is the same as 's'"),
        (("\u00e9", "\u00c9"), "For Spark it is the same as"),
        (("a", ""), "has a field without a name"),
        (("_fs_kind",), "has a field '_fs_kind'"),
        (("_FS_Kind",), "has a field '_FS_Kind'"),
    ],
)
def test_names_that_spark_takes_for_one_are_refused(names: tuple[str, ...], said: str) -> None:
    with pytest.raises(SchemaError) as found:
        check_field_names(of(*names), "the source 'in'")
    assert str(found.value).startswith("the source 'in'") and said in str(found.value)


def test_every_other_name_is_taken() -> None:
    check_field_names(of("a", "a.b", "a b", "`", ",", ";{}()\n\t=", "*", "\u00df", "e\u0301", "\u00e9"), "it")


def test_a_worker_gets_the_columns_under_their_names() -> None:
    seen = []

    def worker(batches):
        for batch in batches:
            seen.append(batch.schema.names)
            yield batch

    batch = pa.record_batch([pa.array([1]), pa.array(["x"])], names=["_fs_column_0", "_fs_column_1"])
    list(_ColumnRenamer(worker, ("a.b", "c`d"))(iter([batch])))
    assert seen == [["a.b", "c`d"]]


def test_types_whose_values_fold_are_no_keys_and_no_partitions() -> None:
    refuse_unfit_key(T.StringType(), "it is keyed by", "k")
    with pytest.raises(GraphError, match=r"keyed by k, a string collate UTF8_LCASE\. Its collation makes"):
        refuse_unfit_key(T.StringType("UTF8_LCASE"), "it is keyed by", "k")
    assert not any(map(why_no_partition, (T.StringType(), T.LongType(), T.TimestampType(), T.DoubleType())))
    assert why_no_partition(T.BinaryType()) == "bytes are no text: different ones would be one partition"
    assert "UTF8_LCASE" in why_no_partition(T.StringType("UTF8_LCASE"))


def test_a_delta_table_says_which_texts_it_pads_and_folds() -> None:
    def field(name: str, **metadata: object) -> dict[str, object]:
        return {"name": name, "type": "string", "nullable": True, "metadata": metadata}

    table = TableInfo(
        (
            field("id", __CHAR_VARCHAR_TYPE_STRING="varchar(5)"),
            field("code", __CHAR_VARCHAR_TYPE_STRING="char(5)"),
            field("Name", __COLLATIONS={"Name": "spark.UTF8_LCASE"}),
        ),
        (),
    )
    assert table.padded == ("code",)
    assert [table.is_collated(name) for name in ("id", "name", "missing")] == [False, True, False]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # Both are topic-a-b-c.
        (("a", KafkaSource("nowhere:1", ["b-c"])), ("a-b", KafkaSource("nowhere:1", ["c"]))),
        # The hybrid's second part is in.1.
        (("in", hybrid_of(2)), ("in.1", numbers())),
    ],
)
def test_sources_whose_inputs_would_be_kept_under_one_name_are_refused(one: Named, other: Named) -> None:
    def named(*sources: Named) -> list[SourceNode]:
        return [cast(SourceNode, SimpleNamespace(uid=uid, source=source)) for uid, source in sources]

    with pytest.raises(GraphError, match=f"'{one[0]}' and '{other[0]}' cannot be told apart"):
        check_source_names(named(one, other))
    check_source_names(named(one, ("z", other[1])))


ODD = T.StructType().add(".u`s.er", "string").add("*", "long")


@pytest.mark.parametrize(
    "program",
    [
        lambda s: s.key_by(".u`s.er").sum("*", uid="sums", emit=Emit.PER_KEY),
        lambda s: (
            s.key_by(".u`s.er")
            .window(TumblingEventTimeWindows(10))
            .fold(AggregateColumn("*", Fold.SUM, "*"), uid="windows")
        ),
        lambda s: s.key_by(".u`s.er").max_by("*", uid="most", emit=Emit.PER_KEY),
    ],
)
def test_aggregates_over_columns_take_any_name(program: Any) -> None:
    """Arrow reads a name that begins with a dot as a path where it is asked for a field by an expression."""
    harness = ProgramHarness(program, ODD)
    harness.push_all([(("ann", 2), 1), (("ann", 5), 2)])
    harness.end_of_input()
    found = [tuple(row)[:2] for row in harness.take().rows]
    assert found in ([("ann", 7)], [("ann", 2), ("ann", 7)], [("ann", 2), ("ann", 5)], [("ann", 5)])


def test_joins_take_any_name() -> None:
    other = T.StructType().add("p`.", "string").add(";,", "long")
    harness = ProgramHarness(
        lambda one, two: (
            one.key_by(".u`s.er")
            .join(two.key_by("p`."))
            .interval(lower_ms=0, upper_ms=5, join_type=JoinType.LEFT, uid="near")
        ),
        ODD,
        other,
    )
    harness.push(("ann", 9), 1, source=1)
    harness.push_all([(("ann", 1), 1), (("ben", 2), 3)])
    harness.end_of_input()
    assert [tuple(row) for row in harness.take().rows] == [("ann", 1, "ann", 9), ("ben", 2, None, None)]
    assert harness.output_type.names == [".u`s.er", "*", "p`.", ";,"]
