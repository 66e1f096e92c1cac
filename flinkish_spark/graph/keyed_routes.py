"""The routes of rows into an operator with state: to key groups, and to its partitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from flinkish_spark.bridge.plan_layout import named_scan
from flinkish_spark.graph.keyed_input import KeyedInput, Sent
from flinkish_spark.graph.latency_markers import subtask_in
from flinkish_spark.protocol.scans import ScanRole
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.branches import DealBlocks, DealtBlocks
from flinkish_spark.runtime.combining import BlamedCombine
from flinkish_spark.runtime.group_runners import Distribution
from flinkish_spark.runtime.key_groups import Routing
from flinkish_spark.runtime.row_blocks import (
    PACKED,
    BlockPacker,
    Calls,
    Combine,
    TimeReport,
    arrow_schema,
)

#: An input of the operator: its number, itself, and what travels of it.
_Way = tuple[int, KeyedInput, Sent]


@dataclass(frozen=True)
class KeyedRoutes:
    """Sends rows into one operator.

    Parameters
    ----------
    operator
        Its number among those who report to the driver.
    has_broadcast
        Whether one of its inputs is broadcast.
    uid
        Its name, for errors.
    """

    routing: Routing
    operator: int
    has_broadcast: bool
    uid: str

    def of_inputs(self, inputs: Sequence[KeyedInput], sent: Sequence[Sent]) -> DataFrame:
        """Send a record, packed, to its key group's route, and a barrier to every partition of the operator.

        Parameters
        ----------
        inputs, sent
            The ways into the operator, and what travels of each.
        """
        frames: list[DataFrame] = []
        apart: list[int] = []
        together: dict[int, list[_Way]] = {}
        for number, (given, one) in enumerate(zip(inputs, sent, strict=True)):
            if given.shared is not None:
                together.setdefault(id(given.shared.frame), []).append((number, given, one))
                continue
            frames.append(self._packed(number, given, one))
            if len(given.frames) == 2:
                apart.append(number)
        frames += map(self._packed_together, together.values())
        if apart:
            # Whatever their records come from, they share the barriers of the control source, or there is
            # one of them.
            barriers = inputs[apart[0]].frames[1]
            frames.append(named_scan(self._spread(barriers, apart), ScanRole.BARRIERS))
        rows = frames[0]
        for frame in frames[1:]:
            rows = rows.unionByName(frame)
        return rows

    def of_seed(self, seed: DataFrame, uid: str) -> DataFrame:
        """Send each key group its state; behind the first micro-batch there is none to send.

        What partitions keep beside their key groups goes to every partition, which chooses: there may be
        another number of them.
        """
        group = F.col("key_group")
        own_route = F.array(F.element_at(_int_array(self.routing.of_group), group + 1))
        routes = F.when(group <= C.FIRST_PARTITION_GROUP, _int_array(self.routing.of_broadcast)).otherwise(
            own_route
        )
        states = seed.select(
            F.explode(routes).alias(C.ROUTE),
            F.lit(int(C.Kind.STATE)).alias(C.KIND),
            F.lit(0).cast("long").alias(C.CHECKPOINT),
            F.lit(C.STATE_CHANNEL).cast("long").alias(C.CHANNEL),
            group.cast("long").alias(C.SEQUENCE),
            F.col("value").alias(C.BLOCK),
        )
        return named_scan(states, ScanRole.SEED, uid)

    def _packed(self, number: int, given: KeyedInput, sent: Sent) -> DataFrame:
        """Return the blocks of one input, with its barriers if they come in the same frame."""
        chosen, own_route = sent.chosen, self._own_route(given.distribution)
        names = chosen.schema.names
        packer = self._packer(number, given, sent)
        if len(given.frames) == 2:
            records = given.frames[0]
            # Only a generator in front makes marks, and behind it barriers are in a frame of their own.
            marks = [C.MARK] if C.MARK in records.columns else []
            taken = _named(records.select(*chosen.columns, *marks), given.source)
            routed = taken.select(own_route.alias(C.ROUTE), *names, *marks)
            return C.map_in_arrow(routed, packer, PACKED)
        (both,) = given.frames
        taken = _named(both.select(C.KIND, C.CHECKPOINT, *chosen.columns), given.source)
        is_record = F.col(C.KIND) == int(C.Kind.RECORD)
        routes = F.when(is_record, F.array(own_route)).otherwise(self._control_routes())
        spread = taken.select(F.explode(routes).alias(C.ROUTE), C.KIND, C.CHECKPOINT, *names)
        return C.map_in_arrow(spread, packer, PACKED)

    def _packed_together(self, ways: Sequence[_Way]) -> DataFrame:
        """Return the blocks of inputs whose rows stand in one frame, and the control rows between them.

        Each gets columns of its own behind those of the frame. A record may be for several, with another
        route to each; so its routes are among these columns.
        """
        frame, dealt = _frame_of(ways[0]), []
        shared = [name for name in (*C.CONTROL, C.TIME) if name in frame.columns]
        for number, given, sent in ways:
            assert given.shared is not None
            is_own, names = given.shared.is_own, sent.chosen.schema.names
            own = {name: name if name in shared else f"{C.PREFIX}in{number}_{name}" for name in names}
            chosen = [
                F.when(is_own, column).alias(own[name])
                for name, column in zip(names, sent.chosen.columns, strict=True)
                if name not in shared
            ]
            frame = frame.select(*frame.columns, *given.shared.named).select(*frame.columns, *chosen)
            route = f"{C.PREFIX}in{number}_{C.ROUTE}"
            by = self._own_route(given.distribution, own[C.KEY_HASH])
            frame = frame.select("*", F.when(is_own, by).alias(route))
            packer = self._packer(number, given, sent)
            dealt.append(DealtBlocks(route, tuple(own.values()), tuple(names), packer))
        is_record = F.col(C.KIND) == int(C.Kind.RECORD)
        routes = F.when(is_record, F.array(F.lit(0))).otherwise(self._control_routes())
        wanted = [name for one in dealt for name in (one.route, *one.columns) if name not in shared]
        spread = frame.select(F.explode(routes).alias(C.ROUTE), *shared, *wanted)
        deal = DealBlocks(tuple(dealt))
        return C.map_in_arrow(spread, deal, deal.columns)

    def _packer(self, number: int, given: KeyedInput, sent: Sent) -> BlockPacker:
        first_barrier = self.routing.of_barrier[0]
        return BlockPacker(
            arrow_schema(sent.transport.schema),
            None if given.reports_as is None else TimeReport(given.reports_as, first_barrier),
            self._combine(sent),
            number,
            copies=self.routing.of_broadcast if given.distribution is Distribution.BROADCAST else (),
            calls=self._calls(given.distribution),
        )

    def _combine(self, sent: Sent) -> Combine | None:
        """Return what makes fewer rows of records before they travel."""
        if sent.folded is None or sent.folded.combiner is None:
            return None
        return BlamedCombine(self.uid, self.routing.max_parallelism, sent.folded.combiner)

    def _own_route(self, distribution: Distribution, key_hash: str = C.KEY_HASH) -> Column:
        """Return the route of a record."""
        match distribution:
            case Distribution.BY_KEY:
                group = F.pmod(F.col(key_hash), F.lit(self.routing.max_parallelism)).cast("int")
                return F.element_at(_int_array(self.routing.of_group), group + 1)
            case Distribution.BY_CHANNEL:
                partition = F.pmod(F.col(C.CHANNEL), F.lit(self.routing.partitions)).cast("int")
                return F.element_at(_int_array(self.routing.of_broadcast), partition + 1)
            case Distribution.BROADCAST:
                # One of them: the packer copies whole blocks for the others.
                return F.lit(self.routing.of_broadcast[0])

    def _calls(self, distribution: Distribution) -> Calls | None:
        """Return whom records call besides where there is a broadcast side.

        A key group needs that of its partition in front of it. What a broadcast element wants done with keyed
        state concerns all key groups.
        """
        if not self.has_broadcast or distribution is Distribution.BY_CHANNEL:
            return None
        is_broadcast = distribution is Distribution.BROADCAST
        return Calls(self.operator, self.routing.of_group if is_broadcast else self.routing.of_broadcast)

    def _spread(self, barriers: DataFrame, inputs: Sequence[int]) -> DataFrame:
        """Return control rows with their routes; a barrier once for each input, which its sequence says."""
        routed = barriers.select(F.explode(self._control_routes()).alias(C.ROUTE), *C.CONTROL)
        is_barrier = F.col(C.KIND) == int(C.Kind.BARRIER)
        numbers = F.array(*[F.lit(number).cast("long") for number in inputs])
        sequences = F.when(is_barrier, numbers).otherwise(F.array(F.col(C.SEQUENCE)))
        no_block = F.lit("").cast("binary").alias(C.BLOCK)
        return routed.select(C.ROUTE, *C.CONTROL[:-1], F.explode(sequences).alias(C.SEQUENCE), no_block)

    def _control_routes(self) -> Column:
        """Return the routes of a control row: a barrier goes everywhere, a call to its key group.

        A latency marker goes on from the subtask that it was in to the one with the same number.
        """
        kind = F.col(C.KIND)
        is_own_call = (kind == int(C.Kind.WAKE)) & (F.col(C.CHANNEL) == self.operator)
        called = F.element_at(_int_array(self.routing.of_group), F.col(C.SEQUENCE).cast("int") + 1)
        also = _int_array(self.routing.of_broadcast) if self.has_broadcast else None
        all_called = F.array(called) if also is None else F.concat(F.array(called), also)
        routes = F.when(kind == int(C.Kind.BARRIER), _int_array(self.routing.of_barrier))
        same = F.get(_int_array(self.routing.of_barrier), subtask_in(F.col(C.CHANNEL)))
        routes = routes.when(kind == int(C.Kind.MARKER), F.array(same))
        # Reports to the driver, and calls of operators behind this one, only pass by: one partition will do.
        return routes.when(is_own_call, all_called).otherwise(_int_array(self.routing.of_barrier[:1]))


def _frame_of(way: _Way) -> DataFrame:
    shared = way[1].shared
    assert shared is not None
    return shared.frame


def _named(frame: DataFrame, source: str | None) -> DataFrame:
    return frame if source is None else named_scan(frame, ScanRole.RECORDS, source)


def _int_array(values: Sequence[int]) -> Column:
    # One text for Spark's parser: a literal for each key group would take some thousand calls into the JVM.
    return F.expr(f"array({', '.join(map(str, values))})")
