"""Folders of Spark's log of micro-batches, and of the state, below its checkpoint."""

from __future__ import annotations

OFFSETS, COMMITS = "offsets", "commits"
STATE = "state"
