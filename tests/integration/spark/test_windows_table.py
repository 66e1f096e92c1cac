"""A sample of the table of windows in a running job, beside the model that the harness is compared with."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import JobStatus, MemorySink, WatermarkStrategy
from flinkish_spark.core.elements import MAX_WATERMARK_MS
from flinkish_spark.datastream.windowed_stream import WindowedStream
from flinkish_spark.sources import CollectionSource, RateLimit
from flinkish_spark.windows import ReduceWindow
from tests.support.jobs import environment, running
from tests.support.windows_model import Model
from tests.support.windows_support import FIELDS, LATE, TABLE, Combination

pytestmark = pytest.mark.timeout(600)
#: Each kind, trigger, clock, lateness and accumulation is in it, each computation, an evictor, retractions.
SAMPLE = [
    Combination("tumbling", "processing time", "event time", 7, True),
    Combination("tumbling with offset", "default", "processing time", 0, False),
    Combination("sliding", "count", "event time", 7, True, "aggregate"),
    Combination("sliding with holes", "default", "event time", 0, False),
    Combination("session", "continuous", "event time", 7, False, "process", evicts=True),
    Combination("dynamic session", "default", "event time", 7, False, retracts=True),
    Combination("global", "own", "event time", 0, False),
    Combination("count", "default", "processing time", 0, True, "reduce"),
    Combination("sliding count", "default", "event time", 0, False),
]
BATCH, DISORDER_MS = 16, 4
#: Whose late elements are looked at, too.
LATE_OF = 3
#: The clock of the wall is far behind the ends of windows whose elements are of the year 1970.
LONG_AGO_MS = 1_000_000_000_000


def elements(seed: int) -> list[tuple[str, int, int]]:
    """Return (key, number, time); some behind the watermark of their micro-batch, and some far behind."""
    chance, found, now_ms = random.Random(seed), [], 0
    for number in range(6 * BATCH):
        now_ms += chance.choice((0, 1, 2, 6))
        found.append((chance.choice("ab"), number, max(0, now_ms - chance.choice((0, 2, 4, 9, 20)))))
    return found


def expected(of: Combination, given: list[tuple[str, int, int]]) -> tuple[Counter[Any], Counter[Any]]:
    """Return rows and late elements of the model; it has a micro-batch's watermark from those before it."""
    model, rows, late, newest_ms = Model(of, clock_ms=LONG_AGO_MS), Counter[Any](), Counter[Any](), 0
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


def check_micro_batches(found: Counter[Any], given: list[tuple[str, int, int]]) -> None:
    """Windows by processing time, shorter than any micro-batch: each has one, and fires in the next."""
    batches = [given[first : first + BATCH] for first in range(0, len(given), BATCH)]
    numbers = [
        (key, tuple(number for own, number, _ in batch if own == key)) for batch in batches for key in "ab"
    ]
    rows = Counter((key, own) for key, begin_ms, end_ms, own in found.elements())
    assert all(end_ms - begin_ms == 10 and begin_ms % 10 == 7 for _, begin_ms, end_ms, _ in found)
    assert rows - Counter(numbers) == Counter()
    # Nothing has to follow the last micro-batch.
    assert Counter(one for one in numbers[:-2] if one[1]) - rows == Counter()


def plain(row: Any) -> tuple[Any, ...]:
    return tuple(tuple(value) if isinstance(value, list) else value for value in row)


def test_the_sample_is_of_the_table_and_has_all_of_it() -> None:
    unnamed = [one for one in SAMPLE if one not in TABLE]
    # With a reduce or an aggregate the table has but some kinds.
    assert all(one.computation != "process" or one.evicts for one in unnamed)
    for name in (
        "kind",
        "trigger",
        "clock",
        "lateness_ms",
        "is_discarding",
        "computation",
        "evicts",
        "retracts",
    ):
        assert {getattr(one, name) for one in SAMPLE} == {getattr(one, name) for one in TABLE}, name


@pytest.mark.nightly
def test_a_sample_of_the_table_in_one_job(spark: Any, tmp_path: Path) -> None:
    given = elements(seed=4)
    source = CollectionSource(given, "k STRING, n LONG, at LONG").limit_rate(
        RateLimit(records_per_batch=BATCH)
    )
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
        found = Counter(plain(row) for row in sinks[number].rows())
        if one.clock == "processing time" and one.has_end:
            check_micro_batches(found, given)
            continue
        rows, late = expected(one, given)
        assert (found - rows, rows - found) == (Counter(), Counter()), one
        assert rows.total() > 10, one
        if number == LATE_OF:
            assert Counter(plain(row) for row in sinks["late"].rows()) == late and late.total() > 3
