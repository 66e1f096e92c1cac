"""Where a chained source stands, in words: what it waits for, and whether it wants a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from flinkish_spark.chaining.cut_gate import turns_unaligned_at_ms
from flinkish_spark.chaining.cut_plan import MOST_MICRO_BATCHES
from flinkish_spark.chaining.cut_state import CutState, channel_of, place_of
from flinkish_spark.chaining.cut_view import View, next_barrier
from flinkish_spark.chaining.status import AlignmentStatus
from flinkish_spark.kafka.answers import Place
from flinkish_spark.protocol.gate import InputGate
from flinkish_spark.protocol.gate_pending import AlignmentPhase


def described(state: CutState, view: View, topics: str) -> AlignmentStatus:
    """Return where a source stands.

    Parameters
    ----------
    state, view
        Of the last plan; `view.begin` is where it ended.
    topics
        What the source reads, for the text.
    """
    gate, cut, drawn = state.gate, state.cut, int(view.drawn)
    if cut is not None and state.is_reached:
        text = f"stands at upstream checkpoint {cut.checkpoint} and waits for a checkpoint of this job"
        return AlignmentStatus(not view.is_offered, text, int(cut.checkpoint), drawn)
    at_ms = turns_unaligned_at_ms(state, view)
    if gate.blocked and at_ms is not None and view.now_ms >= at_ms and not view.is_offered:
        return AlignmentStatus(True, _aligning(gate, view), int(gate.pending[-1].checkpoint), drawn)
    return AlignmentStatus(False, _text(state, view, topics), None, drawn)


def _text(state: CutState, view: View, topics: str) -> str:
    """Return what is to be said of a source that can do nothing with a checkpoint now."""
    gate, cut = state.gate, state.cut
    if any(alignment.phase is not AlignmentPhase.COLLECTING for alignment in gate.pending):
        return _aligning(gate, view)
    if state.stands_at_cut:
        where = "the beginning" if cut is None else f"upstream checkpoint {cut.checkpoint}"
        return f"stands at {where}; nothing new is there"
    if state.job is None:
        return (
            f"has read records of {topics} and has seen no barrier record yet. The upstream job's Kafka "
            "sink needs barriers=BarrierRecords.EACH_CHECKPOINT; without barrier records this job can "
            "take no checkpoint: leave aligned_with out then"
        )
    if state.micro_batches >= MOST_MICRO_BATCHES:
        return (
            f"has read {state.micro_batches} micro-batches since the last checkpoint of this job and waits "
            "until the barriers of the next upstream checkpoint are visible"
        )
    if cut is None:
        return "reads on to the first upstream checkpoint whose barriers it finds in all partitions"
    if view.held:
        return f"reads the channel state of upstream checkpoint {cut.checkpoint} first"
    return f"reads on to the next upstream checkpoint behind {cut.checkpoint}"


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
