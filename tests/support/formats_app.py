"""Jobs that write and read records in every format, in a process that may kill itself at a step."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
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


Forms = Mapping[str, Form]


def write(
    env: StreamExecutionEnvironment, servers: str, ways: Sequence[Way], known: Forms, engine: str
) -> None:
    """Write the JSON of one topic in formats."""
    (topic,) = {way.source for way in ways}
    fields = ", ".join(dict.fromkeys(one for way in ways for one in known[way.form].fields.split(", ")))
    given = env.from_source(KafkaSource(servers, [topic], value=Json(fields), reader=engine), uid="given")
    for way in ways:
        form = known[way.form]
        names = [one.split()[0] for one in form.fields.split(", ")]
        rows = given.transform(lambda df, names=names: df.select(*names))
        sink = KafkaSink(servers, way.out, key=String("user"), value=form.writes)
        rows.sink_to(sink, uid=f"out-{way.out}")


def read(
    env: StreamExecutionEnvironment, servers: str, ways: Sequence[Way], known: Forms, engine: str
) -> None:
    """Write what is read in formats as JSON, with the key beside it."""
    for way in ways:
        read_as = {"value": known[way.form].reads, "key": String("user"), "key_fields_prefix": "key_"}
        source = KafkaSource(servers, [way.source], reader=engine, **read_as)
        found = env.from_source(source, uid=f"read-{way.out}")
        found.sink_to(KafkaSink(servers, way.out, value=Json()), uid=f"out-{way.out}")


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
    env = environment(spark, root / role, job=role)
    ROLES[role](env, servers, ways, forms(url), engine)
    env.observe(KillAt(KillPoint.parse(kill), kill=kill_process_group) if kill else SilentObserver())
    run_until(env, lambda _: wanted and all(len(read_committed(servers, way.out)) >= wanted for way in ways))
    spark.stop()


if __name__ == "__main__":
    role, root, servers, ways, url, engine, wanted, kill = sys.argv[1:]
    main(role, Path(root), servers, [Way(*one) for one in json.loads(ways)], url, engine, int(wanted), kill)
