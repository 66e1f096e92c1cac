"""Where a chained source stands, in words: what it waits for, and whether it wants a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from flinkish_spark.chaining.cut_plan import View, next_barrier
from flinkish_spark.chaining.cut_state import CutPhase, CutState, channel_of, place_of
from flinkish_spark.chaining.status import AlignmentStatus
from flinkish_spark.kafka.answers import Place
from flinkish_spark.protocol.gate import InputGate


def described(state: CutState, view: View, topics: str) -> AlignmentStatus:
    """Return where a source stands.

    Parameters
    ----------
    state, view
        Of the last plan; `view.begin` is where it ended.
    topics
        What the source reads, for the text.
    """
    gate, cut = state.gate, state.cut
    if cut is not None and cut.phase is CutPhase.REACHED:
        text = f"stands at upstream checkpoint {cut.checkpoint} and waits for a checkpoint of this job"
        return AlignmentStatus(not view.is_offered, text)
    if gate.blocked:
        at_ms = gate.turns_unaligned_at_ms
        could_draw = at_ms is not None and view.now_ms >= at_ms and not view.is_offered
        return AlignmentStatus(could_draw, _aligning(gate, view))
    if state.stands_at_cut:
        where = "the beginning" if cut is None else f"upstream checkpoint {cut.checkpoint}"
        return AlignmentStatus(False, f"stands at {where}; nothing new is there")
    if state.job is None:
        text = (
            f"has read records of {topics} and has seen no barrier record yet. The upstream job's Kafka "
            "sink needs barriers=BarrierRecords.EACH_CHECKPOINT; without barrier records this job can "
            "take no checkpoint: leave aligned_with out then"
        )
        return AlignmentStatus(False, text)
    behind = "" if cut is None else f" behind {cut.checkpoint}"
    return AlignmentStatus(False, f"reads on to the next upstream checkpoint{behind}")


def _aligning(gate: InputGate, view: View) -> str:
    alignment = gate.pending[-1]
    missing = sorted(place_of(channel) for channel in alignment.awaited)
    places = ", ".join(_place_text(place, gate, view) for place in missing[:5])
    more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
    return f"waits for the barrier of upstream checkpoint {alignment.checkpoint} on {places}{more}"


def _place_text(place: Place, gate: InputGate, view: View) -> str:
    ahead = view.ahead.get(place)
    barrier = None if ahead is None else next_barrier(gate, ahead)
    where = "not visible yet" if barrier is None else f"at offset {barrier.offset}"
    return f"{place[0]}-{place[1]} ({where}, read up to {_position(gate.channels, place)})"


def _position(channels: Mapping[str, int], place: Place) -> int:
    return channels[channel_of(place)]
