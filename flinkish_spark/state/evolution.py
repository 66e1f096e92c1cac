"""Schema evolution: entries that were stored under another declaration of a state.

Allowed are new fields (null in stored entries), removed fields, and wider types. Fields are matched by name,
at any depth, and keys of maps may become wider numbers. The operator's keys, windows and times never change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pyarrow as pa
import pyarrow.compute as pc

from flinkish_spark.core.elements import TimeDomain
from flinkish_spark.state import codec

#: Prefix of our own field names, which programs cannot declare.
_OURS = "_fs_"
#: Name of the column of a value without fields, or with a single one.
_UNNAMED = "value"


class StateMismatch(ValueError):
    """The stored state belongs to another operator, or its declaration cannot evolve to the present one."""


def evolve(layout: codec.TableLayout, stored: pa.RecordBatch) -> pa.RecordBatch:
    # With their names: two fields of one type may have changed places.
    if stored.schema.equals(layout.schema, check_metadata=True):
        return stored
    kind = codec.read_kind(stored.schema)
    if kind and layout.kind and kind != layout.kind:
        raise StateMismatch(
            f"state {layout.name!r} is stored as {kind} and declared as {layout.kind}, in which its values "
            "mean something else; give it another name"
        )
    values = _as_spread(stored, layout.schema)
    was, now = _clock_in(values), _clock_in(_values_in(layout.schema))
    if now is not None and was is not None and was is not now:
        raise StateMismatch(
            f"state {layout.name!r} is stored with entries that are due by {_clock_text(was)} and declared "
            f"with ones that are due by {_clock_text(now)}, and their due times are unknown; give the "
            "operator another uid"
        )
    arrays = []
    for field in layout.schema:
        name = codec.reader_name(field)
        if not field.name.startswith("value_"):
            arrays.append(_own(layout, field, stored))
        elif name in values:
            arrays.append(_cast(layout, name, values[name], field.type))
        else:
            arrays.append(pa.nulls(stored.num_rows, field.type))
    # Our own fields (due time and place) do not count: the program has not declared them.
    if not set(_names_of_program(values)) & set(_names_of_program(_values_in(layout.schema))):
        raise StateMismatch(
            f"state {layout.name!r} is stored as {types_text(stored.schema)} and declared as "
            f"{types_text(layout.schema)}, which have no field in common"
        )
    return pa.RecordBatch.from_arrays(arrays, schema=layout.schema)


def _clock_in(names: Collection[str]) -> TimeDomain | None:
    return next((clock for clock, name in codec.DUE_FIELDS.items() if name in names), None)


def _clock_text(clock: TimeDomain) -> str:
    return clock.name.lower().replace("_", " ")


def _as_spread(stored: pa.RecordBatch, declared: pa.Schema) -> dict[str, pa.Array]:
    """Return the columns of stored values under the names of a declaration."""
    # A value with several fields has a column for each, one with a single field is a struct in a column
    # without a name. A new or removed field turns one form into the other.
    found = {
        codec.reader_name(field): stored.column(field.name) for field in _values_in(stored.schema).values()
    }
    wanted = _values_in(declared)
    theirs, ours = _names_of_program(found), _names_of_program(wanted)
    if (theirs == [_UNNAMED]) is (ours == [_UNNAMED]):
        return found
    if theirs == [_UNNAMED] and pa.types.is_struct(found[_UNNAMED].type):
        whole = found.pop(_UNNAMED)
        found |= {field.name: pc.struct_field(whole, [at]) for at, field in enumerate(whole.type)}
    elif ours == [_UNNAMED] and pa.types.is_struct(wanted[_UNNAMED].type):
        fields = [found.pop(name) for name in theirs]
        found[_UNNAMED] = pa.StructArray.from_arrays(fields, names=theirs)
    return found


def _values_in(schema: pa.Schema) -> dict[str, pa.Field]:
    return {codec.reader_name(field): field for field in codec.value_fields(schema)}


def _names_of_program(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith(_OURS)]


def misfit(stored: pa.DataType, declared: pa.DataType, path: tuple[str, ...] = ()) -> str:
    """Return which part of a stored type does not fit into a declared one; empty if every value fits.

    `path` is the way from the value to this type: `element` of a list, `key` and `value` of a map, field
    names.
    """
    if stored.equals(declared):
        return ""
    kinds = pa.types
    if kinds.is_list(stored) and kinds.is_list(declared):
        return misfit(stored.value_type, declared.value_type, (*path, "element"))
    if kinds.is_map(stored) and kinds.is_map(declared):
        key, other = stored.key_type, declared.key_type
        # Widened numbers stay equal, or different. Two keys with fields might become equal.
        if not key.equals(other) and not _is_wider_number(key, other):
            return _describe_narrower((*path, "key"), key, other)
        return misfit(stored.item_type, declared.item_type, (*path, "value"))
    if kinds.is_struct(stored) and kinds.is_struct(declared):
        fields = {field.name: field.type for field in stored}
        common = [field for field in declared if field.name in fields]
        found = (misfit(fields[field.name], field.type, (*path, field.name)) for field in common)
        return next(filter(None, found), "") if common else _describe_narrower(path, stored, declared)
    return "" if _is_wider_number(stored, declared) else _describe_narrower(path, stored, declared)


def _describe_narrower(path: tuple[str, ...], stored: pa.DataType, declared: pa.DataType) -> str:
    says = f"{'.'.join(path)!r} is stored as {stored} but declared as {declared}"
    return f"{says}, which does not hold all of its values"


def common_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return a type for the values of both, with all fields and the wider numbers; None if there is none."""
    if one.equals(other):
        return one
    kinds = pa.types
    if kinds.is_list(one) and kinds.is_list(other):
        element = common_type(one.value_type, other.value_type)
        return None if element is None else pa.list_(one.value_field.with_type(element))
    if kinds.is_map(one) and kinds.is_map(other):
        parts = common_type(one.key_type, other.key_type), common_type(one.item_type, other.item_type)
        return None if None in parts else pa.map_(*parts)
    if kinds.is_struct(one) and kinds.is_struct(other):
        fields = {field.name: field.type for field in one}
        for field in other:
            fields[field.name] = common_type(fields.get(field.name, field.type), field.type)
        return None if None in fields.values() else pa.struct(list(fields.items()))
    return next((b for a, b in ((one, other), (other, one)) if _is_wider_number(a, b)), None)


