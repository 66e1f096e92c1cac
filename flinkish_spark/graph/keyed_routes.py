"""The routes of rows into a keyed operator: to key groups, and to its partitions."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from flinkish_spark.bridge.plan_layout import named_scan
from flinkish_spark.graph.keyed_input import KeyedInput, Sent
from flinkish_spark.protocol.scans import ScanRole
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.key_groups import Routing
from flinkish_spark.runtime.row_blocks import PACKED, BlockPacker, TimeReport, arrow_schema


def routed(inputs: Sequence[KeyedInput], sent: Sequence[Sent], operator: int, routing: Routing) -> DataFrame:
    """Send a record, packed, to its key group's route, and a barrier to every partition of the operator.

    Parameters
    ----------
    inputs, sent
        The ways into the operator, and what travels of each.
    operator
        Its number among those who report to the driver.
    """
    frames: list[DataFrame] = []
    apart: list[int] = []
    for number, (given, one) in enumerate(zip(inputs, sent, strict=True)):
        frames.append(_packed(number, given, one, operator, routing))
        if len(given.frames) == 2:
            apart.append(number)
    if apart:
        # Whatever their records come from, they share the barriers of the control source, or there is one.
        barriers = inputs[apart[0]].frames[1]
        frames.append(named_scan(_spread(barriers, apart, operator, routing), ScanRole.BARRIERS))
    rows = frames[0]
    for frame in frames[1:]:
        rows = rows.unionByName(frame)
    return rows


def _packed(number: int, given: KeyedInput, sent: Sent, operator: int, routing: Routing) -> DataFrame:
    """Return the blocks of one input, with its barriers if they come in the same frame."""
    chosen = sent.chosen
    group = F.pmod(F.col(C.KEY_HASH), F.lit(routing.max_parallelism)).cast("int")
    own_route = F.element_at(_int_array(routing.of_group), group + 1)
    names = chosen.schema.names
    packer = BlockPacker(
        arrow_schema(sent.transport.schema),
        None if given.reports_as is None else TimeReport(given.reports_as, routing.of_barrier[0]),
        None if sent.folded is None else sent.folded.combiner,
        number,
    )
    if len(given.frames) == 2:
        records = given.frames[0]
        # Only a generator in front makes marks, and behind it barriers are in a frame of their own.
        marks = [C.MARK] if C.MARK in records.columns else []
        taken = _named(records.select(*chosen.columns, *marks), given.source)
        return taken.select(own_route.alias(C.ROUTE), *names, *marks).mapInArrow(packer, PACKED)
    (both,) = given.frames
    taken = _named(both.select(C.KIND, C.CHECKPOINT, *chosen.columns), given.source)
    is_record = F.col(C.KIND) == int(C.Kind.RECORD)
    routes = F.when(is_record, F.array(own_route)).otherwise(_control_routes(operator, routing))
    spread = taken.select(F.explode(routes).alias(C.ROUTE), C.KIND, C.CHECKPOINT, *names)
    return spread.mapInArrow(packer, PACKED)


def _spread(barriers: DataFrame, inputs: Sequence[int], operator: int, routing: Routing) -> DataFrame:
    """Return control rows with their routes; a barrier once for each input, which its sequence says."""
    routed = barriers.select(F.explode(_control_routes(operator, routing)).alias(C.ROUTE), *C.CONTROL)
    is_barrier = F.col(C.KIND) == int(C.Kind.BARRIER)
    numbers = F.array(*[F.lit(number).cast("long") for number in inputs])
    sequences = F.when(is_barrier, numbers).otherwise(F.array(F.col(C.SEQUENCE)))
    no_block = F.lit("").cast("binary").alias(C.BLOCK)
    return routed.select(C.ROUTE, *C.CONTROL[:-1], F.explode(sequences).alias(C.SEQUENCE), no_block)


def _control_routes(operator: int, routing: Routing) -> Column:
    """Return the routes of a control row: a barrier goes everywhere, a call to its key group."""
    kind = F.col(C.KIND)
    is_own_call = (kind == int(C.Kind.WAKE)) & (F.col(C.CHANNEL) == operator)
    called = F.element_at(_int_array(routing.of_group), F.col(C.SEQUENCE).cast("int") + 1)
    routes = F.when(kind == int(C.Kind.BARRIER), _int_array(routing.of_barrier))
    # Reports to the driver, and calls of operators behind this one, only pass by: one partition will do.
    return routes.when(is_own_call, F.array(called)).otherwise(_int_array(routing.of_barrier[:1]))


def _named(frame: DataFrame, source: str | None) -> DataFrame:
    return frame if source is None else named_scan(frame, ScanRole.RECORDS, source)


def seeded(rows: DataFrame, seed: DataFrame, uid: str, routing: Routing) -> DataFrame:
    """Send each key group its state; behind the first micro-batch there is none to send."""
    states = seed.select(
        F.element_at(_int_array(routing.of_group), F.col("key_group") + 1).alias(C.ROUTE),
        F.lit(int(C.Kind.STATE)).alias(C.KIND),
        F.lit(0).cast("long").alias(C.CHECKPOINT),
        F.lit(C.STATE_CHANNEL).cast("long").alias(C.CHANNEL),
        F.col("key_group").cast("long").alias(C.SEQUENCE),
        F.col("value").alias(C.BLOCK),
    )
    return rows.unionByName(named_scan(states, ScanRole.SEED, uid))


def _int_array(values: Sequence[int]) -> Column:
    return F.array(*[F.lit(v) for v in values])
