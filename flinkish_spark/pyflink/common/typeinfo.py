"""PyFlink's types, each with its Spark type, and values between both."""

from __future__ import annotations

import ast
import collections.abc
import datetime
import decimal
import functools
import io
import pickle
import typing
from collections.abc import Callable, Sequence
from typing import Any

from pyspark.sql import types as T

from flinkish_spark.planning.declare import find_return_hint
from flinkish_spark.pyflink.common.types import Row
from flinkish_spark.types import hints

_KEYS = (T.StringType, T.IntegralType, T.BooleanType, T.DateType, T.DecimalType)


class TypeInformation:
    """A type of elements, keys or state; made by :class:`Types`."""

    #: Whether values are the same on both sides.
    is_plain = True

    def __init__(self, data_type: T.DataType, convert: Callable[[Any], Any] | None = None) -> None:
        self.data_type, self._convert = data_type, convert

    def encode(self, value: Any) -> Any:
        """Return the value as Spark's type has it."""
        return value if self._convert is None or value is None else self._convert(value)

    def decode(self, value: Any) -> Any:
        """Return the value as a PyFlink program has it."""
        return value

    @property
    def fields(self) -> T.StructType:
        """The columns of a stream of this type."""
        return T.StructType([T.StructField("value", self.data_type)])

    def to_row(self, value: Any) -> Any:
        return (self.encode(value),)

    def from_row(self, record: Any) -> Any:
        return self.decode(record[0])

    @property
    def key(self) -> TypeInformation:
        """The type by which a key of this type is stored."""
        return self if isinstance(self.data_type, _KEYS) else _LITERAL

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = object.__hash__


#: What a value without a declared type may be made of. State is read back by this list, so that reading a
#: checkpoint runs no code.
_SAFE = {
    "builtins": "bool bytearray bytes complex dict float frozenset int list range set slice str tuple",
    "collections": "Counter OrderedDict defaultdict deque",
    "datetime": "date datetime time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "uuid": "UUID",
    "flinkish_spark.pyflink.common.types": "make_row",
}


