"""Records find the route of their key group, control rows every partition that is to see them."""

from __future__ import annotations

import pickle
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from flinkish_spark.protocol.key_groups import Bundling
from flinkish_spark.protocol.latency import place_of
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.branches import INPUT
from flinkish_spark.transport.key_hash import hash_keys
from flinkish_spark.transport.routes import ControlRoutes, InputRecords, RecordRoutes, RouteRows
from flinkish_spark.transport.routing import Distribution, Routing
from flinkish_spark.types.ddl import parse_ddl

ROUTING = Routing(Bundling(16, 2))
RECORD, BARRIER, WAKE, MARKER = C.Kind.RECORD, C.Kind.BARRIER, C.Kind.WAKE, C.Kind.MARKER
CONTROL = f"{C.KIND} INT, {C.CHECKPOINT} LONG, {C.CHANNEL} LONG, {C.SEQUENCE} LONG"
KEYS = ["a", "b", None, "", "a"]


def fields(ddl: str) -> T.StructType:
    found = parse_ddl(ddl)
    assert isinstance(found, T.StructType)
    return found


ALL = InputRecords()


def one_input(
    distribution: Distribution = Distribution.BY_KEY, own: InputRecords = ALL, **more: Any
) -> RecordRoutes:
    keys = ("key",) if distribution is Distribution.BY_KEY else ()
    return RecordRoutes(ROUTING, distribution, keys, "hash", "route", own, **more)


def routed(worker: RouteRows, *batches: pa.RecordBatch) -> list[dict[str, Any]]:
    again: RouteRows = pickle.loads(pickle.dumps(worker))
    made = list(again(iter(batches)))
    assert all(one.schema.names == worker.columns.names for one in made)
    return [row for one in made for row in one.to_pylist()]


def records(keys: list[str | None], **more: list[Any]) -> pa.RecordBatch:
    columns = {"key": pa.array(keys, pa.string()), C.CHANNEL: pa.array(range(len(keys)), pa.int64())}
    return pa.record_batch({**columns, **{name: pa.array(one) for name, one in more.items()}})


GIVEN = fields(f"key STRING, {C.CHANNEL} LONG")


def test_a_record_goes_to_the_bundle_of_its_key_group() -> None:
    found = routed(RouteRows((one_input(),), (), GIVEN), records(KEYS))
    hashes = hash_keys([pa.array(KEYS, pa.string())], len(KEYS)).tolist()
    assert [row["hash"] for row in found] == hashes
    assert [row["route"] for row in found] == [ROUTING.of_group[one % 16] for one in hashes]
    assert found[0]["route"] == found[4]["route"]


@pytest.mark.parametrize(
    ("distribution", "routes"),
    [
        (Distribution.BY_CHANNEL, [ROUTING.of_broadcast[channel % 2] for channel in range(5)]),
        (Distribution.PASSING, [ROUTING.of_barrier[channel % 2] for channel in range(5)]),
        (Distribution.BROADCAST, [ROUTING.of_broadcast[0]] * 5),
    ],
)
def test_a_record_without_a_key_goes_by_its_channel_or_everywhere(
    distribution: Distribution, routes: list[int]
) -> None:
    found = routed(RouteRows((one_input(distribution),), (), GIVEN), records(KEYS))
    assert [row["route"] for row in found] == routes
    assert [row["hash"] for row in found] == [0] * 5


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        (InputRecords(number=1), [False, True, False, False, True]),
        (InputRecords(side=0), [True, True, False, True, False]),
        (InputRecords(place="place"), [True, False, True, True, True]),
        (InputRecords(number=0, place="place"), [True, False, True, False, False]),
    ],
)
def test_a_record_of_another_input_has_no_route_of_this_one(own: InputRecords, wanted: list[bool]) -> None:
    side = pa.array([0, 0, 1, 0, 2], pa.int32())
    number = pa.array([0, 1, 0, None, 1], pa.int32())
    place = pa.array([7, None, 8, 9, 9], pa.int64())
    rows = records(KEYS, **{C.SIDE: side, INPUT: number, "place": place})
    given = fields(f"key STRING, {C.CHANNEL} LONG, {C.SIDE} INT, {INPUT} INT, place LONG")
    worker = RouteRows((one_input(own=own),), (), given)
    assert [row["route"] is not None for row in routed(worker, rows)] == wanted
    assert set(own.columns) <= set(given.names)


def control(*rows: tuple[int, int, int, int]) -> pa.RecordBatch:
    kinds, checkpoints, channels, sequences = zip(*rows, strict=True)
    columns = {
        C.KIND: pa.array(kinds, pa.int32()),
        C.CHECKPOINT: pa.array(checkpoints, pa.int64()),
        C.CHANNEL: pa.array(channels, pa.int64()),
        C.SEQUENCE: pa.array(sequences, pa.int64()),
        "key": pa.array([f"k{at}" if kind == RECORD else None for at, kind in enumerate(kinds)], pa.string()),
    }
    return pa.record_batch(columns)


def of_operator(*operators: ControlRoutes) -> RouteRows:
    return RouteRows((one_input(),), operators, fields(f"{CONTROL}, key STRING"))


def test_a_barrier_is_seen_by_every_partition_and_stands_apart_from_records() -> None:
    worker = of_operator(ControlRoutes(ROUTING, 4, False))
    found = routed(worker, control((RECORD, 0, 1, 5), (BARRIER, 3, 0, 0), (RECORD, 0, 1, 6)))
    barriers = [row for row in found if row[C.KIND] == BARRIER]
    assert [row[C.ROUTE] for row in barriers] == list(ROUTING.of_barrier)
    assert all(row["route"] is None and row[C.CHECKPOINT] == 3 for row in barriers)
    assert [row[C.SEQUENCE] for row in found if row[C.KIND] == RECORD] == [5, 6]
    assert all(row["route"] is not None for row in found if row[C.KIND] == RECORD)


def test_a_call_goes_to_its_bundle_and_that_of_others_passes_by() -> None:
    alone, joined = ControlRoutes(ROUTING, 4, False), ControlRoutes(ROUTING, 4, True)
    assert alone.of(WAKE, 4, 1) == (ROUTING.of_bundle[1],)
    assert joined.of(WAKE, 4, 1) == (ROUTING.of_bundle[1], *ROUTING.of_broadcast)
    assert alone.of(WAKE, 5, 1) == joined.of(C.FIRST_REPORT, 4, 1) == ROUTING.of_barrier[:1]


def test_a_marker_goes_to_its_subtask() -> None:
    assert ControlRoutes(ROUTING, 4, False).of(MARKER, place_of(3, 1), 0) == (ROUTING.of_barrier[1],)


def test_operators_that_share_tasks_each_see_a_barrier() -> None:
    other = Routing(Bundling(16, 2), 1)
    worker = of_operator(ControlRoutes(ROUTING, 4, False), ControlRoutes(other, 5, False))
    found = routed(worker, control((BARRIER, 3, 0, 0)))
    assert [row[C.ROUTE] for row in found] == [*ROUTING.of_barrier, *other.of_barrier]
