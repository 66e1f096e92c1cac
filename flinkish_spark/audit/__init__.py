"""Comparing the input and the outputs of a job, record by record, with what its directory says.

Shares no code with sources and sinks, so that an error of theirs cannot hide itself. See `docs/audit.md`.
"""