class _Reader(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if global_name in _SAFE.get(module_name, "").split():
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(
            f"a value without a declared type holds a {global_name} of {module_name}; it may hold numbers, "
            "texts, times, tuples, lists, dicts, sets and Rows: make it one of these, or declare its type"
        )


class _AnyValue(TypeInformation):
    is_plain = False

    def encode(self, value: Any) -> Any:
        return pickle.dumps(value, protocol=5)

    def decode(self, value: Any) -> Any:
        return _Reader(io.BytesIO(value)).load()


class _Literal(TypeInformation):
    """Keys without a usable type: text, since equal keys must have equal bytes, and pickles may differ."""

    is_plain = False

    def encode(self, value: Any) -> Any:
        for one in value if type(value) is tuple else (value,):
            if type(one) is tuple:
                self.encode(one)
            elif one is not None and type(one) not in (bool, int, str, bytes, float):
                raise TypeError(
                    f"the key {one!r} is a {type(one).__name__}, and the key has no declared type; give "
                    "key_by() a key_type, such as Types.STRING(), or let the key be a str, an int, or a tuple"
                )
        return repr(value)

    def decode(self, value: Any) -> Any:
        return _read_literal(value)


_read_literal = functools.lru_cache(maxsize=4096)(ast.literal_eval)


class TupleTypeInfo(TypeInformation):
    """Tuples; their columns are f0, f1 and so on."""

    is_plain = False

    def __init__(self, infos: Sequence[TypeInformation], names: Sequence[str] | None = None) -> None:
        self.infos = list(infos)
        self.names = [f"f{at}" for at in range(len(infos))] if names is None else list(names)
        pairs = zip(self.names, self.infos, strict=True)
        super().__init__(T.StructType([T.StructField(name, one.data_type) for name, one in pairs]))

    def encode(self, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, dict):
            value = [value.get(name) for name in self.names]
        elif isinstance(value, Row) and sorted(value._fields) == sorted(self.names):
            value = value.get_fields_by_names(self.names)
        if len(value) != len(self.infos):
            raise TypeError(f"{value!r} has {len(value)} fields, and {len(self.infos)} are declared")
        return tuple(info.encode(one) for info, one in zip(self.infos, value, strict=True))

    def decode(self, value: Any) -> Any:
        if value is None:
            return None
        # A nested struct is a dict, and a key of one part is no tuple.
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
        return self._make([info.decode(one) for info, one in zip(self.infos, parts, strict=True)])

    def _make(self, values: list[Any]) -> Any:
        return tuple(values)

    @property
    def fields(self) -> Any:
        return self.data_type

    def to_row(self, value: Any) -> Any:
        return self.encode(value)

    def from_row(self, record: Any) -> Any:
        return self.decode(record)

    @property
    def key(self) -> TypeInformation:
        return self if all(isinstance(one.data_type, _KEYS) for one in self.infos) else _LITERAL


class RowTypeInfo(TupleTypeInfo):
    """Rows, with names or without."""

    def _make(self, values: list[Any]) -> Any:
        return Row.of(self.names, values)

    def get_field_names(self) -> list[str]:
        return self.names

    def get_field_types(self) -> list[TypeInformation]:
        return self.infos


class ListTypeInfo(TypeInformation):
    is_plain = False

    def __init__(self, element: TypeInformation) -> None:
        super().__init__(T.ArrayType(element.data_type))
        self.element = element

    def encode(self, value: Any) -> Any:
        return None if value is None else [self.element.encode(one) for one in value]

    def decode(self, value: Any) -> Any:
        return None if value is None else [self.element.decode(one) for one in value]


class MapTypeInfo(TypeInformation):
    is_plain = False

    def __init__(self, key: TypeInformation, value: TypeInformation) -> None:
        super().__init__(T.MapType(key.data_type, value.data_type))
        self.value = value

    def encode(self, value: Any) -> Any:
        return None if value is None else {key: self.value.encode(one) for key, one in value.items()}

    def decode(self, value: Any) -> Any:
        return None if value is None else {key: self.value.decode(one) for key, one in value.items()}


class AsItIs(TypeInformation):
    """Results of an aggregate function, which a window function gets as they are."""

    def from_row(self, record: Any) -> Any:
        return record


class SourceRecord(TypeInformation):
    """Records of a source of ours: a Row of several fields, or the value of the only one."""

    def from_row(self, record: Any) -> Any:
        return Row.of(list(record._fields), list(record)) if len(record) > 1 else record[0]


_LITERAL, PICKLED, AS_IT_IS = _Literal(T.StringType()), _AnyValue(T.BinaryType()), AsItIs(T.NullType())


def map_key(info: TypeInformation) -> TypeInformation:
    """Return the type of keys of a map state, which are scalars in Spark."""
    return info if info.is_plain else _LITERAL


def _maker(kind: T.DataType, convert: Callable[[Any], Any] | None = None) -> Any:
    return staticmethod(lambda: TypeInformation(kind, convert))


def _primitive_array(element_type: TypeInformation) -> TypeInformation:
    is_bytes = isinstance(element_type.data_type, T.ByteType)
    return TypeInformation(T.BinaryType(), bytes) if is_bytes else ListTypeInfo(element_type)


def _map(key_type: TypeInformation, value_type: TypeInformation) -> TypeInformation:
    return MapTypeInfo(key_type, value_type) if key_type.is_plain else PICKLED


class Types:
    """The types of a PyFlink program: ``Types.TUPLE([Types.STRING(), Types.LONG()])``."""

    STRING = CHAR = _maker(T.StringType())
    BOOLEAN, BYTE, SHORT = _maker(T.BooleanType()), _maker(T.ByteType()), _maker(T.ShortType())
    INT, LONG = _maker(T.IntegerType()), _maker(T.LongType())
    FLOAT, DOUBLE = _maker(T.FloatType(), float), _maker(T.DoubleType(), float)
    BIG_DEC, SQL_DATE = _maker(T.DecimalType(38, 18)), _maker(T.DateType())
    SQL_TIMESTAMP = _maker(T.TimestampNTZType())
    PICKLED_BYTE_ARRAY = BIG_INT = SQL_TIME = INSTANT = staticmethod(lambda: PICKLED)
    ROW = staticmethod(lambda field_types: RowTypeInfo(field_types))
    ROW_NAMED = staticmethod(lambda field_names, field_types: RowTypeInfo(field_types, field_names))
    TUPLE = staticmethod(lambda field_types: TupleTypeInfo(field_types))
    LIST = BASIC_ARRAY = OBJECT_ARRAY = staticmethod(lambda element_type: ListTypeInfo(element_type))
    PRIMITIVE_ARRAY, MAP = staticmethod(_primitive_array), staticmethod(_map)


_OF_HINTS: dict[Any, Callable[[], TypeInformation]] = {
    bool: Types.BOOLEAN,
    int: Types.LONG,
    float: Types.DOUBLE,
    str: Types.STRING,
    datetime.date: Types.SQL_DATE,
    decimal.Decimal: Types.BIG_DEC,
}
_MANY = (collections.abc.Iterable, collections.abc.Iterator, collections.abc.Generator, list)


def _read_hint(hint: Any) -> TypeInformation:
    hint = hints.strip_none(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and arguments and Ellipsis not in arguments:
        return Types.TUPLE([_read_hint(one) for one in arguments])
    if origin is list and arguments:
        return Types.LIST(_read_hint(arguments[0]))
    return _OF_HINTS[hint]() if isinstance(hint, type) and hint in _OF_HINTS else PICKLED


def find_hinted_type(call: Any, *, makes_many: bool) -> TypeInformation:
    """Return the type that a function's hint says of its results; pickled, if it says none."""
    try:
        hint = find_return_hint(call)
    except hints.NoSuchType:
        return PICKLED
    if not makes_many:
        return _read_hint(hint)
    is_many = typing.get_origin(hint) in _MANY and typing.get_args(hint)
    return _read_hint(typing.get_args(hint)[0]) if is_many else PICKLED


def infer_type(values: Sequence[Any]) -> TypeInformation:
    """Return the type that all values of a bounded source have; pickled, if they have several or none."""
    kinds = {type(value) for value in values}
    kind: Any = kinds.pop() if len(kinds) == 1 else None
    if kind in (bool, float, str) or (kind is int and all(abs(value) < 1 << 63 for value in values)):
        return _OF_HINTS[kind]()
    if kind not in (tuple, Row) or len({(len(one), *getattr(one, "_fields", ())) for one in values}) != 1:
        return PICKLED
    infos = [infer_type(column) for column in zip(*values, strict=True)]
    if not infos:
        return PICKLED
    return Types.TUPLE(infos) if kind is tuple else RowTypeInfo(infos, values[0]._fields or None)


def show(value: Any) -> str:
    if isinstance(value, Row):
        return f"+I[{', '.join(map(show, value))}]"
    return f"({','.join(map(show, value))})" if isinstance(value, tuple) else str(value)
