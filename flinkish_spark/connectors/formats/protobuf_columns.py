"""Reading of Protobuf messages a slice at a time, by `ptars`, with a proof for each message.

`ptars` reads bytes into Arrow columns, and writes columns as bytes. A message is proven if writing it gives
the same bytes. Messages that Protobuf's own libraries wrote are proven if the descriptor knows all of their
fields. Not proven are messages with unknown fields, unpacked lists, repeated or reordered fields, and numbers
that are longer than necessary: Protobuf's own reader reads these. Two cases that give the same bytes and may
still be read wrongly are searched over columns: several members of a oneof, and a repeated key in a map.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flinkish_spark.connectors.formats.proofs import (
    Convert,
    NoProof,
    RoundTripReader,
    cast,
    check_keys,
    find_key_order,
    rebuild_list,
    rebuild_struct,
)
from flinkish_spark.connectors.formats.reader import SliceConverter

#: `ptars` allocates a table as large as the largest field number.
_LARGEST_NUMBER = 20_000
_PACKAGE = "flinkish"


def message_columns(message: Any, kind: pa.StructType) -> SliceConverter | None:
    """Return a converter of slices of a message; None if only Protobuf's own reader can read it."""
    try:
        import ptars
    except ImportError:
        return None
    from google.protobuf import descriptor_pb2, descriptor_pool

    file = descriptor_pb2.FileDescriptorProto(name="columns.proto", package=_PACKAGE, syntax="proto3")
    try:
        name = _add_plain(message, file, {})
    except NoProof:
        return None
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    made = pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")
    handler, convert = ptars.HandlerPool([made.file]).get_for_message(made), _struct_of(message)
    return RoundTripReader(
        handler.array_to_record_batch,
        handler.record_batch_to_array,
        lambda batch: convert(batch.to_struct_array(), kind),
    )


def is_map(one: Any) -> bool:
    return bool(one.message_type is not None and one.message_type.GetOptions().map_entry)


def _add_plain(message: Any, file: Any, names: dict[str, str]) -> str:
    """Add a message type with the same encoding and only plain types; return its name."""
    # `ptars` reads a message named Timestamp as nanoseconds, does not check that a StringValue is UTF-8,
    # loses numbers of closed enums, and does not know editions.
    if message.full_name in names:
        return names[message.full_name]
    name = names[message.full_name] = f"M{len(names)}"
    made = file.message_type.add(name=name)
    if not message.fields or message.GetOptions().message_set_wire_format:
        raise NoProof
    for one in _sort_by_number(message):
        if one.number > _LARGEST_NUMBER or one.is_required or one.type == one.TYPE_GROUP:
            raise NoProof
        field = made.field.add(name=f"f{one.number}", number=one.number)
        field.label = field.LABEL_REPEATED if one.is_repeated else field.LABEL_OPTIONAL
        if one.message_type is not None:
            # Entries of maps are plain messages too: otherwise `ptars` would not write defaults in them.
            inner = _add_plain(one.message_type, file, names)
            field.type, field.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{inner}"
            continue
        field.type = field.TYPE_INT32 if one.enum_type is not None else one.type
        if not one.is_repeated:
            # With presence, a field that was there is written even if it has the default.
            field.proto3_optional, field.oneof_index = True, len(made.oneof_decl)
            made.oneof_decl.add(name=f"_{field.name}")
    return name


def _sort_by_number(message: Any) -> list[Any]:
    """Return the fields in the order in which Protobuf's libraries write them."""
    return sorted(message.fields, key=lambda one: int(one.number))


def _struct_of(message: Any) -> Convert:
    places = {one.number: at for at, one in enumerate(_sort_by_number(message))}
    parts = [(places[one.number], _column_of(one)) for one in message.fields]
    oneofs = [[places[each.number] for each in one.fields] for one in message.oneofs if len(one.fields) > 1]
    return partial(_struct, parts, oneofs)


def _column_of(one: Any) -> Convert:
    if is_map(one):
        key, value = (one.message_type.fields_by_name[name] for name in ("key", "value"))
        return partial(_map, _always(key), _always(value))
    if one.is_repeated:
        return partial(rebuild_list, _single_of(one))
    return _single_of(one) if one.has_presence else _always(one)


def _always(one: Any) -> Convert:
    convert, is_message = _single_of(one), one.message_type is not None
    default = None if is_message else 0 if one.enum_type is not None else one.default_value

    def fill(column: pa.Array, kind: pa.DataType) -> pa.Array:
        if column.null_count and is_message:
            raise NoProof
        return convert(column.fill_null(default) if column.null_count else column, kind)

    return fill


def _single_of(one: Any) -> Convert:
    if one.message_type is not None:
        return _struct_of(one.message_type)
    if one.enum_type is not None:
        # The first name of each number.
        names = {each.number: each.name for each in reversed(one.enum_type.values)}
        return partial(_enum, pa.array(list(names), pa.int32()), pa.array(list(names.values()), pa.string()))
    # Unsigned numbers are cast to the next wider type.
    return cast


def _enum(numbers: pa.Array, names: pa.Array, column: pa.Array, kind: pa.DataType) -> pa.Array:
    found = names.take(pc.index_in(column, value_set=numbers))
    if found.null_count == column.null_count:
        return found
    return pc.coalesce(found, column.cast(kind))


def _struct(
    parts: Sequence[tuple[int, Convert]],
    oneofs: Sequence[Sequence[int]],
    column: pa.StructArray,
    kind: pa.StructType,
) -> pa.Array:
    for members in oneofs:
        there = [column.field(at).is_valid().to_numpy(zero_copy_only=False) for at in members]
        if (np.sum(there, axis=0) > 1).any():
            raise NoProof
    return rebuild_struct(parts, column, kind)


def _map(key: Convert, value: Convert, column: pa.ListArray, kind: pa.MapType) -> pa.Array:
    entries = column.values
    keys, items = key(entries.field(0), kind.key_type), value(entries.field(1), kind.item_type)
    check_keys(column.offsets, keys)
    # Sorted, since the order of Protobuf's own maps differs between processes.
    places = find_key_order(column.offsets, keys)
    if places is not None:
        keys, items = keys.take(places), items.take(places)
    return pa.MapArray.from_arrays(column.offsets, keys, items, type=kind)
