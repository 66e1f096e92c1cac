"""Vertices of a job graph, where only their ids matter."""

from __future__ import annotations

from collections.abc import Iterable

from flinkish_spark.protocol.job_graph import JobOperator, JobVertex, OperatorKind, RunsIn


def vertices_of(uids: Iterable[str]) -> tuple[JobVertex, ...]:
    """Return a vertex for each operator, under its uid."""
    return tuple(
        JobVertex(uid, (JobOperator(uid, uid, uid, "", OperatorKind.STATEFUL, RunsIn.PYTHON),), ())
        for uid in uids
    )
