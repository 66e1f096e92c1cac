"""What became of an order to go back, as the job directory tells it.

    orders/rewind.json         the order that waits; at most one
    rewinding/<lineage>.json   the rewind that was begun for it
    rewinds/<lineage>.json     the rewind that was finished for it
    orders/refused/<id>.json   the order, with the reason why it could not be carried out

For whoever gave the order: the command line and the job's client, in any process. The one who
carries an order out is the recovery (`runtime/rewinding.py`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from flinkish_spark.clock import Clock
from flinkish_spark.job_dir import JobDir
from flinkish_spark.protocol.decisions import RewindIntent
from flinkish_spark.protocol.ids import BatchId, Lineage
from flinkish_spark.protocol.lineage import RewindOrder
from flinkish_spark.sealed_objects import SealedObjects

_POLL_MS = 100


class RewindState(enum.Enum):
    """How far an order has come; named by what a program may do about it."""

    #: Nothing has changed yet; the next start of the query carries it out.
    WAITING = "WAITING"
    #: Its intent is durable: it will be finished, by this start or by a later one.
    BEGUN = "BEGUN"
    #: The job has gone back.
    DONE = "DONE"
    #: The job found that it cannot go back there; nothing was changed.
    REFUSED = "REFUSED"
    #: The order is in none of its places: somebody deleted it by hand. Flinkish never does.
    GONE = "GONE"

    @property
    def is_closed(self) -> bool:
        """Whether nothing more will become of it."""
        return self in (RewindState.DONE, RewindState.REFUSED, RewindState.GONE)


@dataclass(frozen=True, slots=True)
class RewindStatus:
    """What became of an order.

    Parameters
    ----------
    state
        See :class:`RewindState`.
    text
        The same in words, without a full stop.
    lineage
        The lineage that the rewind began; None unless DONE.
    first_removed
        The first micro-batch that was left behind, of any older lineage; None unless DONE. A record whose
        header `flinkish-batch` says an older lineage and this micro-batch or a later one is superseded.
    """

    state: RewindState
    text: str
    lineage: Lineage | None = None
    first_removed: BatchId | None = None


def what_became_of(job_dir: JobDir, order: RewindOrder) -> RewindStatus:
    """Return what became of an order; changes nothing, and may be called as often as one likes.

    Parameters
    ----------
    job_dir
        Of the job that was ordered to go back.
    order
        What `rewinding.order_rewind` returned.

    Raises
    ------
    StoreError
        The job directory cannot be read.
    CorruptObjectError
        An object in it cannot be trusted.

    Examples
    --------
    See `tests/unit/test_rewind_orders.py`; a wait for the end is::

        while not what_became_of(job_dir, order).state.is_closed:
            clock.sleep_ms(100)
    """
    target = order.target
    # This order matters: an order is closed by a new object first, and only then taken away. Who
    # looked for it last would find an order that was closed meanwhile in none of its places.
    waiting = job_dir.rewind_order()
    begun = job_dir.open_rewind()
    if begun is not None and begun.order_id == order.order_id:
        return RewindStatus(RewindState.BEGUN, f"the job is going back to checkpoint {target}")
    if waiting is not None and waiting.order_id == order.order_id:
        text = f"the next start of the query goes back to checkpoint {target}"
        return RewindStatus(RewindState.WAITING, text)
    objects = SealedObjects(job_dir.store, "the job directory")
    done = _finished_for(order, objects)
    if done is not None:
        text = f"the job has gone back to checkpoint {target}: lineage {done.lineage}"
        return RewindStatus(RewindState.DONE, text, done.lineage, done.first_removed)
    refused = objects.optional(f"orders/refused/{order.order_id}.json", "refused-order", dict)
    if refused is not None:
        text = f"the job cannot go back to checkpoint {target}: {refused.get('refused', '')}"
        return RewindStatus(RewindState.REFUSED, text)
    return RewindStatus(
        RewindState.GONE,
        f"the order to go back to checkpoint {target} is gone: somebody deleted it by hand, "
        "and the job has neither carried it out nor refused it",
    )


def _finished_for(order: RewindOrder, objects: SealedObjects) -> RewindIntent | None:
    """Return the finished rewind of an order; None without one."""
    for number in sorted(objects.numbers("rewinds"), reverse=True):
        done = objects.optional(f"rewinds/{number}.json", "rewind", RewindIntent.from_json)
        if done is not None and done.order_id == order.order_id:
            return done
    return None


class PendingRewind:
    """An order that was given; what becomes of it is seen in the job directory.

    Parameters
    ----------
    job_dir
        Of the job.
    order
        What was ordered.
    """

    def __init__(self, job_dir: JobDir, order: RewindOrder, clock: Clock) -> None:
        self._job_dir, self.order, self._clock = job_dir, order, clock

    @property
    def status(self) -> RewindStatus:
        """How far it has come; see :func:`what_became_of`."""
        return what_became_of(self._job_dir, self.order)

    def wait(self, timeout_ms: int) -> RewindStatus:
        """Return what became of it, or how far it has come within `timeout_ms`; it is not taken back."""
        deadline_ms = self._clock.monotonic_ms() + timeout_ms
        while True:
            status = self.status
            if status.state.is_closed or self._clock.monotonic_ms() >= deadline_ms:
                return status
            self._clock.sleep_ms(_POLL_MS)
