"""Operators with a broadcast input without Spark: what comes into a partition, route by route."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import types as T

from flinkish_spark.core.errors import InternalError
from flinkish_spark.functions.keyed import BroadcastProcessFunction, KeyedBroadcastProcessFunction
from flinkish_spark.functions.stream import CheckpointedProcessFunction
from flinkish_spark.operators.broadcast import KeyedBroadcastOperator
from flinkish_spark.protocol.key_groups import Bundling
from flinkish_spark.state import MapStateDescriptor, ValueStateDescriptor
from flinkish_spark.state.operator_state import OperatorListDescriptor, Redistribution
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.blocks import EMITTED, BlockPacker, BlockUnpacker, RouteCalls
from flinkish_spark.transport.columns import Origins
from flinkish_spark.transport.routing import Distribution, Routing, spark_hash_int
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.rows import arrow_schema
from flinkish_spark.worker.broadcast_runner import UnkeyedBroadcast, UnkeyedCheckpointedFunction
from flinkish_spark.worker.keyed_operator import KeyedOperator, KeyedOperatorSpec, OperatorError
from flinkish_spark.worker.runners import InputShape, RowShape
from tests.unit.worker.test_keyed_operator import INPUT, State, control, records

FACTORS = MapStateDescriptor("factors", "STRING", "LONG")
TOTAL = ValueStateDescriptor("total", "LONG", default=0)
ROUTING = Routing(Bundling(4, 2, 2))
#: What a LONG cannot hold.
WRONG = "many"


class Scaled(KeyedBroadcastProcessFunction):
    def open(self, context: Any) -> None:
        self.total = context.get_state(TOTAL)

    def process_element(self, value: Any, ctx: Any) -> Any:
        self.total.update(self.total.value() + value.amount)
        yield value.user, self.total.value() * ctx.get_broadcast_state(FACTORS).get("all", 1)

    def process_broadcast_element(self, rule: Any, ctx: Any) -> Any:
        if rule.amount == 13:
            raise RuntimeError("unlucky")
        if rule.user == "forget":
            ctx.apply_to_keyed_state(TOTAL, lambda key, total: total.clear())
        else:
            ctx.get_broadcast_state(FACTORS)[rule.user] = rule.amount
        yield rule.user, WRONG if rule.amount == 14 else -rule.amount


class Plain(BroadcastProcessFunction):
    def process_element(self, value: Any, ctx: Any) -> Any:
        factor = ctx.get_broadcast_state(FACTORS).get("all", 1)
        yield value.user, WRONG if value.amount == 14 else value.amount * factor

    def process_broadcast_element(self, rule: Any, ctx: Any) -> Any:
        ctx.get_broadcast_state(FACTORS)[rule.user] = rule.amount


def operator(runs: Any, first: Distribution) -> KeyedOperator:
    keys = ("c0",) if first is Distribution.BY_KEY else ()
    came = (arrow_schema(INPUT), ("user", "amount"), ("c0", "c1"))
    shape = RowShape(
        inputs=(
            InputShape(*came, keys, distribution=first),
            InputShape(*came, (), entry=1, distribution=Distribution.BROADCAST),
        ),
        key_types=(T.StringType(),) if keys else (),
        outputs=(parse_ddl("user STRING, n LONG"),),
    )
    return KeyedOperator(
        KeyedOperatorSpec(
            uid="scaled",
            bundling=ROUTING.bundling,
            operator=runs,
            shape=shape,
            upstream_channels=(frozenset({0}), frozenset({0})),
            bundle_of_route={route: bundle for bundle, route in enumerate(ROUTING.of_bundle)},
            barrier_routes={route: p for p, route in enumerate(ROUTING.of_barrier)},
            origins=(Origins(("orders",)), Origins(("rules",))),
            broadcast_routes={route: p for p, route in enumerate(ROUTING.of_broadcast)},
        )
    )


def keyed() -> KeyedOperator:
    return operator(KeyedBroadcastOperator(Scaled(), [FACTORS]), Distribution.BY_KEY)


class Partition:
    """Calls the routes of one partition as Spark does: those with rows, in ascending order."""

    def __init__(self, number: int = 0) -> None:
        self.broadcast, self.states = ROUTING.of_broadcast[number], dict[int, State]()

    def run(self, op: KeyedOperator, rows: dict[int, pd.DataFrame]) -> list[Any]:
        found = []
        for route in sorted(rows):
            state = self.states.setdefault(route, State())
            out = [
                pa.RecordBatch.from_pandas(f, arrow_schema(EMITTED))
                for f in op((route,), [rows[route]], state)
            ]
            outputs = op.spec.shape.outputs
            for batch in BlockUnpacker(outputs, (False,) * len(outputs))(iter(out)):
                found += [(r["user"], r["n"]) for r in batch.to_pylist() if r[C.KIND] == int(C.Kind.RECORD)]
        return found


def block(rows: list[Any], number: int = 0) -> pd.DataFrame:
    (packed,) = BlockPacker(arrow_schema(INPUT), number=number)(iter([records(rows)]))
    return packed.to_pandas()


def call(sequence: int = C.BROADCAST_CALL) -> pd.DataFrame:
    return control(C.Kind.WAKE, channel=0, sequence=sequence)


def test_broadcast_routes_are_below_all_others_of_their_partition() -> None:
    for partitions in (1, 2, 7, 200):
        routing = Routing(Bundling(128, partitions))
        for partition, route in enumerate(routing.of_broadcast):
            assert route < 0 and spark_hash_int(route) % partitions == partition


def test_key_groups_see_what_their_partition_was_told_before() -> None:
    partition, group = Partition(), ROUTING.of_group[0]
    orders = [("a", 2), ("b", 3)]
    assert partition.run(keyed(), {partition.broadcast: call(), group: block(orders)}) == [("a", 2), ("b", 3)]
    told = {partition.broadcast: block([("all", 10)], 1), group: block([("a", 1)])}
    assert partition.run(keyed(), told) == [("all", -10), ("a", 30)]
    # In another process, with a call only.
    assert partition.run(keyed(), {partition.broadcast: call(), group: block([("a", 1)])}) == [("a", 40)]
    # A group that is called by a broadcast element that wants nothing of it does nothing.
    assert partition.run(keyed(), {partition.broadcast: block([("x", 1)], 1), group: call()}) == [("x", -1)]


def test_what_is_applied_to_keyed_state_concerns_all_groups() -> None:
    partition, groups = Partition(), ROUTING.of_group[::2]
    op = keyed()
    rows = {group: block([(str(n), 5)]) for n, group in enumerate(groups)}
    partition.run(op, {partition.broadcast: call(), **rows})
    forget = {partition.broadcast: block([("forget", 0)], 1), groups[0]: call(), groups[1]: call()}
    assert partition.run(op, forget) == [("forget", 0)]
    assert partition.run(op, {partition.broadcast: call(), **rows}) == [("0", 5), ("1", 5)]


def test_a_failure_names_the_broadcast_element() -> None:
    partition = Partition()
    with pytest.raises(OperatorError, match='"topic": "rules", "partition": 0, "offset": 1, '):
        partition.run(keyed(), {partition.broadcast: block([("a", 1), ("b", 13)], 1)})


def test_a_group_in_front_of_its_broadcast_side_is_an_error() -> None:
    with pytest.raises(InternalError, match="before its partition"):
        Partition().run(keyed(), {ROUTING.of_group[0]: block([("a", 1)])})


def test_copies_of_a_seed_are_one() -> None:
    partition, group = Partition(), ROUTING.of_group[0]
    partition.run(keyed(), {partition.broadcast: block([("all", 10)], 1)})
    value = partition.states[partition.broadcast].value[0]
    copy = control(C.Kind.STATE, channel=C.STATE_CHANNEL, sequence=C.FIRST_PARTITION_GROUP - 3, block=value)
    other = Partition()
    rows = {other.broadcast: pd.concat([copy, copy, call()], ignore_index=True), group: block([("a", 1)])}
    assert other.run(keyed(), rows) == [("a", 10)]
    assert other.run(keyed(), {other.broadcast: call(), group: block([("a", 1)])}) == [("a", 20)]


def test_without_keys_all_is_on_the_broadcast_route() -> None:
    op = operator(UnkeyedBroadcast(Plain(), (FACTORS,)), Distribution.BY_CHANNEL)
    partition = Partition()
    assert partition.run(op, {partition.broadcast: block([("a", 1)])}) == [("a", 1)]
    both = pd.concat([block([("a", 1), ("b", 2)]), block([("all", 3)], 1)], ignore_index=True)
    assert partition.run(op, {partition.broadcast: both}) == [("a", 3), ("b", 6)]


def test_a_packer_copies_blocks_and_calls_others() -> None:
    packer = BlockPacker(arrow_schema(INPUT), number=1, copies=(-1, -2), calls=RouteCalls(4, (8, 9)))
    blocks, calls = packer(iter([records([("a", 1), ("b", 2)], route=-1)]))
    assert blocks.column(C.ROUTE).to_pylist() == [-1, -2]
    first, second = blocks.column(C.BLOCK).to_pylist()
    assert first == second
    assert calls.select([C.ROUTE, C.KIND, C.CHANNEL, C.SEQUENCE]).to_pylist() == [
        {C.ROUTE: route, C.KIND: int(C.Kind.WAKE), C.CHANNEL: 4, C.SEQUENCE: C.BROADCAST_CALL}
        for route in (8, 9)
    ]
    assert not list(packer(iter([])))


# -- operator list state -----------------------------------------------------------------------------

SEEN = OperatorListDescriptor("seen", "STRING")
ALL = OperatorListDescriptor("all", "STRING", Redistribution.UNION)


class Remembering(CheckpointedProcessFunction):
    def open(self, context: Any) -> None:
        self.seen = context.get_operator_list_state(SEEN)
        self.all = context.get_operator_list_state(ALL)

    def process_element(self, value: Any, ctx: Any) -> Any:
        if value.amount == 13:
            raise RuntimeError("unlucky")
        yield "".join(self.seen), WRONG if value.amount == 14 else len(self.all)
        self.seen.add(value.user)
        self.all.add(value.user)


def remembering() -> KeyedOperator:
    return operator(UnkeyedCheckpointedFunction(Remembering()), Distribution.BY_CHANNEL)


def test_a_wrong_row_names_the_element_that_it_came_from() -> None:
    """With state of a partition the micro-batch is run once more, from what is stored, to find it."""
    plain = operator(UnkeyedBroadcast(Plain(), (FACTORS,)), Distribution.BY_CHANNEL)
    of_rules = block([("a", 1), ("b", 14)], 1)
    of_orders = pd.concat([block([("all", 3)], 1), block([("a", 1), ("b", 14), ("c", 2)])], ignore_index=True)
    for op, rows, topic in ((keyed(), of_rules, "rules"), (plain, of_orders, "orders")):
        partition = Partition()
        place = f'"topic": "{topic}", "partition": 0, "offset": 1, .*cannot hold \'{WRONG}\''
        with pytest.raises(OperatorError, match=place):
            partition.run(op, {partition.broadcast: rows})
    partition, op = Partition(), remembering()
    partition.run(op, {partition.broadcast: block([("x", 1)])})
    with pytest.raises(OperatorError, match=r'"offset": 1, .*field \'n\' of type int64 cannot hold \'many\''):
        partition.run(op, {partition.broadcast: block([("y", 1), ("z", 14)])})
    assert partition.run(op, {partition.broadcast: block([("y", 1)])}) == [("x", 1)]


def kept(partition: Partition) -> bytes:
    value: bytes = partition.states[partition.broadcast].value[0]
    return value


def test_each_partition_keeps_its_own_items() -> None:
    first, other = Partition(0), Partition(1)
    assert first.run(remembering(), {first.broadcast: block([("a", 1), ("b", 1)])}) == [("", 0), ("a", 1)]
    op = remembering()
    assert first.run(op, {first.broadcast: block([("c", 1)])}) == [("ab", 2)]
    assert other.run(op, {other.broadcast: block([("z", 1)])}) == [("", 0)]
    with pytest.raises(OperatorError, match='"topic": "orders", "partition": 0, "offset": 1, '):
        first.run(op, {first.broadcast: block([("d", 1), ("e", 13)])})
    assert first.run(op, {first.broadcast: block([("f", 1)])}) == [("abc", 3)]


def test_items_of_a_savepoint_are_dealt_out() -> None:
    """Three partitions, of which the second kept nothing, become two."""
    before = [Partition(0), Partition(1)]
    before[0].run(remembering(), {before[0].broadcast: block([("a", 1), ("b", 1), ("c", 1)])})
    before[1].run(remembering(), {before[1].broadcast: block([("z", 1)])})
    rows = [
        control(C.Kind.STATE, channel=C.STATE_CHANNEL, sequence=C.FIRST_PARTITION_GROUP - number, block=value)
        for number, value in ((2, kept(before[1])), (0, kept(before[0])))
    ]
    found = []
    for number in (0, 1):
        after = Partition(number)
        given = pd.concat([*rows, block([("n", 1)])], ignore_index=True)
        found += after.run(remembering(), {after.broadcast: given})
    assert found == [("ab", 4), ("cz", 4)]
