"""Checks of what a user declares about a stream: fields, types, keys, key groups, functions."""

from __future__ import annotations

import collections.abc
import contextlib
import functools
import inspect
import sys
import typing
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from pyspark.sql import Column
from pyspark.sql import types as T

from flinkish_spark.core.arrow_pass import ComposedWorker, map_in_arrow
from flinkish_spark.core.elements import OutputTag, OutputType
from flinkish_spark.core.errors import GraphError, SchemaError, UserFunctionError
from flinkish_spark.core.fields import Range, check_arguments
from flinkish_spark.core.suggestions import describe_choices
from flinkish_spark.core.validation import check_function, check_methods
from flinkish_spark.functions.keyed import (
    AggregateFunction,
    FilterFunction,
    FlatMapFunction,
    MapFunction,
    RichFunction,
)
from flinkish_spark.functions.stream import CoFlatMapFunction, CoMapFunction, KeySelector
from flinkish_spark.functions.watermark_strategy import WatermarkStrategy
from flinkish_spark.planning.stream_graph import (
    Key,
    KeyedEntry,
    KeyedNode,
    KeyFunction,
    StreamGraph,
    StreamNode,
)
from flinkish_spark.transport.columns import Origins
from flinkish_spark.types import hints
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.schemas import PREFIX, output_schema
from flinkish_spark.windows.functions import WINDOW_BOUNDS, ProcessWindowFunction, WindowBounds
from flinkish_spark.worker.functions import AppendColumns, RowFunction, SingleRow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from flinkish_spark.planning.stream_graph import KeyedFunction


#: The most key groups that a state store should hold.
MAX_PARALLELISM_LIMIT = 32_768


#: The number of key groups of an operator.
KeyGroups = Annotated[int, Range(1, MAX_PARALLELISM_LIMIT)]
KEY_GROUPS_ADVICE = "use the default of 128, or a multiple of the cluster's cores"


def check_accumulator_type(given: hints.StateType, uid: str) -> hints.StateType:
    try:
        hints.to_ddl(given)
        # Stored accumulators must be restorable as instances of the class.
        hints.maker_of(given)
    except hints.NoSuchType as error:
        raise SchemaError(
            f"the accumulator of '{uid}' cannot be of the type {given!r}",
            why=str(error),
            what_to_do="write it like \"total LONG, n LONG\", or give a type of Spark's or Python's",
        ) from None
    return given


def check_same_fields(first: T.StructType, other: T.StructType, what: str) -> None:
    shown = [", ".join(f"{f.name} {f.dataType.simpleString()}" for f in one) for one in (first, other)]
    if shown[0] != shown[1]:
        raise SchemaError(
            f"{what} unites a stream of ({shown[0]}) with one of ({shown[1]})",
            what_to_do="give them the same fields in the same order, for example with transform()",
        )


def check_late_output(tag: OutputTag, schema: T.StructType, uid: str, *, types_may_differ: bool) -> None:
    """Raise SchemaError if elements with these fields cannot go out by a tag."""
    # Checked when the job starts: the first late element may come after weeks.
    declared = output_schema(tag.output, uid)
    ours, theirs = ([field.dataType.simpleString() for field in one] for one in (schema, declared))
    if len(ours) == len(theirs) if types_may_differ else ours == theirs:
        return
    shown = [", ".join(f"{f.name} {f.dataType.simpleString()}" for f in one) for one in (schema, declared)]
    raise SchemaError(
        f"late elements of '{uid}' are ({shown[0]}), and the OutputTag '{tag.name}' says ({shown[1]})",
        what_to_do="give the tag the fields of the stream",
    )


@check_arguments(max_parallelism=KEY_GROUPS_ADVICE)
def declare_operator(
    graph: StreamGraph,
    entries: Sequence[KeyedEntry],
    function: KeyedFunction,
    output: OutputType | None,
    uid: str,
    max_parallelism: KeyGroups | None,
) -> KeyedNode:
    groups = graph.max_parallelism if max_parallelism is None else max_parallelism
    check_can_be_sent(function, "of operator", uid)
    fields = None if output is None else output_schema(output, uid)
    node = KeyedNode(graph.check_uid(uid), tuple(entries), function, fields, groups)
    graph.operators.append(node)
    return node


def resolve_uid(
    graph: StreamGraph, uid: str | None, method: str, *fronts: str | StreamNode | KeyedEntry
) -> str:
    """Return the given uid; without one, warn and derive it from the place in the program."""
    if uid is not None:
        return uid
    derived = graph.derive_uid(method, fronts)
    warnings.warn(
        f"{method.replace('_', ' ')} has no uid and is called '{derived}', by its place in the program: what "
        f'it keeps is not found again when that changes. Say it to keep it: uid="{derived}"',
        stacklevel=_find_stack_level(),
    )
    return derived


