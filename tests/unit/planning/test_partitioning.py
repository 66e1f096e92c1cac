"""Redistributions without Spark: what they ask of a DataFrame, what a partitioner does, what is refused."""

from __future__ import annotations

import json
import threading
import zlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import types as T

from flinkish_spark.contracts.source import SourceNode
from flinkish_spark.core.errors import ConfigError, GraphError, UserFunctionError
from flinkish_spark.functions.stream import KeySelector, Partitioner
from flinkish_spark.planning.partitioning import (
    CustomPartitioning,
    Rebalance,
    Rescale,
    check_is_shuffle_partitions,
    is_partitioning,
    make_custom_partitioning,
)
from flinkish_spark.planning.sent_columns import make_keyed_input
from flinkish_spark.planning.sink_rows import TaggedStream
from flinkish_spark.planning.stream_graph import KeyedEntry, KeyedNode
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.columns import Origins
from flinkish_spark.worker.functions import RecordPartitioner
from flinkish_spark.worker.keyed_operator import OperatorError
from tests.unit.planning.test_row_functions import rows

PLACE = ["*", "monotonically_increasing_id() AS _fs_place"]


class Recorder:
    """Stands for a DataFrame: writes down what is asked of it, and runs what mapInArrow is given."""

    def __init__(self, *names: str, batch: pa.RecordBatch | None = None, shuffle_partitions: int = 7) -> None:
        self.columns, self.batch, self.asked = list(names), batch, list[Any]()
        self.schema = T.StructType([T.StructField(name, T.LongType()) for name in names])
        self.sparkSession, self.conf = self, self
        self._shuffle_partitions = shuffle_partitions

    def get(self, name: str, default: str | None = None) -> str:
        assert name == "spark.sql.shuffle.partitions"
        return str(self._shuffle_partitions)

    def mapInArrow(self, worker: Any, columns: T.StructType) -> Recorder:
        if self.batch is not None:
            (self.batch,) = worker(iter([self.batch]))
            assert self.batch.schema.names == columns.names
        self.asked.append(("mapInArrow", columns.names))
        return self

    def __getattr__(self, name: str) -> Any:
        def asked(*arguments: Any) -> Recorder:
            self.asked.append((name, *arguments))
            return self

        return asked


def asked_of(move: Any, *names: str) -> list[Any]:
    frame = Recorder(*names)
    move(frame)
    return frame.asked


def test_records_go_where_their_place_says_and_stand_in_their_order_there() -> None:
    assert asked_of(Rebalance(3), "user", C.CHANNEL, C.SEQUENCE, C.TIME) == [
        ("selectExpr", *PLACE),
        ("repartition", 3, C.CHANNEL, C.SEQUENCE),
        ("sortWithinPartitions", "_fs_place"),
        ("drop", "_fs_place"),
    ]


def test_behind_a_keyed_operator_a_row_has_its_number_in_its_task_as_its_place() -> None:
    assert asked_of(Rebalance(3), "user", "total")[1] == ("repartition", 3, "_fs_place")


def test_without_a_number_there_are_as_many_tasks_as_shuffle_partitions() -> None:
    assert asked_of(Rebalance(None), "user")[1][1] == 7
    assert asked_of(Rescale(None), "user") == [("coalesce", 7)]
    assert asked_of(Rescale(2), "user") == [("coalesce", 2)]


class ByLength(Partitioner):
    def partition(self, key: Any, num_partitions: int) -> int:
        return len(key) % num_partitions


class Upper(KeySelector):
    def open(self, context: Any) -> None:
        self.mark = "!" if context.uid == "partition_custom ByLength" else "?"

    def get_key(self, value: Any) -> str:
        return value.text + self.mark


@pytest.mark.parametrize(
    "partitioner,key,targets",
    [
        (ByLength(), "text", [1, 2, 0]),
        (lambda key, tasks: zlib.crc32(key.encode()) % tasks, lambda r: r.text, [0, 1, 2]),
        (lambda key, tasks: np.int64(key), "amount", [1, 0, 2]),
        (ByLength(), Upper(), [2, 0, 1]),
    ],
)
def test_a_partitioner_chooses_the_task(partitioner: Any, key: Any, targets: list[int]) -> None:
    batch = rows(("a", 1), ("bb", 0), ("ccc", 2))
    frame: Any = Recorder(*batch.schema.names, batch=batch)
    make_custom_partitioning(partitioner, key, 3)(frame)
    assert frame.asked[1:] == [
        ("selectExpr", *PLACE),
        ("repartitionById", 3, "_fs_target"),
        ("sortWithinPartitions", "_fs_place"),
        ("drop", "_fs_place"),
        ("drop", "_fs_target"),
    ]
    assert frame.batch.column("_fs_target").to_pylist() == targets
    assert frame.batch.column("_fs_target").type == pa.int32()
    assert frame.batch.drop_columns(["_fs_target"]) == batch


