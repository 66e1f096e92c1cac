"""Key groups too big for a state value: bases in files, over restarts, rewinds and savepoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flinkish_spark import (
    KeyedProcessFunction,
    MemorySink,
    RestoreSettings,
    UnpositionedSources,
    ValueStateDescriptor,
    VectorizedProcessFunction,
)
from flinkish_spark.operators.vectorized import count_by_key
from flinkish_spark.savepoints.reader import read_state
from tests.support.jobs import await_that, environment, rows

pytestmark = pytest.mark.timeout(900)
KEYS = 20_000


class Count(VectorizedProcessFunction):
    def open(self, context: Any) -> None:
        context.get_state(ValueStateDescriptor("n", "LONG"))

    def process_batch(self, batch: pa.RecordBatch, ctx: Any) -> Iterator[pa.RecordBatch]:
        state, index = ctx.state("n"), ctx.index
        counts = state.numbers() + count_by_key(index)
        state.put([counts])
        yield pa.RecordBatch.from_arrays([*index.keys, pa.array(counts)], names=["k", "n"])


def feed(folder: Path, name: str, keys: range) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f".{name}").write_text("".join(f'{{"k":"key-{n:012}-of-many"}}\n' for n in keys))
    (folder / f".{name}").rename(folder / f"{name}.json")


def job(spark: Any, root: Path, folder: Path, sink: MemorySink, **options: Any) -> Any:
    env = environment(spark, root, trigger_interval_ms=100, **options)
    stream = env.from_dataframe(spark.readStream.schema("k STRING").json(str(folder)), uid="files")
    counted = stream.key_by("k").process(Count(), output="k STRING, n LONG", uid="count", max_parallelism=2)
    counted.sink_to(sink, uid="out")
    return env


def bases(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("spark/*/state/bases/count/*"))


def newest(sink: MemorySink) -> Counter[int]:
    """Count keys by their newest count."""
    return Counter({row["k"]: row["n"] for row in sink.rows()}.values())


@pytest.mark.nightly(by_day="tests/crash/test_all_families.py")
def test_big_groups_go_on_over_restarts_and_into_savepoints(spark: Any, tmp_path: Path) -> None:
    root, folder, sink = tmp_path / "job", tmp_path / "in", MemorySink(str(tmp_path))
    feed(folder, "0", range(KEYS))
    client = job(spark, root, folder, sink).execute_async()
    await_that(lambda: rows(client, "out") == KEYS, client)
    first = bases(root)
    assert len(first) == 2, "each of the two key groups has moved into a base"
    fed = KEYS
    for round_ in range(1, 5):
        # More than an eighth of the keys: the base is written anew.
        feed(folder, str(round_), range(0, KEYS, 5))
        fed += KEYS // 5
        await_that(lambda wanted=fed: rows(client, "out") == wanted, client)
    client.stop_with_checkpoint()
    client.wait()
    assert newest(sink) == {5: KEYS // 5, 1: KEYS - KEYS // 5}
    assert not set(first) & set(bases(root)), "nobody can ask for the first bases any more"

    feed(folder, "5", range(100))
    client = job(spark, root, folder, sink).execute_async()
    await_that(lambda: rows(client, "out") == 100, client)
    answer = client.trigger_savepoint(str(tmp_path / "savepoint")).wait(120_000)
    assert answer is not None, "the savepoint was not done in two minutes"
    client.stop_with_checkpoint()
    client.wait()
    stored = read_state(spark, tmp_path / "savepoint", "count", "n").collect()
    assert Counter(row["value"] for row in stored) == newest(sink)
    assert len(stored) == KEYS

    feed(tmp_path / "more", "0", range(10))
    other = MemorySink(f"{tmp_path}-other")
    begins = UnpositionedSources.BEGIN_WHERE_THEY_ARE
    restored = RestoreSettings(str(tmp_path / "savepoint"), unpositioned=begins)
    env = job(spark, tmp_path / "new", tmp_path / "more", other, restore=restored)
    client = env.execute_async()
    await_that(lambda: rows(client, "out") == 10, client)
    client.stop_with_checkpoint()
    client.wait()
    before = {row["key"]: row["value"] for row in stored}
    assert {row["k"]: row["n"] for row in other.rows()} == {k: before[k] + 1 for k in sorted(before)[:10]}


class Longer(KeyedProcessFunction):
    """Keeps so many megabytes more for each record."""

    def open(self, context: Any) -> None:
        self.kept = context.get_state(ValueStateDescriptor("kept", "BINARY", default=b""))

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        self.kept.update(self.kept.value() + bytes(value.mb * 1_000_000))
        yield value.k, len(self.kept.value())


@pytest.mark.nightly
def test_a_state_value_of_300_mb_goes_on_over_a_restart(spark: Any, tmp_path: Path) -> None:
    """It lies in a base, so Spark's state store does not have it; a key beside it leaves it alone."""
    folder, sink = tmp_path / "in", MemorySink("longer")

    def run(*records: tuple[str, int]) -> list[tuple[str, int]]:
        number = len(list(folder.glob("*.json"))) if folder.exists() else 0
        folder.mkdir(exist_ok=True)
        lines = "".join(f'{{"k": "{k}", "mb": {mb}}}\n' for k, mb in records)
        (folder / f".{number}").write_text(lines)
        (folder / f".{number}").rename(folder / f"{number}.json")
        env = environment(spark, tmp_path / "job", trigger_interval_ms=100)
        stream = env.from_dataframe(
            spark.readStream.schema("k STRING, mb LONG").json(str(folder)), uid="files"
        )
        longer = stream.key_by("k").process(
            Longer(), output="k STRING, n LONG", uid="count", max_parallelism=1
        )
        longer.sink_to(sink, uid="out")
        before = len(sink.rows())
        client = env.execute_async()
        await_that(lambda: len(sink.rows()) >= before + len(records), client)
        client.stop_with_checkpoint()
        client.wait()
        return [(row["k"], row["n"]) for row in sink.rows()[before:]]

    assert sorted(run(("a", 300), ("b", 1))) == [("a", 300_000_000), ("b", 1_000_000)]
    written = bases(tmp_path / "job")
    assert run(("b", 0)) == [("b", 1_000_000)]
    assert run(("a", 1)) == [("a", 301_000_000)]
    assert set(bases(tmp_path / "job")) - set(written), "what has changed is in a base again"
    stored = sum(file.stat().st_size for file in (tmp_path / "job").glob("spark/*/state/0/*/*"))
    assert stored < 50_000_000, "it went through Spark's state store"
