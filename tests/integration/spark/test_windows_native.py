"""Windows of Spark's own (`window`, `session_window`) and ours give the same over the same input."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Column
from pyspark.sql import functions as F

from flinkish_spark import AggregateFunction, JobStatus, MemorySink, WatermarkStrategy
from flinkish_spark.core.elements import MAX_WATERMARK_MS
from flinkish_spark.sources import CollectionSource, FileSource, JsonLines, RateLimit
from flinkish_spark.windows import (
    DynamicEventTimeSessionWindows,
    EventTimeSessionWindows,
    ProcessWindowFunction,
    SlidingEventTimeWindows,
    TumblingEventTimeWindows,
    WindowAssigner,
)
from tests.support.jobs import environment, running

pytestmark = pytest.mark.timeout(600)
READING = "user STRING, n LONG, at LONG"
RESULT = "user STRING, count LONG, total LONG, least LONG, greatest LONG, begin_ms LONG, end_ms LONG"
#: How far readings are out of order, in milliseconds.
DISORDER_MS = 20_000
Reading = tuple[str | None, int | None, int | None]


@dataclass(frozen=True)
class Same:
    """A kind of windows, as both say it."""

    native: Callable[[], Column]
    ours: Callable[[], WindowAssigner]


def gap_ms_of(reading: Any) -> int:
    return 2_000 if reading.n is None or reading.n % 2 else 6_000


PLAIN = {
    "tumbling": Same(lambda: F.window("time", "10 seconds"), lambda: TumblingEventTimeWindows(10_000)),
    "sliding": Same(
        lambda: F.window("time", "30 seconds", "10 seconds"), lambda: SlidingEventTimeWindows(30_000, 10_000)
    ),
    "session": Same(lambda: F.session_window("time", "3 seconds"), lambda: EventTimeSessionWindows(3_000)),
}
ODD = {
    "tumbling": Same(
        lambda: F.window("time", "10 seconds", startTime="3 seconds"),
        lambda: TumblingEventTimeWindows(10_000, 3_000),
    ),
    "sliding": Same(
        # No multiple of each other.
        lambda: F.window("time", "25 seconds", "10 seconds", "1500 milliseconds"),
        lambda: SlidingEventTimeWindows(25_000, 10_000, 1_500),
    ),
    "session": Same(
        lambda: F.session_window(
            "time", F.when(F.col("n").isNull() | (F.col("n") % 2 != 0), "2 seconds").otherwise("6 seconds")
        ),
        lambda: DynamicEventTimeSessionWindows(gap_ms_of),
    ),
}


def readings(seed: int) -> list[Reading]:
    """Return readings around 1970 in no order, many of them exactly on the edges of windows."""
    chance = random.Random(seed)
    found: list[Reading] = []
    for _ in range(900):
        at = chance.randrange(-200_000, 200_000)
        if chance.random() < 0.3:
            at = at // 500 * 500 - chance.choice((0, 0, 1))
        user = chance.choice(("ann", "ben", "cid", "dan", "", None))
        found.append((user, chance.choice((None, chance.randrange(-50, 50))), at))
    # Sessions that touch, and that miss each other by a millisecond; to both sides of 1970.
    for begin in (-90_000, 90_000):
        found += [("touch", n, begin + n * 3_000) for n in range(4)]
        found += [("apart", n, begin + n * 3_001) for n in range(4)]
        found += [("touch by gap", 2 * n, begin + n * 6_000) for n in range(4)]
    found += [("alone", None, 0), ("alone", None, -1), (None, None, -10_000), ("untimed", 1, None)]
    order = [(DISORDER_MS * chance.random() + (at or 0), i) for i, (_, _, at) in enumerate(found)]
    return [found[i] for _, i in sorted(order)]


def native(spark: Any, given: list[Reading], same: Same) -> Counter[tuple[Any, ...]]:
    """Return what Spark makes of it in a plain batch; what has no time is in no window."""
    frame = spark.createDataFrame(given, READING).withColumn("time", F.timestamp_millis("at"))
    grouped = frame.groupBy("user", same.native().alias("w")).agg(
        F.count("*"), F.sum("n"), F.min("n"), F.max("n")
    )
    bounds = [F.unix_millis(f"w.{name}") for name in ("start", "end")]
    return Counter(tuple(row) for row in grouped.select("*", *bounds).drop("w").collect())


class Numbers(AggregateFunction):
    """SQL's count(*), sum, min and max."""

    def create_accumulator(self) -> Any:
        return 0, None, None, None

    def add(self, value: Any, accumulator: Any) -> Any:
        one = (1, None, None, None) if value.n is None else (1, value.n, value.n, value.n)
        return self.merge(accumulator, one)

    def get_result(self, accumulator: Any) -> Any:
        return accumulator

    def merge(self, first: Any, second: Any) -> Any:
        (count, *known), (more, *others) = first, second
        folded = []
        for fold, one, other in zip((int.__add__, min, max), known, others, strict=True):
            folded.append(one if other is None else other if one is None else fold(one, other))
        return count + more, *folded


