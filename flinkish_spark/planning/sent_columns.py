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
from flinkish_spark.planning.between import RecordStream, SharedRows, find_functions_between
from flinkish_spark.planning.declare import (
    KeyColumn,
    KeyPart,
    check_late_output,
    compute_keys,
    no_such_key,
    refuse_unfit_key,
)
from flinkish_spark.planning.factories import ColumnFolding, FoldingWindows, add_retraction_field, find_fields
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
    #: Two frames, records and barriers (a source), or one frame of both (another operator): using a
    #: frame twice would run its operator twice.
    frames: tuple[DataFrame, ...]
    schema: T.StructType
    #: Upstream channels; each delivers every barrier once.
    channels: ExpectedChannels
    origins: Origins
    keys: tuple[KeyPart, ...]
    #: Number of the operator's entry.
    entry: int = 0
    #: How its records are distributed over partitions; without a key all have the same hash.
    distribution: Distribution = Distribution.BY_KEY
    #: Name of the chain's input whose records are in the first frame; None after another operator.
    source: str | None = None
    #: Its number as a reporter of event times to the driver; None if it reports none.
    reports_as: int | None = None
    #: Its rows, if other inputs read the same operator or there are functions between; its frame then only
    #: defines the columns of its records.
    shared: SharedRows | None = None

    @property
    def has_times(self) -> bool:
        return C.TIME in self.frames[0].columns


PlannedStream = RecordStream | TaggedStream


def make_keyed_input(node: KeyedNode, at: int, stream: PlannedStream, reporters: Sequence[str]) -> KeyedInput:
    """Return the input of an operator's entry for a single path without functions."""
    entry = node.entries[at]
    if isinstance(stream, RecordStream):
        frames = find_frames(stream, by_expression=has_expression(entry))
        first, (keys,) = compute_keys(frames[0], [(node.uid, entry.keys)], stream.origins)
        made = make_source_input(stream, (first, *frames[1:]), keys, reporters, stream.source)
    else:
        find_functions_between(node.uid, stream.transforms)
        for key in entry.keys:
            if isinstance(key, Column) and calls_python(stream.select_own_rows(), key):
                raise GraphError(
                    f"the key of operator '{node.uid}' is an expression that calls a function in Python",
                    why="after an operator Spark would also call it for barriers, which have no fields",
                    what_to_do="give key_by() the function itself, and key=; or compute a column before it",
                )
        frame, (keys,) = compute_keys(stream.select_own_rows(), [(node.uid, entry.keys)], Origins())
        made = KeyedInput((frame,), stream.schema, stream.channels, Origins(), keys)
    return replace(made, entry=at, distribution=entry.distribution)


def find_frames(stream: RecordStream, *, by_expression: bool) -> tuple[DataFrame, ...]:
    # A user's expression must not see rows without fields, such as rows with an event time only.
    stream = stream.keep_records() if by_expression else stream
    return (stream.frame,) if stream.is_marked else (stream.frame, stream.barriers())


def has_expression(entry: KeyedEntry) -> bool:
    return any(isinstance(key, Column) for key in entry.keys)


def make_source_input(
    stream: RecordStream,
    frames: tuple[DataFrame, ...],
    keys: tuple[KeyPart, ...],
    reporters: Sequence[str],
    name: str,
) -> KeyedInput:
    """Return an operator's input from a source, named as in the chain (the scan may have another name)."""
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


def make_branch_input(
    stream: RecordStream, rows: SharedRows, keys: tuple[KeyPart, ...], reporters: Sequence[str], name: str
) -> KeyedInput:
    beside = [name for name in (C.CHANNEL, C.SEQUENCE, C.TIME) if name in rows.frame.columns]
    view = rows.frame.select(*beside, *rows.named)
    made = make_source_input(stream, (view, stream.barriers()), keys, reporters, name)
    return replace(made, shared=rows)


