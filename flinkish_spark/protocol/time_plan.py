"""Reporters of event time in a plan, and how the driver reads their reports.

Workers know their *reporter* by a number. Keyed operators come first, in the order of the program, then
its sources. Numbers are valid for one plan and never stored: stored reports have uids.

report rows -> TaskAck.reports -> find_reports -> BatchTimes
                               -> count_late_records -> StagedBatch.late_dropped
                               -> find_counts -> StagedBatch.counts

Counts of operators are part of the decision: a micro-batch that runs again counts once, and one that is never
decided does not count.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flinkish_spark.protocol.event_time import (
    MAX_WATERMARK_MS,
    MIN_WATERMARK_MS,
    AssignerRules,
    ChannelReport,
    NoWatermarkStrategy,
    Place,
    TimerReport,
)
from flinkish_spark.protocol.key_groups import Bundling
from flinkish_spark.protocol.latency import FIRST_LATE_REPORTER, SINK_REPORTER
from flinkish_spark.protocol.records import SinkAck, StagedBatch, TimeReport, iterate_reports, keep_reports
from flinkish_spark.protocol.timer_index import Agenda, NextTimers
from flinkish_spark.protocol.watermarks import EventTime, OperatorTime


class ReporterRole(enum.Enum):
    """Kind of a reporter; it says what the two numbers of a report mean."""

    #: A channel: the greatest time, `MIN_WATERMARK_MS` for none; then the number of records.
    SOURCE = "SOURCE"
    #: A bundle of key groups: the next timers in event time and in processing time, `MAX_WATERMARK_MS` for
    #: none.
    OPERATOR = "OPERATOR"


@dataclass(frozen=True, slots=True)
class Reporter:
    #: Uid of the operator; of a source, the name of the chain's input.
    uid: str
    role: ReporterRole


@dataclass(frozen=True, slots=True)
class Assigner:
    """Assigner of event times to the records of an input, in one chain of the plan."""

    source: str
    rules: AssignerRules
    #: True if its channels are those of the source. After a transform that chose its own columns they are
    #: unknown, and all records count as those of channel 0.
    has_channels: bool = True

    @property
    def is_timed(self) -> bool:
        return not isinstance(self.rules.generation, NoWatermarkStrategy)


@dataclass(frozen=True)
class TimePlan:
    """Facts about a plan from which the driver computes event time."""

    reporters: tuple[Reporter, ...] = ()
    #: By sink uid, the names of the chains whose ends its parts read: a source may be scanned by several
    #: chains, and in one micro-batch two scans may end at different places.
    chains: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: By chain, its keyed operators. Spark runs an operator that is in two chains twice.
    operators: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: By their own uid, see :func:`assigner_uid`.
    assigners: Mapping[str, Assigner] = field(default_factory=dict)
    #: By operator, the assigners before it and before the operators that it reads, in all chains: an operator
    #: has one watermark, in however many chains it runs. An operator that is not named has all assigners.
    inputs: Mapping[str, frozenset[str]] = field(default_factory=dict)
    #: By operator, the bundles of its key groups: a call, and a report, is for all key groups of a bundle.
    #: The key groups of an operator that is not named are called one by one.
    bundlings: Mapping[str, Bundling] = field(default_factory=dict)

    def expand_bundle(self, operator: str, group: int) -> Iterable[int]:
        return self.bundlings[operator].groups_of(group) if operator in self.bundlings else (group,)

    @property
    def rules(self) -> dict[str, AssignerRules]:
        return {uid: one.rules for uid, one in self.assigners.items()}

    @property
    def is_timed(self) -> bool:
        return any(one.is_timed for one in self.assigners.values())

    def number_of(self, uid: str) -> int:
        return next(number for number, one in enumerate(self.reporters) if one.uid == uid)

    def instance(self, operator: str, chain: str) -> str:
        is_shared = sum(operator in found for found in self.operators.values()) > 1
        return assigner_uid(operator, chain) if is_shared else operator

    def instances(self) -> dict[str, str]:
        return {
            self.instance(uid, chain): uid
            for chain, operators in sorted(self.operators.items())
            for uid in operators
        }

    def make_operator_times(self) -> dict[str, OperatorTime]:
        names: dict[str, set[str]] = {}
        for name, uid in self.instances().items():
            names.setdefault(uid, set()).add(name)
        everything = frozenset(self.assigners)
        return {
            uid: OperatorTime(self.inputs.get(uid, everything), frozenset(own))
            for uid, own in sorted(names.items())
        }

    def number_groups(self, places: Iterable[Place]) -> dict[int, frozenset[int]]:
        instances = self.instances()
        numbers = {uid: self.number_of(uid) for uid in set(instances.values())}
        found: dict[int, set[int]] = {}
        for name, group in places:
            uid = instances.get(name)
            if uid is not None:
                bundling = self.bundlings.get(uid)
                opens = group if bundling is None else bundling.bundle_of(group)
                found.setdefault(numbers[uid], set()).add(opens)
        return {number: frozenset(groups) for number, groups in sorted(found.items())}

    def report_silent_groups(
        self, called: Iterable[tuple[int, int]], reported: Iterable[TimerReport]
    ) -> tuple[TimerReport, ...]:
        """Return reports without timers for the key groups that were called and reported nothing."""
        known = {(report.operator, report.group) for report in reported}
        # A number may belong to an earlier plan, since Spark's log keeps it.
        numbers = {number: one.uid for number, one in enumerate(self.reporters)}
        places = {
            (name, group)
            for number, opens in called
            for name, uid in self.instances().items()
            if uid == numbers.get(number)
            for group in self.expand_bundle(uid, opens)
        }
        return tuple(TimerReport(name, group, None, None) for name, group in sorted(places - known))

    def adapt_to_plan(self, state: EventTime) -> EventTime:
        """Adapt a stored state to this plan.

        Timers of an operator that is now in other chains are expected in all of them: a needless call costs
        little, and a key group that is not called never fires.
        """
        instances = self.instances()
        found: dict[Place, NextTimers] = {}
        for (name, group), timers in state.agenda.groups.items():
            uids = [uid for uid in instances.values() if name == uid or name.startswith(f"{uid}.")]
            own = max(uids, key=len, default=None)
            now_named = [now for now, uid in instances.items() if uid == own]
            for now in [name] if name in instances else now_named:
                found[now, group] = timers.or_earlier(found.get((now, group), timers))
        agenda = Agenda(dict(sorted(found.items())))
        reporting = {one.uid for one in self.reporters}
        levels = {uid: level for uid, level in state.levels.items() if uid in reporting}
        return replace(state, agenda=agenda, levels=levels).adapt_to_job(
            self.rules, self.make_operator_times()
        )


def make_reporters(operators: Sequence[str], inputs: Sequence[str]) -> tuple[Reporter, ...]:
    """Return the reporters of a program; operators come first, since watermark strategies may change."""
    return (
        *(Reporter(uid, ReporterRole.OPERATOR) for uid in operators),
        *(Reporter(name, ReporterRole.SOURCE) for name in inputs),
    )


def assigner_uid(name: str, chain: str) -> str:
    return f"{name}.{chain}"


def has_reports(acks: Iterable[SinkAck]) -> bool:
    return any(True for _ in iterate_reports(acks))


def drop_reports(acks: Sequence[SinkAck]) -> tuple[SinkAck, ...]:
    return keep_reports(acks, lambda report: False)


def find_reports(
    plan: TimePlan, acks: Iterable[SinkAck]
) -> tuple[tuple[ChannelReport, ...], tuple[TimerReport, ...]]:
    """Return the reports of a micro-batch's tasks, in an order that does not depend on theirs.

    Of several reports about one channel the greatest time counts, of several about one key group the
    earliest timers: every sink at the end of a chain gets the same reports.
    """
    channels: dict[Place, int] = {}
    timers: dict[Place, tuple[int, int]] = {}
    for sink, report in iterate_reports(acks):
        if report.reporter >= SINK_REPORTER:
            continue
        reporter, chain = _find_reporter(plan, sink, report.reporter)
        if reporter.role is ReporterRole.OPERATOR:
            name = plan.instance(reporter.uid, chain)
            for group in plan.expand_bundle(reporter.uid, report.place):
                event_ms, processing_ms = timers.get((name, group), (MAX_WATERMARK_MS, MAX_WATERMARK_MS))
                timers[name, group] = min(event_ms, report.first), min(processing_ms, report.second)
        else:
            uid = assigner_uid(reporter.uid, chain)
            assigner = plan.assigners.get(uid)
            place = uid, report.place if assigner is None or assigner.has_channels else 0
            channels[place] = max(channels.get(place, MIN_WATERMARK_MS), report.first)
    return (
        tuple(
            ChannelReport(uid, channel, None if time_ms == MIN_WATERMARK_MS else time_ms)
            for (uid, channel), time_ms in sorted(channels.items())
        ),
        tuple(
            TimerReport(name, group, *(None if ms == MAX_WATERMARK_MS else ms for ms in times_ms))
            for (name, group), times_ms in sorted(timers.items())
        ),
    )


def _find_reporter(plan: TimePlan, sink: str, number: int) -> tuple[Reporter, str]:
    """Return the reporter and its chain; the parts of a sink number their reporters consecutively."""
    chains = plan.chains.get(sink, ("",))
    if number >= len(plan.reporters) * len(chains):
        raise ValueError(f"reporter {number} is not one of {len(plan.reporters)}")
    part, own = divmod(number, len(plan.reporters))
    return plan.reporters[own], chains[part]


def find_known_channels(found: Collection[int] | None, assigner: Assigner) -> frozenset[int] | None:
    if found is None or not assigner.has_channels or not assigner.is_timed:
        return None
    return frozenset(found)


#: Names of the counters. A report has the index of its counter, so the order never changes.
COUNTERS = (
    "late_records_dropped",
    "matches",
    "partial_matches_timed_out",
    "partial_matches_discarded",
    "partial_matches_opened",
    "partial_matches_closed",
    "partial_matches_restored",
)
_LATE = 0
#: Levels by name, with their counters of additions, removals and restored items: a level is the additions
#: minus the removals. If the first micro-batch of a log restores state, the level is the restored count.
_LEVELS = {
    "partial_matches_open": (
        "partial_matches_opened",
        "partial_matches_closed",
        "partial_matches_restored",
    )
}


def is_count(report: TimeReport) -> bool:
    return report.reporter >= FIRST_LATE_REPORTER


def count_late_records(plan: TimePlan, acks: Iterable[SinkAck]) -> dict[str, int]:
    """Return by operator the number of late records that a micro-batch dropped, without zeros.

    Every sink after an operator gets its reports. An operator in several chains runs in each, over the same
    records: only the first chain counts.
    """
    return {uid: count for (uid, counter), count in _count_by_counter(plan, acks).items() if counter == _LATE}


def find_counts(plan: TimePlan, acks: Iterable[SinkAck]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (uid, counter), count in _count_by_counter(plan, acks).items():
        if counter != _LATE:
            found.setdefault(uid, {})[COUNTERS[counter]] = count
    return found


def _count_by_counter(plan: TimePlan, acks: Iterable[SinkAck]) -> dict[tuple[str, int], int]:
    groups: dict[tuple[str, int, str, int], int] = {}
    for sink, report in iterate_reports(acks):
        if is_count(report):
            reporter, chain = _find_reporter(plan, sink, report.reporter - FIRST_LATE_REPORTER)
            groups[reporter.uid, report.second, chain, report.place] = report.first
    found = Counter[tuple[str, int]]()
    for (uid, counter, chain, _), count in sorted(groups.items()):
        own = [name for name, operators in plan.operators.items() if uid in operators]
        if chain == min(own, default=chain):
            found[uid, counter] += count
    return found


def sum_counts(batches: Iterable[StagedBatch], state: EventTime | None = None) -> dict[str, dict[str, int]]:
    """Return by operator the other counts of micro-batches, by name, and the levels after them."""
    found: dict[str, Counter[str]] = {}
    for batch in batches:
        for uid, counts in batch.counts.items():
            found.setdefault(uid, Counter()).update(counts)
    for uid, levels in ({} if state is None else state.levels).items():
        found.setdefault(uid, Counter()).update(levels)
    return {uid: dict(counts) for uid, counts in found.items()}


def update_levels(state: EventTime, counts: Mapping[str, Mapping[str, int]]) -> EventTime:
    """Return the state after a micro-batch with the levels of its operators updated.

    A level is part of the state that is stored with checkpoints, so it continues after a restart, and a
    micro-batch that runs again changes it once. After a savepoint it is recomputed from the state.
    """
    levels = dict(state.levels)
    for uid, own in counts.items():
        for name, (come, gone, restored) in _LEVELS.items():
            if not own.keys().isdisjoint((come, gone, restored)):
                before = levels.get(uid, {})
                begun = own[restored] if restored in own else before.get(name, 0)
                levels[uid] = {**before, name: begun + own.get(come, 0) - own.get(gone, 0)}
    return state if levels == state.levels else replace(state, levels=levels)


def sum_late_records(batches: Iterable[StagedBatch]) -> dict[str, int]:
    found = Counter[str]()
    for batch in batches:
        found.update(batch.late_dropped)
    return dict(found)
