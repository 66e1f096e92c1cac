"""The measurements of latency markers, as `JobClient.latencies` returns it. See `docs/latency-markers.md`."""

from __future__ import annotations

from flinkish_spark.protocol.latency import Latencies, LatencyGranularity, LatencyHistogram, MeasuredAt

#: Needed for suggestions on misspelt imports, as in `sources`.
__path__: list[str] = []

__all__ = ["Latencies", "LatencyGranularity", "LatencyHistogram", "MeasuredAt"]