@dataclass(frozen=True)
class Transport:
    """The columns that go to the worker, and their names there."""

    #: Columns of the input's frame, in the order of the schema without the hash, which comes first.
    columns: tuple[str, ...]
    schema: T.StructType
    field_names: tuple[str, ...]
    key_names: tuple[str, ...]
    key_types: tuple[T.DataType, ...]
    #: Columns that Spark computes for key expressions, by name.
    expressions: tuple[tuple[str, Column], ...] = ()


@dataclass(frozen=True)
class FoldPlan:
    """An operator of aggregates over columns, made when the fields of its input are known."""

    operator: MergePartials | WindowFold | WindowOperator
    #: Columns that it gets, by their names there; the transport has other names.
    fields: tuple[str, ...]
    #: Fields of its main output.
    output: T.StructType
    #: Aggregates partially before the shuffle; None if rows are sent unchanged.
    combiner: Combiner | WindowCombiner | None = None


@dataclass(frozen=True)
class SentColumns:
    """Columns of one input that go to the worker: the chosen ones, and those after partial aggregation."""

    chosen: Transport
    transport: Transport
    folded: FoldPlan | None = None


def find_sent_columns(node: KeyedNode, given: KeyedInput) -> SentColumns:
    # Spark's names ignore case.
    known = {name.lower() for name in given.schema.names}
    for key in given.keys:
        if isinstance(key, str) and key.lower() not in known:
            raise no_such_key(node.uid, key, given.schema)
    try:
        transport = make_transport(node, given, given.keys)
    except AnalysisException as error:
        raise GraphError(
            f"operator '{node.uid}' is keyed by an expression that Spark refuses",
            why=str(error).partition("\n")[0],
            what_to_do=f"correct it; the records have {', '.join(given.schema.names)}",
        ) from None
    return choose_sent_columns(node, given, transport)


def choose_sent_columns(node: KeyedNode, given: KeyedInput, transport: Transport) -> SentColumns:
    """Return the columns to send of an input, given the transport of whole records; needs no Spark."""
    if isinstance(node.function, ColumnFolding):
        return _plan_fold(node.function, node.output, given, transport)
    if isinstance(node.function, FoldingWindows):
        return plan_window_fold(node.function, node.uid, given.schema, given.keys, transport)
    return SentColumns(transport, transport)


def _plan_fold(
    function: ColumnFolding, declared: T.StructType | None, given: KeyedInput, transport: Transport
) -> SentColumns:
    names = tuple(key for key in given.keys if isinstance(key, str))
    aggregation = function.make_aggregation(given.schema, names)
    partials = find_fields(aggregation)
    output = partials if declared is None else declared
    kept = _find_copied_columns(transport)
    fields = tuple(zip(transport.field_names, given.schema.names, strict=True))
    combiner = Combiner(aggregation, _name_columns(kept), transport.key_names, fields)
    operator = function.operator(aggregation, output)
    folded = FoldPlan(operator, tuple(partials.names), output, combiner)
    return _send_partials(transport, kept, tuple(partials), folded)


def plan_window_fold(
    function: FoldingWindows, uid: str, schema: T.StructType, keys: Sequence[object], transport: Transport
) -> SentColumns:
    """Return the columns to send into aggregates of windows: partial aggregates, or the rows."""
    # Rows are sent if late ones go to a side output, and if windows are computed element by element.
    if function.needs_event_time and C.TIME not in transport.schema.names:
        raise no_event_times(uid)
    folds = tuple(find_fields(function.make_aggregation(schema)))
    own = [
        T.StructField(str(keys[at]), transport.key_types[at])
        for at in function.find_key_positions(schema, keys)
    ]
    result = T.StructType([*own, *folds, *output_schema(WINDOW_BOUNDS, uid)])
    output = add_retraction_field(function.spec, result)
    check_field_names(output, f"the output of '{uid}'", RENAME)
    if function.spec.late_output is not None:
        check_late_output(function.spec.late_output, schema, uid, types_may_differ=False)
    windows = find_column_windows(function.spec)
    if isinstance(windows, NoColumnWindows):
        by_element = function.make_element_operator(schema, keys, result)
        return SentColumns(transport, transport, FoldPlan(by_element, tuple(schema.names), output))
    operator = function.make_column_fold(windows, schema, keys)
    if function.spec.late_output is not None:
        return SentColumns(transport, transport, FoldPlan(operator, tuple(schema.names), output))
    extra = tuple(T.StructField(name, T.LongType()) for name in (ELEMENTS, LAST_MS))
    kept, fields = (
        _find_copied_columns(transport),
        tuple(zip(transport.field_names, schema.names, strict=True)),
    )
    combiner = WindowCombiner(operator.rules, _name_columns(kept), transport.key_names, fields)
    names = tuple(field.name for field in (*folds, *extra))
    return _send_partials(transport, kept, (*folds, *extra), FoldPlan(operator, names, output, combiner))


