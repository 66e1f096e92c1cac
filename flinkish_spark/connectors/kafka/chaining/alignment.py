"""Planning of a chained source: where the next micro-batch ends, and whether it carries this job's barrier.

The functions are pure: the same values give the same plan. Rules:

1. A micro-batch reads a partition at most up to its next barrier, unless barriers are only counted (at least
   once).
2. The input gate (`protocol/input_gate.py`) decides what a barrier means; a blocked partition is not read.
3. When the gate completes the alignment of an upstream checkpoint, its cut is *reached*: the source reads
   nothing more until a checkpoint of this job, offered by its coordinator, is drawn exactly there.
4. An unaligned cut is drawn only when a checkpoint is offered, and never for a savepoint. Until then
   partitions read on to their barriers, so that the channel state only shrinks. An unaligned cut needs every
   missing barrier to be ahead. A new source may begin behind some barriers, so its first cut is aligned.
5. A checkpoint that is offered later, before the source has read beyond the newest cut, is drawn at the same
   cut; before the first record, at the beginning. So a job can be stopped while its upstream job is idle.
6. An added partition is read only once the next cut contains it: its records were written after every barrier
   that it lacks.
7. A checkpoint whose barrier is missing in a partition has no cut. It is given up as soon as a newer barrier,
   or the checkpoint's number of partitions, shows that.
8. Micro-batches between two checkpoints are limited, since Spark deletes old log entries. At the limit the
   source reads the rest up to the cut in one micro-batch, once all barriers are visible. It always finishes
   the channel state of an unaligned cut, so that it comes to rest there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from flinkish_spark.connectors.kafka.chaining.cut_state import CutState, channel_of, place_of
from flinkish_spark.connectors.kafka.client.barriers import BarrierMark, BarrierScan, SeenBarrier
from flinkish_spark.connectors.kafka.offset_ranges import apply_limit
from flinkish_spark.core.upstream_cut import Cut, CutPhase
from flinkish_spark.protocol.ids import CheckpointId, Place
from flinkish_spark.protocol.input_gate import (
    AbortAlignment,
    AbortReason,
    AlignmentComplete,
    AlignmentMode,
    AlignmentPhase,
    AlignmentSettings,
    BarrierKind,
    CheckpointBarrier,
    Effect,
    InputGate,
    NewChannel,
    TakeCheckpoint,
)


@dataclass(frozen=True, slots=True)
class Offer:
    checkpoint: CheckpointId
    kind: BarrierKind = BarrierKind.CHECKPOINT


@dataclass(frozen=True, slots=True)
class View:
    #: The position of each partition; for an added partition its first offset.
    begin: Mapping[Place, int]
    #: Barriers and end of each partition from its position on.
    ahead: Mapping[Place, BarrierScan]
    #: This job's newest checkpoint that was drawn (its barrier is in a micro-batch).
    drawn: CheckpointId
    #: The newest checkpoint that the coordinator offers.
    offer: Offer
    now_ms: int
    #: Most offsets of a micro-batch; None for no limit.
    most: int | None = None
    #: Partitions that the caller holds back.
    held: frozenset[Place] = frozenset()

    @property
    def is_offered(self) -> bool:
        return self.offer.checkpoint > self.drawn

    def partitions(self, topic: str) -> int:
        return sum(name == topic for name, _ in self.begin)


def next_barrier(gate: InputGate, ahead: BarrierScan) -> SeenBarrier | None:
    pending = {alignment.checkpoint for alignment in gate.pending}
    wanted = (s for s in ahead.barriers if s.mark.checkpoint in pending or s.mark.checkpoint > gate.newest)
    return next(wanted, None)


def count_barriers(checkpoint: CheckpointId, topic: str, view: View) -> int:
    """Return how many partitions of a topic have a barrier of the checkpoint; 0 if unknown."""
    barriers = (s.mark for (name, _), ahead in view.ahead.items() if name == topic for s in ahead.barriers)
    return max((mark.partitions for mark in barriers if mark.checkpoint == checkpoint), default=0)


def turns_unaligned_at_ms(state: CutState, view: View) -> int | None:
    """Return the time from which an offered checkpoint is drawn unaligned at the pending cut, or None."""
    # Also None unless the barrier is known to be ahead in each awaited partition, and in no partition outside
    # the gate.
    at_ms = state.gate.turns_unaligned_at_ms
    if at_ms is None or state.cut is None:
        return None
    [alignment] = (one for one in state.gate.pending if one.phase is AlignmentPhase.BLOCKING)
    awaited = map(place_of, alignment.awaited)
    outside = [place for place in view.begin if channel_of(place) not in state.gate.channels]
    partitions = {topic: count_barriers(alignment.checkpoint, topic, view) for topic, _ in outside}
    is_ahead = all(place in state.passed or place in state.resting for place in awaited)
    return at_ms if is_ahead and all(0 < partitions[topic] <= number for topic, number in outside) else None


def adapt_to_mode(
    state: CutState, view: View, settings: AlignmentSettings
) -> tuple[CutState, tuple[Effect, ...]]:
    """Adapt the state to the alignment mode, which may have changed at this start."""
    # If barriers are only counted from now on, blocked partitions go on. If they were only counted before,
    # cuts that some partitions have passed are given up; the effects name them.
    gate, effects = replace(state.gate, settings=drop_timeout(settings)), list[Effect]()
    if settings.mode is AlignmentMode.AT_LEAST_ONCE:
        pending = tuple(
            replace(one, phase=AlignmentPhase.COUNTING) if one.phase is AlignmentPhase.BLOCKING else one
            for one in gate.pending
        )
        return replace(state, gate=replace(gate, pending=pending)), ()
    for alignment in gate.pending:
        if alignment.phase is AlignmentPhase.COUNTING:
            gate, aborted = gate.on_abort(alignment.checkpoint, view.now_ms)
            effects += aborted
    state = replace(state, gate=gate)
    if state.cut is not None and state.is_reached and not state.stands_at_cut:
        effects.append(AbortAlignment(state.cut.checkpoint, AbortReason.COORDINATOR))
        state = replace(state, cut=None)
    return state, tuple(effects)


def drop_timeout(settings: AlignmentSettings) -> AlignmentSettings:
    counts = settings.mode is AlignmentMode.AT_LEAST_ONCE
    return AlignmentSettings(AlignmentMode.AT_LEAST_ONCE if counts else AlignmentMode.ALIGNED)


def deliver(
    state: CutState, view: View, end: Mapping[Place, int], settings: AlignmentSettings
) -> tuple[InputGate, list[Effect]]:
    """Pass records and barriers up to `end` through the gate, then abort lost checkpoints, then time out."""
    gate = replace(state.gate, settings=drop_timeout(settings))
    effects: list[Effect] = []

    def note(step: tuple[InputGate, tuple[Effect, ...]]) -> None:
        nonlocal gate
        gate = step[0]
        effects.extend(step[1])

    moved = [place for place in sorted(end) if end[place] > view.begin[place]]
    passing = {p: [s for s in view.ahead[p].barriers if s.offset < end[p]] for p in moved}
    # Partitions advance together: all records before barriers precede the first barrier.
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
        awaited = map(place_of, alignment.awaited if alignment.phase is AlignmentPhase.BLOCKING else ())
        if any(_is_missing(alignment.checkpoint, view.ahead[place], end[place]) for place in awaited):
            note(gate.on_abort(alignment.checkpoint, view.now_ms))
    gate = replace(gate, settings=settings)
    may_turn = view.is_offered and view.offer.kind is BarrierKind.CHECKPOINT
    if may_turn and turns_unaligned_at_ms(replace(state, gate=gate), view) is not None:
        note(gate.on_time(view.now_ms))
    return gate, effects


def _leaves_out(mark: BarrierMark, topic: str, gate: InputGate) -> bool:
    if gate.settings.mode is AlignmentMode.AT_LEAST_ONCE:
        return False
    # The writer may have learnt an old number of partitions from a broker that lags behind.
    return any(name == topic and number >= mark.partitions for name, number in map(place_of, gate.channels))


def _is_missing(checkpoint: CheckpointId, ahead: BarrierScan, position: int) -> bool:
    """Return whether the next barrier in a partition proves that the checkpoint has none there."""
    newer = (s.mark.checkpoint for s in ahead.barriers if s.offset >= position)
    return next((c > checkpoint for c in newer if c >= checkpoint), False)


#: Spark keeps log entries of 200 micro-batches; the coordinator accepts 80 undecided ones.
MOST_MICRO_BATCHES = 80


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    end: Mapping[Place, int]
    #: This job's newest drawn checkpoint; a higher one if this micro-batch carries a barrier.
    drawn: CheckpointId
    #: The state that is stored in the micro-batch's offset.
    state: CutState
    #: Upstream checkpoints at which no checkpoint of this job will be drawn.
    skipped: tuple[CheckpointId, ...] = ()


def plan_micro_batch(state: CutState, view: View, settings: AlignmentSettings) -> MicroBatchPlan | None:
    state, given_up = adapt_to_mode(state, view, settings)
    state = _add_new_partitions(state, view, settings)
    end = _plan_end(state, view, settings)
    gate, effects = deliver(state, view, end, settings)
    after = _advance(replace(state, gate=gate), view, end)
    after, skipped = _take_new_cut(after, view, end, [*given_up, *effects])
    is_drawn = view.is_offered and (after.is_reached or after.stands_at_cut)
    if is_drawn:
        cut = None if after.cut is None else replace(after.cut, phase=CutPhase.TAKEN)
        after = replace(after, cut=cut, micro_batches=0)
    elif end == view.begin:
        return None
    else:
        after = replace(after, micro_batches=state.micro_batches + 1)
    return MicroBatchPlan(end, view.offer.checkpoint if is_drawn else view.drawn, after, skipped)


def _add_new_partitions(state: CutState, view: View, settings: AlignmentSettings) -> CutState:
    """Add partitions to the gate as soon as the next cut contains them."""
    gate, resting = state.gate, set(state.resting)
    outside = [place for place in sorted(view.begin) if channel_of(place) not in gate.channels]
    if not outside:
        return state
    counts = settings.mode is AlignmentMode.AT_LEAST_ONCE
    target = _find_next_cut(gate, view)
    awaits = target in {alignment.checkpoint for alignment in gate.pending}
    stands = NewChannel.AWAITS_BARRIERS if awaits else NewChannel.BEHIND_BARRIERS
    gate = replace(gate, settings=drop_timeout(settings))
    for place in outside:
        if counts or (target is not None and place[1] < count_barriers(target, place[0], view)):
            gate, _ = gate.on_new_channel(channel_of(place), view.begin[place], stands, view.now_ms)
            resting.add(place)
    return replace(state, gate=gate, resting=frozenset(resting))


def _find_next_cut(gate: InputGate, view: View) -> CheckpointId | None:
    waiting = [alignment.checkpoint for alignment in gate.pending if not alignment.channel_state]
    if waiting:
        return waiting[-1]
    ahead = (next_barrier(gate, scanned) for scanned in view.ahead.values())
    newer = [s.mark.checkpoint for s in ahead if s is not None and s.mark.checkpoint > gate.newest]
    return min(newer, default=None)


def _plan_end(state: CutState, view: View, settings: AlignmentSettings) -> dict[Place, int]:
    caps = {place: _find_cap(place, state, view, settings) for place in view.begin}
    if state.micro_batches < MOST_MICRO_BATCHES:
        return caps if view.most is None else apply_limit(view.begin, caps, view.most)
    if _cut_is_visible(state, view, caps):
        return caps
    # Partitions read up to their barriers of the newest cut, and come to rest there.
    end = dict(view.begin)
    for place, begin in view.begin.items():
        if state.cut is not None and place not in view.held and not _is_held(place, state.gate):
            seen = view.ahead[place].barriers
            barriers = (s.offset + 1 for s in seen if s.mark.checkpoint == state.cut.checkpoint)
            end[place] = next(barriers, begin)
    return end


def _find_cap(place: Place, state: CutState, view: View, settings: AlignmentSettings) -> int:
    counts = settings.mode is AlignmentMode.AT_LEAST_ONCE
    begin, ahead = view.begin[place], view.ahead[place]
    is_waiting = state.is_reached and not counts
    if is_waiting or place in view.held or _is_held(place, state.gate):
        return begin
    ends = [ahead.end]
    barrier = next_barrier(state.gate, ahead)
    if barrier is not None and not counts:
        ends.append(barrier.offset + 1)
    # An unknown new partition may hold records of that checkpoint.
    known = view.partitions(place[0])
    ends += [s.offset for s in ahead.barriers if s.mark.partitions > known]
    return max(begin, min(ends))


def _is_held(place: Place, gate: InputGate) -> bool:
    channel = channel_of(place)
    return channel not in gate.channels or gate.is_blocked(channel)


def _cut_is_visible(state: CutState, view: View, caps: Mapping[Place, int]) -> bool:
    """Return whether `caps` are beyond the next cut's barriers in all awaited partitions."""
    gate = state.gate
    awaited = [place for place in view.begin if not _is_held(place, gate)]
    if gate.settings.mode is AlignmentMode.AT_LEAST_ONCE and gate.pending:
        awaited = [place_of(channel) for channel in gate.pending[0].awaited]
    # During a replay of channel state the other partitions are held, and reach their barriers later.
    barriers = {p: next_barrier(gate, view.ahead[p]) for p in awaited if p not in view.held}
    return all(b is not None and b.offset < caps[place] for place, b in barriers.items())