def read_value_types(schema: pa.Schema) -> dict[str, pa.DataType]:
    return {name: field.type for name, field in _values_in(schema).items()}


def is_single(names: Iterable[str]) -> bool:
    return _names_of_program(names) == [_UNNAMED]


def flatten_types(values: dict[str, pa.DataType]) -> dict[str, pa.DataType]:
    if not is_single(values) or not pa.types.is_struct(values[_UNNAMED]):
        return values
    ours = {name: kind for name, kind in values.items() if name != _UNNAMED}
    return ours | {field.name: field.type for field in values[_UNNAMED]}


def _is_wider_number(stored: pa.DataType, declared: pa.DataType) -> bool:
    kinds = pa.types
    for is_one in (kinds.is_signed_integer, kinds.is_floating):
        if is_one(stored) and is_one(declared):
            return int(stored.bit_width) <= int(declared.bit_width)
    if kinds.is_decimal(stored) and kinds.is_decimal(declared):
        whole = declared.precision - declared.scale >= stored.precision - stored.scale
        return bool(whole and declared.scale >= stored.scale)
    return False


def types_text(schema: pa.Schema) -> str:
    keys = [f"{field.name} {field.type}" for field in schema if field.name.startswith("key_")]
    return ", ".join(
        [*keys, *(f"{codec.reader_name(field)} {field.type}" for field in codec.value_fields(schema))]
    )


def _cast(layout: codec.TableLayout, name: str, column: pa.Array, declared: pa.DataType) -> pa.Array:
    if wrong := misfit(column.type, declared, (name,)):
        raise StateMismatch(f"state {layout.name!r}: {wrong}; give the field, or the state, another name")
    return column if column.type.equals(declared) else column.cast(declared)


def _own(layout: codec.TableLayout, field: pa.Field, stored: pa.RecordBatch) -> pa.Array:
    if field.name == codec.TOUCHES and field.name not in stored.schema.names:
        # A savepoint writer got no times of elements: each has the time of the whole entry.
        return pa.nulls(stored.num_rows, field.type)
    if field.name == codec.TOUCHED and field.name not in stored.schema.names:
        # A time to live was added, and stored entries have no time of their last access.
        raise StateMismatch(
            f"state {layout.name!r} is stored without a time to live and declared with one, "
            "and the times of its entries are unknown; give it another name"
        )
    if field.name not in stored.schema.names or not stored.schema.field(field.name).type.equals(field.type):
        raise StateMismatch(
            f"state {layout.name!r} is stored as {types_text(stored.schema)} "
            f"but declared as {types_text(layout.schema)}"
        )
    return stored.column(field.name)
