"""Strict conversion of Python values to Arrow columns: nothing is silently rounded, cut or converted."""

from __future__ import annotations

import datetime
import decimal
import fractions
import functools
import numbers
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from flinkish_spark.types.arrow_columns import has_type
from flinkish_spark.types.hints import parts_of
from flinkish_spark.types.row_form import RowForm

REFUSALS = (pa.ArrowException, TypeError, ValueError, OverflowError)


class NestedType(ABC):
    """A type that contains structs; Arrow reads structs from tuples by position, not by name."""

    @abstractmethod
    def is_plain(self, values: Iterable[Any]) -> bool:
        """Return if values need no conversion; may return false for such values."""

    @abstractmethod
    def plain(self, value: Any) -> Any:
        """Return a value that is not None with structs as tuples."""

    def plain_all(self, values: Sequence[Any]) -> list[Any]:
        return [None if value is None else self.plain(value) for value in values]


@functools.lru_cache(maxsize=256)
def find_nested_type(kind: pa.DataType) -> NestedType | None:
    if pa.types.is_struct(kind):
        return _Struct(kind)
    if pa.types.is_map(kind):
        key, item = find_nested_type(kind.key_type), find_nested_type(kind.item_type)
        return None if key is None and item is None else _Map(key, item)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        each = find_nested_type(kind.value_type)
        return None if each is None else _List(each)
    return None


class _Struct(NestedType):
    def __init__(self, kind: pa.DataType) -> None:
        fields = list(kind)
        required = [field.name for field in fields if not field.nullable]
        self._form, self._width = RowForm([field.name for field in fields], required), len(fields)
        inner = ((at, find_nested_type(field.type)) for at, field in enumerate(fields))
        self._inner = [(at, one) for at, one in inner if one is not None]

    def is_plain(self, values: Iterable[Any]) -> bool:
        if not self._inner:
            return self._form.keeps(set(map(type, values)))
        rows = list(values)
        if not self._form.keeps(set(map(type, rows))):
            return False
        there = [row for row in rows if row is not None]
        return set(map(len, there)) <= {self._width} and all(
            one.is_plain([row[at] for row in there]) for at, one in self._inner
        )

    def plain_all(self, values: Sequence[Any]) -> list[Any]:
        if self._inner or type(None) in set(map(type, values)):
            return super().plain_all(values)
        return self._form.tuples(list(values))

    def plain(self, value: Any) -> Any:
        row = self._form.tuple_of(value)
        if not self._inner:
            return row
        if len(row) != self._width:
            raise ValueError(f"it has {len(row)} fields, but {self._width} are declared")
        made = list(row)
        for at, one in self._inner:
            made[at] = _plain_or_none(one, made[at])
        return tuple(made)


class _List(NestedType):
    def __init__(self, each: NestedType) -> None:
        self._each = each

    def is_plain(self, values: Iterable[Any]) -> bool:
        lists = [value for value in values if value is not None]
        return set(map(type, lists)) <= {list, tuple} and self._each.is_plain(chain.from_iterable(lists))

    def plain(self, value: Any) -> Any:
        return [_plain_or_none(self._each, one) for one in value]


class _Map(NestedType):
    def __init__(self, key: NestedType | None, item: NestedType | None) -> None:
        self._key, self._item = key, item

    def is_plain(self, values: Iterable[Any]) -> bool:
        maps = [value for value in values if value is not None]
        if not set(map(type, maps)) <= {dict}:
            return False
        items = chain.from_iterable(one.values() for one in maps)
        return (self._key is None or self._key.is_plain(chain.from_iterable(maps))) and (
            self._item is None or self._item.is_plain(items)
        )

    def plain(self, value: Any) -> Any:
        pairs = value.items() if isinstance(value, dict) else value
        return [(_plain_or_none(self._key, key), _plain_or_none(self._item, item)) for key, item in pairs]


def _plain_or_none(nested: NestedType | None, value: Any) -> Any:
    return value if nested is None or value is None else nested.plain(value)


Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class MissingValue:
    #: The path to the null: names of fields, `element` of a list, `value` of a map.
    path: str
    row: int

    def __str__(self) -> str:
        return f"field {self.path!r} is None and must not be null"


