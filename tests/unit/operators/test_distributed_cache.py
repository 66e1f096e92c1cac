"""Functions of every kind find the files that are registered, in the harness and in a task of Spark."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import SparkFiles

from flinkish_spark import (
    AggregateFunction,
    AsyncDataStream,
    AsyncFunction,
    BroadcastProcessFunction,
    DataStream,
    FilterFunction,
    FlatMapFunction,
    KeyedBroadcastProcessFunction,
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    MapFunction,
    MapStateDescriptor,
    ReduceFunction,
    VectorizedProcessFunction,
)
from flinkish_spark.cep import CEP, IterativeCondition, Pattern, PatternProcessFunction
from flinkish_spark.core.distributed_cache import CACHED_FILES_PROPERTY, find_cached_files
from flinkish_spark.core.errors import ConfigError, UserFunctionError
from flinkish_spark.functions.stream import (
    CheckpointedProcessFunction,
    CoMapFunction,
    CoProcessFunction,
    ProcessFunction,
)
from flinkish_spark.joins import CoGroupFunction, LookupTable, ProcessJoinFunction
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.windows import ProcessWindowFunction, TumblingEventTimeWindows

ORDERS, FOUND = "user STRING, amount LONG", "found STRING"
WINDOWS = TumblingEventTimeWindows(10)
RULES = MapStateDescriptor("rules", "STRING", "LONG")


class Opened:
    """Reads the file when it is opened, and asks again, of the context that it has kept."""

    def open(self, context: Any) -> None:
        self.context = context
        self.path = context.get_distributed_cache().get_file("word")

    def said(self) -> tuple[str]:
        assert self.context.get_distributed_cache().get_file("word") == self.path
        return (Path(self.path).read_text(),)


class Mapped(Opened, MapFunction):
    def map(self, value: Any) -> Any:
        return self.said()


class FlatMapped(Opened, FlatMapFunction):
    def flat_map(self, value: Any) -> Any:
        yield self.said()


class Filtered(Opened, FilterFunction):
    def filter(self, value: Any) -> bool:
        return self.said() == ("word",)


class Processed(Opened, ProcessFunction):
    def process_element(self, value: Any, ctx: Any) -> Any:
        yield self.said()


class Both(Opened, CoProcessFunction):
    def process_element1(self, value: Any, ctx: Any) -> Any:
        yield self.said()

    process_element2 = process_element1


class BothMapped(Opened, CoMapFunction):
    def map1(self, value: Any) -> Any:
        return self.said()

    map2 = map1


class Checkpointed(Opened, CheckpointedProcessFunction):
    def process_element(self, value: Any, ctx: Any) -> Any:
        yield self.said()


class Keyed(Opened, KeyedProcessFunction):
    def process_element(self, value: Any, ctx: Any) -> Any:
        yield self.said()


class KeyedBoth(Opened, KeyedCoProcessFunction):
    def process_element1(self, value: Any, ctx: Any) -> Any:
        yield self.said()

    process_element2 = process_element1


class Batches(Opened, VectorizedProcessFunction):
    def process_batch(self, batch: Any, ctx: Any) -> Any:
        yield pa.RecordBatch.from_pydict({"found": [self.said()[0]] * batch.num_rows})


class Ruled(Opened, BroadcastProcessFunction):
    def process_element(self, value: Any, ctx: Any) -> Any:
        yield self.said()

    def process_broadcast_element(self, value: Any, ctx: Any) -> Any:
        yield self.said()


class KeyedRuled(Opened, KeyedBroadcastProcessFunction):
    def process_element(self, value: Any, ctx: Any) -> Any:
        yield self.said()

    def process_broadcast_element(self, value: Any, ctx: Any) -> Any:
        yield self.said()


class Windowed(Opened, ProcessWindowFunction):
    def process(self, key: Any, context: Any, elements: Any) -> Any:
        yield self.said()


class Largest(Opened, ReduceFunction):
    def reduce(self, first: Any, second: Any) -> Any:
        return first


class Counted(Opened, AggregateFunction):
    def create_accumulator(self) -> int:
        return 0

    def add(self, value: Any, accumulator: int) -> int:
        return accumulator + 1

    def get_result(self, accumulator: int) -> Any:
        return self.said()


class Asked(Opened, AsyncFunction):
    async def async_invoke(self, value: Any) -> Any:
        return [self.said()]


class Matched(Opened, PatternProcessFunction):
    def process_match(self, match: Any, ctx: Any) -> Any:
        yield self.said()


class Condition(Opened, IterativeCondition):
    def filter(self, value: Any, ctx: Any) -> bool:
        return self.said() == ("word",)


class Joined(Opened, ProcessJoinFunction):
    def process_element(self, left: Any, right: Any, ctx: Any) -> Any:
        yield self.said()


class Grouped(Opened, CoGroupFunction):
    def co_group(self, key: Any, context: Any, lefts: Any, rights: Any) -> Any:
        yield self.said()


class Table(LookupTable):
    def lookup(self, keys: Any) -> Any:
        return {key: [(key,)] for key in keys}


def found(stream: DataStream) -> DataStream:
    return stream.map(lambda one: ("word",), output=FOUND)


COUNT = {"accumulator": "LONG", "output": FOUND, "uid": "part"}
KINDS: dict[str, Callable[[DataStream], DataStream]] = {
    "map": lambda s: s.map(Mapped(), output=FOUND),
    "flat_map": lambda s: s.flat_map(FlatMapped(), output=FOUND),
    "filter": lambda s: found(s.filter(Filtered())),
    "process": lambda s: s.process(Processed(), output=FOUND),
    "two": lambda s: s.connect(s).process(Both(), output=FOUND),
    "two mapped": lambda s: s.connect(s).map(BothMapped(), output=FOUND),
    "checkpointed": lambda s: s.process_with_state(Checkpointed(), output=FOUND, uid="part"),
    "keyed": lambda s: s.key_by("user").process(Keyed(), output=FOUND, uid="part"),
    "keyed map": lambda s: s.key_by("user").map(Mapped(), output=FOUND, uid="part"),
    "two keyed": lambda s: (
        s.key_by("user").connect(s.key_by("user")).process(KeyedBoth(), output=FOUND, uid="part")
    ),
    "vectorized": lambda s: s.key_by("user").process(Batches(), output=FOUND, uid="part"),
    "broadcast": lambda s: s.connect(s.broadcast(RULES)).process(Ruled(), output=FOUND, uid="part"),
    "keyed broadcast": lambda s: (
        s.key_by("user").connect(s.broadcast(RULES)).process(KeyedRuled(), output=FOUND, uid="part")
    ),
    "reduce": lambda s: found(s.key_by("user").reduce(Largest(), uid="part")),
    "aggregate": lambda s: s.key_by("user").aggregate(Counted(), **COUNT),
    "window": lambda s: s.key_by("user").window(WINDOWS).process(Windowed(), output=FOUND, uid="part"),
    "window aggregate": lambda s: s.key_by("user").window(WINDOWS).aggregate(Counted(), **COUNT),
    "async": lambda s: AsyncDataStream.ordered_wait(s, Asked(), 1_000, output=FOUND, uid="part"),
    "pattern": lambda s: CEP.pattern(s.key_by("user"), Pattern.begin("a").where(Condition())).process(
        Matched(), output=FOUND, uid="part"
    ),
    "interval join": lambda s: (
        s.key_by("user")
        .join(s.key_by("user"))
        .interval(lower_ms=-5, upper_ms=5, function=Joined(), output=FOUND, uid="part")
    ),
    "co-group": lambda s: (
        s.key_by("user").join(s.key_by("user")).co_group(WINDOWS, Grouped(), output=FOUND, uid="part")
    ),
    "lookup join": lambda s: s.lookup_join(
        Table(), "name STRING", key=lambda order: order.user, function=Joined(), output=FOUND
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_finds_what_is_registered(kind: str, tmp_path: Path) -> None:
    (tmp_path / "word.txt").write_text("word")
    harness = ProgramHarness(KINDS[kind], ORDERS, cached_files={"word": tmp_path / "word.txt"})
    harness.push(("ann", 1), 3)
    # A copy that is opened behind a crash finds it, too.
    harness.crash()
    harness.push(("ann", 1), 3)
    harness.end_of_input()
    rows = harness.take().rows
    assert rows and {tuple(row) for row in rows} == {("word",)}
    harness.close()


def test_without_it_the_error_says_what_there_is_and_how_to_register(tmp_path: Path) -> None:
    says = r"'part' asks for the cached file 'word', and there is 'other'; register it: env\.register_cached"
    (tmp_path / "other").touch()
    with pytest.raises((UserFunctionError, ValueError), match=says):
        ProgramHarness(KINDS["keyed"], ORDERS, cached_files={"other": tmp_path / "other"})
    with pytest.raises((UserFunctionError, ValueError), match="and there is none"):
        ProgramHarness(KINDS["keyed"], ORDERS)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"word": "missing"}, r"cached_files\['word'\] is 'missing'.*a file or folder that is there"),
        ({"word": 3}, "a file or folder that is there"),
        ({" ": "/"}, "name is ' '"),
        ({3: "/"}, "a dict with texts as keys"),
        (["word"], "a dict with texts as keys"),
    ],
)
def test_files_that_a_harness_cannot_have_are_refused(given: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ProgramHarness(KINDS["map"], ORDERS, cached_files=given)


def test_in_a_task_files_lie_below_spark_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Task:
        def getLocalProperty(self, name: str) -> str | None:
            return json.dumps({"word": "flinkish-1/word.txt"}) if name == CACHED_FILES_PROPERTY else None

    monkeypatch.setattr("flinkish_spark.core.distributed_cache.TaskContext.get", Task)
    monkeypatch.setattr(SparkFiles, "_is_running_on_worker", True)
    monkeypatch.setattr(SparkFiles, "_root_directory", ".")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"is not at .*do not delete files there"):
        find_cached_files("part").get_file("word")
    (tmp_path / "flinkish-1").mkdir()
    (tmp_path / "flinkish-1" / "word.txt").touch()
    path = find_cached_files("part").get_file("word")
    assert path == str(tmp_path / "flinkish-1" / "word.txt"), (
        "absolute, although executors have a relative root"
    )
    monkeypatch.setattr("flinkish_spark.core.distributed_cache.TaskContext.get", lambda: None)
    with pytest.raises(ValueError, match="there is none"):
        find_cached_files("part").get_file("word")
