"""What travels of one input of a keyed operator: columns, the key, and what is aggregated in front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.errors import GraphError
from flinkish_spark.graph.branches import SharedRows
from flinkish_spark.graph.declared import check_field_names, check_late_output, output_schema
from flinkish_spark.graph.key_selectors import no_such_key, refuse_unfit_key
from flinkish_spark.graph.operator_factories import (
    ColumnFolding,
    FoldingWindows,
    fields_of,
    with_retraction_field,
)
from flinkish_spark.graph.stream_graph import KeyedNode
from flinkish_spark.operators.column_windows import NotOverColumns, column_windows_or_why_not
from flinkish_spark.operators.element_windows import WindowOperator
from flinkish_spark.operators.vectorized_aggregates import MergePartials
from flinkish_spark.operators.vectorized_windows import ELEMENTS, LAST_MS, WindowFold
from flinkish_spark.protocol.alignment import ExpectedChannels
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.combining import Combiner, WindowCombiner
from flinkish_spark.runtime.group_runners import Distribution
from flinkish_spark.runtime.keyed_operator import Origins
from flinkish_spark.windows.functions import WINDOW_BOUNDS


@dataclass(frozen=True)
class KeyedInput:
    """One way into a keyed operator.

    Parameters
    ----------
    frames
        Either records and barriers apart (a source), or one frame of both (another operator): a
        frame that is used twice would run the operator before it twice.
    schema
        The records' fields.
    channels
        Upstream channels, each of which shows every barrier once.
    keys
        Columns of the key.
    entry
        Which of the operator's entries it is for.
    distribution
        How its records are spread over the partitions; without a key all have the same hash.
    source
        Name of the chain's input whose records are in the first frame; None behind another operator.
    reports_as
        Its number, if its records have event times that the driver is told of here.
    shared
        Where its rows are, if other inputs read the same operator, or functions lie in between. Its frame
        only says then what its records look like.
    """

    frames: tuple[DataFrame, ...]
    schema: T.StructType
    channels: ExpectedChannels
    origins: Origins
    keys: tuple[str | Column, ...]
    entry: int = 0
    distribution: Distribution = Distribution.BY_KEY
    source: str | None = None
    reports_as: int | None = None
    shared: SharedRows | None = None

    @property
    def has_times(self) -> bool:
        """Whether its records have event times."""
        return C.TIME in self.frames[0].columns


@dataclass(frozen=True)
class Transport:
    """Which columns go to the worker, under which names."""

    columns: tuple[Column, ...]
    schema: T.StructType
    field_names: tuple[str, ...]
    key_names: tuple[str, ...]
    key_types: tuple[T.DataType, ...]


@dataclass(frozen=True)
class Folded:
    """An operator of folds, which is made when the fields of its input are known.

    Parameters
    ----------
    operator
        What runs.
    fields
        Columns that it gets, under their names there; the transport has others.
    output
        Fields of its main output.
    combiner
        Computes a part of it before the shuffle; None where rows travel as they are.
    """

    operator: MergePartials | WindowFold | WindowOperator
    fields: tuple[str, ...]
    output: T.StructType
    combiner: Combiner | WindowCombiner | None = None


@dataclass(frozen=True)
class Sent:
    """What goes to the worker of one input: which columns are chosen, and what travels in the end."""

    chosen: Transport
    transport: Transport
    folded: Folded | None = None


def columns_sent(node: KeyedNode, given: KeyedInput) -> Sent:
    """Return what travels of an input.

    Raises
    ------
    GraphError
        A part of the key is not there, or cannot be one.
    """
    # Spark's names ignore case.
    known = {name.lower() for name in given.schema.names}
    for key in given.keys:
        if isinstance(key, str) and key.lower() not in known:
            raise no_such_key(node.uid, key, given.schema)
    keys = [F.col(C.quoted(k)) if isinstance(k, str) else k for k in given.keys]
    try:
        transport = _transport(node, given, keys)
    except AnalysisException as error:
        raise GraphError(
            f"operator '{node.uid}' is keyed by an expression that Spark refuses",
            why=str(error).partition("\n")[0],
            what_to_do=f"correct it; the records have {', '.join(given.schema.names)}",
            uid=node.uid,
        ) from None
    return sent_by(node, given, transport)


def sent_by(node: KeyedNode, given: KeyedInput, transport: Transport) -> Sent:
    """Return what travels of an input whose whole records would travel by a transport; needs no Spark."""
    if isinstance(node.function, ColumnFolding):
        return _folding(node.function, node.output, given, transport)
    if isinstance(node.function, FoldingWindows):
        return folding_windows(node.function, node.uid, given.schema, given.keys, transport)
    return Sent(transport, transport)


def _folding(
    function: ColumnFolding, declared: T.StructType | None, given: KeyedInput, transport: Transport
) -> Sent:
    names = tuple(key for key in given.keys if isinstance(key, str))
    aggregation = function.aggregation(given.schema, names)
    partials = fields_of(aggregation)
    output = partials if declared is None else declared
    kept = _kept(transport)
    fields = tuple(zip(transport.field_names, given.schema.names, strict=True))
    combiner = Combiner(aggregation, _names(kept), transport.key_names, fields)
    operator = function.operator(aggregation, output)
    folded = Folded(operator, tuple(partials.names), output, combiner)
    return _combined(transport, kept, tuple(partials), folded)


def folding_windows(
    function: FoldingWindows, uid: str, schema: T.StructType, keys: Sequence[object], transport: Transport
) -> Sent:
    """Return what travels into folds of windows: parts of them, or the rows.

    Rows travel where late ones go elsewhere, and where windows are computed element by element.

    Parameters
    ----------
    schema, keys
        Of the records; a key that is a field is its name.
    transport
        Of whole records.

    Raises
    ------
    GraphError
        The windows go by event time, and the records have none.
    ConfigError, SchemaError
        There is no such field, or its type has no such fold; or what comes out has a name twice; or late
        elements do not fit their side output.
    """
    if function.needs_event_time and C.TIME not in transport.schema.names:
        raise without_event_times(uid)
    folds = tuple(fields_of(function.aggregation(schema)))
    own = [T.StructField(str(keys[at]), transport.key_types[at]) for at in function.key_places(schema, keys)]
    result = T.StructType([*own, *folds, *output_schema(WINDOW_BOUNDS, uid)])
    output = with_retraction_field(function.spec, result)
    check_field_names(output, f"the output of '{uid}'")
    if function.spec.late_output is not None:
        check_late_output(function.spec.late_output, schema, uid)
    windows = column_windows_or_why_not(function.spec)
    if isinstance(windows, NotOverColumns):
        by_element = function.by_element(schema, keys, result)
        return Sent(transport, transport, Folded(by_element, tuple(schema.names), output))
    operator = function.over_columns(windows, schema, keys)
    if function.spec.late_output is not None:
        return Sent(transport, transport, Folded(operator, tuple(schema.names), output))
    extra = tuple(T.StructField(name, T.LongType()) for name in (ELEMENTS, LAST_MS))
    kept, fields = _kept(transport), tuple(zip(transport.field_names, schema.names, strict=True))
    combiner = WindowCombiner(operator.rules, _names(kept), transport.key_names, fields)
    names = tuple(field.name for field in (*folds, *extra))
    return _combined(transport, kept, (*folds, *extra), Folded(operator, names, output, combiner))


def without_event_times(uid: str) -> GraphError:
    """Return the error for an operator that goes by event time on a stream without."""
    return GraphError(
        f"operator '{uid}' goes by event time, and its stream has no timestamps",
        why="each stream that it reads needs them",
        what_to_do="call assign_timestamps_and_watermarks() before key_by(); behind a vectorised function, "
        "let that say which column of its rows is their event_time",
        uid=uid,
    )


def _kept(transport: Transport) -> list[T.StructField]:
    """Return the columns of which a first row's stand for all that are combined: control columns, the key."""
    control = [f for f in transport.schema if f.name.startswith(C.PREFIX)]
    own = {f.name: f for f in transport.schema}
    return [*control, *(own[name] for name in dict.fromkeys(transport.key_names))]