def first_missing(field: T.StructField, column: pa.Array) -> MissingValue | None:
    """Return the first null in a field or a part of it that must not be null; None if there is none."""
    if field.nullable and not has_required(field.dataType):
        return None
    return _missing(field.dataType, column, np.arange(len(column)), field.name, field.nullable)


def has_required(kind: T.DataType) -> bool:
    return any(
        (isinstance(part, T.StructType) and not all(field.nullable for field in part))
        or (isinstance(part, T.ArrayType) and not part.containsNull)
        or (isinstance(part, T.MapType) and not part.valueContainsNull)
        for part in parts_of(kind)
    )


def _missing(
    kind: T.DataType, column: pa.Array, rows: Array, path: str, may_be_null: bool
) -> MissingValue | None:
    """Return the first forbidden null; `rows` are the values' rows in the whole column."""
    there = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    if not may_be_null and len(there) < len(column):
        gap = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        return MissingValue(path, int(rows[gap]))
    if not has_required(kind) or pa.types.is_null(column.type):
        return None
    # `take` returns offsets from 0, and drops values below a null.
    column, rows = column.take(pa.array(there)), rows[there]
    match kind:
        case T.StructType():
            for at, field in enumerate(kind):
                part, name = pc.struct_field(column, [at]), f"{path}.{field.name}"
                if (found := _missing(field.dataType, part, rows, name, field.nullable)) is not None:
                    return found
            return None
        case T.ArrayType():
            inner = np.repeat(rows, pc.list_value_length(column).to_numpy(zero_copy_only=False))
            return _missing(kind.elementType, column.flatten(), inner, f"{path}.element", kind.containsNull)
        case T.MapType():
            inner = np.repeat(rows, np.diff(column.offsets.to_numpy()))
            return _missing(kind.valueType, column.items, inner, f"{path}.value", kind.valueContainsNull)
    raise AssertionError(f"{kind} has no parts")


def first_repeated(array: pa.Array) -> tuple[int, Any] | None:
    if find_repeated_key(array) is None:
        return None
    rows = ((at, find_repeated_key(array.slice(at, 1))) for at in range(len(array)))
    return next((at, found[0]) for at, found in rows if found is not None)


def find_repeated_key(array: pa.Array) -> tuple[Any] | None:
    """Return a key that a map has twice, at any depth of an array; None if there is none."""
    # Different keys of a dict may be equal in the declared type: times of one day as a DATE, or 0.1 and its
    # rounded value as a FLOAT. Repeated NaN is allowed: readers of maps make one key of it.
    if not has_type(array.type, pa.types.is_map):
        return None
    kind = array.type
    if pa.types.is_struct(kind):
        return next((found for one in array.flatten() if (found := find_repeated_key(one)) is not None), None)
    if pa.types.is_map(kind):
        first, last = (int(array.offsets[at].as_py()) for at in (0, -1))
        keys, items = (part.slice(first, last - first) for part in (array.keys, array.items))
        return _twice(keys, np.diff(array.offsets.to_numpy())) or find_repeated_key(items)
    return find_repeated_key(array.flatten())


def _twice(keys: pa.Array, counts: np.ndarray[Any, Any]) -> tuple[Any] | None:
    if pa.types.is_nested(keys.type):
        return None
    if pa.types.is_floating(keys.type):
        codes = keys.to_numpy(zero_copy_only=False)
    else:
        codes = keys.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    of_map = np.repeat(np.arange(len(counts)), counts)
    order = np.lexsort((codes, of_map))
    same = (codes[order][1:] == codes[order][:-1]) & (of_map[order][1:] == of_map[order][:-1])
    found = np.flatnonzero(same)
    return (keys[int(order[found[0]])].as_py(),) if len(found) else None


# Arrow silently stores 1 for 1.5 in a list, a cut Decimal, a text as a list of its characters, a number as
# microseconds, numpy's times as numbers, pandas' NaT as the first day, and infinity for a number beyond
# FLOAT; it drops pandas' nanoseconds and the zone of a time of day. So only classes that are known to be
# stored unchanged are accepted.
_FIRST_AND_LAST_YEAR = (datetime.MINYEAR, datetime.MAXYEAR)
#: The greatest FLOAT.
_GREATEST_FLOAT = float(np.finfo(np.float32).max)
BEYOND_FLOAT = "it is beyond what a FLOAT can be: declare DOUBLE"
_WHOLE, _FLOATS = (int, np.integer), (float, np.floating)
#: Below this, all whole numbers are exact as a float.
_WHOLE_UP_TO = 1 << 53
#: Classes of numbers, besides floats, whose fraction Arrow cuts off.
_EXACT = (decimal.Decimal, fractions.Fraction)


