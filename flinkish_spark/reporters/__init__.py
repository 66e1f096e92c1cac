"""Tells other systems how a job is: metrics, traces and lineage, all out of the job's own record."""
