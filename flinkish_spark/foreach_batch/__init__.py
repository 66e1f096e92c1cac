"""Sinks that commit together in a plain Spark query, by its foreachBatch."""
