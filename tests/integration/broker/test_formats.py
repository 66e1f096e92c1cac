"""Keys and values in every format, through jobs that crash, with a real schema registry."""

from __future__ import annotations

import json
import uuid
from collections import Counter

import pytest
from google.protobuf import descriptor_pb2

from flinkish_spark import (
    Avro,
    Csv,
    DeadLetter,
    Json,
    JsonSchema,
    KafkaSink,
    KafkaSource,
    OnBadRecord,
    OnSchemaChange,
    Protobuf,
    SchemaRegistry,
    String,
)
from tests.support.jobs import (
    await_that,
    environment,
    failure_of,
    produce,
    read_committed,
    rows,
    run_until,
    running,
)
from tests.support.two_phase_app import crash_at

pytestmark = pytest.mark.timeout(300)

PLAIN = "user STRING, n BIGINT, ratio DOUBLE, ok BOOLEAN"
FIELDS = f"{PLAIN}, amount DECIMAL(20,4), at TIMESTAMP"
ROWS = (
    '{"user": "a", "n": 9223372036854775807, "ratio": 0.1, "ok": true, '
    '"amount": 1234567890123456.7891, "at": "0001-01-01T00:00:00.000001Z"}',
    '{"user": "\\u00e4 \\"quoted\\", with\\nlines", "n": -9223372036854775808, "ratio": 5e-324, "ok": false, '
    '"amount": -0.0001, "at": "9999-12-31T23:59:59.999999Z"}',
    '{"user": "", "n": 0, "ratio": 1.7976931348623157e308, "ok": true, '
    '"amount": 0.0000, "at": "2026-10-25T01:30:00.123456Z"}',
)
AVRO = json.dumps(
    {
        "type": "record",
        "name": "shop.Order",
        "fields": [
            {"name": "user", "type": "string"},
            {"name": "n", "type": "long"},
            {"name": "ratio", "type": "double"},
            {"name": "ok", "type": "boolean"},
            {
                "name": "amount",
                "type": {"type": "bytes", "logicalType": "decimal", "precision": 20, "scale": 4},
            },
            {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        ],
    }
)
JSON_SCHEMA = json.dumps(
    {
        "title": "Order",
        "type": "object",
        "properties": {
            "user": {"type": "string"},
            "n": {"type": "integer"},
            "ratio": {"type": "number"},
            "ok": {"type": "boolean"},
        },
        "required": ["user"],
    }
)


def order_descriptor() -> bytes:
    """shop.Order as protoc would write it, the second message of its file."""
    kinds = descriptor_pb2.FieldDescriptorProto
    files = descriptor_pb2.FileDescriptorSet()
    file = files.file.add(name="order.proto", package="shop", syntax="proto3")
    file.message_type.add(name="Other")
    message = file.message_type.add(name="Order")
    types = (kinds.TYPE_STRING, kinds.TYPE_INT64, kinds.TYPE_DOUBLE, kinds.TYPE_BOOL)
    for number, (name, kind) in enumerate(zip(("user", "n", "ratio", "ok"), types, strict=True), 1):
        message.field.add(name=name, number=number, type=kind, label=kinds.LABEL_OPTIONAL)
    return files.SerializeToString()


PROTOBUF = order_descriptor()


def forms(url: str):
    """By name: what writes, what reads, and which fields it has."""
    registry = SchemaRegistry(url)
    return {
        "csv": (Csv(FIELDS), Csv(FIELDS), FIELDS),
        "avro": (Avro(AVRO), Avro(AVRO), FIELDS),
        "protobuf": (Protobuf(PROTOBUF, "shop.Order"), Protobuf(PROTOBUF, "shop.Order"), PLAIN),
        "json schema": (JsonSchema(JSON_SCHEMA), JsonSchema(JSON_SCHEMA), PLAIN),
        "avro, registry": (Avro(AVRO, registry=registry), Avro(registry=registry), FIELDS),
        "protobuf, registry": (
            Protobuf(PROTOBUF, "shop.Order", registry=registry),
            Protobuf(message="shop.Order", registry=registry),
            PLAIN,
        ),
        "json schema, registry": (
            JsonSchema(registry=registry),
            JsonSchema(fields=FIELDS, registry=registry),
            FIELDS,
        ),
    }


def exact(text: bytes, names) -> str:
    """An object with every number as it is written."""
    found = json.loads(text, parse_float=str, parse_int=str)
    return json.dumps([found.get(name) for name in names])


@pytest.mark.parametrize("engine", ["jvm", "python"])
@pytest.mark.parametrize("form", list(forms("http://nowhere")))
def test_a_round_trip_through_a_job_that_crashes(spark, broker, topic, registry, job_dir, form, engine):
    servers, source, between, plain, out = broker.bootstrap_servers, topic(2), topic(2), topic(2), topic(2)
    writes, reads, fields = forms(registry.url)[form]
    names = [one.split()[0] for one in fields.split(", ")]

    def job():
        env = environment(spark, job_dir)
        given = env.from_source(KafkaSource(servers, [source], value=Json(fields), reader=engine), uid="given")
        given.sink_to(KafkaSink(servers, between, key=String("user"), value=writes, writer=engine), uid="written")
        given.sink_to(KafkaSink(servers, plain, value=Json(fields), writer=engine), uid="plain")
        found = env.from_source(
            KafkaSource(
                servers,
                [between],
                key=String("user"),
                key_fields_prefix="key_",
                value=reads,
                reader=engine,
            ),
            uid="read",
        )
        found.sink_to(KafkaSink(servers, out, value=Json(), writer=engine), uid="out")
        return env

    if "registry" in form and "json" not in form:
        # The schema that is read with is the newest of the subject, so one has to be there.
        written, kind = (AVRO, "AVRO") if form.startswith("avro") else (None, "PROTOBUF")
        if kind == "AVRO":
            registry.register(f"{between}-value", written)
        else:
            text = 'syntax = "proto3"; package shop; message Other {} message Order { string user = 1; '
            text += "int64 n = 2; double ratio = 3; bool ok = 4; }"
            registry.register(f"{between}-value", text, kind)
    elif "registry" in form:
        from flinkish_spark.connectors.formats.json_schema import derived_schema
        from flinkish_spark.types.ddl import parse_ddl

        registry.register(f"{between}-value", derived_schema(parse_ddl(fields)), "JSON")
    produce(servers, source, [row.encode() for row in ROWS])
    for point in ("decision:after:1", "sink-commit:before:2"):
        crash_at(job(), point)
        produce(servers, source, [row.encode() for row in ROWS])
    run_until(job(), lambda client: rows(client, "out") > 0 and len(read_committed(servers, out)) == 9)
    given = Counter(exact(one.value, names) for one in read_committed(servers, plain))
    found = Counter(exact(one.value, names) for one in read_committed(servers, out))
    assert given == found and set(given.values()) == {3} and len(given) == 3
    keys = {json.loads(one.value)["key_user"] for one in read_committed(servers, out)}
    assert keys == {"a", 'ä "quoted", with\nlines', ""}
