"""Jobs that write and read records in every format, in a process that may kill itself at a step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2

from flinkish_spark import (
    Avro,
    Csv,
    Json,
    JsonSchema,
    KafkaSink,
    KafkaSource,
    Protobuf,
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


def writing_job(
    spark: Any, job_dir: Path, servers: str, source: str, out: str, form: Any, fields: str, engine: str
) -> StreamExecutionEnvironment:
    """Write JSON of a topic in a format."""
    env = environment(spark, job_dir, job="writer")
    given = env.from_source(KafkaSource(servers, [source], value=Json(fields), reader=engine), uid="given")
    given.sink_to(KafkaSink(servers, out, key=String("user"), value=form, writer=engine), uid="out")
    return env


def reading_job(
    spark: Any, job_dir: Path, servers: str, source: str, out: str, form: Any, engine: str
) -> StreamExecutionEnvironment:
    """Write what is read in a format as JSON, with the key beside it."""
    env = environment(spark, job_dir, job="reader")
    key = {"key": String("user"), "key_fields_prefix": "key_"}
    found = env.from_source(KafkaSource(servers, [source], value=form, reader=engine, **key), uid="read")
    found.sink_to(KafkaSink(servers, out, value=Json(), writer=engine), uid="out")
    return env


def main(
    role: str,
    root: Path,
    servers: str,
    source: str,
    out: str,
    form: str,
    url: str,
    engine: str,
    wanted: int,
    kill: str,
) -> None:
    from pyspark.sql import SparkSession

    from flinkish_spark.bridge.session import configure_spark_with_jars
    from tests.conftest import spark_test_conf
    from tests.support.services import BUILD

    builder = SparkSession.builder.master("local[2,4]").config(map={**spark_test_conf(root / "scratch")})
    spark = configure_spark_with_jars(builder, BUILD / "jars").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    writes, reads, fields = forms(url)[form]
    if role == "writer":
        env = writing_job(spark, root / role, servers, source, out, writes, fields, engine)
    else:
        env = reading_job(spark, root / role, servers, source, out, reads, engine)
    env.observe(KillAt(KillPoint.parse(kill), kill=kill_process_group) if kill else SilentObserver())
    run_until(env, lambda _: wanted and len(read_committed(servers, out)) >= wanted)
    spark.stop()


if __name__ == "__main__":
    role, root, servers, source, out, form, url, engine, wanted, kill = sys.argv[1:]
    main(role, Path(root), servers, source, out, form, url, engine, int(wanted), kill)
