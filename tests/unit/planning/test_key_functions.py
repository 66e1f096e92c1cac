"""key_by with functions: what hints say about the key, what runs in the workers, and what is refused."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import functools
import json
import threading
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from flinkish_spark.core.errors import GraphError, SchemaError, UserFunctionError
from flinkish_spark.functions.stream import KeySelector
from flinkish_spark.planning.declare import make_key_worker, parse_keys
from flinkish_spark.planning.stream_graph import KeyFunction
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.blocks import BlockPacker
from flinkish_spark.transport.columns import Origins
from flinkish_spark.types.rows import arrow_schema
from flinkish_spark.worker.keyed_operator import OperatorError

RECORD, BARRIER, WAKE = int(C.Kind.RECORD), int(C.Kind.BARRIER), int(C.Kind.WAKE)
GIVEN = T.StructType(
    [
        T.StructField(C.KIND, T.IntegerType()),
        T.StructField(C.CHECKPOINT, T.LongType()),
        T.StructField(C.CHANNEL, T.LongType()),
        T.StructField(C.SEQUENCE, T.LongType()),
        T.StructField(C.TIME, T.LongType()),
        T.StructField("user", T.StringType()),
        T.StructField("amount", T.LongType()),
    ]
)
ONLY_RECORDS = T.StructType([field for field in GIVEN if field.name not in (C.KIND, C.CHECKPOINT)])


def only(key: Any) -> KeyFunction:
    """Return the one function of what a stream is keyed by."""
    (found,) = key
    assert isinstance(found, KeyFunction)
    return found


def frame(*records: tuple[str | None, int | None], given: T.StructType = ONLY_RECORDS) -> pa.RecordBatch:
    """Return records of channel 2, from sequence 40 on; users BARRIER and WAKE make control rows."""
    kinds = [{"BARRIER": BARRIER, "WAKE": WAKE}.get(str(user), RECORD) for user, _ in records]
    columns = {
        C.KIND: kinds,
        C.CHECKPOINT: [7 if kind == BARRIER else 0 for kind in kinds],
        C.CHANNEL: [2] * len(records),
        C.SEQUENCE: list(range(40, 40 + len(records))),
        C.TIME: [1_000 if kind == RECORD else None for kind in kinds],
        "user": [user if kind == RECORD else None for (user, _), kind in zip(records, kinds, strict=True)],
        "amount": [amount for _, amount in records],
    }
    return pa.RecordBatch.from_pydict({n: columns[n] for n in given.names}, schema=arrow_schema(given))


def keyed(key: KeyFunction, *batches: pa.RecordBatch, given: T.StructType = ONLY_RECORDS) -> pa.Table:
    worker = make_key_worker(key, given, "totals", Origins(("orders",)))
    out = list(worker(iter(batches)))
    assert all(batch.schema.equals(arrow_schema(worker.columns)) for batch in out)
    return pa.Table.from_batches(out)


def test_a_key_stands_beside_its_record_and_nothing_else_changes() -> None:
    batch = frame(("Ann", 1), (None, 2), ("ben", None))
    lower = only(parse_keys([lambda r: r.user and r.user.lower()], "STRING"))
    found = keyed(lower, batch, batch.slice(0, 1))
    assert found.column("_fs_key0").to_pylist() == ["ann", None, "ben", "ann"]
    assert found.drop_columns(["_fs_key0"]) == pa.Table.from_batches([batch, batch.slice(0, 1)])


def test_no_function_sees_a_control_row() -> None:
    """Behind another operator, records and barriers stand in one frame."""
    seen: list[Any] = []

    def user_of(record: Any) -> str:
        seen.append(record)
        return str(record.user)

    batch = frame(("WAKE", None), ("ann", 1), ("BARRIER", None), ("ben", 2), ("BARRIER", None), given=GIVEN)
    found = keyed(only(parse_keys([user_of], None)), batch, given=GIVEN)
    assert found.column("_fs_key0").to_pylist() == [None, "ann", None, "ben", None]
    assert found.drop_columns(["_fs_key0"]) == pa.Table.from_batches([batch])
    assert [(record.user, record.amount) for record in seen] == [("ann", 1), ("ben", 2)]
    assert seen[0]._fields == ("user", "amount")
    only_barriers = frame(("BARRIER", None), given=GIVEN)
    assert keyed(only(parse_keys([user_of], None)), only_barriers, given=GIVEN).num_rows == 1
    assert len(seen) == 2


def test_what_comes_out_goes_into_the_packer_of_the_operator() -> None:
    """Rows with a route in front, as Spark selects them; barriers pass, and records become blocks."""
    batch = frame(("ann", 1), ("BARRIER", None), ("ben", 2), given=GIVEN)
    rows = keyed(only(parse_keys([lambda r: r.user], "STRING")), batch, given=GIVEN).to_batches()[0]
    names = [C.KEY_HASH, C.CHANNEL, C.SEQUENCE, C.TIME, "c0", "k0"]
    columns = [rows.column(name) for name in (C.CHANNEL, C.CHANNEL, C.SEQUENCE, C.TIME, "amount", "_fs_key0")]
    routes = pa.array([1, 9, 2], pa.int32())
    sent = pa.RecordBatch.from_arrays(
        [routes, rows.column(C.KIND), rows.column(C.CHECKPOINT), *columns],
        names=[C.ROUTE, C.KIND, C.CHECKPOINT, *names],
    )
    payload = pa.schema([pa.field(name, column.type) for name, column in zip(names, columns, strict=True)])
    packed = pa.Table.from_batches(BlockPacker(payload)(iter([sent])))
    found = zip(packed.column(C.ROUTE).to_pylist(), packed.column(C.KIND).to_pylist(), strict=True)
    assert sorted(found) == [(1, RECORD), (2, RECORD), (9, BARRIER)]


class Pair(NamedTuple):
    user: str
    big: bool


@dataclasses.dataclass
class Place:
    user: str
    at: int


def test_a_key_of_several_parts_has_a_column_for_each() -> None:
    def hinted(record: Any) -> tuple[str, int]:
        return record.user, record.amount

    def named(record: Any) -> Pair:
        return Pair(record.user, record.amount > 1)

    def dataclass_key(record: Any) -> Place:
        return Place(record.user, record.amount)

    batch = frame(("ann", 1), ("ben", 2))
    for key in (
        parse_keys([lambda r: (r.user, r.amount)], "user STRING, amount LONG"),
        parse_keys([hinted], None),
        parse_keys([dataclass_key], None),
    ):
        found = keyed(only(key), batch)
        assert found.column("_fs_key0").to_pylist() == ["ann", "ben"]
        assert found.column("_fs_key1").to_pylist() == [1, 2]
    found = keyed(only(parse_keys([named], None)), batch)
    assert found.column("_fs_key1").to_pylist() == [False, True]


@pytest.mark.parametrize(
    "hint,kind",
    [
        (str, "string"),
        (int, "bigint"),
        (str | None, "string"),
        (bool, "boolean"),
        (datetime.date, "date"),
        (decimal.Decimal, "decimal(38,18)"),
        (datetime.datetime, "timestamp"),
    ],
)
def test_the_hint_says_the_type(hint: Any, kind: str) -> None:
    def key(record: Any) -> Any: ...

    key.__annotations__["return"] = hint
    (part,) = only(parse_keys([key], None)).parts
    assert part.dataType.simpleString() == kind


class ByUser:
    def __call__(self, record: Any) -> str:
        return str(record.user)


def test_an_object_that_can_be_called_has_a_hint_too() -> None:
    found = keyed(only(parse_keys([ByUser()], None)), frame(("ann", 1)))
    assert found.column("_fs_key0").to_pylist() == ["ann"]
    with pytest.raises(SchemaError, match="no hint"):
        parse_keys([functools.partial(min, "a")], None)


class Opened(KeySelector):
    """Counts on its class, as a test can read it in the same process."""

    closed = 0

    def open(self, context: Any) -> None:
        self.prefix = f"{context.uid}/"

    def get_key(self, value: Any) -> str:
        return self.prefix + value.user

    def close(self) -> None:
        type(self).closed += 1


def test_a_key_selector_is_opened_and_closed_by_each_task() -> None:
    closed = Opened.closed
    found = keyed(only(parse_keys([Opened()], None)), frame(("ann", 1)), frame(("ben", 2)))
    assert found.column("_fs_key0").to_pylist() == ["totals/ann", "totals/ben"]
    assert Opened.closed == closed + 1
    with pytest.raises(OperatorError):
        keyed(only(parse_keys([Opened()], None)), frame((None, 1)))
    assert Opened.closed == closed + 2


class WantsState(Opened):
    def open(self, context: Any) -> None:
        context.get_state(None)


def test_a_key_selector_has_no_state() -> None:
    with pytest.raises(RuntimeError, match="'totals' asks for state"):
        keyed(only(parse_keys([WantsState()], None)), frame(("ann", 1)))


@pytest.mark.parametrize(
    "function,declared,says",
    [
        (lambda r: 1 // r.amount, "LONG", "ZeroDivisionError"),
        (lambda r: "x" if r.amount == 0 else 1, "LONG", "field 'key' of type int64 cannot hold 'x'"),
        (lambda r: 0.5 if r.amount == 0 else 1, "LONG", "it is a float"),
        (
            lambda r: (1,) if r.amount == 0 else (1, 2),
            "a LONG, b LONG",
            "emitted 1 fields, but 2 are declared",
        ),
        (lambda r: None if r.amount == 0 else (1, 2), "a LONG, b LONG", "emitted a NoneType"),
    ],
)
@pytest.mark.parametrize("given", [ONLY_RECORDS, GIVEN], ids=["records", "with control rows"])
def test_an_error_names_the_operator_and_the_record(
    function: Any, declared: str, says: str, given: T.StructType
) -> None:
    first = ("BARRIER", None) if given is GIVEN else ("ann", 1)
    with pytest.raises(OperatorError) as failed:
        keyed(
            only(parse_keys([function], declared)),
            frame(first, ("ben", 0), ("c", 2), given=given),
            given=given,
        )
    facts = json.loads(str(failed.value).split(" ", 1)[1])
    assert {name: facts[name] for name in ("uid", "topic", "partition", "offset", "what")} == {
        "uid": "totals",
        "topic": "orders",
        "partition": 2,
        "offset": 41,
        "what": "the key function of operator 'totals'",
    }
    assert says in facts["error"]


@pytest.mark.parametrize(
    "keys,declared,kind,says",
    [
        ([lambda r: r.user], None, SchemaError, r"no hint .* say key="),
        ([lambda r: r.user], "STRINGS", SchemaError, "cannot be read"),
        ([lambda r: r.user], 5, SchemaError, "the type of the key is 5"),
        ([lambda r: r.user], "DOUBLE", GraphError, "a double.*cannot be compared"),
        ([lambda r: r.user], "a STRING, b ARRAY<LONG>", GraphError, "makes b, a array<bigint>"),
        ([lambda r: r.user, "user"], "STRING", GraphError, "a function and another key"),
        (["user", Opened()], None, GraphError, "a function and another key"),
        (["user"], "STRING", GraphError, "without a function"),
        ([Opened], "STRING", GraphError, "an instance of a KeySelector"),
        ([], None, GraphError, "no key"),
        ([5], None, GraphError, "or a function of a record"),
    ],
)
def test_what_cannot_be_a_key_is_refused(keys: Any, declared: Any, kind: Any, says: str) -> None:
    with pytest.raises(kind, match=says):
        parse_keys(keys, declared)


def test_a_function_that_cannot_travel_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(UserFunctionError, match="'key_by' cannot be sent"):
        parse_keys([lambda r: str(lock)], "STRING")


def test_columns_stay_what_they_were() -> None:
    assert parse_keys(["user", "product"], None) == ("user", "product")