@dataclass(frozen=True, slots=True)
class ValueChange:
    value: Any
    reason: str


Check = Callable[[Sequence[Any]], ValueChange | None]


@functools.lru_cache(maxsize=256)
def check_of(kind: pa.DataType) -> Check | None:
    """Return a function that finds the first value that a type would change; None if it changes none."""
    kinds = pa.types
    if kinds.is_list(kind) or kinds.is_large_list(kind):
        return functools.partial(_check_lists, _find_inner_check(kind.value_type))
    if kinds.is_map(kind):
        return functools.partial(
            _check_maps, _find_inner_check(kind.key_type), _find_inner_check(kind.item_type)
        )
    if kinds.is_struct(kind):
        own = tuple(
            (at, check) for at, one in enumerate(kind) if (check := _find_inner_check(one.type)) is not None
        )
        return functools.partial(_check_structs, kind.num_fields, own) if own else None
    if kinds.is_integer(kind):
        return _float_for_integer
    if kinds.is_floating(kind):
        return functools.partial(_no_float, kinds.is_float32(kind))
    if kinds.is_timestamp(kind):
        local = functools.partial(_check_zone, "take it away with replace(tzinfo=None), or declare TIMESTAMP")
        zone: Check = _find_beyond_utc if kind.tz is not None else local
        return _chain(_no_time(datetime.datetime), functools.partial(_too_fine, "nanosecond"), zone)
    if kinds.is_date(kind):
        # A datetime becomes its day, as in Spark.
        return _no_time(datetime.date)
    if kinds.is_duration(kind):
        return _chain(_no_time(datetime.timedelta), functools.partial(_too_fine, "nanoseconds"))
    if kinds.is_time(kind):
        return _chain(
            _no_time(datetime.time), functools.partial(_check_zone, "a TIME has none: take it away")
        )
    # For other types Arrow itself refuses values that it would change.
    return None


def _find_inner_check(kind: pa.DataType) -> Check | None:
    return _cut_for_integer if pa.types.is_integer(kind) else check_of(kind)


def _chain(*checks: Check) -> Check:
    return lambda values: next((found for check in checks if (found := check(values)) is not None), None)


def _check_lists(check: Check | None, values: Sequence[Any]) -> ValueChange | None:
    if (text := _first(values, (str, bytes, bytearray))) is not None:
        return ValueChange(text, "a text is no list; each of its letters would be an element")
    # Other values, such as iterators, can be iterated only once, so they are left to Arrow.
    return None if check is None else check(list(chain.from_iterable(_keep_sized(values))))


def _check_maps(keys: Check | None, items: Check | None, values: Sequence[Any]) -> ValueChange | None:
    # Arrow would end the process.
    pairs_of = (one for one in values if isinstance(one, (list, tuple)))
    if (wrong := next((one for one in pairs_of if any(pair is None for pair in one)), None)) is not None:
        return ValueChange(wrong, "a map consists of pairs of a key and a value, and one of them is None")
    if keys is items is None:
        return None
    pairs = [(one.items() if isinstance(one, dict) else one) for one in _keep_sized(values)]
    found = [pair for pair in chain.from_iterable(pairs) if isinstance(pair, tuple) and len(pair) == 2]
    for at, check in enumerate((keys, items)):
        if check is not None and (changed := check([pair[at] for pair in found])) is not None:
            return changed
    return None


def _check_structs(
    width: int, checks: tuple[tuple[int, Check], ...], values: Sequence[Any]
) -> ValueChange | None:
    # Arrow refuses rows of another width.
    rows = [row for row in values if isinstance(row, tuple) and len(row) == width]
    for at, check in checks:
        if (changed := check([row[at] for row in rows])) is not None:
            return changed
    return None


def _float_for_integer(values: Sequence[Any]) -> ValueChange | None:
    wrong = _first(values, _FLOATS)
    return _cut_for_integer(values) if wrong is None else ValueChange(wrong, "it is a float")