def _names(kept: Sequence[T.StructField]) -> tuple[str, ...]:
    return (C.ROUTE, *(field.name for field in kept))


def _combined(
    transport: Transport, kept: Sequence[T.StructField], partials: Sequence[T.StructField], folded: Folded
) -> Sent:
    """Return what travels in place of the rows: what is kept of them, and partial aggregates."""
    columns = [T.StructField(f"p{at}", field.dataType) for at, field in enumerate(partials)]
    travels = replace(
        transport,
        schema=T.StructType([*kept, *columns]),
        field_names=tuple(field.name for field in columns),
    )
    return Sent(transport, travels, folded)


def _transport(node: KeyedNode, given: KeyedInput, keys: Sequence[Column]) -> Transport:
    key_fields = _key_fields(node, given.frames[0], keys)
    keys = [
        own if isinstance(key, str) else _of_records(own, given)
        for key, own in zip(given.keys, keys, strict=True)
    ]
    names = {f.name: f"c{i}" for i, f in enumerate(given.schema)}
    # The event time travels along if the stream has one.
    times = [C.TIME] if C.TIME in given.frames[0].columns else []
    control = [C.CHANNEL, C.SEQUENCE, *times]
    key_hash = F.xxhash64(*keys) if keys else F.lit(0).cast("long")
    columns = [key_hash.alias(C.KEY_HASH), *map(F.col, control)]
    fields = [T.StructField(name, T.LongType()) for name in (C.KEY_HASH, *control)]
    for field in given.schema:
        columns.append(F.col(C.quoted(field.name)).alias(names[field.name]))
        fields.append(T.StructField(names[field.name], field.dataType))
    key_names = []
    for index, (key, column, field) in enumerate(zip(given.keys, keys, key_fields, strict=True)):
        # A key that is a field travels once.
        if isinstance(key, str) and key in names:
            key_names.append(names[key])
            continue
        key_names.append(f"k{index}")
        columns.append(column.alias(f"k{index}"))
        fields.append(T.StructField(f"k{index}", field.dataType))
    return Transport(
        columns=tuple(columns),
        schema=T.StructType(fields),
        field_names=tuple(names.values()),
        key_names=tuple(key_names),
        key_types=tuple(f.dataType for f in key_fields),
    )


def _of_records(key: Column, given: KeyedInput) -> Column:
    """Return an expression that is null in control rows: they have no fields, so it could raise an error."""
    if len(given.frames) == 2 or given.shared is not None:
        # Without control rows; or looked at in the rows of its own way only.
        return key
    return F.when(F.col(C.KIND) == int(C.Kind.RECORD), key)


def _key_fields(node: KeyedNode, tagged: DataFrame, keys: Sequence[Column]) -> list[T.StructField]:
    fields = tagged.select(*keys).schema.fields if keys else []
    for field in fields:
        refuse_unfit_key(field.dataType, f"operator '{node.uid}' is keyed by", field.name)
    return fields
