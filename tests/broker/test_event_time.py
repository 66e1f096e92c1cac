"""Event time of Kafka's records: their own timestamps, partitions as channels, one that is silent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from flinkish_spark import KeyedProcessFunction, MemorySink, WatermarkStrategy
from flinkish_spark.runtime.spark_log import LoggedOffsets
from tests.support import await_that, environment, order, orders_source, produce, rows

T0 = 1_700_000_000_000


class Alarm(KeyedProcessFunction):
    """Says what it sees, and once more a second of event time later."""

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        ctx.timer_service().register_event_time_timer(ctx.timestamp() + 1_000)
        yield value.user, "seen", ctx.timestamp() - T0

    def on_timer(self, time_ms: int, ctx: Any) -> Iterator[Any]:
        yield ctx.get_current_key(), "fired", time_ms - T0


@pytest.mark.parametrize("reader", ["python", "jvm"])
def test_a_silent_partition_is_waited_for_until_it_is_idle(
    spark: Any, broker: Any, topic: Any, tmp_path: Any, reader: str
) -> None:
    """Behaviour 124. The Python reader has watermark and calls of key groups in its own offset."""
    servers, name = broker.bootstrap_servers, topic(partitions=2)
    env = environment(spark, tmp_path / "job", trigger_interval_ms=50)
    stream = env.from_source(orders_source(servers, name, reader=reader), uid="orders")
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
