"""The interface of functions that call systems outside, for the planner and for the engine of a job."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from flinkish_spark.core.store import Store
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.latency import LatencyHistogram
from flinkish_spark.protocol.plan_layout import Chain


@dataclass(frozen=True)
class AsyncStatistics:
    """Statistics of an operator's async calls, named as in PyFlink's metrics where it has them."""

    #: Elements with a result, without those whose answer had been recorded earlier.
    elements: int = 0
    #: Calls that were started, and how many of them were retries.
    calls: int = 0
    retries: int = 0
    #: Calls that raised, and elements that timed out over all of their calls.
    failures: int = 0
    timeouts: int = 0
    #: Greatest number of concurrent calls in one worker.
    inflight: int = 0
    batch_size: LatencyHistogram = field(default_factory=LatencyHistogram)
    #: From the start of an element's first call to its result, including retries and waits.
    batch_latency_ms: LatencyHistogram = field(default_factory=LatencyHistogram)
    #: Duration of each single call.
    async_call_duration_ms: LatencyHistogram = field(default_factory=LatencyHistogram)

    def merge(self, other: AsyncStatistics) -> AsyncStatistics:
        both: dict[str, Any] = {}
        for each in fields(self):
            one, two = getattr(self, each.name), getattr(other, each.name)
            if isinstance(one, LatencyHistogram):
                both[each.name] = one.merge(two)
            else:
                both[each.name] = max(one, two) if each.name == "inflight" else one + two
        return AsyncStatistics(**both)


class Stream(enum.Enum):
    """Scope in which an element's channel and sequence are unique."""

    #: Assigned by a source: unique for the life of the job.
    OF_SOURCE = "OF_SOURCE"
    #: Assigned anew in each micro-batch, by an operator or by the position in a task.
    OF_MICRO_BATCH = "OF_MICRO_BATCH"


@dataclass(frozen=True)
class Evaluation:
    """One place in or after a plan where a function runs over the elements of a path."""

    #: A function in several chains reads sources several times, and may see different elements.
    chain: Chain
    #: The operator or the sink that reads it.
    reader: str
    #: True if it is part of the streaming plan; else it runs for a sink on the evaluated micro-batch.
    is_planned: bool


@dataclass(frozen=True)
class CallPlace:
    """The job for which functions call systems outside."""

    #: Where answers are recorded; None for a plan that belongs to no job.
    job_dir: StoreSpec | None = None
    job: str = ""
    #: How many Python workers may run at once.
    workers: int = 1
    #: Gets the statistics of an operator's calls; called in workers.
    report: Callable[[str, AsyncStatistics], None] | None = None


#: Of a plan that belongs to no job.
NO_PLACE = CallPlace()


class Retention(Protocol):
    """Finds recorded answers that are not needed any more; lives as long as a process owns the job."""

    def find_unneeded(self, lineage: int, batches: Collection[int]) -> list[str]:
        """Return the keys of objects to delete after a checkpoint is confirmed."""


class Recording(Protocol):
    """How the answers of a function on one path of a plan are recorded."""

    @property
    def folder(self) -> str:
        """Return their folder in the job directory."""

    def make_retention(self, store: Store) -> Retention: ...
