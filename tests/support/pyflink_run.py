"""Runs a PyFlink program in this process: its sources are read whole, then the input ends."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flinkish_spark.connectors.driver_sinks import _ROOMS, ForeachSink, MemorySink
from flinkish_spark.core.config import CheckpointConfig
from flinkish_spark.datastream import environment as own
from flinkish_spark.datastream.data_stream import DataStream
from flinkish_spark.planning.stream_graph import StreamGraph
from flinkish_spark.pyflink.datastream import StreamExecutionEnvironment
from flinkish_spark.testing import program_harness


class InProcess(own.StreamExecutionEnvironment):
    """An environment without Spark: each sink's stream runs in a harness.

    `watermarks` says after how many elements of each source the watermark advances, and to what.
    """

    def __init__(self, watermarks: Mapping[int, int]) -> None:
        self.graph = StreamGraph(max_parallelism=16)
        self.spark = SimpleNamespace(conf=SimpleNamespace(get=lambda name, default=None: "1"))
        self.job, self.checkpoint, self.watermarks = "program", CheckpointConfig(), watermarks

    def execute(self, *_: Any, **__: Any) -> Any:
        sinks, self.graph.sinks = self.graph.sinks, []
        for node in sinks:
            rows = self._rows(DataStream(self, node.parent))
            if isinstance(node.sink, MemorySink):
                _ROOMS[node.sink.name][("job", node.uid, 1)] = rows
            else:
                assert isinstance(node.sink, ForeachSink)
                for row in rows:
                    node.sink.function(row, 1)

    def _rows(self, stream: DataStream) -> list[Any]:
        sources = [(node, node.source.schema) for node in self.graph.sources]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(program_harness, "build_program", lambda *_: (sources, stream))
            harness = program_harness.ProgramHarness(lambda: stream)
        values = [[(value, None) for value in node.source.values] for node, _ in sources]
        done = 0
        for count, watermark_ms in self.watermarks.items():
            harness.micro_batch(*(own[done:count] for own in values))
            harness.watermark(watermark_ms)
            done = count
        harness.micro_batch(*(own[done:] for own in values))
        harness.end_of_input()
        return harness.take().rows


def run(program: Callable[[Any], Any], watermarks: Mapping[int, int] | None = None) -> Any:
    """Return what a program returns, a list of the elements if it returns a stream."""
    env = StreamExecutionEnvironment(InProcess(watermarks or {}))
    made = program(env)
    return list(made.execute_and_collect()) if hasattr(made, "execute_and_collect") else made


@dataclass
class Programs:
    """PyFlink programs of one chapter, each with its elements by Flink's documented semantics."""

    chapter: str
    cases: dict[str, tuple[Any, Any, Mapping[int, int]]] = field(default_factory=dict)

    def add(
        self, name: str, expected: Any, watermarks: Mapping[int, int] | None = None
    ) -> Callable[[Any], Any]:
        """Register a program by what it shows; `expected` is a list in any order, or what it returns."""
        assert name not in self.cases

        def register(program: Any) -> Any:
            self.cases[name] = program, expected, watermarks or {}
            return program

        return register

    def test(self) -> Any:
        """Return the test of all programs."""

        @pytest.mark.parametrize("name", list(self.cases))
        def test_program(name: str) -> None:
            program, expected, watermarks = self.cases[name]
            found = run(program, watermarks)
            if isinstance(expected, list):
                found, expected = sorted(map(repr, found)), sorted(map(repr, expected))
            assert found == expected

        return test_program


def table() -> str:
    """Return the table of docs/migrate/flink-programs.md: what the programs of each chapter show."""
    chapters = [importlib.import_module(f"tests.unit.pyflink.{name}").P for name in _FILES]
    lines = [
        f"{sum(len(one.cases) for one in chapters)} programs.",
        "",
        "| chapter | programs |",
        "|---|---|",
    ]
    return "\n".join(
        [*lines, *(f"| {one.chapter} ({len(one.cases)}) | {'; '.join(one.cases)} |" for one in chapters)]
    )


def write() -> None:
    """Put the table into its page: ``python -m tests.support.pyflink_run``."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(f"{MARKS[0]}\n")
    after = rest[rest.index(MARKS[1]) :]
    PAGE.write_text(f"{before}{MARKS[0]}\n{table()}\n{after}", encoding="utf-8")


PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrate" / "flink-programs.md"
MARKS = "<!-- flink-programs -->", "<!-- /flink-programs -->"
_FILES = ("test_streams", "test_keyed", "test_windows")

if __name__ == "__main__":
    write()
