"""Reporters of a job's metrics, traces and lineage to other systems, from its job directory."""