def _cut_for_integer(values: Sequence[Any]) -> ValueChange | None:
    if (strange := _first_strange(values, (*_WHOLE, *_FLOATS, *_EXACT))) is not None:
        return strange
    if _first(values, _FLOATS + _EXACT) is None:
        return None
    for value in values:
        if isinstance(value, _FLOATS) and not (value.is_integer() and abs(float(value)) < _WHOLE_UP_TO):
            return ValueChange(value, "it is a float")
        is_fraction = isinstance(value, fractions.Fraction) and value.denominator != 1
        # Arrow refuses a decimal that is not finite.
        is_decimal = isinstance(value, decimal.Decimal) and value.is_finite()
        if is_fraction or (is_decimal and value != value.to_integral_value()):
            return ValueChange(value, "it is no whole number")
    return None


def _no_float(is_single: bool, values: Sequence[Any]) -> ValueChange | None:
    if (strange := _first_strange(values, (*_WHOLE, *_FLOATS))) is not None:
        return strange
    if _first(values, (np.longdouble,)) is not None:
        for value in values:
            if isinstance(value, np.longdouble) and float(value) != value and value == value:
                return ValueChange(value, "it has more digits than a DOUBLE")
    for value in values if is_single else ():
        if isinstance(value, int | float) and _GREATEST_FLOAT < abs(value) < float("inf"):
            return ValueChange(value, BEYOND_FLOAT)
    return None


def _no_time(kind: type) -> Check:
    def check(values: Sequence[Any]) -> ValueChange | None:
        # Arrow would take a number for microseconds or days; users mostly mean seconds or milliseconds.
        # The class of pandas' NaT is a subclass of datetime.
        wrong = _first(values, (numbers.Number, *_find_nat()))
        if wrong is None:
            return _first_strange(values, (kind,))
        return ValueChange(
            wrong,
            f"it is {'a number, and no time' if isinstance(wrong, numbers.Number) else 'no time: give None'}",
        )

    return check


def _find_nat() -> tuple[type, ...]:
    # Pandas is not imported for it: without pandas in this process no value is a NaT.
    nat = getattr(sys.modules.get("pandas"), "NaT", None)
    return () if nat is None else (type(nat),)


def _find_beyond_utc(values: Sequence[Any]) -> ValueChange | None:
    for value in values:
        # The greatest local time, as in `datetime.max.replace(tzinfo=...)`, may be out of range in UTC.
        is_at_end = getattr(value, "year", None) in _FIRST_AND_LAST_YEAR
        if is_at_end and getattr(value, "tzinfo", None) is not None:
            try:
                value.astimezone(datetime.UTC)
            except (OverflowError, ValueError):
                return ValueChange(value, "in UTC it is beyond the years from 1 to 9999")
    return None


def _check_zone(what_to_do: str, values: Sequence[Any]) -> ValueChange | None:
    wrong = next((value for value in values if getattr(value, "tzinfo", None) is not None), None)
    return None if wrong is None else ValueChange(wrong, f"it has a time zone: {what_to_do}")


def _too_fine(nanos: str, values: Sequence[Any]) -> ValueChange | None:
    """Return the first pandas value that Arrow would cut to microseconds; `nanos` is its attribute."""
    if any(hasattr(one, nanos) for one in set(map(type, values))):
        for value in values:
            if getattr(value, nanos, 0):
                return ValueChange(value, "it has nanoseconds: cut them off with floor('us')")
    return None


def _first_strange(values: Sequence[Any], classes: tuple[type, ...]) -> ValueChange | None:
    """Return the first value whose class is not known to be stored unchanged."""
    known = (*classes, type(None), pa.Scalar)
    for kind in set(map(type, values)):
        # numpy's timedelta64 is a subclass of its signed integers.
        if not issubclass(kind, known) or issubclass(kind, np.timedelta64):
            wrong = next(value for value in values if type(value) is kind)
            return ValueChange(
                wrong, f"a {kind.__module__}.{kind.__qualname__} is not known to be stored unchanged"
            )
    return None


def _first(values: Sequence[Any], classes: tuple[type, ...]) -> Any:
    # A column mostly has one class, so its classes are checked before its values.
    if not any(issubclass(one, classes) for one in set(map(type, values))):
        return None
    return next(value for value in values if isinstance(value, classes))


def _keep_sized(values: Sequence[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, Sized)]


