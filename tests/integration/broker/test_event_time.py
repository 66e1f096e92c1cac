"""Event time of Kafka's records: their own timestamps, a silent partition; retractions as tombstones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import KeyedProcessFunction, MemorySink, WatermarkStrategy
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.sources import CollectionSource, RateLimit
from flinkish_spark.windows import EventTimeSessionWindows
from tests.support.jobs import await_that, environment, order, orders_source, produce, read_committed, rows

PAGE = Path(__file__).resolve().parents[3] / "docs" / "windows.md"
T0 = 1_700_000_000_000


class Alarm(KeyedProcessFunction):
    """Says what it sees, and once more a second of event time later."""

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        ctx.timer_service().register_event_time_timer(ctx.timestamp() + 1_000)
        yield value.user, "seen", ctx.timestamp() - T0

    def on_timer(self, time_ms: int, ctx: Any) -> Iterator[Any]:
        yield ctx.get_current_key(), "fired", time_ms - T0


@pytest.mark.nightly
def test_a_silent_partition_is_waited_for_until_it_is_idle(
    spark: Any, broker: Any, topic: Any, tmp_path: Any
) -> None:
    """Behaviour 124. The reader has watermark and calls of key groups in its own offset."""
    servers, name = broker.bootstrap_servers, topic(partitions=2)
    env = environment(spark, tmp_path / "job", trigger_interval_ms=50)
    stream = env.from_source(orders_source(servers, name), uid="orders")
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(0).with_idleness(6_000)
    timed = stream.assign_timestamps_and_watermarks(strategy)
    sink = MemorySink(f"{tmp_path}/rows")
    output = "user STRING, what STRING, time LONG"
    timed.key_by("user").process(Alarm(), output=output, uid="alarms").sink_to(sink, uid="out")
    produce(servers, name, [order("ann")], partition=0, timestamp_ms=T0 + 10_000)
    produce(servers, name, [order("ben")], partition=0, timestamp_ms=T0 + 15_000)
    client = env.execute_async()
    await_that(lambda: rows(client, "out") >= 2, client)
    # Of partition 1 nothing is known, so nothing is due before it is idle.
    await_that(lambda: rows(client, "out") == 3, client)
    client.stop_with_checkpoint()
    client.wait()
    assert sorted(tuple(row) for row in sink.rows()) == [
        ("ann", "fired", 11_000),
        ("ann", "seen", 10_000),
        ("ben", "seen", 15_000),
    ]
    (folder,) = (tmp_path / "job" / "spark").glob("*/offsets")
    entries = [LoggedOffsets.parse(one.read_text()) for one in folder.iterdir() if one.name.isdecimal()]
    entries.sort(key=lambda logged: logged.processing_time_ms or 0)
    carried = [logged.control.time.watermark_ms for logged in entries]
    assert carried == sorted(carried) and carried[-1] == T0 + 14_999
    first = next(logged for logged in entries if logged.control.time.watermark_ms == carried[-1])
    begun_ms, idle_ms = entries[0].processing_time_ms or 0, first.processing_time_ms or 0
    assert idle_ms - begun_ms >= 6_000


def test_what_windows_take_back_is_a_tombstone(spark: Any, broker: Any, topic: Any, tmp_path: Path) -> None:
    """As the page says; of each key, which is a user and a window, the last record counts."""
    name, env = topic(partitions=2), environment(spark, tmp_path / "job", trigger_interval_ms=50)
    given = [("ann", 1, 0), ("ben", 2, 100), ("ann", 4, 45), ("ben", 8, 130)]
    given += [("ann", 16, 20), ("cid", 1, 300), ("ben", 32, 110)]
    source = CollectionSource(given, "user STRING, amount LONG, at LONG").limit_rate(
        RateLimit(records_per_batch=2)
    )
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(0).with_timestamp_assigner("at")
    keyed = env.from_source(source, strategy, uid="elements").key_by("user")
    windows = keyed.window(EventTimeSessionWindows(30)).allowed_lateness(1_000).emit_retractions("gone")
    (block,) = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    scope = {"servers": broker.bootstrap_servers, "sums": windows.sum("amount", uid="sums")}
    block = block.replace('"sessions", key=', f'"{name}", key=')
    exec(compile(block, PAGE.name, "exec"), scope)
    env.execute()
    found: dict[tuple[str, int, int], list[Any]] = {}
    for record in read_committed(broker.bootstrap_servers, name):
        value = None if record.value is None else json.loads(record.value)["amount"]
        found.setdefault(tuple(json.loads(record.key).values()), []).append(value)
    assert found == {
        ("ann", 0, 30): [1, None],
        ("ann", 45, 75): [4, None],
        ("ann", 0, 75): [21],
        ("ben", 100, 160): [10, None, 42],
        ("cid", 300, 330): [1],
    }
