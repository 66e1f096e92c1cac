"""Protobuf messages of a slice as columns, by `ptars`, with a proof for each message.

`ptars` reads bytes into Arrow's columns, and writes columns as bytes. A message is proven if what was read of
it is written as the same bytes: then these bytes say these values, whoever reads them. That holds for what
Protobuf's own libraries write of messages whose fields are all known. It does not hold for fields that the
descriptor does not know, lists that are not packed, fields that come twice or in another order, and
numbers that are longer than they must be: such messages Protobuf's own reader reads. What is written as the
same bytes and may be read as something else is looked for over columns: two members of a oneof, and a key
that is twice in a map.
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

#: `ptars` has a table with a place for each number of a field, up to the largest.
_LARGEST_NUMBER = 20_000
_PACKAGE = "flinkish"


def message_columns(message: Any, kind: pa.StructType) -> SliceConverter | None:
    """Return what reads slices of a message; None if only Protobuf's own reader can read it."""
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
    """Add a message with the same bytes, in which nothing has a meaning of its own; return its name."""
    # By its own name `ptars` would read a Timestamp as nanoseconds, and a StringValue without a look at its
    # letters. A closed enum would lose numbers. Editions it does not know.
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
            # The entries of a map, too: of those `ptars` would leave out what is a default.
            inner = _add_plain(one.message_type, file, names)
            field.type, field.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{inner}"
            continue
        field.type = field.TYPE_INT32 if one.enum_type is not None else one.type
        if not one.is_repeated:
            # So it is written if it was there, be it a default.
            field.proto3_optional, field.oneof_index = True, len(made.oneof_decl)
            made.oneof_decl.add(name=f"_{field.name}")
    return name


def _sort_by_number(message: Any) -> list[Any]:
    """Return the fields as all of Protobuf's libraries write them."""
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
    """Return what converts a column, in which nothing stands for the default."""
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
    # To a type that holds all values: of unsigned numbers the next wider one.
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
    # Protobuf's own maps have another order in each process.
    places = find_key_order(column.offsets, keys)
    if places is not None:
        keys, items = keys.take(places), items.take(places)
    return pa.MapArray.from_arrays(column.offsets, keys, items, type=kind)
