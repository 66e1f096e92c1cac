"""What travels of one input of a keyed operator: columns, the key, and what is aggregated in front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.graph.key_selectors import refuse_unfit_key
from flinkish_spark.graph.operator_factories import FoldingColumns, fields_of
from flinkish_spark.graph.stream_graph import KeyedNode
from flinkish_spark.operators.vectorized_aggregates import ColumnAggregation
from flinkish_spark.protocol.alignment import ExpectedChannels
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.combining import Combiner
from flinkish_spark.runtime.group_runners import Distribution
from flinkish_spark.runtime.keyed_operator import Origins
from flinkish_spark.state import StateTtl


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
    """An aggregate that is computed in part before the shuffle."""

    aggregation: ColumnAggregation
    combiner: Combiner
    ttl: StateTtl | None


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
        A part of the key cannot be one.
    """
    keys = [F.col(C.quoted(k)) if isinstance(k, str) else k for k in given.keys]
    transport = _transport(node, given, keys)
    if not isinstance(node.function, FoldingColumns):
        return Sent(transport, transport)
    names = tuple(key for key in given.keys if isinstance(key, str))
    aggregation = node.function.aggregation(given.schema, names)
    control = [f for f in transport.schema if f.name.startswith(C.PREFIX)]
    own = {f.name: f for f in transport.schema}
    own_keys = [own[name] for name in dict.fromkeys(transport.key_names)]
    partials = [T.StructField(f"p{at}", f.dataType) for at, f in enumerate(fields_of(aggregation))]
    kept = (C.ROUTE, *(f.name for f in (*control, *own_keys)))
    fields = tuple(zip(transport.field_names, given.schema.names, strict=True))
    travels = replace(
        transport,
        schema=T.StructType([*control, *own_keys, *partials]),
        field_names=tuple(f.name for f in partials),
    )
    combiner = Combiner(aggregation, kept, transport.key_names, fields)
    return Sent(transport, travels, Folded(aggregation, combiner, node.function.ttl))


def _transport(node: KeyedNode, given: KeyedInput, keys: Sequence[Column]) -> Transport:
    key_fields = _key_fields(node, given.frames[0], keys)
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


def _key_fields(node: KeyedNode, tagged: DataFrame, keys: Sequence[Column]) -> list[T.StructField]:
    fields = tagged.select(*keys).schema.fields if keys else []
    for field in fields:
        refuse_unfit_key(field.dataType, f"operator '{node.uid}' is keyed by", field.name)
    return fields
