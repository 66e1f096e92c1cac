"""Metadata columns of Kafka records: topic, partition, offset, timestamp, headers and others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from flinkish_spark.connectors.kafka.checks import HEADERS, HEADERS_TYPE
from flinkish_spark.connectors.kafka.client.settings import INCLUDE_LEADER_EPOCH
from flinkish_spark.contracts.format import name_metadata_column
from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.transport import columns as C
from flinkish_spark.types.arrow_types import arrow_type
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.record_time import NO_TIME_MS

#: Column with the leader epoch in which the partition's leader appended the record; -1 if unknown.
LEADER_EPOCH = "leaderEpoch"
#: Spark's `timestampType` number -> the name in Kafka and Flink.
_TIMESTAMP_TYPES = {-1: "NoTimestampType", 0: "CreateTime", 1: "LogAppendTime"}


class _Part(NamedTuple):
    type: str
    #: Computes the column from a reader's columns.
    column: Callable[[pa.RecordBatch], pa.Array]


def _read_column(name: str) -> Callable[[pa.RecordBatch], pa.Array]:
    return lambda records: records.column(name)


def clear_missing_times(times: pa.Array) -> pa.Array:
    """Replace the timestamp -1, Kafka's "no timestamp", by null."""
    without = pc.equal(times.view(pa.int64()), NO_TIME_MS * 1_000)
    return pc.if_else(without, pa.scalar(None, times.type), times)


def to_milliseconds(records: pa.RecordBatch) -> pa.Array:
    return pc.divide(clear_missing_times(records.column("timestamp")).view(pa.int64()), 1_000)


def _timestamp_type(records: pa.RecordBatch) -> pa.Array:
    known = records.column("timestampType").to_pylist()
    return pa.array([_TIMESTAMP_TYPES.get(number) for number in known], pa.string())


def _headers(records: pa.RecordBatch) -> pa.Array:
    # A reader gives null for a record without headers.
    headers = records.column(HEADERS)
    if headers.null_count:
        headers = pa.array([one or [] for one in headers.to_pylist()], headers.type)
    return headers


def _headers_map(records: pa.RecordBatch) -> pa.Array:
    found = []
    for headers in _headers(records).to_pylist():
        by_name: dict[str, list[bytes | None]] = {}
        for header in headers:
            by_name.setdefault(header["key"], []).append(header["value"])
        found.append(list(by_name.items()))
    return pa.array(found, arrow_type(parse_ddl(_PARTS["headers-map"].type)))


def _leader_epoch(records: pa.RecordBatch) -> pa.Array:
    epochs = records.column(LEADER_EPOCH)
    return pc.if_else(pc.greater_equal(epochs, 0), epochs, pa.scalar(None, epochs.type))


_PARTS: Mapping[str, _Part] = {
    "topic": _Part("STRING", _read_column("topic")),
    "partition": _Part("INT", _read_column("partition")),
    "offset": _Part("LONG", _read_column("offset")),
    "timestamp": _Part("TIMESTAMP", lambda records: clear_missing_times(records.column("timestamp"))),
    "timestamp-type": _Part("STRING", _timestamp_type),
    "key": _Part("BINARY", _read_column("key")),
    "headers": _Part(HEADERS_TYPE, _headers),
    "headers-map": _Part("MAP<STRING, ARRAY<BINARY>>", _headers_map),
    "leader-epoch": _Part("INT", _leader_epoch),
}
#: Names for `metadata`; a column is named with a leading underscore and underscores for hyphens.
METADATA = tuple(_PARTS)
#: For the planner only: the record's timestamp as event time.
OWN_TIME = "event time"
#: Prefix of metadata that the format of the value provides.
OF_VALUE = "value."
_WITH_HEADERS = frozenset({"headers", "headers-map"})


def check_metadata(metadata: Sequence[str]) -> tuple[str, ...]:
    for name in metadata:
        if name not in METADATA and not is_of_value(name):
            to_do = f"choose from {', '.join(METADATA)}"
            raise ConfigError(f"metadata is {metadata!r}, and records have no {name!r}", what_to_do=to_do)
    return tuple(dict.fromkeys(metadata))


def is_of_value(name: str) -> bool:
    return name.startswith(OF_VALUE)


def metadata_fields(metadata: Sequence[str]) -> list[T.StructField]:
    """Return the fields of the metadata columns, without those that the value's format provides."""
    own = [name for name in metadata if not is_of_value(name)]
    kinds = [T.LongType() if name == OWN_TIME else parse_ddl(_PARTS[name].type) for name in own]
    return [T.StructField(name, kind) for name, kind in zip(names_of(own), kinds, strict=True)]


def metadata_arrays(metadata: Sequence[str], records: pa.RecordBatch) -> list[pa.Array]:
    """Compute the metadata columns from a reader's columns."""
    own = [name for name in metadata if not is_of_value(name)]
    return [to_milliseconds(records) if name == OWN_TIME else _PARTS[name].column(records) for name in own]


def names_of(metadata: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the metadata columns, without those that the value's format provides."""
    own = [name for name in metadata if not is_of_value(name)]
    return tuple(C.TIME if name == OWN_TIME else "_" + name.replace("-", "_") for name in own)


def check_names(metadata: Sequence[str], fields: T.StructType) -> None:
    # Spark's column names are case-insensitive.
    taken = {name.lower() for name in fields.names}
    for asked in metadata:
        of_value = asked.removeprefix(OF_VALUE)
        name = name_metadata_column(of_value) if is_of_value(asked) else names_of([asked])[0]
        if name in taken:
            raise SchemaError(
                f"the records have a field '{name}', and metadata asks for a column of that name",
                what_to_do=f"leave '{asked}' out of metadata, or rename the field",
            )


def to_reader_options(metadata: Sequence[str]) -> dict[str, str]:
    options = {"includeHeaders": "true"} if _WITH_HEADERS & set(metadata) else {}
    return {**options, **({INCLUDE_LEADER_EPOCH: "true"} if "leader-epoch" in metadata else {})}
