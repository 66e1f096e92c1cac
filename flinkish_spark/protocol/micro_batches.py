"""Folders below Spark's checkpoint: its log of micro-batches, its state, the job directory of our sinks."""

from __future__ import annotations

OFFSETS, COMMITS = "offsets", "commits"
STATE = "state"
#: Of sinks that commit by micro-batch.
SINKS = "flinkish"
