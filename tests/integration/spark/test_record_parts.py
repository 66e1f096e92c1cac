"""Keys and values in every format together: rows, tombstones and bad records, out of a table of records."""

from __future__ import annotations

import json
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
from flinkish_spark.connectors.formats.decoding import REASON
from flinkish_spark.connectors.kafka.records import Decoding, Deserializer
from flinkish_spark.connectors.kafka.writer import check_columns, record_columns
from flinkish_spark.contracts.source import NO_JOB
from flinkish_spark.core.errors import SchemaError


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
        assert error.facts["offset"] == 0 and "cannot be read. because" in str(error)


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
    found = frame.select(*record_columns(sink, frame.schema).values()).collect()
    value = [bytes(row.value) if row.value is not None else None for row in found]
    assert [bytes(row.key) for row in found] == [good] * 6
    assert value == [good, None, good, None, good, good]
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
    found = frame.select(*record_columns(sink, frame.schema).values()).collect()
    assert [bytes(one.value) if one.value is not None else None for one in found] == [
        b'{"id":"a","n":1}',
        b'{"id":"a","n":2}',
        None,
    ]
    assert [one.misfit is None for one in found] == [True, False, True]


@pytest.mark.parametrize("value", [Json("n INT"), String("n"), Csv("n INT")])
def test_a_letter_of_a_key_that_does_not_fit_has_all_fields(spark: Any, value: Any) -> None:
    """There is no key, and the value may not have its fields; a retraction has no value either."""
    symbols: Any = {"type": "enum", "name": "E", "symbols": ["A"]}
    key = Avro(json.dumps({"type": "record", "name": "K", "fields": [{"name": "k", "type": symbols}]}))
    given = [("A", 1, "+I"), ("Z", 2, "+U"), ("Z", 3, "-D"), ("A", 4, "-D")]
    frame = spark.createDataFrame(given, "k STRING, n INT, _row_kind STRING").coalesce(1)
    for row_kind, letter in (("_row_kind", b'{"k":"Z","n":2}'), ("", b'{"k":"Z","n":2,"_row_kind":"+U"}')):
        sink = KafkaSink("b:9092", "out", key=key, value=value, row_kind=row_kind)
        parts = record_columns(sink, frame.schema)
        found = frame.select(*[parts[one].cast("binary") for one in ("key", "value", "misfit")]).collect()
        assert [one.misfit is None for one in found] == [True, False, False, True]
        assert [one.key for one in found] == [b"\0", None, None, b"\0"]
        assert found[1].value == letter
        assert found[2].value == b'{"k":"Z","n":3,"_row_kind":"-D"}'
        assert (found[3].value is None) == bool(row_kind)
