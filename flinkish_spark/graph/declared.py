"""Checks of what a user declares about a stream: field names, output types, key groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import types as T

from flinkish_spark.arguments import refuse_async
from flinkish_spark.errors import ConfigError, GraphError, SchemaError, UserFunctionError
from flinkish_spark.functions import KeyedProcessFunction
from flinkish_spark.graph.stream_graph import KeyedEntry, KeyedNode, StreamGraph
from flinkish_spark.operators.elements import OutputTag
from flinkish_spark.operators.vectorized import VectorizedProcessFunction
from flinkish_spark.runtime.columns import PREFIX
from flinkish_spark.runtime.hinted_types import (
    NoSuchType,
    OutputType,
    StateType,
    declared_ddl,
    declared_type,
    maker_of,
)
from flinkish_spark.runtime.usable_types import same_names

if TYPE_CHECKING:
    from flinkish_spark.graph.stream_graph import KeyedFunction

#: Key groups are numbered by the job's settings; this is the most that a state store should hold.
MAX_PARALLELISM_LIMIT = 32_768


def check_max_parallelism(groups: int) -> None:
    """Raise ConfigError unless `groups` is a usable number of key groups."""
    if not isinstance(groups, int) or isinstance(groups, bool) or not 1 <= groups <= MAX_PARALLELISM_LIMIT:
        raise ConfigError(
            f"max_parallelism is {groups!r}",
            why=f"it is the number of key groups, from 1 to {MAX_PARALLELISM_LIMIT}",
            what_to_do="use the default of 128, or a multiple of the cluster's cores",
        )


def output_schema(output: OutputType, uid: str) -> T.StructType:
    """Return the declared output of an operator as a StructType.

    Raises
    ------
    SchemaError
        It is no list of fields, or one with a name that is reserved or there twice, within a field, too.
    """
    what_to_do = 'write it like "user STRING, total LONG", or give a StructType, a dataclass or a NamedTuple'
    try:
        schema = declared_type(output)
    except NoSuchType as error:
        raise SchemaError(
            f"the output of '{uid}' cannot be read", why=str(error), what_to_do=what_to_do
        ) from None
    if not isinstance(schema, T.StructType) or not schema.fields:
        raise SchemaError(f"the output of '{uid}' is not a list of fields: {output!r}", what_to_do=what_to_do)
    check_field_names(schema, f"the output of '{uid}'")
    if (why := same_names(schema)) is not None:
        raise SchemaError(f"the output of '{uid}' cannot be read", why=why, what_to_do="rename one of them")
    return schema


def accumulator_type(given: StateType, uid: str) -> StateType:
    """Return the declared type of an accumulator.

    Raises
    ------
    SchemaError
        It is no type.
    """
    try:
        declared_ddl(given)
        # A class has to be one of which instances can be made again.
        maker_of(given)
    except NoSuchType as error:
        raise SchemaError(
            f"the accumulator of '{uid}' cannot be of the type {given!r}",
            why=str(error),
            what_to_do="write it like \"total LONG, n LONG\", or give a type of Spark's or Python's",
            uid=uid,
        ) from None
    return given


def check_field_names(schema: T.StructType, what: str) -> None:
    """Raise SchemaError for names that are empty, reserved or used twice (Spark ignores case)."""
    seen: dict[str, str] = {}
    for name in schema.names:
        if not name:
            raise SchemaError(
                f"{what} has a field without a name",
                why="no expression could name it",
                what_to_do="name the field",
            )
        if name.lower().startswith(PREFIX):
            raise SchemaError(
                f"{what} has a field '{name}'",
                why=f"names that start with {PREFIX} are control columns",
                what_to_do="rename the field",
            )
        # As Java compares without case, which is what Spark does.
        folded = name.upper().lower()
        if folded in seen:
            raise SchemaError(
                f"{what} has the field '{name}' twice",
                why="" if seen[folded] == name else f"for Spark it is the same as '{seen[folded]}'",
                what_to_do="rename one of them",
            )
        seen[folded] = name


def check_same_fields(first: T.StructType, other: T.StructType, what: str) -> None:
    """Raise SchemaError unless two streams that become one have the same fields in the same order."""
    shown = [", ".join(f"{f.name} {f.dataType.simpleString()}" for f in one) for one in (first, other)]
    if shown[0] != shown[1]:
        raise SchemaError(
            f"{what} unites a stream of ({shown[0]}) with one of ({shown[1]})",
            what_to_do="give them the same fields in the same order, for example with transform()",
        )


def check_late_output(tag: OutputTag, schema: T.StructType, uid: str) -> None:
    """Raise SchemaError unless elements with these fields can go out by a tag as they are."""
    declared = output_schema(tag.output, uid)
    kinds = [[field.dataType.simpleString() for field in one] for one in (schema, declared)]
    if kinds[0] != kinds[1]:
        raise _unfit_for_late(tag, schema, declared, uid)


def check_late_row(tag: OutputTag, schema: T.StructType, uid: str) -> None:
    """Raise SchemaError if no element with these fields can go out by a tag, whose types may be others.

    Said when a job is planned: the first late element may come after weeks.
    """
    declared = output_schema(tag.output, uid)
    if len(declared) != len(schema):
        raise _unfit_for_late(tag, schema, declared, uid)


def _unfit_for_late(tag: OutputTag, schema: T.StructType, declared: T.StructType, uid: str) -> SchemaError:
    shown = [", ".join(f"{f.name} {f.dataType.simpleString()}" for f in one) for one in (schema, declared)]
    return SchemaError(
        f"late elements of '{uid}' are ({shown[0]}), and the OutputTag '{tag.name}' says ({shown[1]})",
        what_to_do="give the tag the fields of the stream",
        uid=uid,
    )


def check_keyed_function(function: object, uid: str) -> None:
    """Raise GraphError unless `process` of a keyed stream can call it, ConfigError if it would never run."""
    if not isinstance(function, KeyedProcessFunction | VectorizedProcessFunction):
        given = (
            f"the class {function.__name__}" if isinstance(function, type) else f"a {type(function).__name__}"
        )
        raise GraphError(
            f"process() of '{uid}' got {given}",
            what_to_do="give it an instance of a KeyedProcessFunction or VectorizedProcessFunction subclass",
        )
    refuse_async(function, ("process_element", "on_timer", "process_batch"), f"'{uid}'")


def declare_operator(
    graph: StreamGraph,
    entries: Sequence[KeyedEntry],
    function: KeyedFunction,
    output: OutputType | None,
    uid: str,
    max_parallelism: int | None,
) -> KeyedNode:
    """Add a keyed operator to the graph and return its node.

    Parameters
    ----------
    output
        None stands for the fields of the input, or what the function itself says of them.
    max_parallelism
        None for the graph's.

    Raises
    ------
    ConfigError, GraphError, SchemaError, UserFunctionError
        Something cannot be used; the graph is as it was.
    """
    groups = graph.max_parallelism if max_parallelism is None else max_parallelism
    check_max_parallelism(groups)
    check_can_be_sent(function, "of operator", uid)
    fields = None if output is None else output_schema(output, uid)
    node = KeyedNode(graph.check_uid(uid), tuple(entries), function, fields, groups)
    graph.operators.append(node)
    return node


def check_can_be_sent(function: object, what: str, uid: str) -> None:
    """Raise UserFunctionError if a function of the user's cannot be serialised."""
    from pyspark import cloudpickle

    try:
        cloudpickle.dumps(function)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise UserFunctionError(
            f"the function {what} '{uid}' cannot be sent to the workers",
            why=f"{type(error).__name__}: {error}",
            what_to_do="make sessions, locks and connections in open(), not in __init__",
            uid=uid,
        ) from error
