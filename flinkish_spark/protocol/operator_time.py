"""Where one operator stands: a valve over the assigners in front of it, and over no others.

Two parts of a job that share nothing do not wait for each other. An operator behind another one has all of
the other's inputs among its own, so its watermark is not the greater one: what fires in front of it is never
late. (But for inputs that come back from being idle: they hold nobody back who is ahead of them, and as in
Flink that may be the second operator alone.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from flinkish_spark.protocol.assigner_time import AssignerTime
from flinkish_spark.protocol.codec import INLINE, Form, Stored, read, write
from flinkish_spark.protocol.ids import Instance
from flinkish_spark.protocol.json_values import member
from flinkish_spark.protocol.time_facts import once_each
from flinkish_spark.protocol.watermark_valve import (
    MAX_WATERMARK_MS,
    MIN_WATERMARK_MS,
    ChannelStatus,
    Valve,
    ValveChannel,
    WatermarkMs,
)

_ROWS = tuple[tuple[Instance, WatermarkMs, ChannelStatus, bool], ...]


def _valve_members(valve: Valve[str]) -> dict[str, Any]:
    channels = sorted(valve.channels.items())
    rows = [(uid, one.watermark_ms, one.status, one.counts) for uid, one in channels]
    return {"watermark_ms": valve.watermark_ms, "valve": write(_ROWS, rows)}


def _valve_from(stored: Mapping[str, Any]) -> Valve[str]:
    rows = read(_ROWS, member(stored, "valve"))
    once_each("assigner", (uid for uid, *_ in rows))
    watermark_ms = read(WatermarkMs, member(stored, "watermark_ms"))
    return Valve({uid: ValveChannel(*channel) for uid, *channel in rows}, watermark_ms)


#: A valve over assigners: two members of the object that it is a part of.
StoredValve = Annotated[Valve[str], Form(_valve_members, _valve_from)]


@dataclass(frozen=True, slots=True)
class OperatorTime(Stored):
    """Where an operator stands between two micro-batches.

    Parameters
    ----------
    inputs
        The assigners in front of it.
    instances
        Under which names its timers are known: Spark runs one that is in two chains twice.
    valve
        Over its inputs that have not ended; at the end of all of them it has let out the last watermark.
    carried_ms
        The watermark that the last micro-batch carried for it.

    Examples
    --------
    >>> OperatorTime(frozenset({"orders.sums"}), frozenset({"sums"})).watermark_ms == MIN_WATERMARK_MS
    True
    """

    inputs: frozenset[Instance]
    instances: frozenset[Instance]
    valve: StoredValve = field(default_factory=Valve, metadata=INLINE)
    carried_ms: WatermarkMs = MIN_WATERMARK_MS

    @property
    def watermark_ms(self) -> int:
        """What the next micro-batch carries for it."""
        return self.valve.watermark_ms

    def after(
        self,
        assigners: Mapping[str, AssignerTime],
        there: Mapping[str, AssignerTime],
        active: Collection[str],
        carried_ms: int,
    ) -> OperatorTime:
        """Return where it stands behind a micro-batch.

        Parameters
        ----------
        assigners
            All of the job, behind the micro-batch.
        there, active
            Those that had not ended before it, and which of them take part.
        carried_ms
            What the micro-batch carried for it.
        """
        own = {uid: one for uid, one in there.items() if uid in self.inputs}
        valve = joined(self.valve, carried_ms, own, active)
        if self.inputs and all(uid in assigners and assigners[uid].has_ended for uid in self.inputs):
            valve = replace(valve, watermark_ms=MAX_WATERMARK_MS)
        return replace(self, valve=valve, carried_ms=carried_ms)

    def going_on(self, valve: Valve[str], carried_ms: int) -> OperatorTime:
        """Return it as it goes on from a valve of before, which may be over other inputs.

        The watermark stays, since its state has seen it; inputs that are gone hold it back no more, and new
        ones join with the next micro-batch.
        """
        return replace(self, valve=valve.without(valve.channels.keys() - self.inputs), carried_ms=carried_ms)


def joined(
    valve: Valve[str], seen_ms: int, there: Mapping[str, AssignerTime], active: Collection[str]
) -> Valve[str]:
    """Return a valve over assigners behind a micro-batch.

    Parameters
    ----------
    valve
        Before it.
    seen_ms
        What operators have seen, from which it goes on whatever the valve says.
    there, active
        Assigners that had not ended before it, and the uids of those that take part; others may be among
        these. One that ends in this micro-batch still says how far it came.
    """
    taking_part = there.keys() & active
    valve = replace(valve, watermark_ms=max(valve.watermark_ms, seen_ms))
    valve = valve.with_channels(sorted(there))
    # This order matters: an assigner lets its greatest watermark out as it becomes idle.
    valve = valve.resumed(taking_part).advanced({uid: one.valve.watermark_ms for uid, one in there.items()})
    valve = valve.silenced(there.keys() - taking_part)
    return valve.without(uid for uid in valve.channels if uid not in there or there[uid].has_ended)
