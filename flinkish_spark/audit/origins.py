"""Where each row of an output says that it comes from: headers, fields of JSON values, or columns."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from flinkish_spark.audit.counting import Bools, Int64s, Place
from flinkish_spark.errors import SchemaError

#: Multiplied with a place's number, it changes about half of a hash's bits.
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class OriginNames:
    """Names of headers, fields or columns that hold a row's origin.

    Parameters
    ----------
    topic
        Empty if the rows do not say it; then the input is one topic.
    partition, offset
        Of the input's record.

    Examples
    --------
    >>> OriginNames.of("_topic,_partition,_offset")
    OriginNames(topic='_topic', partition='_partition', offset='_offset')
    """

    topic: str = "_topic"
    partition: str = "_partition"
    offset: str = "_offset"

    @classmethod
    def of(cls, text: str) -> OriginNames:
        """Return the names in a list of three, or of two without the topic; raise ValueError."""
        names = [name.strip() for name in text.split(",")]
        if len(names) not in (2, 3) or not all(names):
            raise ValueError(f"{text!r} is not TOPIC,PARTITION,OFFSET or PARTITION,OFFSET")
        return cls(names[0] if len(names) == 3 else "", *names[-2:])

    @property
    def all(self) -> tuple[str, ...]:
        """The names in use."""
        return tuple(filter(None, (self.topic, self.partition, self.offset)))


@dataclass(frozen=True, slots=True)
class Origins:
    """Origins of some rows.

    `is_named` says which rows have one; the others' places are -1 and their offsets 0. A place is -1,
    too, where it is none of the input.
    """

    places: Int64s
    offsets: Int64s
    is_named: Bools


class OriginReader:
    """Turns columns of text or numbers into places and offsets.

    Parameters
    ----------
    names
        Of the columns.
    places
        Of the input; their order numbers them.
    """

    def __init__(self, names: OriginNames, places: Sequence[Place]) -> None:
        self._names = names
        #: By topic, a place's number at each partition's.
        self._numbers: dict[str, Int64s] = {}
        for number, (topic, partition) in enumerate(places):
            known = self._numbers.get(topic, np.zeros(0, np.int64))
            if partition >= len(known):
                known = np.concatenate((known, np.full(partition + 1 - len(known), -1, np.int64)))
            known[partition] = number
            self._numbers[topic] = known

    def of_records(self, batch: pa.RecordBatch) -> Origins:
        """Return the origins of Kafka records: by their headers, else by fields of their JSON values."""
        headers = batch.column("headers")
        found = [header_column(headers, name) for name in self._names.all]
        if batch.num_rows and any(column.null_count == batch.num_rows for column in found):
            found = json_columns(batch.column("value"), self._names.all) or found
        return self._origins(found)

    def of_rows(self, batch: pa.RecordBatch) -> Origins:
        """Return the origins of rows of a file, which has the columns."""
        return self._origins([batch.column(name) for name in self._names.all])

    def _origins(self, columns: Sequence[Any]) -> Origins:
        partitions, offsets = (
            _numbers(column, name) for column, name in zip(columns[-2:], self._names.all[-2:], strict=True)
        )
        is_named = pc.and_(pc.is_valid(partitions), pc.is_valid(offsets))
        topics: Any = None
        if self._names.topic:
            topics = texts(columns[0]).dictionary_encode()
            is_named = pc.and_(is_named, pc.is_valid(topics))
        named: Bools = np.asarray(is_named.to_numpy(zero_copy_only=False), np.bool_)
        numbers = _filled(partitions)
        places = np.full(len(named), -1, np.int64)
        for topic, rows in self._by_topic(topics, named):
            known = self._numbers[topic]
            inside = rows[(numbers[rows] >= 0) & (numbers[rows] < len(known))]
            places[inside] = known[numbers[inside]]
        return Origins(places, _filled(offsets), named)

    def _by_topic(self, topics: Any, named: Bools) -> list[tuple[str, npt.NDArray[np.intp]]]:
        if topics is None:
            return [(topic, np.flatnonzero(named)) for topic in self._numbers]
        codes = topics.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        words = topics.dictionary.to_pylist()
        return [
            (word, np.flatnonzero(named & (codes == code)))
            for code, word in enumerate(words)
            if word in self._numbers
        ]


def header_column(headers: Any, name: str) -> Any:
    """Return the value of a header for each record, null where it is missing; the first one counts."""
    flat, rows = pc.list_flatten(headers), pc.list_parent_indices(headers)
    is_it = pc.equal(pc.struct_field(flat, "key"), name)
    values = pc.struct_field(flat, "value").filter(is_it)
    found, first = np.unique(rows.filter(is_it).to_numpy(zero_copy_only=False), return_index=True)
    at = np.full(len(headers), -1, np.int64)
    at[found] = first
    return values.take(pa.array(at, mask=at < 0))


def json_columns(values: Any, names: Sequence[str]) -> list[Any] | None:
    """Return fields of JSON values, one column a name; None if they are no JSON objects.

    Fields that a value does not have are null, and so are all of a record without value.
    """
    is_there = pc.is_valid(values)
    lines = values.filter(is_there).to_pylist()
    if not lines:
        return [pa.nulls(len(values), pa.string()) for _ in names]
    # Of one type each: what they are in the first value decides, and numbers may be texts in another.
    schema = pa.schema([(name, pa.string()) for name in names])
    found = _parsed(lines, schema) or _parsed(lines, _typed(schema))
    if found is None or found.num_rows != len(lines):
        return None
    at = np.full(len(values), -1, np.int64)
    at[np.flatnonzero(is_there.to_numpy(zero_copy_only=False))] = np.arange(len(lines))
    places = pa.array(at, mask=at < 0)
    return [found.column(name).combine_chunks().take(places) for name in names]


def _typed(schema: pa.Schema) -> pa.Schema:
    """Return the schema with numbers where numbers are expected: the last two are."""
    names = schema.names
    return pa.schema([(n, pa.int64() if n in names[-2:] else pa.string()) for n in names])


def _parsed(lines: list[bytes], schema: pa.Schema) -> pa.Table | None:
    parsing = pj.ParseOptions(
        explicit_schema=schema, unexpected_field_behavior="ignore", newlines_in_values=True
    )
    text = b"\n".join(lines)
    reading = pj.ReadOptions(block_size=max(len(text) + 1, 1 << 20))
    try:
        return pj.read_json(io.BytesIO(text), reading, parsing)
    except pa.ArrowInvalid:
        return None


def key_hashes(keys: Any, places: Int64s) -> npt.NDArray[np.uint64]:
    """Return a hash of key and place for each record; records must have keys."""
    from pandas.util import hash_array

    encoded = keys.dictionary_encode()
    words = np.array([*encoded.dictionary.to_pylist(), None], object)[:-1]
    hashed = np.asarray(hash_array(words, categorize=False), np.uint64)
    codes = np.asarray(encoded.indices.to_numpy(zero_copy_only=False), np.int64)
    mixed: npt.NDArray[np.uint64] = hashed[codes] ^ (places.astype(np.uint64) * _MIX)
    return mixed


def texts(column: Any) -> Any:
    """Return bytes, such as header values, as text; what is none stays recognisable and is no error."""
    try:
        return pc.cast(column, pa.string())
    except pa.ArrowInvalid:
        found = (None if value is None else value.decode(errors="replace") for value in column.to_pylist())
        return pa.array(found, pa.string())


def _numbers(column: Any, name: str) -> Any:
    try:
        return pc.cast(texts(column) if pa.types.is_binary(column.type) else column, pa.int64())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as wrong:
        raise SchemaError(
            f"'{name}' of an output is not a whole number",
            why=str(wrong).split("\n")[0],
            what_to_do="name the headers or columns that hold the origin with --origin",
        ) from wrong


def _filled(column: Any) -> Int64s:
    return np.asarray(column.fill_null(0).to_numpy(zero_copy_only=False), np.int64)
