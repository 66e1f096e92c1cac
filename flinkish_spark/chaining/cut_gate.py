"""What a micro-batch of a chained source means to the alignment gate (`protocol/gate.py`).

Pure, and part of the plan (`cut_plan.py`), which says how far the micro-batch reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flinkish_spark.chaining.cut_state import CutState, channel_of, place_of
from flinkish_spark.chaining.cut_view import View, covered
from flinkish_spark.kafka.answers import Place
from flinkish_spark.kafka.barrier_records import BarrierMark
from flinkish_spark.protocol.gate import InputGate
from flinkish_spark.protocol.gate_pending import AlignmentPhase, PendingAlignment
from flinkish_spark.protocol.gate_values import (
    Aborted,
    AbortReason,
    AlignmentMode,
    AlignmentSettings,
    BarrierKind,
    CheckpointBarrier,
    Effect,
)


def turns_unaligned_at_ms(state: CutState, view: View) -> int | None:
    """Return from when on a checkpoint on offer is drawn unaligned, at the cut that is pending.

    None while nothing is pending or the mode does not allow it, and where it is not known that the
    barrier is still ahead of each partition that has not shown it, and in no other partition.
    """
    at_ms = state.gate.turns_unaligned_at_ms
    if at_ms is None or state.cut is None:
        return None
    [alignment] = (one for one in state.gate.pending if one.phase is AlignmentPhase.BLOCKING)
    awaited = map(place_of, alignment.awaited)
    outside = [place for place in view.begin if channel_of(place) not in state.gate.channels]
    partitions = {topic: covered(alignment.checkpoint, topic, view) for topic, _ in outside}
    is_ahead = all(place in state.passed or place in state.resting for place in awaited)
    return at_ms if is_ahead and all(0 < partitions[topic] <= number for topic, number in outside) else None


def in_mode(state: CutState, view: View, settings: AlignmentSettings) -> tuple[CutState, tuple[Effect, ...]]:
    """Return the state for a source that may have had another mode up to its start.

    Where barriers are only counted from now on, nobody waits any more. Where they were only counted,
    cuts are given up that some partitions have passed already: the effects say which.
    """
    gate, effects = replace(state.gate, settings=without_time(settings)), list[Effect]()
    if settings.mode is AlignmentMode.AT_LEAST_ONCE:
        return replace(state, gate=replace(gate, pending=tuple(map(_counted, gate.pending)))), ()
    for alignment in gate.pending:
        if alignment.phase is AlignmentPhase.COUNTING:
            gate, aborted = gate.on_abort(alignment.checkpoint, view.now_ms)
            effects += aborted
    state = replace(state, gate=gate)
    if state.cut is not None and state.is_reached and not state.stands_at_cut:
        effects.append(Aborted(state.cut.checkpoint, AbortReason.COORDINATOR))
        state = replace(state, cut=None)
    return state, tuple(effects)


def _counted(alignment: PendingAlignment) -> PendingAlignment:
    is_blocking = alignment.phase is AlignmentPhase.BLOCKING
    return replace(alignment, phase=AlignmentPhase.COUNTING) if is_blocking else alignment


def without_time(settings: AlignmentSettings) -> AlignmentSettings:
    """Return settings under which no checkpoint turns unaligned by itself."""
    counts = settings.mode is AlignmentMode.AT_LEAST_ONCE
    return AlignmentSettings(AlignmentMode.AT_LEAST_ONCE if counts else AlignmentMode.ALIGNED)


def delivered(
    state: CutState, view: View, end: Mapping[Place, int], settings: AlignmentSettings
) -> tuple[InputGate, list[Effect]]:
    """Let everything up to `end` go through the gate, then what is seen ahead, and then the time."""
    gate = replace(state.gate, settings=without_time(settings))
    effects: list[Effect] = []

    def note(step: tuple[InputGate, tuple[Effect, ...]]) -> None:
        nonlocal gate
        gate = step[0]
        effects.extend(step[1])

    moved = [place for place in sorted(end) if end[place] > view.begin[place]]
    passing = {p: [s for s in view.ahead[p].barriers if s.offset < end[p]] for p in moved}
    # Partitions go on together: all records in front of barriers come before the first barrier.
    for place in moved:
        upto = passing[place][0].offset if passing[place] else end[place]
        note(gate.on_records(channel_of(place), upto, view.now_ms))
    for place in moved:
        for seen in passing[place]:
            barrier = CheckpointBarrier(seen.mark.checkpoint, seen.mark.written_at_ms)
            note(gate.on_barrier(channel_of(place), barrier, seen.offset, view.now_ms))
            if _leaves_out(seen.mark, place[0], gate):
                note(gate.on_abort(seen.mark.checkpoint, view.now_ms))
        if gate.channels[channel_of(place)] < end[place]:
            note(gate.on_records(channel_of(place), end[place], view.now_ms))
    for alignment in gate.pending:
        if any(_is_missing(alignment, place_of(channel), view, end) for channel in alignment.awaited):
            note(gate.on_abort(alignment.checkpoint, view.now_ms))
    gate = replace(gate, settings=settings)
    may_turn = view.is_offered and view.offer.kind is BarrierKind.CHECKPOINT
    if may_turn and turns_unaligned_at_ms(replace(state, gate=gate), view) is not None:
        note(gate.on_time(view.now_ms))
    return gate, effects


def _leaves_out(mark: BarrierMark, topic: str, gate: InputGate) -> bool:
    """Return whether a partition that waits for barriers has none of this checkpoint.

    Brokers that do not agree yet on the number of partitions may have told a lower one to its writer.
    """
    if gate.settings.mode is AlignmentMode.AT_LEAST_ONCE:
        return False
    return any(name == topic and number >= mark.partitions for name, number in map(place_of, gate.channels))


def _is_missing(alignment: PendingAlignment, place: Place, view: View, end: Mapping[Place, int]) -> bool:
    """Return whether the next barrier in a partition shows that it has none of a checkpoint."""
    if alignment.phase is not AlignmentPhase.BLOCKING:
        return False
    ahead = (s.mark.checkpoint for s in view.ahead[place].barriers if s.offset >= end[place])
    return next((c > alignment.checkpoint for c in ahead if c >= alignment.checkpoint), False)
