"""What stands beside a record's fields, as columns."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from flinkish_spark.connectors.kafka.client.reader import record_schema
from flinkish_spark.connectors.kafka.metadata import (
    METADATA,
    OWN_TIME,
    metadata_arrays,
    metadata_fields,
    names_of,
)
from flinkish_spark.types.arrow_types import arrow_type

HEADERS = [{"key": "a", "value": b"1"}, {"key": "b", "value": None}, {"key": "a", "value": b"2"}]


def records(*rows: dict[str, Any]) -> pa.RecordBatch:
    schema = record_schema(include_headers=True, include_leader_epoch=True)
    place = {"topic": "t", "partition": 3, "offset": 7}
    return pa.RecordBatch.from_pylist([{**place, **row} for row in rows], schema=schema)


def of(name: str, *rows: dict[str, Any]) -> list[Any]:
    (column,) = metadata_arrays([name], records(*rows))
    (field,) = metadata_fields([name])
    assert column.cast(arrow_type(field.dataType)).null_count == column.null_count
    found: list[Any] = column.to_pylist()
    return found


def test_a_record_without_a_time_has_none() -> None:
    times = pa.array([-1_000, -5_000, 0, 7_000], pa.int64()).view(pa.timestamp("us", "UTC")).to_pylist()
    rows = [{"timestamp": one} for one in times]
    assert of(OWN_TIME, *rows) == [None, -5, 0, 7]
    assert of("timestamp", *rows) == [None, *times[1:]]


def test_headers_keep_their_order_and_a_map_has_each_name_once() -> None:
    assert of("headers", {"headers": HEADERS}, {"headers": None}) == [HEADERS, []]
    assert of("headers-map", {"headers": HEADERS}, {}) == [[("a", [b"1", b"2"]), ("b", [None])], []]


def test_numbers_have_names_and_an_unknown_epoch_is_null() -> None:
    rows = [{"timestampType": one, "leaderEpoch": one} for one in (-1, 0, 1)]
    assert of("timestamp-type", *rows) == ["NoTimestampType", "CreateTime", "LogAppendTime"]
    assert of("leader-epoch", *rows) == [None, 0, 1]


def test_what_a_format_of_changes_knows_is_no_column_of_the_record() -> None:
    asked = (*METADATA, "value.source.table", OWN_TIME)
    assert len(metadata_fields(asked)) == len(metadata_arrays(asked, records({}))) == len(METADATA) + 1
    assert names_of(asked)[-1] == "_fs_time" and "_timestamp_type" in names_of(asked)