def _find_stack_level() -> int:
    """Return the `stacklevel` for `warnings.warn` of the first frame outside this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("flinkish_spark."):
        frame, level = frame.f_back, level + 1
    return level


def check_can_be_sent(function: object, what: str, uid: str) -> None:
    from pyspark import cloudpickle

    try:
        cloudpickle.dumps(function)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise UserFunctionError(
            f"the function {what} '{uid}' cannot be sent to the workers",
            why=f"{type(error).__name__}: {error}",
            what_to_do="make sessions, locks and connections in open(), not outside of it",
            uid=uid,
        ) from error


def check_strategy(strategy: WatermarkStrategy, uid: str) -> None:
    for function in (strategy.timestamps, strategy.generator):
        if callable(function) and not isinstance(function, Column):
            check_can_be_sent(function, "of the watermark strategy", uid)


#: By method: the function class for one input, the class for two inputs, and the two methods of the latter.
_KINDS: dict[str, tuple[type[RichFunction], type[RichFunction] | None, tuple[str, str]]] = {
    "map": (MapFunction, CoMapFunction, ("map1", "map2")),
    "flat_map": (FlatMapFunction, CoFlatMapFunction, ("flat_map1", "flat_map2")),
    "filter": (FilterFunction, None, ("", "")),
}


@dataclass(frozen=True)
class RecordCall:
    #: From a record to the result.
    call: Callable[[Any], Any]
    #: The object to open and close, if `call` is its method; None for a plain function.
    rich: RichFunction | None


def make_record_call(function: Any, method: str, uid: str | None = None) -> RecordCall:
    kind = _KINDS[method][0]
    if isinstance(function, kind):
        check_methods(function, kind, _describe_call(method, uid))
        return RecordCall(getattr(function, method), function)
    is_class, why = isinstance(function, type), ""
    is_wrong = not callable(function) or (is_class and issubclass(function, RichFunction))
    if not is_wrong and method == "filter" and is_class and function.__module__ != "builtins":
        is_wrong, why = True, "what a class makes is there, and so keeps every record"
    if is_wrong:
        raise GraphError(
            f"{_describe_call(method, uid)} got {_describe(function)}",
            why=why,
            what_to_do=f"give it a function of one record, or an instance of a {kind.__name__} subclass",
        )
    check_function(
        function, f"the function of {_describe_call(method, uid)}", 1, is_rows=method == "flat_map"
    )
    return RecordCall(function, None)


def make_connected_calls(
    first: Any, second: Any, method: str, uid: str | None = None
) -> tuple[RecordCall, RecordCall]:
    kind, methods = _KINDS[method][1:]
    assert kind is not None
    if isinstance(first, kind):
        if second is None:
            check_methods(first, kind, _describe_call(method, uid))
            left, right = (RecordCall(getattr(first, one), first) for one in methods)
            return left, right
        why = f"a {kind.__name__} has a method for each of the two streams"
    elif second is None:
        why = "two streams are connected"
    else:
        return make_record_call(first, method, uid), make_record_call(second, method, uid)
    raise GraphError(
        f"{_describe_call(method, uid)} of connected streams got {_describe(first)}, and "
        f"{'nothing' if second is None else _describe(second)} beside it",
        why=why,
        what_to_do=f"give it an instance of a {kind.__name__} subclass alone, or a function for each stream",
    )


def _describe_call(method: str, uid: str | None) -> str:
    return f"{method}()" if uid is None else f"{method}() of '{uid}'"


def _describe(function: Any) -> str:
    if isinstance(function, type):
        return f"the class {function.__name__}"
    return f"a {type(function).__name__}"


# ----------------------------------------------------------------------------------------------------------
# Output fields inferred from a function's type hints, if they are not declared.


_MANY = (collections.abc.Iterable, collections.abc.Iterator, collections.abc.Generator)
_LISTS = (list, collections.abc.Sequence)

#: Stands for a hint that is not there.
_NO_HINT = inspect.Signature.empty


def infer_output(
    call: Callable[..., Any], what: str, *others: Callable[..., Any], is_iterable: bool
) -> T.StructType:
    """Return the fields of the rows that a function emits, by its return type hint."""
    reasons = []
    for one in (call, *others):
        try:
            hint = find_return_hint(one)
            return hints.fields_of(_find_row_type(hint) if is_iterable else hints.strip_none(hint))
        except hints.NoSuchType as error:
            reasons.append(f"{_name_function(one)}: {error}")
    hint_text = "Iterator[Total]" if is_iterable else "Total"
    raise SchemaError(
        f"the output of {what} is not known",
        why="; ".join(reasons),
        what_to_do='say output="user STRING, total LONG", or let the hint for what '
        f"{_name_function(call)} returns be `-> {hint_text}`, with a dataclass or a NamedTuple `Total`",
    )


def infer_aggregate_output(
    aggregate: AggregateFunction, then: ProcessWindowFunction | None, what: str
) -> T.StructType:
    if then is not None and not isinstance(then, WindowBounds):
        return infer_output(then.process, what, is_iterable=True)
    result = infer_output(aggregate.get_result, what, is_iterable=False)
    if then is None:
        return result
    bounds = parse_ddl(WINDOW_BOUNDS)
    assert isinstance(bounds, T.StructType)
    return T.StructType([*result, *bounds])


def find_return_hint(call: Callable[..., Any]) -> Any:
    while isinstance(call, functools.partial):
        call = call.func
    # A callable object has its hints on `__call__`.
    routine: Any = call if inspect.isroutine(call) else type(call).__call__
    routine = inspect.unwrap(getattr(routine, "__func__", routine))
    hint = getattr(routine, "__annotations__", {}).get("return", _NO_HINT)
    if hint is _NO_HINT:
        raise hints.NoSuchType("there is no hint for what it returns")
    # Classes that are defined inside a function are in the closures of functions that use them.
    holder: Any = type("Holder", (), {"__annotations__": {"row": hint}})
    try:
        return typing.get_type_hints(holder, routine.__globals__, _find_nonlocals(routine))["row"]
    except Exception as error:
        # A hint may be any expression, which may raise anything.
        says = f"{type(error).__name__}: {error}"
        raise hints.NoSuchType(f"its hint {hint!r} cannot be read here: {says}") from None


def _find_nonlocals(routine: Any) -> dict[str, Any]:
    found = {}
    for name, cell in zip(routine.__code__.co_freevars, routine.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def _find_row_type(hint: Any) -> Any:
    plain = hints.strip_none(hint)
    origin, arguments = typing.get_origin(plain), typing.get_args(plain)
    if origin in (*_MANY, *_LISTS) and arguments:
        return arguments[0]
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return arguments[0]
    if hints.is_record(plain):
        raise hints.NoSuchType(
            f"{hints.hint_name(plain)} is one row, and it returns rows: Iterator[{hints.hint_name(plain)}]"
        )
    raise hints.NoSuchType(f"{hints.hint_name(hint)} does not say what it holds")


def _name_function(call: Callable[..., Any]) -> str:
    return f"{getattr(call, '__name__', type(call).__name__)}()"


# ----------------------------------------------------------------------------------------------------------
# Keys as a user gives them: columns, expressions, or a Python function of a record.


#: Types whose values do not compare reliably, or cannot be keys of a Python dict.
UNFIT_KEYS = (T.ArrayType, T.MapType, T.StructType, T.FloatType, T.DoubleType, T.VariantType)
_SAY_IT = 'say key="STRING", or key="user STRING, product LONG" for a tuple'


def parse_keys(keys: Sequence[Any], declared: hints.StateType | None) -> tuple[Key, ...]:
    if not keys:
        raise GraphError("key_by() got no key", what_to_do='name a column: key_by("user")')
    functions = [key for key in keys if is_key_function(key)]
    if functions and len(keys) > 1:
        raise GraphError(
            "key_by() got a function and another key",
            why="a function makes the whole key",
            what_to_do="let it return a tuple: "
            'key_by(lambda order: (order.user, order.product), key="user STRING, product LONG")',
        )
    if functions:
        return (_make_key_function(functions[0], declared),)
    for key in keys:
        if not isinstance(key, str | Column) or (isinstance(key, str) and not key):
            raise GraphError(
                f"key_by() got {key!r} ({type(key).__name__})",
                why="a key is the name of a column, a column expression or a function of a record",
                what_to_do='name them one by one: key_by("user", "product")',
            )
    if declared is not None:
        raise GraphError(f"key_by() got key={declared!r} without a function", what_to_do="leave it out")
    return tuple(keys)


def is_key_function(key: Any) -> bool:
    return isinstance(key, KeySelector) or (callable(key) and not isinstance(key, str | Column))


def find_callable(function: Any, method: str) -> tuple[Callable[[Any], Any], RichFunction | None]:
    if isinstance(function, KeySelector):
        check_methods(function, KeySelector, f"the key of {method}")
        return function.get_key, function
    if not callable(function) or (isinstance(function, type) and issubclass(function, KeySelector)):
        raise GraphError(
            f"{method} got {function!r} ({type(function).__name__}) as its key",
            what_to_do="give it a function of one record, or an instance of a KeySelector",
        )
    check_function(function, f"the function of {method}", 1)
    return function, None


def _make_key_function(function: Any, declared: hints.StateType | None) -> KeyFunction:
    call, rich = find_callable(function, "key_by()")
    kind = _infer_key_type(call) if declared is None else _parse_key_type(declared)
    check_can_be_sent(call, "of", "key_by")
    if isinstance(kind, T.StructType):
        made = KeyFunction(call, rich, kind)
    else:
        made = KeyFunction(SingleRow(call), rich, T.StructType([T.StructField("key", kind)]))
    for part in made.parts:
        refuse_unfit_key(part.dataType, "the function of key_by() makes", part.name)
    return made


def no_such_key(uid: str, key: str, fields: T.StructType) -> GraphError:
    return GraphError(
        f"operator '{uid}' is keyed by '{key}', which its records do not have",
        why=describe_choices(fields.names, key),
        what_to_do="name one of them; an expression, or a field of a STRUCT, is a Column: "
        'key_by(F.expr("amount % 2")), key_by(F.col("address.city"))',
    )


def refuse_unfit_key(kind: T.DataType, what: str, name: str) -> None:
    if isinstance(kind, UNFIT_KEYS):
        raise GraphError(
            f"{what} {name}, a {kind.simpleString()}",
            why="values of that type cannot be compared reliably",
            what_to_do="key by its parts: a string, a whole number, a date, a timestamp or a decimal",
        )
    if isinstance(kind, T.StringType) and not kind.isUTF8BinaryCollation():
        raise GraphError(
            f"{what} {name}, a {kind.simpleString()}",
            why="its collation makes different texts equal in Spark, but they are different keys in Python",
            what_to_do=f"key by a STRING that is the same for equal texts, such as F.expr('lower({name})')",
        )


def _parse_key_type(declared: hints.StateType) -> T.DataType:
    try:
        kind = hints.to_data_type(declared)
        if isinstance(declared, str) and (name := hints.first_required(kind)) is not None:
            raise hints.NoSuchType(f"{name!r} is NOT NULL, and null is a key like others: leave NOT NULL out")
        return kind
    except hints.NoSuchType as error:
        what = f"the type of the key is {declared!r}"
        if isinstance(declared, str):
            what = "the type of the key cannot be read"
        raise SchemaError(what, why=str(error), what_to_do=_SAY_IT) from None


def _infer_key_type(call: Callable[[Any], Any]) -> T.DataType:
    try:
        return _find_type(find_return_hint(call))
    except hints.NoSuchType as error:
        raise SchemaError(
            "the type of the key that the function of key_by() makes is not known",
            why=str(error),
            what_to_do=f"{_SAY_IT}; or give the function a hint for what it returns",
        ) from None


def _find_type(hint: Any) -> T.DataType:
    hint = hints.strip_none(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and arguments and Ellipsis not in arguments:
        return T.StructType(
            [T.StructField(f"key{at}", hints.type_of(one)) for at, one in enumerate(arguments)]
        )
    try:
        return hints.fields_of(hint)
    except hints.NoSuchType:
        return hints.type_of(hint)


@dataclass(frozen=True)
class KeyColumn:
    """A part of a key in a column of its own, which is no field of the record."""

    name: str


#: A part of a key in a plan: a field of the records, a column of its own, or a Spark expression.
KeyPart = str | KeyColumn | Column


def compute_keys(
    frame: DataFrame, operators: Sequence[tuple[str, Sequence[Key]]], origins: Origins
) -> tuple[DataFrame, list[tuple[KeyPart, ...]]]:
    """Add columns with the keys that functions make; return the frame and the key of each operator."""
    workers, schema, found = make_key_workers(frame.schema, operators, origins)
    return (map_in_arrow(frame, ComposedWorker(workers), schema) if workers else frame), found


def make_key_workers(
    given: T.StructType, operators: Sequence[tuple[str, Sequence[Key]]], origins: Origins
) -> tuple[tuple[AppendColumns, ...], T.StructType, list[tuple[KeyPart, ...]]]:
    """Return workers that add the keys of several operators, the columns then, and the key of each."""
    workers, found = list[AppendColumns](), list[tuple[KeyPart, ...]]()
    for place, (uid, keys) in enumerate(operators):
        function = next((key for key in keys if isinstance(key, KeyFunction)), None)
        if function is None:
            found.append(tuple(key for key in keys if not isinstance(key, KeyFunction)))
            continue
        names = tuple(f"{PREFIX}at{place}_key{at}" for at in range(len(function.parts)))
        worker = replace(make_key_worker(function, given, uid, origins), names=names)
        workers.append(worker)
        given = worker.columns
        found.append(tuple(map(KeyColumn, names)))
    return tuple(workers), given, found


def make_key_worker(key: KeyFunction, given: T.StructType, uid: str, origins: Origins) -> AppendColumns:
    """Return a worker that adds the parts of an operator's key to rows; see :func:`compute_keys`."""
    what = f"the key function of operator '{uid}'"
    function = RowFunction(uid, key.call, key.rich, origins, what, counts_as=key.counts_as)
    names = tuple(f"{PREFIX}key{at}" for at in range(len(key.parts)))
    return AppendColumns(function, given, key.parts, names)