def test_the_partitioner_is_told_how_many_tasks_there_are() -> None:
    batch = rows(("a", 1))
    frame: Any = Recorder(*batch.schema.names, batch=batch, shuffle_partitions=5)
    make_custom_partitioning(lambda key, tasks: tasks - 1, "text", None)(frame)
    assert frame.batch.column("_fs_target").to_pylist() == [4]


def test_a_field_is_found_whatever_its_name() -> None:
    batch = pa.RecordBatch.from_pydict({"a field": pa.array([2], pa.int64())})
    frame: Any = Recorder("a field", batch=batch)
    make_custom_partitioning(lambda key, tasks: key, "a field", 3)(frame)
    assert frame.batch.column("_fs_target").to_pylist() == [2]


def test_a_field_that_is_not_there_is_named() -> None:
    frame: Any = Recorder("user", C.CHANNEL)
    with pytest.raises(GraphError, match=r"has the key 'text'.*They have user"):
        make_custom_partitioning(ByLength(), "text", 3)(frame)


@pytest.mark.parametrize("chosen", [3, -1, None, "1", 1.0, True])
def test_what_is_no_task_stops_the_job_with_the_record(chosen: Any) -> None:
    batch = rows(("a", 1), ("b", 0), channel=3)
    frame: Any = Recorder(*batch.schema.names, batch=batch)
    moved = make_custom_partitioning(lambda key, tasks: 0 if key == "a" else chosen, "text", 3)
    with pytest.raises(OperatorError) as failed:
        moved.replace_origins(Origins(("orders",)))(frame)
    facts = json.loads(str(failed.value).split(" ", 1)[1])
    assert facts == {
        "uid": "partition_custom",
        "topic": "orders",
        "partition": 3,
        "offset": 41,
        "error": f"ValueError: the partitioner returned {chosen!r}; there are partitions 0 to 2",
    }


@pytest.mark.parametrize(
    "partitioner,key,says",
    [
        (5, "user", "got a int as its partitioner"),
        (ByLength, "user", "as its partitioner"),
        (ByLength(), 5, "got 5"),
        (ByLength(), "", "got ''"),
        (ByLength(), None, "got None"),
        (ByLength(), Upper, "an instance of a KeySelector"),
    ],
)
def test_what_is_no_partitioner_or_key_is_refused(partitioner: Any, key: Any, says: str) -> None:
    with pytest.raises(GraphError, match=says):
        make_custom_partitioning(partitioner, key, None)


def test_a_partitioner_that_cannot_travel_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(UserFunctionError, match="'partition_custom' cannot be sent"):
        make_custom_partitioning(lambda key, tasks: len(str(lock)), "user", None)


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "2", 32_769])
def test_a_number_of_tasks_is_a_whole_number(value: Any) -> None:
    for kind in (Rebalance, Rescale):
        with pytest.raises(ConfigError, match=r"parallelism is .* It must be a whole number from 1 to 32768"):
            kind(value)
        assert kind(None).parallelism is None and kind(32_768).parallelism == 32_768


def test_keyed_operators_have_the_tasks_that_spark_has() -> None:
    check_is_shuffle_partitions(4, 4, "the job 'orders'")
    with pytest.raises(ConfigError, match=r"the job 'orders' cannot be 8.*shuffle.partitions\", 8\)"):
        check_is_shuffle_partitions(8, 4, "the job 'orders'")


def test_the_planner_knows_what_only_moves_records() -> None:
    assert all(
        map(is_partitioning, (Rebalance(3), Rescale(None), make_custom_partitioning(ByLength(), "user", 2)))
    )
    assert not is_partitioning(lambda frame: frame)


def test_a_target_travels_with_its_function() -> None:
    moved = make_custom_partitioning(ByLength(), "text", 2)
    assert isinstance(moved, CustomPartitioning) and moved.name == "partition_custom ByLength"
    assert RecordPartitioner(ByLength().partition, lambda r: r, 2)("abc") == (1,)


def test_in_front_of_a_keyed_operator_behind_another_one_nothing_moves_records() -> None:
    """No step between two operators is part of the plan, and the second one distributes the records anew."""
    frame: Any = Recorder("user", C.KIND)
    function: Any = None
    tagged = TaggedStream(frame, frame.schema, frozenset({0}), transforms=(Rebalance(3), Rescale(1)))
    entry = KeyedEntry(SourceNode("orders", function), ("user",))
    node = KeyedNode("again", (entry,), function, None, 128)
    assert make_keyed_input(node, 0, tagged, ()).frames == (frame,) and not frame.asked
    mapped = TaggedStream(frame, frame.schema, frozenset({0}), transforms=(Rebalance(3), lambda one: one))
    with pytest.raises(GraphError, match=r"transform\(\) stands between the keyed operator 'again'"):
        make_keyed_input(node, 0, mapped, ())
