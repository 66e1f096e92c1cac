"""Rows of a sink as Spark's tasks get them, and the records that are made of them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from flinkish_spark import Json, KafkaSink, String
from flinkish_spark.connectors.kafka.record_encoder import EncodeRecords, RecordEncoder
from flinkish_spark.transport import columns as C
from flinkish_spark.types.ddl import parse_ddl

FIELDS: Any = parse_ddl("id STRING, tags ARRAY<STRING>, raw BINARY, kind STRING")


def rows(strings: pa.DataType, binaries: pa.DataType, lists: Any) -> pa.RecordBatch:
    kinds = [0, 1, 0, 0]
    return pa.RecordBatch.from_pydict(
        {
            C.KIND: pa.array(kinds, pa.int32()),
            **{name: pa.array([7, 8, 9, 10]) for name in (C.CHECKPOINT, C.CHANNEL, C.HASH)},
            "id": pa.array(['a"', None, "b", "c"], strings),
            "tags": pa.array([["x", None], None, [], None], lists(strings)),
            "raw": pa.array([b"\x00", None, None, b""], binaries),
            "kind": pa.array(["+I", None, "-D", "?"], strings),
        }
    )


@pytest.mark.parametrize(
    "batch",
    [
        rows(pa.string(), pa.binary(), pa.list_),
        rows(pa.large_string(), pa.large_binary(), pa.list_),
        rows(pa.large_string(), pa.large_binary(), pa.large_list),
    ],
    ids=["usual", "large", "large lists"],
)
def test_records_are_the_same_for_all_arrow_types_of_a_session(batch: pa.RecordBatch) -> None:
    sink = KafkaSink("b:9092", "out", key=String("id"), value=Json(), row_kind="kind", headers={"h": "raw"})
    encoder = RecordEncoder.of(sink, FIELDS)
    encode = EncodeRecords(encoder, tuple(FIELDS.names))
    records, control = encode(iter([batch]))
    made = [{k: v for k, v in one.items() if not k.startswith("_fs")} for one in records.to_pylist()]
    assert made[0] == {
        "key": b'a"',
        "value": b'{"id":"a\\"","tags":["x",null],"raw":"AA=="}',
        "topic": None,
        "headers": [{"key": "h", "value": b"\x00"}],
        "misfit": None,
    }
    assert (made[1]["key"], made[1]["value"], made[1]["headers"]) == (b"b", None, [])
    assert made[2]["misfit"] == "it has no row kind" and b'"kind":"?"' in made[2]["value"]
    assert control.column(C.KIND).to_pylist() == [1] and control.column("value").to_pylist() == [None]
    assert records.schema.names == encode.columns().names == control.schema.names
