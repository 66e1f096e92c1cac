"""How many late records operators have dropped, as tasks report it and staged micro-batches keep it.

    count in a key group -> report in TaskAck.reports -> late_in -> StagedBatch.late_dropped

So it is part of what is decided: a micro-batch that runs again counts once, and one that never counts
counts nothing. Numbers of operators are those of `protocol/time_plan.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from flinkish_spark.protocol.latencies import FIRST_LATE_REPORTER
from flinkish_spark.protocol.records import SinkAck, StagedBatch, TimeReport
from flinkish_spark.protocol.time_plan import TimePlan


def is_late_count(report: TimeReport) -> bool:
    """Whether a report says how many late records a key group has dropped."""
    return report.reporter >= FIRST_LATE_REPORTER


def late_in(plan: TimePlan, acks: Iterable[SinkAck]) -> dict[str, int]:
    """Return by operator how many late records a micro-batch dropped; those that dropped none are left out.

    Every sink behind an operator shows its reports. One that is in several chains runs in each, over the
    same records: it counts in the first of them.

    Examples
    --------
    >>> from flinkish_spark.protocol.records import TaskAck
    >>> from flinkish_spark.protocol.time_plan import reporters_of
    >>> plan = TimePlan(reporters_of(["hours"], ["orders"]), {"out": ("hours",)}, {"hours": ("hours",)})
    >>> task = TaskAck(0, 5, 0, reports=(TimeReport(FIRST_LATE_REPORTER, 7, 3, 0),))
    >>> late_in(plan, [SinkAck("out", (task,)), SinkAck("out", (task,))])
    {'hours': 3}
    """
    groups: dict[tuple[str, str, int], int] = {}
    for ack in acks:
        chains = plan.chains.get(ack.sink, ("",))
        for report in (one for task in ack.tasks for one in task.reports if is_late_count(one)):
            part, number = divmod(report.reporter - FIRST_LATE_REPORTER, len(plan.reporters))
            groups[plan.reporters[number].uid, chains[part], report.place] = report.first
    found: dict[str, int] = {}
    for (uid, chain, _), count in sorted(groups.items()):
        own = [name for name, operators in plan.operators.items() if uid in operators]
        if chain == min(own, default=chain):
            found[uid] = found.get(uid, 0) + count
    return found


def late_of(batches: Iterable[StagedBatch]) -> dict[str, int]:
    """Return by operator how many late records micro-batches dropped."""
    found: dict[str, int] = {}
    for batch in batches:
        for uid, count in batch.late_dropped.items():
            found[uid] = found.get(uid, 0) + count
    return found
