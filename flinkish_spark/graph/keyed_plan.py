"""The plan of one keyed operator: route, transport, apply, restore."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.streaming.state import GroupStateTimeout

from flinkish_spark.errors import GraphError
from flinkish_spark.graph.stream_graph import KeyedNode
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.key_groups import Routing
from flinkish_spark.runtime.keyed_operator import KeyedOperator, KeyedOperatorSpec, Origins

#: Bits of a null mask; one is left for the sign.
_MASK_BITS = 63
STATE_DDL = "value BINARY"


def plan_keyed(
    node: KeyedNode,
    tagged: DataFrame,
    schema: T.StructType,
    upstream_channels: frozenset[int],
    origins: Origins,
    partitions: int,
) -> DataFrame:
    """Return the operator's output: control columns and the declared fields.

    Parameters
    ----------
    tagged
        Input rows with kind, checkpoint, channel, sequence and the fields of `schema`.
    """
    routing = Routing(node.max_parallelism, partitions)
    keys = [F.col(_quoted(k)) if isinstance(k, str) else k for k in node.keys]
    key_fields = _key_fields(node, tagged, keys)
    is_record = F.col(C.KIND) == int(C.Kind.RECORD)
    group = F.pmod(F.xxhash64(*keys), F.lit(node.max_parallelism)).cast("int")
    own_route = F.array(F.element_at(_int_array(routing.of_group), group + 1))
    # A barrier goes to every partition of this operator; a record to its key group's only.
    routes = F.when(is_record, own_route).otherwise(_int_array(routing.of_barrier))

    columns = [F.col(_quoted(f.name)) for f in schema]
    input_names = [f"c{i}" for i in range(len(columns))]
    key_names = [f"k{i}" for i in range(len(keys))]
    field_masks = [_mask(columns[i : i + _MASK_BITS]) for i in range(0, len(columns), _MASK_BITS)]
    mask_names = [f"{C.NULLS}{i}" for i in range(len(field_masks) + 1)]
    rows = tagged.select(
        F.explode(routes).alias(C.ROUTE),
        F.coalesce(group, F.lit(0)).alias(C.GROUP),
        C.KIND,
        C.CHECKPOINT,
        C.CHANNEL,
        C.SEQUENCE,
        *[m.alias(n) for m, n in zip([*field_masks, _mask(keys)], mask_names, strict=True)],
        *[_send(c, f.dataType).alias(n) for c, f, n in zip(columns, schema, input_names, strict=True)],
        *[_send(c, f.dataType).alias(n) for c, f, n in zip(keys, key_fields, key_names, strict=True)],
    )
    spec = KeyedOperatorSpec(
        uid=node.uid,
        function=node.function,
        input_schema=schema,
        output_schema=node.output,
        key_columns=tuple(key_names),
        key_types=tuple(f.dataType for f in key_fields),
        input_columns=tuple(input_names),
        mask_columns=tuple(mask_names),
        upstream_channels=upstream_channels,
        barrier_routes={route: p for p, route in enumerate(routing.of_barrier)},
        origins=origins,
    )
    returned = T.StructType(
        [
            T.StructField(C.KIND, T.IntegerType()),
            *[T.StructField(n, T.LongType()) for n in (C.CHECKPOINT, C.CHANNEL, C.SEQUENCE, C.NANS)],
            *[T.StructField(f.name, f.dataType) for f in node.output],
        ]
    )
    applied = rows.groupBy(C.ROUTE).applyInPandasWithState(
        KeyedOperator(spec), returned, STATE_DDL, "append", GroupStateTimeout.NoTimeout
    )
    return applied.select(*C.CONTROL, *_restored(node.output))


def _key_fields(node: KeyedNode, tagged: DataFrame, keys: Sequence[Column]) -> list[T.StructField]:
    fields = tagged.select(*keys).schema.fields
    for field in fields:
        if isinstance(field.dataType, T.MapType | T.FloatType | T.DoubleType | T.VariantType):
            raise GraphError(
                f"operator '{node.uid}' is keyed by {field.name}, a {field.dataType.simpleString()}",
                why="values of that type are not equal to themselves reliably",
                what_to_do="key by a string, a whole number, a date, a timestamp or a decimal",
            )
    return fields


def _int_array(values: Sequence[int]) -> Column:
    return F.array(*[F.lit(v) for v in values])


def _mask(columns: Sequence[Column]) -> Column:
    """Return a number with one bit per column, set where it is null."""
    mask = F.lit(0).cast("long")
    for bit, column in enumerate(columns):
        mask = mask.bitwiseOR(F.when(column.isNull(), F.lit(1 << bit).cast("long")).otherwise(F.lit(0)))
    return mask


def _send(column: Column, kind: T.DataType) -> Column:
    """Return `column` in the form that pandas carries without loss, never null where it can be."""
    if isinstance(kind, T.TimestampType):
        return F.coalesce(F.unix_micros(column), F.lit(0).cast("long"))
    if isinstance(kind, T.DateType):
        return F.coalesce(F.unix_date(column), F.lit(0))
    if isinstance(kind, T.BooleanType):
        return F.coalesce(column, F.lit(False))
    if isinstance(kind, T.StringType):
        return F.coalesce(column, F.lit(""))
    if isinstance(kind, T.NumericType):
        return F.coalesce(column, F.lit(0).cast(kind))
    return column


def _restored(output: T.StructType) -> list[Column]:
    """Return the output fields with NaN where the operator said NaN: pandas made them null."""
    restored, bit = [], 0
    for field in output:
        column = F.col(_quoted(field.name))
        if isinstance(field.dataType, T.FloatType | T.DoubleType):
            is_nan = F.col(C.NANS).bitwiseAND(F.lit(1 << bit).cast("long")) != 0
            column = F.when(is_nan, F.lit(float("nan")).cast(field.dataType)).otherwise(column)
            bit += 1
        restored.append(column.alias(field.name))
    return restored


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
