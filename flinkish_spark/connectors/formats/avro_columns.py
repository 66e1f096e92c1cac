"""Reading of Avro records a slice at a time, by `pyruhvro`, with a proof for each record.

Only for schemas whose types `pyruhvro` reads: no `bytes`, `fixed` and decimals, no unions except with `null`.
It gets the writer's schema without names, logical types and defaults; this module converts its columns to the
reader's schema by the same rules as `avro.py`. If that takes more than widening numbers, records are read one
by one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from flinkish_spark.connectors.formats.avro_schemas import (
    find_named_types,
    kind_of,
    limits_of,
    logical_of,
    name_of,
    resolve_name,
    score_match,
)
from flinkish_spark.connectors.formats.proofs import (
    Convert,
    NoProof,
    RoundTripReader,
    cast,
    check_keys,
    rebuild_list,
    rebuild_struct,
)
from flinkish_spark.types.arrow_columns import find_gaps

if TYPE_CHECKING:
    from flinkish_spark.connectors.formats.reader import SliceConverter

#: Returns the default of a reader's field that the writer lacks; takes the field and its name.
_Default = Callable[[Mapping[str, Any], str], Any]
_READ = ("boolean", "int", "long", "float", "double", "string")
_WIDENED = (("int", "long"), ("float", "double"))


def record_columns(writer: Any, reader: Any, default: _Default, kind: pa.DataType) -> SliceConverter | None:
    """Return a converter of slices from a writer's schema to a reader's; None if it cannot read them."""
    try:
        import pyruhvro
    except ImportError:
        return None
    columns = _Columns(writer, reader, default)
    try:
        plain = columns.plain(writer, ())
        # A union of null and a record is refused: only its branch number tells it from a record.
        if not all(isinstance(one, dict) and kind_of(one) == "record" for one in (plain, reader)):
            return None
        convert = columns.resolve(writer, reader)
    except NoProof:
        return None
    schema = json.dumps(plain)

    def rows_of(batch: pa.RecordBatch) -> pa.Array:
        # pyruhvro does not check that strings are UTF-8.
        batch.validate(full=True)
        return convert(batch.to_struct_array(), kind)

    return RoundTripReader(
        lambda data: pyruhvro.deserialize_array(data.to_pylist(), schema),
        lambda batch: pyruhvro.serialize_record_batch(batch, schema, 1)[0],
        rows_of,
    )


class _Columns:
    def __init__(self, writer: Any, reader: Any, default: _Default) -> None:
        self._theirs, self._ours = find_named_types(writer), find_named_types(reader)
        self._default, self._count = default, 0

    def plain(self, schema: Any, within: tuple[str, ...]) -> Any:
        """Return a schema with the same encoding, in which every type is spelled out under a unique name."""
        schema = resolve_name(schema, self._theirs)
        if isinstance(schema, list):
            if len(schema) != 2 or schema.count("null") != 1:
                raise NoProof
            return ["null" if one == "null" else self.plain(one, within) for one in schema]
        kind = kind_of(schema)
        if kind in _READ:
            return kind
        if kind == "array":
            return {"type": kind, "items": self.plain(schema["items"], within)}
        if kind == "map":
            return {"type": kind, "values": self.plain(schema["values"], within)}
        self._count += 1
        name = f"N{self._count}"
        if kind == "enum":
            return {"type": kind, "name": name, "symbols": schema["symbols"]}
        # A list of records without fields has no bytes, whatever its length.
        if kind != "record" or schema["name"] in within or not schema["fields"]:
            raise NoProof
        around = (*within, schema["name"])
        fields = [
            {"name": f"f{at}", "type": self.plain(one["type"], around)}
            for at, one in enumerate(schema["fields"])
        ]
        return {"type": kind, "name": name, "fields": fields}

    def resolve(self, writer: Any, reader: Any) -> Convert:
        """Return a function from a column of the writer's type to one of the reader's type."""
        writer, reader = resolve_name(writer, self._theirs), resolve_name(reader, self._ours)
        if isinstance(writer, list) and not (isinstance(reader, list) and "null" in reader):
            raise NoProof
        if isinstance(reader, list) and (len(reader) != 2 or reader.count("null") != 1):
            raise NoProof
        writer, reader = _other_than_null(writer), _other_than_null(reader)
        writer, reader = resolve_name(writer, self._theirs), resolve_name(reader, self._ours)
        kinds = kind_of(writer), kind_of(reader)
        if (kinds[0] == kinds[1] and not score_match(writer, reader)) or logical_of(writer) != logical_of(
            reader
        ):
            raise NoProof
        match kinds:
            case ("record", "record"):
                return self._record(writer, reader)
            case ("array", "array"):
                return partial(rebuild_list, self.resolve(writer["items"], reader["items"]))
            case ("map", "map"):
                return partial(_map, self.resolve(writer["values"], reader["values"]))
            case ("enum", "enum") if set(writer["symbols"]) <= set(reader["symbols"]):
                return cast
        if (kinds[0] != kinds[1] and kinds not in _WIDENED) or kinds[0] not in _READ:
            raise NoProof
        limits = limits_of(kinds[1], logical_of(reader))
        return cast if limits is None else partial(_whole, *limits)

    def _record(self, writer: Any, reader: Any) -> Convert:
        places = {one["name"]: at for at, one in enumerate(writer["fields"])}
        parts: list[tuple[int | None, Convert]] = []
        for one in reader["fields"]:
            name = name_of(one, reader, places)
            if name is not None:
                at = places.pop(name)
                parts.append((at, self.resolve(writer["fields"][at]["type"], one["type"])))
            elif "default" in one:
                parts.append((None, partial(_constant, self._default(one, one["name"]))))
            else:
                raise NoProof
        return partial(rebuild_struct, parts)


def _other_than_null(schema: Any) -> Any:
    return next(one for one in schema if one != "null") if isinstance(schema, list) else schema


def _whole(first: int, last: int, factor: int, column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert whole numbers to days or times; raise NoProof if one is out of range."""
    ends = pc.min_max(column)
    if (
        ends["min"].is_valid
        and not first <= ends["min"].as_py() * factor <= ends["max"].as_py() * factor <= last
    ):
        raise NoProof
    return (pc.multiply(column, factor) if factor != 1 else column).cast(kind)


def _constant(value: Any, column: pa.Array, kind: pa.DataType) -> pa.Array:
    return pa.array([value], kind).take(pa.array([0] * len(column), pa.int32()))


def _map(convert: Convert, column: pa.MapArray, kind: pa.MapType) -> pa.Array:
    check_keys(column.offsets, column.keys)
    made = convert(column.items, kind.item_type)
    return pa.MapArray.from_arrays(column.offsets, column.keys, made, type=kind, mask=find_gaps(column))
