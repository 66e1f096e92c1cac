"""What latency markers have measured, as `JobClient.latencies` returns it. See `docs/latency-markers.md`."""

from __future__ import annotations

from flinkish_spark.protocol.latencies import Latencies, LatencyGranularity, MeasuredAt
from flinkish_spark.protocol.latency_histogram import LatencyHistogram

__all__ = ["Latencies", "LatencyGranularity", "LatencyHistogram", "MeasuredAt"]