def _advance(state: CutState, view: View, end: Mapping[Place, int]) -> CutState:
    """Record the barriers passed on the way to `end`, and the remaining channel state."""
    passed, resting = dict(state.passed), set(state.resting)
    for place in (p for p in end if end[p] > view.begin[p]):
        barriers = [s for s in view.ahead[place].barriers if s.offset < end[place]]
        resting.discard(place)
        if barriers:
            passed[place] = barriers[-1].mark.checkpoint
            if barriers[-1].offset + 1 == end[place]:
                resting.add(place)
    left = {}
    if state.cut is not None:
        for place in state.channel_state:
            barrier = _find_barrier(state.cut.checkpoint, view.ahead[place], end[place])
            is_past = place in passed and passed[place] >= state.cut.checkpoint
            if not is_past and barrier != end[place]:
                left[place] = barrier
    return replace(state, passed=passed, resting=frozenset(resting), channel_state=left)


def _find_barrier(checkpoint: CheckpointId, ahead: BarrierScan, position: int) -> int | None:
    barriers = (s.offset for s in ahead.barriers if s.mark.checkpoint >= checkpoint and s.offset >= position)
    return next(barriers, None)


def _take_new_cut(
    state: CutState, view: View, end: Mapping[Place, int], effects: list[Effect]
) -> tuple[CutState, tuple[CheckpointId, ...]]:
    """Move to the newest cut among `effects`; also return the checkpoints that were given up."""
    skipped = [e.checkpoint for e in effects if isinstance(e, AbortAlignment)]
    # A drawn unaligned cut may still be aborted in the gate; its offsets are enough.
    before = None if state.cut is None or state.is_reached else state.cut.checkpoint
    for effect in effects:
        if not isinstance(effect, TakeCheckpoint):
            continue
        if state.is_reached and state.cut is not None:
            skipped.append(state.cut.checkpoint)
        checkpoint, gate = effect.checkpoint, state.gate
        left: dict[Place, int | None] = {}
        announced: tuple[Effect, ...] = ()
        for place in map(place_of, effect.in_flight):
            offset = _find_barrier(checkpoint, view.ahead[place], end[place])
            if offset is not None:
                gate, announced = gate.on_announcement(channel_of(place), checkpoint, offset, view.now_ms)
            if offset != end[place]:
                left[place] = offset
        state = replace(state, gate=gate, cut=Cut(checkpoint, CutPhase.REACHED), channel_state=left)
        state = _add_alignment_times(state, announced)
    state = _add_alignment_times(state, effects)
    taken = None if state.cut is None else state.cut.checkpoint
    return state, tuple(sorted(c for c in skipped if c not in (taken, before)))


def _add_alignment_times(state: CutState, effects: Iterable[Effect]) -> CutState:
    cut = state.cut
    for effect in effects:
        if isinstance(effect, AlignmentComplete) and cut is not None and effect.checkpoint == cut.checkpoint:
            start_ms, took_ms = effect.stats.start_delay_ms, effect.stats.alignment_duration_ms
            cut = replace(cut, start_delay_ms=start_ms, alignment_ms=took_ms)
    return replace(state, cut=cut)
