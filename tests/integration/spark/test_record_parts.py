"""Keys and values in every format together: rows, tombstones and bad records, out of a table of records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

from flinkish_spark import (
    Avro,
    Csv,
    DeadLetter,
    DebeziumJson,
    Json,
    JsonSchema,
    KafkaSink,
    OnBadRecord,
    OnTombstone,
    Protobuf,
    Raw,
    String,
)
from flinkish_spark.checkpoint.failures import classify
from flinkish_spark.connectors.bad_records import REASON
from flinkish_spark.connectors.kafka.record_encoder import check_columns
from flinkish_spark.connectors.kafka.records import Decoding, Deserializer
from flinkish_spark.contracts.source import NO_JOB
from flinkish_spark.core.errors import SchemaError
from tests.support.encoded import encoded_records


def message() -> bytes:
    kinds = descriptor_pb2.FieldDescriptorProto
    files = descriptor_pb2.FileDescriptorSet()
    made = files.file.add(name="key.proto", syntax="proto3").message_type.add(name="Key")
    made.field.add(name="id", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    return files.SerializeToString()


AVRO = '{"type": "record", "name": "Key", "fields": [{"name": "id", "type": "string"}]}'
SCHEMA = '{"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}'

#: By name: the format with a field `id`, one whose `id` is "a", and what it cannot be.
FORMS: dict[str, tuple[Any, bytes, bytes]] = {
    "json": (Json("id STRING"), b'{"id":"a"}', b'{"id": '),
    "string": (String("id"), b"a", b"\xff"),
    "csv": (Csv("id STRING"), b"a", b'"'),
    "avro": (Avro(AVRO), b"\2a", b"\4a"),
    "protobuf": (Protobuf(message(), "Key"), b"\n\1a", b"\xff"),
    "json schema": (JsonSchema(SCHEMA), b'{"id":"a"}', b"{}"),
}


def records(spark: Any, *rows: tuple[bytes | None, bytes | None]) -> Any:
    fields = "key BINARY, value BINARY, topic STRING, partition INT, offset LONG"
    given = [(key, value, "t", 0, offset) for offset, (key, value) in enumerate(rows)]
    return spark.createDataFrame(given, fields).coalesce(1)


def deserializer(value: Any, **settings: Any) -> Deserializer:
    return Decoding(value, **settings).deserializer("in", NO_JOB, ["t"])


def rows(spark: Any, made: Deserializer, *given: tuple[bytes | None, bytes | None]) -> list[tuple[Any, ...]]:
    found = made.rows(records(spark, *given), ["t"], ["offset"]).collect()
    return [tuple(bytes(one) if isinstance(one, bytearray) else one for one in row) for row in found]


def bad(spark: Any, made: Deserializer, *given: tuple[bytes | None, bytes | None]) -> list[tuple[int, str]]:
    found = made.bad(records(spark, *given)).select("offset", REASON).collect()
    return [(row.offset, row[REASON]) for row in found]


@pytest.mark.parametrize("form", FORMS)
def test_a_format_of_keys_and_of_values(spark: Any, form: str) -> None:
    """One table: good, without a key, a tombstone, a bad key, a bad value, a tombstone with a bad key."""
    read, good, wrong = FORMS[form]
    given = ((good, good), (None, good), (good, None), (wrong, good), (good, wrong), (wrong, None))
    prefix = {"key": read, "key_fields_prefix": "key_"}
    value = replace(read, on_bad_record=OnBadRecord.DROP)
    kept = [("a", "a", 0), (None, "a", 1)]
    for tombstones, found, refused in (
        (OnTombstone.REFUSE, kept, [2, 3, 4, 5]),
        (OnTombstone.DROP, kept, [3, 4]),
        (OnTombstone.KEEP, [*kept, ("a", None, 2)], [3, 4, 5]),
    ):
        made = deserializer(value, tombstones=tombstones, **prefix)
        assert rows(spark, made, *given) == found
        told = bad(spark, made, *given)
        assert [offset for offset, _ in told] == refused
        assert all(("key" in why) == (offset in (3, 5)) for offset, why in told), told
    made = deserializer(value, tombstones=OnTombstone.DELETE, key=read)
    assert rows(spark, made, *given) == [("a", "+U", 0), ("a", "-D", 2)]
    assert (1, "the record has no key") in bad(spark, made, *given)
    strict = deserializer(read, tombstones=OnTombstone.KEEP, **prefix)
    assert rows(spark, strict, *given[:3]) == [*kept, ("a", None, 2)]
    for offset in (3, 4, 5):
        with pytest.raises(Exception) as failed:
            rows(spark, strict, *given[: offset + 1][-1:])
        error = classify(failed.value)
        assert error.facts["offset"] == 0 and "cannot be read. " in str(error)


@pytest.mark.parametrize("form", FORMS)
def test_a_format_of_keys_beside_bytes_and_beside_changes(spark: Any, form: str) -> None:
    read, good, wrong = FORMS[form]
    beside_bytes = deserializer(Raw("data"), key=read, tombstones=OnTombstone.KEEP)
    given = ((good, b"\xff"), (None, b""), (good, None))
    assert rows(spark, beside_bytes, *given) == [("a", b"\xff", 0), (None, b"", 1), ("a", None, 2)]
    letters = DeadLetter("bad")
    changes = deserializer(DebeziumJson("id STRING, n INT", letters), key=read, tombstones=OnTombstone.DROP)
    update = b'{"before": {"id": "b", "n": 1}, "after": {"id": "b", "n": 2}, "op": "u"}'
    given = ((good, update), (wrong, update), (good, b'{"op": "u"}'), (wrong, None), (None, update))
    both = [("b", 1, "-U"), ("b", 2, "+U")]
    assert rows(spark, changes, *given) == [(*one, offset) for offset in (0, 4) for one in both]
    (first, of_key), (second, of_value) = bad(spark, changes, *given)
    assert (first, second) == (1, 2) and "key" in of_key
    assert of_value.startswith("the value is no change in DebeziumJson (op is c, r, u or d;")


@pytest.mark.parametrize("form", [form for form in FORMS if form != "string"])
def test_a_changelog_in_a_format_has_tombstones(spark: Any, form: str) -> None:
    """What does not fit matters to a record with a value; the column of kinds is no field."""
    read, good, _ = FORMS[form]
    if form == "json schema":
        # What a schema does not name is written, too.
        read = replace(read, schema=SCHEMA[:-1] + ', "additionalProperties": false}')
    sink = KafkaSink(
        "b:9092", "out", key=read, value=read, row_kind="_row_kind", on_bad_record=OnBadRecord.DROP
    )
    given = [("a", "+I"), ("a", "-U"), ("a", "+U"), ("a", "-D"), ("a", "d"), ("a", None)]
    frame = spark.createDataFrame(given, "id STRING, _row_kind STRING").coalesce(1)
    check_columns(sink, frame.schema, "out")
    found = encoded_records(sink, frame).collect()
    value = [bytes(row.value) if row.value is not None else None for row in found]
    assert [bytes(row.key) for row in found] == [good] * 6
    told = [b'{"id":"a","_row_kind":"d"}', b'{"id":"a","_row_kind":null}']
    assert value == [good, None, good, None, *told]
    assert [row.misfit for row in found] == [None] * 4 + ["it has no row kind"] * 2
    with pytest.raises(SchemaError, match="does not have"):
        named = replace(sink, value=Json("id STRING, _row_kind STRING"))
        check_columns(named, frame.schema, "out")


def test_a_value_that_does_not_fit_is_none_of_a_deletion_s(spark: Any) -> None:
    sink = KafkaSink(
        "b:9092",
        "out",
        key=String("id"),
        value=JsonSchema(
            '{"properties": {"id": {"type": "string"}, "n": {"type": "integer", "maximum": 1}}}'
        ),
        row_kind="_row_kind",
        on_bad_record=OnBadRecord.DROP,
    )
    given = [("a", 1, "+I"), ("a", 2, "+U"), ("a", 2, "-D")]
    frame = spark.createDataFrame(given, "id STRING, n LONG, _row_kind STRING").coalesce(1)
    found = encoded_records(sink, frame).collect()
    assert [bytes(one.value) if one.value is not None else None for one in found] == [
        b'{"id":"a","n":1}',
        b'{"id":"a","n":2,"_row_kind":"+U"}',
        None,
    ]
    assert [one.misfit is None for one in found] == [True, False, True]


def parts_of(spark: Any, sink: KafkaSink, rows: str) -> list[Any]:
    """What writers get of rows in SQL, with bytes for bytearrays."""
    frame = spark.sql(rows).coalesce(1)
    check_columns(sink, frame.schema, "out")
    found = encoded_records(sink, frame).collect()
    return [row.asDict(recursive=True) for row in found]


@pytest.mark.parametrize("key", ["id", String("id"), Raw("id")])
def test_a_change_without_a_key_says_of_no_row_what_happens_to_it(spark: Any, key: Any) -> None:
    """What is left of it for a dead letter is all of it, its kind too."""
    sink = KafkaSink("b:9092", "out", key=key, value=Json("n INT"), row_kind="_row_kind")
    given = "('a', 1, '-D'), ('', 2, '+U'), (NULL, 3, '-D'), (NULL, 4, '+I')"
    rows = parts_of(spark, sink, f"SELECT * FROM VALUES {given} AS t(id, n, _row_kind)")
    found = [(one["key"], one["value"], one["misfit"]) for one in rows]
    assert found == [
        (b"a", None, None),
        (b"", b'{"n":2}', None),
        (None, b'{"id":null,"n":3,"_row_kind":"-D"}', "it has no key"),
        (None, b'{"id":null,"n":4,"_row_kind":"+I"}', "it has no key"),
    ]
    # A record that is no change may have none.
    plain = KafkaSink("b:9092", "out", key=key, value=Json("n INT"))
    (one,) = parts_of(spark, plain, "SELECT CAST(NULL AS STRING) AS id, 1 AS n")
    assert one == {"key": None, "value": b'{"n":1}', "topic": None}


def test_a_key_that_does_not_fit_is_told_with_all_fields(spark: Any) -> None:
    schema = '{"properties": {"id": {"type": "integer", "maximum": 1}}}'
    sink = KafkaSink("b:9092", "out", key=JsonSchema(schema), value=Json("name STRING"), row_kind="_row_kind")
    rows = "SELECT * FROM VALUES (7L, 'x', '+I'), (8L, 'y', '-D'), (1L, 'z', '+I') AS t(id, name, _row_kind)"
    bad, deletion, good = parts_of(spark, sink, rows)
    assert bad["value"] == b'{"id":7,"name":"x","_row_kind":"+I"}' and "maximum" in bad["misfit"]
    assert deletion["value"] == b'{"id":8,"name":"y","_row_kind":"-D"}' and "maximum" in deletion["misfit"]
    assert (good["value"], good["misfit"]) == (b'{"name":"z"}', None)


def test_headers_of_maps_with_lists_that_are_null(spark: Any) -> None:
    """A name with no list, or an empty one, is no header; the other names stay."""
    sink = KafkaSink("b:9092", "out", value=Raw("v"), headers="h")
    maps = (
        "map('a', array(X'31', NULL)), map('a', array(X'31'), 'b', NULL, 'c', array()), map('b', NULL), NULL"
    )
    given = f"SELECT explode(array({maps})) AS h"
    rows = f"SELECT X'00' AS v, CAST(h AS MAP<STRING, ARRAY<BINARY>>) AS h FROM ({given})"
    found = parts_of(spark, sink, rows)
    headers = [one["headers"] and [(h["key"], h["value"]) for h in one["headers"]] for one in found]
    assert headers == [[("a", b"1"), ("a", None)], [("a", b"1")], [], None]
    assert all("misfit" not in one for one in found), "names of a map are never null"


def test_a_record_with_a_header_without_a_name_is_a_bad_one(spark: Any) -> None:
    sink = KafkaSink("b:9092", "out", value=Raw("v"), headers="h")
    entries = "named_struct('key', 'a', 'value', X'31'), named_struct('key', NULL, 'value', X'32'), NULL"
    rows = f"SELECT X'00' AS v, CAST(array({entries}) AS ARRAY<STRUCT<key: STRING, value: BINARY>>) AS h"
    (one,) = parts_of(spark, sink, rows)
    assert (one["headers"], one["misfit"]) == ([{"key": "a", "value": b"1"}], "a header of it has no name")
    assert one["value"].startswith(b'{"v":"AA==","h":[{"key":"a"')
    (one,) = parts_of(spark, sink, rows.replace("'key', NULL", "'key', ''").replace(", NULL) AS", ") AS"))
    assert (one["value"], one["misfit"]) == (b"\0", None) and [h["key"] for h in one["headers"]] == ["a", ""]
