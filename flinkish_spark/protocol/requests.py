"""Requests for a checkpoint, and the queue in which they wait.

Who asks is told by the purpose, and the purpose gives the rank: savepoints and last checkpoints
before what a user or the job asks for, and all of them before the timer. Within a rank the older
request goes first. A full queue turns away the newest of the least important ones, which may be
the one that just came.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from flinkish_spark.protocol.purpose import CheckpointPurpose


class Urgency(enum.Enum):
    """Whether the limits hold for a request."""

    NORMAL = "NORMAL"
    #: Ignores the number of checkpoints in flight and the size of the queue.
    FORCED = "FORCED"


@dataclass(frozen=True, slots=True)
class CheckpointRequest:
    """One request.

    Parameters
    ----------
    number
        Rises with every request of a process; tells requests apart and orders them within a rank.
    purpose
        See :class:`~flinkish_spark.protocol.purpose.CheckpointPurpose`.
    asked_at_ms
        Monotonic time.
    urgency
        See :class:`Urgency`.
    target
        Where a savepoint is to be written; empty for checkpoints.
    """

    number: int
    purpose: CheckpointPurpose
    asked_at_ms: int
    urgency: Urgency = Urgency.NORMAL
    target: str = ""

    @property
    def order(self) -> tuple[int, bool, int]:
        """Return what requests are sorted by: rank, then forced ones, then age."""
        return self.purpose.rank, self.urgency is not Urgency.FORCED, self.number


@dataclass(frozen=True, slots=True)
class RequestQueue:
    """Requests that wait, most important first.

    Examples
    --------
    >>> queue, rejected = RequestQueue(limit=1).offer(CheckpointRequest(1, CheckpointPurpose.PERIODIC, 0))
    >>> queue, rejected = queue.offer(CheckpointRequest(2, CheckpointPurpose.SAVEPOINT, 5))
    >>> rejected.purpose, queue.head.purpose
    (<CheckpointPurpose.PERIODIC: 'PERIODIC'>, <CheckpointPurpose.SAVEPOINT: 'SAVEPOINT'>)
    """

    limit: int = 1_000
    waiting: tuple[CheckpointRequest, ...] = ()

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ValueError(f"a queue of requests holds at least 1, not {self.limit}")

    @property
    def head(self) -> CheckpointRequest | None:
        """Return the request that goes next."""
        return self.waiting[0] if self.waiting else None

    def holds(self, purpose: CheckpointPurpose) -> bool:
        """Whether a request of that purpose waits."""
        return any(request.purpose is purpose for request in self.waiting)

    def offer(self, request: CheckpointRequest) -> tuple[RequestQueue, CheckpointRequest | None]:
        """Return the queue with `request` in its place, and the request that has no room any more."""
        ordered = tuple(sorted((*self.waiting, request), key=lambda one: one.order))
        if len(ordered) <= self.limit or request.urgency is Urgency.FORCED:
            return RequestQueue(self.limit, ordered), None
        droppable = [one for one in ordered if one.urgency is Urgency.NORMAL]
        rejected = droppable[-1]
        return RequestQueue(self.limit, tuple(one for one in ordered if one is not rejected)), rejected

    def without(
        self, unwanted: Callable[[CheckpointRequest], bool]
    ) -> tuple[RequestQueue, tuple[CheckpointRequest, ...]]:
        """Return the queue without some requests, and these."""
        gone = tuple(one for one in self.waiting if unwanted(one))
        return RequestQueue(self.limit, tuple(one for one in self.waiting if one not in gone)), gone