def no_event_times(uid: str) -> GraphError:
    return GraphError(
        f"operator '{uid}' uses event time, and its stream has no timestamps",
        what_to_do="call assign_timestamps_and_watermarks() before key_by(); after a vectorised function, "
        "let the function name the column with the event_time of its rows",
    )


def _find_copied_columns(transport: Transport) -> list[T.StructField]:
    control = [f for f in transport.schema if f.name.startswith(PREFIX)]
    own = {f.name: f for f in transport.schema}
    return [*control, *(own[name] for name in dict.fromkeys(transport.key_names))]


def _name_columns(kept: Sequence[T.StructField]) -> tuple[str, ...]:
    return (C.ROUTE, *(field.name for field in kept))


def _send_partials(
    transport: Transport, kept: Sequence[T.StructField], partials: Sequence[T.StructField], folded: FoldPlan
) -> SentColumns:
    columns = [T.StructField(f"p{at}", field.dataType) for at, field in enumerate(partials)]
    travels = replace(
        transport, schema=T.StructType([*kept, *columns]), field_names=tuple(field.name for field in columns)
    )
    return SentColumns(transport, travels, folded)


def make_transport(node: KeyedNode, given: KeyedInput, keys: Sequence[KeyPart]) -> Transport:
    names = {f.name: f"c{i}" for i, f in enumerate(given.schema)}
    # The event time is sent too if the stream has one.
    control = [C.CHANNEL, C.SEQUENCE, *([C.TIME] if given.has_times else [])]
    columns = [*control, *given.schema.names]
    fields = [T.StructField(name, T.LongType()) for name in (C.KEY_HASH, *control)]
    fields += [T.StructField(names[field.name], field.dataType) for field in given.schema]
    key_names, key_types, expressions = list[str](), list[T.DataType](), list[tuple[str, Column]]()
    for index, (key, field) in enumerate(zip(keys, _find_key_fields(node, given, keys), strict=True)):
        key_types.append(field.dataType)
        # A key that is a field is sent once.
        if isinstance(key, str):
            key_names.append(names[field.name])
            continue
        column = key.name if isinstance(key, KeyColumn) else f"{PREFIX}expression{index}"
        if isinstance(key, Column):
            expressions.append((column, _guard_expression(key, given)))
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


def _guard_expression(key: Column, given: KeyedInput) -> Column:
    """Make a key expression null in control rows: they have no fields, so it could raise an error."""
    if len(given.frames) == 2 or given.shared is not None:
        # There are no control rows, or the expression is evaluated only in rows of its own path.
        return key
    return F.when(F.col(C.KIND) == int(C.Kind.RECORD), key)


def _find_key_fields(node: KeyedNode, given: KeyedInput, keys: Sequence[KeyPart]) -> list[T.StructField]:
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


#: Advice if an operator adds fields, such as window bounds, to fields of its input with the same name.
RENAME = (
    "rename the field of the input before key_by(): map(lambda one: (one.user, one.amount, "
    'one.window_end), output="user STRING, amount LONG, hour TIMESTAMP")'
)