class ValueMismatch(ValueError):
    """A value does not fit the declared type; `value` is the first that does not."""

    def __init__(self, value: Any, kind: pa.DataType, reason: str) -> None:
        # Arrow's reason repeats the value, so it is shortened.
        super().__init__(f"type {kind} cannot hold {show_value(value)}: {reason:.{_MOST_SHOWN}}")
        self.value = value


class ColumnTooLarge(ValueMismatch):
    """The values of a column are together larger than an Arrow column can be; none of them is wrong."""

    def __init__(self, kind: pa.DataType) -> None:
        ValueError.__init__(
            self, f"values of the type {kind} that take more than 2 GiB together, Arrow's limit for a column"
        )
        #: Equal to no value of the column.
        self.value = object()


def show_value(value: Any) -> str:
    """Return a value for an error message; long texts and bytes are shortened."""
    if isinstance(value, str | bytes | bytearray) and len(value) > _MOST_SHOWN:
        unit = "characters" if isinstance(value, str) else "bytes"
        return f"{value[:_MOST_SHOWN]!r}... ({len(value):,} {unit})"
    return f"{value!r}"


#: Greatest offset in a column.
_MOST_BYTES = 2**31 - 2
_MOST_SHOWN = 200


def strict_array(column: Sequence[Any], kind: pa.DataType) -> pa.Array:
    plain = _plain(column, kind) if pa.types.is_nested(kind) else column
    check = check_of(kind)
    if check is not None and (changed := check(plain)) is not None:
        raise _to_mismatch(column, plain, kind, check, changed)
    if pa.types.is_map(kind) and _bytes_in_maps(plain, kind) > _MOST_BYTES:
        # Arrow would crash the process.
        raise ColumnTooLarge(kind)
    try:
        array = pa.array(plain, type=kind)
    except MemoryError:
        raise
    except pa.ArrowCapacityError:
        raise ColumnTooLarge(kind) from None
    except REFUSALS as error:
        wrong = next((v for v in plain if not _fits(v, kind)), None)
        raise ValueMismatch(wrong, kind, str(error)) from error
    if isinstance(array, pa.ChunkedArray):
        raise ColumnTooLarge(kind)
    if (found := first_repeated(array)) is not None:
        at, key = found
        raise ValueMismatch(column[at], kind, f"a map has the key {key!r} twice there")
    return array


def _bytes_in_maps(maps: Sequence[Any], kind: pa.MapType) -> int:
    if not any(is_one(kind.item_type) for is_one in (pa.types.is_binary, pa.types.is_string)):
        return 0
    values = (one.values() if isinstance(one, Mapping) else (item for _, item in one) for one in maps if one)
    return sum(len(item) for own in values for item in own if isinstance(item, Sized))


def _to_mismatch(
    column: Sequence[Any], plain: Sequence[Any], kind: pa.DataType, check: Check, changed: ValueChange
) -> ValueMismatch:
    if not pa.types.is_nested(kind):
        return ValueMismatch(changed.value, kind, changed.reason)
    # The value as it was given, so that the caller can find its row.
    whole = next(given for given, one in zip(column, plain, strict=True) if check([one]) is not None)
    return ValueMismatch(whole, kind, f"{show_value(changed.value)} in it: {changed.reason}")


def _plain(column: Sequence[Any], kind: pa.DataType) -> Sequence[Any]:
    nested = find_nested_type(kind)
    if nested is None or nested.is_plain(column):
        return column
    try:
        return nested.plain_all(column)
    except REFUSALS:
        for value in column:
            try:
                nested.plain_all([value])
            except REFUSALS as error:
                raise ValueMismatch(value, kind, str(error)) from None
        raise


def _fits(value: Any, kind: pa.DataType) -> bool:
    try:
        pa.array([value], type=kind)
    except REFUSALS:
        return False
    return True


def first_refused(count: int, make: Callable[[int], object]) -> int | None:
    """Return the first row at which the conversion of rows fails; None if it does not."""
    fits, fails = 0, count + 1
    while fails - fits > 1:
        middle = (fits + fails) // 2
        try:
            make(middle)
            fits = middle
        except REFUSALS:
            fails = middle
    return fails - 1 if fails <= count else None


def first_valid(column: pa.Array) -> int | None:
    there = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    return int(there[0]) if len(there) else None


def first_of(column: pa.Array) -> str:
    """Return the first value that is not null as a suffix for an error message; empty if all are null."""
    at = first_valid(column)
    return "" if at is None else f": {column[at].as_py()!r:.200}"
