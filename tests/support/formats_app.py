"""Jobs that write and read records in every format, in a process that may kill itself at a step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2

from flinkish_spark import (
    Avro,
    Csv,
    Json,
    JsonSchema,
    KafkaSink,
    KafkaSource,
    Protobuf,
    Raw,
    SchemaRegistry,
    StreamExecutionEnvironment,
    String,
)
from flinkish_spark.core.steps import SilentObserver
from flinkish_spark.testing.crash_points import KillAt, KillPoint, kill_process_group
from tests.support.jobs import environment, read_committed, run_until

PLAIN = "user STRING, n BIGINT, ratio DOUBLE, ok BOOLEAN"
FIELDS = f"{PLAIN}, amount DECIMAL(20,4), at TIMESTAMP"
ROWS = (
    '{"user": "a", "n": 9223372036854775807, "ratio": 0.1, "ok": true, '
    '"amount": 1234567890123456.7891, "at": "0001-01-01T00:00:00.000001Z", "data": "AAH/"}',
    '{"user": "\\u00e4 \\"quoted\\", with\\nlines", "n": -9223372036854775808, "ratio": 5e-324, "ok": false, '
    '"amount": -0.0001, "at": "9999-12-31T23:59:59.999999Z", "data": "Cg=="}',
    '{"user": "", "n": 0, "ratio": 1.7976931348623157e308, "ok": true, '
    '"amount": 0.0000, "at": "2026-10-25T01:30:00.123456Z", "data": ""}',
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


class Form(NamedTuple):
    """A format as a sink has it and as a source has it, and the fields of the rows that are written."""

    writes: Any
    reads: Any
    fields: str

    @property
    def names(self) -> list[str]:
        """The fields that a value has; what else is written is the key."""
        if isinstance(self.writes, Raw):
            return [self.writes.column]
        return [one.split()[0] for one in self.fields.split(", ")]


def forms(url: str) -> dict[str, Form]:
    """Every format that is read and written, those with schemas with a registry and without."""
    registry = SchemaRegistry(url)
    alike = {
        "json": (Json(FIELDS), FIELDS),
        "string": (String("user"), "user STRING"),
        "raw": (Raw("data"), "user STRING, data BINARY"),
        "csv": (Csv(FIELDS), FIELDS),
        "avro": (Avro(AVRO), FIELDS),
        "protobuf": (Protobuf(PROTOBUF, "shop.Order"), PLAIN),
        "json schema": (JsonSchema(JSON_SCHEMA), PLAIN),
    }
    return {
        **{name: Form(form, form, fields) for name, (form, fields) in alike.items()},
        "avro, registry": Form(Avro(AVRO, registry=registry), Avro(registry=registry), FIELDS),
        "protobuf, registry": Form(
            Protobuf(PROTOBUF, "shop.Order", registry=registry),
            Protobuf(message="shop.Order", registry=registry),
            PLAIN,
        ),
        "json schema, registry": Form(
            JsonSchema(registry=registry), JsonSchema(fields=FIELDS, registry=registry), FIELDS
        ),
    }


class Way(NamedTuple):
    """From a topic to another, one of which is in a format and the other one in JSON."""

    form: str
    source: str
    out: str


def write(env: StreamExecutionEnvironment, servers: str, way: Way, form: Form, engine: str) -> None:
    """Write JSON of a topic in a format."""
    source = KafkaSource(servers, [way.source], value=Json(form.fields), reader=engine)
    given = env.from_source(source, uid=f"given-{way.out}")
    sink = KafkaSink(servers, way.out, key=String("user"), value=form.writes, writer=engine)
    given.sink_to(sink, uid=f"out-{way.out}")


def read(env: StreamExecutionEnvironment, servers: str, way: Way, form: Form, engine: str) -> None:
    """Write what is read in a format as JSON, with the key beside it."""
    key = {"key": String("user"), "key_fields_prefix": "key_"}
    source = KafkaSource(servers, [way.source], value=form.reads, reader=engine, **key)
    found = env.from_source(source, uid=f"read-{way.out}")
    found.sink_to(KafkaSink(servers, way.out, value=Json(), writer=engine), uid=f"out-{way.out}")


ROLES = {"writer": write, "reader": read}


def main(
    role: str, root: Path, servers: str, ways: list[Way], url: str, engine: str, wanted: int, kill: str
) -> None:
    from pyspark.sql import SparkSession

    from flinkish_spark.bridge.session import configure_spark_with_jars
    from tests.conftest import spark_test_conf
    from tests.support.services import BUILD

    builder = SparkSession.builder.master("local[2,4]").config(map={**spark_test_conf(root / "scratch")})
    spark = configure_spark_with_jars(builder, BUILD / "jars").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    env, known = environment(spark, root / role, job=role), forms(url)
    for way in ways:
        ROLES[role](env, servers, way, known[way.form], engine)
    env.observe(KillAt(KillPoint.parse(kill), kill=kill_process_group) if kill else SilentObserver())
    run_until(env, lambda _: wanted and all(len(read_committed(servers, way.out)) >= wanted for way in ways))
    spark.stop()


if __name__ == "__main__":
    role, root, servers, ways, url, engine, wanted, kill = sys.argv[1:]
    main(role, Path(root), servers, [Way(*one) for one in json.loads(ways)], url, engine, int(wanted), kill)
