"""A sample of the table of windows in a running job, beside the model that the harness is compared with."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import JobStatus, MemorySink, WatermarkStrategy
from flinkish_spark.operators.elements import MAX_WATERMARK_MS
from flinkish_spark.sources import CollectionSource, RateLimit
from flinkish_spark.windowed_stream import WindowedStream
from flinkish_spark.windows import ReduceWindow
from tests.support import environment, running
from tests.windows_support import LATE, TABLE, Combination, Model

pytestmark = pytest.mark.timeout(600)
#: Each kind, trigger, lateness and accumulation is in it, and each computation.
SAMPLE = [
    Combination("tumbling", "default", "event time", 7, False, "reduce"),
    Combination("tumbling with offset", "count", "event time", 0, True),
    Combination("sliding", "continuous", "event time", 7, True, "aggregate"),
    Combination("sliding with holes", "default", "event time", 0, False),
    Combination("session", "continuous", "event time", 7, False, "process", evicts=True),
    Combination("dynamic session", "default", "event time", 7, True),
    Combination("global", "count", "event time", 0, False),
]
FIELDS = {
    "process": "k STRING, begin_ms LONG, end_ms LONG, numbers ARRAY<LONG>",
    "reduce": "k STRING, n LONG",
    "aggregate": "total LONG, n LONG",
}
BATCH, DISORDER_MS = 12, 4
#: Whose late elements are looked at, too.
LATE_OF = 3


def elements(seed: int) -> list[tuple[str, int, int]]:
    """Return (key, number, time); some behind the watermark of their micro-batch, and some far behind."""
    chance, found, now_ms = random.Random(seed), [], 0
    for number in range(8 * BATCH):
        now_ms += chance.choice((0, 1, 2, 6))
        found.append((chance.choice("ab"), number, max(0, now_ms - chance.choice((0, 2, 4, 9, 20)))))
    return found


def expected(of: Combination, given: list[tuple[str, int, int]]) -> tuple[Counter[Any], Counter[Any]]:
    """Return rows and late elements of the model; it has a micro-batch's watermark from those before it."""
    model, rows, late, newest_ms = Model(of), Counter[Any](), Counter[Any](), 0
    steps: list[tuple[str, Any]] = []
    for first in range(0, len(given), BATCH):
        own = given[first : first + BATCH]
        newest_ms = max(newest_ms, *(time_ms for _, _, time_ms in own))
        steps += [("push", own), ("watermark", newest_ms - DISORDER_MS - 1)]
    for step in [*steps, ("watermark", MAX_WATERMARK_MS)]:
        fired, too_late = model.step(step)
        rows.update(row for row, _ in fired)
        late.update(too_late)
    return rows, late


def plain(row: Any) -> tuple[Any, ...]:
    return tuple(tuple(value) if isinstance(value, list) else value for value in row)


def test_the_sample_is_of_the_table_and_has_all_of_it() -> None:
    unnamed = [one for one in SAMPLE if one not in TABLE]
    # With a reduce or an aggregate the table has but some kinds.
    assert all(one.computation != "process" or one.evicts for one in unnamed)
    of_event_time = [one for one in TABLE if one.by_event_time]
    for name in ("kind", "trigger", "lateness_ms", "is_discarding", "computation", "evicts"):
        assert {getattr(one, name) for one in SAMPLE} == {getattr(one, name) for one in of_event_time}, name


def test_a_sample_of_the_table_in_one_job(spark: Any, tmp_path: Path) -> None:
    given = elements(seed=4)
    source = CollectionSource(given, "k STRING, n LONG, at LONG").limited(RateLimit(records_per_batch=BATCH))
    env = environment(spark, tmp_path / "job")
    bounded = WatermarkStrategy.for_bounded_out_of_orderness(DISORDER_MS).with_timestamp_assigner("at")
    timed = env.from_source(source, uid="elements").assign_timestamps_and_watermarks(bounded)
    keyed = timed.transform(lambda df: df.drop("at")).key_by("k")
    sinks = {}
    for number, one in enumerate(SAMPLE):
        computation = one.computation_of()
        output = None if isinstance(computation, ReduceWindow) else FIELDS[one.computation]
        windows = WindowedStream(keyed, one.spec())._apply(computation, f"windows-{number}", output, 8)
        sinks[number] = MemorySink(f"{tmp_path}/{number}")
        windows.sink_to(sinks[number], uid=f"out-{number}")
        if number == LATE_OF:
            sinks["late"] = MemorySink(f"{tmp_path}/late")
            windows.get_side_output(LATE).sink_to(sinks["late"], uid="late")
    with running(env) as client:
        assert client.wait(timeout_ms=500_000), f"the job did not end; {client.progress}"
        assert client.status is JobStatus.FINISHED
    for number, one in enumerate(SAMPLE):
        rows, late = expected(one, given)
        found = Counter(plain(row) for row in sinks[number].rows())
        assert (found - rows, rows - found) == (Counter(), Counter()), one
        assert rows.total() > 10, one
        if number == LATE_OF:
            assert Counter(plain(row) for row in sinks["late"].rows()) == late and late.total() > 3
