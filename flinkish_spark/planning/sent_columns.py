"""Inputs of keyed operators, and which columns of them go to the workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.plans import calls_python
from flinkish_spark.core.errors import GraphError
from flinkish_spark.operators.columnar_aggregates import MergePartials
from flinkish_spark.operators.columnar_windows import (
    ELEMENTS,
    LAST_MS,
    NoColumnWindows,
    WindowFold,
    find_column_windows,
)
from flinkish_spark.operators.windowing import WindowOperator
from flinkish_spark.planning.between import RecordStream, SharedRows, functions_between
from flinkish_spark.planning.declare import (
    KeyColumn,
    KeyPart,
    check_late_output,
    no_such_key,
    refuse_unfit_key,
    with_computed_keys,
)
from flinkish_spark.planning.factories import (
    ColumnFolding,
    FoldingWindows,
    fields_of,
    with_retraction_field,
)
from flinkish_spark.planning.sink_rows import TaggedStream
from flinkish_spark.planning.stream_graph import KeyedEntry, KeyedNode
from flinkish_spark.protocol.alignment import ExpectedChannels
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.columns import Origins
from flinkish_spark.transport.routing import Distribution
from flinkish_spark.types.schemas import PREFIX, check_field_names, output_schema
from flinkish_spark.windows.functions import WINDOW_BOUNDS
from flinkish_spark.worker.combiner import Combiner, WindowCombiner


@dataclass(frozen=True)
class KeyedInput:
    #: Either records and barriers apart (a source), or one frame of both (another operator): a
    #: frame that is used twice would run the operator before it twice.
    frames: tuple[DataFrame, ...]
    schema: T.StructType
    #: Upstream channels, each of which shows every barrier once.
    channels: ExpectedChannels
    origins: Origins
    keys: tuple[KeyPart, ...]
    #: Which of the operator's entries it is for.
    entry: int = 0
    #: How its records are spread over the partitions; without a key all have the same hash.
    distribution: Distribution = Distribution.BY_KEY
    #: Name of the chain's input whose records are in the first frame; None behind another operator.
    source: str | None = None
    #: Its number, if its records have event times that the driver is told of here.
    reports_as: int | None = None
    #: Where its rows are, if other inputs read the same operator, or functions lie in between. Its frame
    #: only says then what its records look like.
    shared: SharedRows | None = None

    @property
    def has_times(self) -> bool:
        return C.TIME in self.frames[0].columns


PlannedStream = RecordStream | TaggedStream


def keyed_input(node: KeyedNode, at: int, stream: PlannedStream, reporters: Sequence[str]) -> KeyedInput:
    """Return the input of an operator's entry where one path leads into it, with nothing on it."""
    entry = node.entries[at]
    if isinstance(stream, RecordStream):
        frames = frames_of(stream, by_expression=has_expression(entry))
        first, (keys,) = with_computed_keys(frames[0], [(node.uid, entry.keys)], stream.origins)
        made = of_source(stream, (first, *frames[1:]), keys, reporters, stream.source)
    else:
        functions_between(node.uid, stream.transforms)
        for key in entry.keys:
            if isinstance(key, Column) and calls_python(stream.alone(), key):
                raise GraphError(
                    f"the key of operator '{node.uid}' is an expression that calls a function in Python",
                    why="behind an operator Spark would call it for barriers, which have no fields",
                    what_to_do="give key_by() the function itself, and key=; or compute a column in front",
                )
        frame, (keys,) = with_computed_keys(stream.alone(), [(node.uid, entry.keys)], Origins())
        made = KeyedInput((frame,), stream.schema, stream.channels, Origins(), keys)
    return replace(made, entry=at, distribution=entry.distribution)


def frames_of(stream: RecordStream, *, by_expression: bool) -> tuple[DataFrame, ...]:
    """Return records and barriers of a source, in one frame if they may be."""
    # An expression of the user's must not see rows without fields, and times alone are such.
    stream = stream.records_only() if by_expression else stream
    return (stream.frame,) if stream.is_marked else (stream.frame, stream.barriers())


def has_expression(entry: KeyedEntry) -> bool:
    return any(isinstance(key, Column) for key in entry.keys)


def of_source(
    stream: RecordStream,
    frames: tuple[DataFrame, ...],
    keys: tuple[KeyPart, ...],
    reporters: Sequence[str],
    name: str,
) -> KeyedInput:
    """Return an input of an operator by its name in the chain, which may not be that of the scan."""
    is_timed = C.TIME in stream.frame.columns
    return KeyedInput(
        frames,
        stream.schema,
        stream.channels,
        stream.origins,
        keys,
        source=name,
        reports_as=reporters.index(name) if is_timed else None,
    )


def of_branch(
    stream: RecordStream,
    rows: SharedRows,
    keys: tuple[KeyPart, ...],
    reporters: Sequence[str],
    name: str,
) -> KeyedInput:
    beside = [name for name in (C.CHANNEL, C.SEQUENCE, C.TIME) if name in rows.frame.columns]
    view = rows.frame.select(*beside, *rows.named)
    made = of_source(stream, (view, stream.barriers()), keys, reporters, name)
    return replace(made, shared=rows)


@dataclass(frozen=True)
class Transport:
    """Which columns go to the worker, under which names."""

    #: Those of the input's frame, in the order of the schema; the hash in front is in none.
    columns: tuple[str, ...]
    schema: T.StructType
    field_names: tuple[str, ...]
    key_names: tuple[str, ...]
    key_types: tuple[T.DataType, ...]
    #: Columns that Spark computes for keys which are expressions, by their names.
    expressions: tuple[tuple[str, Column], ...] = ()