class Result(ProcessWindowFunction):
    """Key, numbers, bounds; and whether the window has fired before the end of the input."""

    def process(self, key: Any, context: Any, elements: Any) -> Iterator[Any]:
        (numbers,) = elements
        yield key, *numbers, *context.window, context.current_watermark() < MAX_WATERMARK_MS


def ours(
    spark: Any, tmp_path: Path, source: Any, kinds: dict[str, Same]
) -> dict[str, tuple[Counter[tuple[Any, ...]], int]]:
    """Return what a job makes of it, and how many windows fired before the end."""
    env = environment(spark, tmp_path / "job")
    timed = env.from_source(source, uid="readings").transform(lambda df: df.where("at IS NOT NULL"))
    bounded = WatermarkStrategy.for_bounded_out_of_orderness(DISORDER_MS).with_timestamp_assigner("at")
    by_user = timed.assign_timestamps_and_watermarks(bounded).key_by("user")
    sinks = {}
    for name, same in kinds.items():
        result = by_user.window(same.ours()).aggregate(
            Numbers(),
            Result(),
            accumulator="count LONG, total LONG, least LONG, greatest LONG",
            output=f"{RESULT}, early BOOLEAN",
            uid=name,
        )
        sinks[name] = MemorySink(f"{tmp_path}/{name}")
        result.sink_to(sinks[name], uid=f"{name}-out")
    with running(env) as client:
        assert client.wait(timeout_ms=400_000), f"the job did not end; {client.progress}"
        assert client.status is JobStatus.FINISHED
    found = {name: [tuple(row) for row in sink.rows()] for name, sink in sinks.items()}
    return {
        name: (Counter(row[:-1] for row in own), sum(row[-1] for row in own)) for name, own in found.items()
    }


def check(spark: Any, tmp_path: Path, given: list[Reading], source: Any, kinds: dict[str, Same]) -> None:
    found = ours(spark, tmp_path, source, kinds)
    for name, same in kinds.items():
        wanted, (windows, early) = native(spark, given, same), found[name]
        assert windows - wanted == wanted - windows == Counter(), name
        assert wanted.total() > 100 and early > 0.3 * wanted.total(), name


@pytest.mark.nightly(by_day="tests/integration/spark/test_job_pages.py")
def test_a_collection_in_micro_batches_gives_what_sparks_own_windows_give(spark: Any, tmp_path: Path) -> None:
    """Tumbling, sliding and session windows: out of order, nulls, before 1970, on the edges."""
    given = readings(seed=11)
    source = CollectionSource(given, READING, splits=2).limit_rate(RateLimit(records_per_batch=150))
    check(spark, tmp_path, given, source, PLAIN)


@pytest.mark.nightly
def test_files_give_the_same_with_offsets_uneven_slides_and_gaps_of_their_own(
    spark: Any, tmp_path: Path
) -> None:
    given = readings(seed=12)
    (tmp_path / "in").mkdir()
    for number in range(6):
        lines = [
            json.dumps({"user": user, "n": n, "at": at}) + "\n"
            for user, n, at in given[number * 155 : (number + 1) * 155]
        ]
        (tmp_path / "in" / f"{number}.json").write_text("".join(lines))
    assert number * 155 < len(given) <= (number + 1) * 155
    source = FileSource(str(tmp_path / "in"), JsonLines(), READING, max_files_per_batch=1)
    check(spark, tmp_path, given, source, ODD)
