"""Audits: compare the input and the outputs of a job, record by record, with its job directory.

Shares no code with sources and sinks, so that a bug of theirs cannot hide itself. See `docs/audit.md`.
"""