@dataclass(frozen=True)
class Folded:
    """An operator of folds, which is made when the fields of its input are known."""

    operator: MergePartials | WindowFold | WindowOperator
    #: Columns that it gets, under their names there; the transport has others.
    fields: tuple[str, ...]
    #: Fields of its main output.
    output: T.StructType
    #: Computes a part of it before the shuffle; None where rows travel as they are.
    combiner: Combiner | WindowCombiner | None = None


@dataclass(frozen=True)
class Sent:
    """What goes to the worker of one input: which columns are chosen, and what travels in the end."""

    chosen: Transport
    transport: Transport
    folded: Folded | None = None


def columns_sent(node: KeyedNode, given: KeyedInput) -> Sent:
    # Spark's names ignore case.
    known = {name.lower() for name in given.schema.names}
    for key in given.keys:
        if isinstance(key, str) and key.lower() not in known:
            raise no_such_key(node.uid, key, given.schema)
    try:
        transport = transport_of(node, given, given.keys)
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
    """Return what travels into folds of windows: parts of them, or the rows."""
    # Rows travel where late ones go elsewhere, and where windows are computed element by element.
    if function.needs_event_time and C.TIME not in transport.schema.names:
        raise without_event_times(uid)
    folds = tuple(fields_of(function.aggregation(schema)))
    own = [T.StructField(str(keys[at]), transport.key_types[at]) for at in function.key_places(schema, keys)]
    result = T.StructType([*own, *folds, *output_schema(WINDOW_BOUNDS, uid)])
    output = with_retraction_field(function.spec, result)
    check_field_names(output, f"the output of '{uid}'", RENAME)
    if function.spec.late_output is not None:
        check_late_output(function.spec.late_output, schema, uid, types_may_differ=False)
    windows = find_column_windows(function.spec)
    if isinstance(windows, NoColumnWindows):
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
    return GraphError(
        f"operator '{uid}' goes by event time, and its stream has no timestamps",
        why="each stream that it reads needs them",
        what_to_do="call assign_timestamps_and_watermarks() before key_by(); behind a vectorised function, "
        "let that say which column of its rows is their event_time",
        uid=uid,
    )


def _kept(transport: Transport) -> list[T.StructField]:
    control = [f for f in transport.schema if f.name.startswith(PREFIX)]
    own = {f.name: f for f in transport.schema}
    return [*control, *(own[name] for name in dict.fromkeys(transport.key_names))]


def _names(kept: Sequence[T.StructField]) -> tuple[str, ...]:
    return (C.ROUTE, *(field.name for field in kept))


def _combined(
    transport: Transport, kept: Sequence[T.StructField], partials: Sequence[T.StructField], folded: Folded
) -> Sent:
    columns = [T.StructField(f"p{at}", field.dataType) for at, field in enumerate(partials)]
    travels = replace(
        transport,
        schema=T.StructType([*kept, *columns]),
        field_names=tuple(field.name for field in columns),
    )
    return Sent(transport, travels, folded)


def transport_of(node: KeyedNode, given: KeyedInput, keys: Sequence[KeyPart]) -> Transport:
    names = {f.name: f"c{i}" for i, f in enumerate(given.schema)}
    # The event time travels along if the stream has one.
    control = [C.CHANNEL, C.SEQUENCE, *([C.TIME] if given.has_times else [])]
    columns = [*control, *given.schema.names]
    fields = [T.StructField(name, T.LongType()) for name in (C.KEY_HASH, *control)]
    fields += [T.StructField(names[field.name], field.dataType) for field in given.schema]
    key_names, key_types, expressions = list[str](), list[T.DataType](), list[tuple[str, Column]]()
    for index, (key, field) in enumerate(zip(keys, _key_fields(node, given, keys), strict=True)):
        key_types.append(field.dataType)
        # A key that is a field travels once.
        if isinstance(key, str):
            key_names.append(names[field.name])
            continue
        column = key.name if isinstance(key, KeyColumn) else f"{PREFIX}expression{index}"
        if isinstance(key, Column):
            expressions.append((column, _of_records(key, given)))
        key_names.append(f"k{index}")
        columns.append(column)
        fields.append(T.StructField(f"k{index}", field.dataType))
    return Transport(
        columns=tuple(columns),
        schema=T.StructType(fields),
        field_names=tuple(names.values()),
        key_names=tuple(key_names),
        key_types=tuple(key_types),
        expressions=tuple(expressions),
    )


def _of_records(key: Column, given: KeyedInput) -> Column:
    """Return an expression that is null in control rows: they have no fields, so it could raise an error."""
    if len(given.frames) == 2 or given.shared is not None:
        # Without control rows; or looked at in the rows of its own path only.
        return key
    return F.when(F.col(C.KIND) == int(C.Kind.RECORD), key)


def _key_fields(node: KeyedNode, given: KeyedInput, keys: Sequence[KeyPart]) -> list[T.StructField]:
    known, found = given.frames[0].schema, list[T.StructField]()
    for key in keys:
        if isinstance(key, Column):
            (field,) = given.frames[0].select(key).schema.fields
        elif isinstance(key, KeyColumn):
            field = known[key.name]
        else:
            # Spark's names ignore case.
            alike = [one for one in given.schema if one.name.lower() == key.lower()]
            field = next((one for one in alike if one.name == key), alike[0])
        refuse_unfit_key(field.dataType, f"operator '{node.uid}' is keyed by", field.name)
        found.append(field)
    return found


#: What helps where an operator puts its own fields beside those of its input, as windows their bounds.
RENAME = (
    "rename the field of the input in front of key_by(): map(lambda one: (one.user, one.amount, "
    'one.window_end), output="user STRING, amount LONG, hour TIMESTAMP")'
)
