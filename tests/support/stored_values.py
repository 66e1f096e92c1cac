"""Draws values of everything that is stored as JSON, from the hints of its fields; and compares such values.

Nothing here knows how a value is stored: golden forms and round trips are tested with what this draws.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import importlib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "orders", "sums-1", "x.y", "Z_9", "0", "orders2", "aggregate.out"])
TEXTS = st.one_of(NAMES, st.sampled_from(["", "é\n\"'", "\u2028 ☃ \x00", "v1\n{}"]))
SHA256 = st.sampled_from(["0" * 64, "a1" * 32])
HEX32 = st.sampled_from(["0" * 32, "0123456789abcdef" * 2])
COUNTS = st.one_of(st.integers(0, 9), st.sampled_from([1 << 31, (1 << 53) + 1, (1 << 63) - 1]))
FEW = st.integers(0, 9)
SIGNED = st.sampled_from([-(1 << 63), -1, 0, 5, 60_000, (1 << 63) - 2])
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), COUNTS, st.sampled_from([0.5, -1e300]), TEXTS),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)

#: Every class that is stored, or shown as JSON from its fields; module and name.
RECORDS = (
    "protocol.records TaskAck",
    "protocol.records SinkAck",
    "protocol.records Committable",
    "protocol.records StagedBatch",
    "protocol.decisions Decision",
    "protocol.decisions Receipt",
    "protocol.decisions RewindIntent",
    "protocol.decisions TriggerRecord",
    "protocol.lineage RewindOrder",
    "protocol.savepoints StateFile",
    "protocol.savepoints OperatorState",
    "protocol.savepoints SourceFacts",
    "protocol.savepoints SavedChain",
    "protocol.savepoints SavepointMetadata",
    "protocol.plan_layout Chain",
    "protocol.plan_layout PlanLayout",
    "protocol.savepoints Claim",
    "protocol.savepoints SeededChain",
    "protocol.savepoints Seed",
    "protocol.decisions RestagedEpoch",
    "protocol.timeline Stretch",
    "protocol.decisions SinkShare",
    "protocol.decisions ManifestRecord",
    "protocol.control_offset Wake",
    "protocol.control_offset TimeOffer",
    "protocol.control_offset ControlOffset",
    "protocol.statistics ChannelStatistics",
    "protocol.statistics ParticipantStatistics",
    "protocol.statistics CheckpointDurations",
    "protocol.statistics CheckpointFailure",
    "protocol.statistics CheckpointStatistics",
    "protocol.statistics RestoredCheckpoint",
    "protocol.statistics CheckpointCounts",
    "protocol.statistics StatisticsHistory",
    "protocol.series SeriesPoint",
    "protocol.series Series",
    "protocol.input_gate PendingAlignment",
    "protocol.watermarks OperatorTime",
    "protocol.watermarks AssignerTime",
    "protocol.watermarks EventTime",
    "protocol.event_time BatchTimes",
    "protocol.watermark_alignment HeldChannels",
    "checkpoint.retention PinManifest",
    "job.requests OutsideRequest",
    "job.requests Reply",
    "job.requests Claim",
    "connectors.files.rolling Chunk",
    "connectors.files.ledger Part",
    "connectors.files.ledger Plan",
    "connectors.files.ledger State",
    "connectors.files.writer StagedFile",
    "connectors.dead_letters VisibleLetters",
    "connectors.kafka.client.transactions KafkaCommittable",
    "connectors.split_positions SplitPosition",
    "connectors.files.source FoundFile",
    "connectors.kafka.offsets EndAtLatest",
    "connectors.kafka.offsets EndAtTimestamp",
    "connectors.kafka.offsets EndAtOffsets",
    "core.upstream_cut Cut",
    "connectors.write_modes Append",
    "connectors.write_modes OverwritePartitions",
    "connectors.write_modes Upsert",
)

_SMALL = st.integers(0, 999)
_BASES = st.lists(
    st.builds("{0}/{0}/{1}-{2}-00112233445566ff".format, NAMES, _SMALL, _SMALL), max_size=2
).map(tuple)
#: What a field may hold where its hint says too little; by class and field, or by field.
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "sink": NAMES,
    "uid": NAMES,
    "operator": NAMES,
    "name": NAMES,
    "savepoint": NAMES,
    "order_id": NAMES,
    "assigner": NAMES,
    "group": COUNTS,
    "root": NAMES,
    "staged": NAMES,
    "digest": SIGNED,
    "TaskAck.digest": SIGNED,
    "TimeReport.first": SIGNED,
    "TimeReport.second": SIGNED,
    "time_ms": st.none() | SIGNED,
    "event_time_ms": st.none() | SIGNED,
    "TimerReport.processing_time_ms": st.none() | SIGNED,
    "carried_ms": SIGNED,
    "watermark_ms": SIGNED,
    "least_ms": SIGNED,
    "above": st.dictionaries(NAMES, st.just((1 << 63) - 1), max_size=2),
    "carried_above": st.dictionaries(NAMES, st.just((1 << 63) - 1), max_size=2),
    **dict.fromkeys(("StagedBatch.bases", "Decision.bases", "PinManifest.bases"), _BASES),
    "late_dropped": st.dictionaries(NAMES, st.integers(1, 9), max_size=2),
    "StagedBatch.counts": st.dictionaries(
        NAMES, st.dictionaries(NAMES, st.integers(1, 9), max_size=2), max_size=2
    ),
    "ParticipantStatistics.counts": st.dictionaries(NAMES, st.integers(0, 9), max_size=2),
    "ParticipantStatistics.late_dropped": st.none() | COUNTS,
    "identity": st.dictionaries(NAMES, JSON, max_size=2),
    "states": st.dictionaries(NAMES, TEXTS, max_size=2),
    "token": st.sampled_from(["00000000000000aa", "f" * 16]),
    "Attempt.token": TEXTS,
    "Attempt.block": st.just(1),
    "Attempt.highest_block": st.integers(1, 9),
    "OperatorTime.inputs": st.frozensets(NAMES, max_size=2),
    "OperatorTime.instances": st.frozensets(NAMES, max_size=2),
    "OutsideRequest.name": HEX32,
    "OutsideRequest.target": st.just("/savepoints/a"),
    "log": st.dictionaries(st.sampled_from(["offsets/3", "commits/3"]), TEXTS, max_size=2),
    "PinManifest.files": st.dictionaries(st.sampled_from(["0/1/2.delta", "x"]), COUNTS, max_size=2),
    "removed": st.dictionaries(st.sampled_from(["offsets/3", "commits/3"]), TEXTS, max_size=2),
    "by_batch": st.dictionaries(NAMES, st.frozensets(SHA256, max_size=2), max_size=2),
    "sha256": SHA256,
    "KafkaCommittable.records": st.integers(1, 9),
    "protocol_version": st.just(3),
    "transactional_id": NAMES,
    "topic": NAMES,
    "SeededChain.positions": st.dictionaries(NAMES, JSON.filter(lambda one: one is not None), max_size=2),
    "EndAtOffsets.ends": st.dictionaries(NAMES, st.dictionaries(st.integers(0, 20), COUNTS), max_size=2),
    "Upsert.keys": st.just(("id", "day")),
    "not_stored": st.sampled_from([(), ("op",)]),
    "SplitPosition.offsets": st.dictionaries(TEXTS, JSON, max_size=3),
    "ParticipantStatistics.channels": st.just(()),
    "FoundFile.partition": st.dictionaries(NAMES, st.none() | TEXTS, max_size=2),
    "Wake.groups": st.dictionaries(st.integers(0, 9), st.frozensets(st.integers(0, 200)), max_size=2),
}


def record(package: str, name: str) -> Any:
    """Return one of :data:`RECORDS`."""
    module, _, cls = name.partition(" ")
    return getattr(importlib.import_module(f"{package}.{module}"), cls)


class Drawn:
    """Strategies for the records of a package.

    Parameters
    ----------
    package
        Its name.
    """

    def __init__(self, package: str = "flinkish_spark") -> None:
        self.package = package
        self._known: dict[Any, st.SearchStrategy[Any]] = {}

    def of(self, hint: Any) -> st.SearchStrategy[Any]:
        """Return values of a class, or of any hint."""
        if hint not in self._known:
            self._known[hint] = self._of(hint)
        return self._known[hint]

    @functools.cached_property
    def _special(self) -> dict[str, Callable[[], st.SearchStrategy[Any]]]:
        return {
            "CheckpointId": lambda: self._counter("CheckpointId", 0),
            "BatchId": lambda: self._counter("BatchId", 0),
            "OwnerEpoch": lambda: self._counter("OwnerEpoch", 0),
            "Lineage": lambda: self._counter("Lineage", 0),
            "JobUuid": lambda: HEX32.map(record(self.package, "protocol.ids JobUuid")),
            "AccumulatorValue": self._accumulators,
            "Stretch": lambda: self._valid("Stretch", first=self._counter("CheckpointId", 1)),
            "Decision": self._decisions,
            "RestagedEpoch": lambda: self._valid("RestagedEpoch", batches=self._some("StagedBatch")),
            "CheckpointStatistics": self._statistics,
            "CheckpointCounts": lambda: self._valid(
                "CheckpointCounts", triggered=st.integers(99, 1 << 40), completed=FEW, failed=FEW
            ),
            "StatisticsHistory": self._histories,
            "PositionRange": lambda: st.tuples(st.integers(0, 9), st.integers(9, 1 << 40)).map(
                lambda ends: record(self.package, "protocol.input_gate PositionRange")(*ends)
            ),
            "SplitPosition": lambda: self._valid("SplitPosition", done=st.frozensets(TEXTS, max_size=2)),
            "BatchTimes": lambda: self._valid("BatchTimes", inputs=self._inputs()),
            "AssignerTime": self._assigners,
            "EventTime": self._times,
            "RequestKind": lambda: st.sampled_from(
                [one for one in record(self.package, "job.requests RequestKind") if "SAVE" in one.value]
            ),
            "Valve": lambda: self._valves(NAMES),
            "Agenda": self._agendas,
            "Upsert": lambda: st.one_of(
                self._valid("Upsert", row_kind=st.none()),
                self._valid("Upsert", row_kind=st.just("_row_kind"), delete_when=st.none()),
            ),
        }

    def _accumulators(self) -> st.SearchStrategy[Any]:
        value = record(self.package, "protocol.accumulators AccumulatorValue")
        kind = record(self.package, "protocol.accumulators AccumulatorKind")
        counters = st.integers(-(1 << 70), 1 << 70).map(lambda held: value.of(kind.LONG_COUNTER, held))
        averages = st.tuples(st.floats(allow_nan=False), st.integers(1, 9))
        histograms = st.dictionaries(st.integers(-9, 9), st.integers(1, 9))
        return st.one_of(
            counters,
            averages.map(lambda held: value.of(kind.AVERAGE, held)),
            histograms.map(lambda held: value.of(kind.HISTOGRAM, held)),
        )

    def _class(self, name: str) -> Any:
        return record(self.package, next(one for one in RECORDS if one.split()[1] == name))

    def _counter(self, name: str, least: int) -> st.SearchStrategy[Any]:
        return st.integers(least, 1 << 40).map(record(self.package, f"protocol.ids {name}"))

    def _some(self, name: str) -> st.SearchStrategy[Any]:
        return st.lists(self.of(self._class(name)), min_size=1, max_size=2).map(tuple)

    def _valid(self, name: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return self._built(self._class(name), **fields)

    def _built(self, cls: Any, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        hints = typing.get_type_hints(cls)
        found = {}
        for field in dataclasses.fields(cls):
            given = (fields.get(field.name), FIELDS.get(f"{cls.__name__}.{field.name}"))
            own = next((one for one in given if one is not None), FIELDS.get(field.name))
            found[field.name] = self.of(hints[field.name]) if own is None else own
        return st.builds(cls, **found)

    def _of(self, hint: Any) -> st.SearchStrategy[Any]:
        origin, args = typing.get_origin(hint) or hint, typing.get_args(hint)
        if origin is typing.Annotated:
            return self.of(args[0])
        plain = {int: COUNTS, str: TEXTS, bool: st.booleans(), Any: JSON, type(None): st.none()}
        if hint in plain:
            return plain[hint]
        if origin in (typing.Union, types.UnionType):
            return st.one_of([self.of(one) for one in args])
        if origin is tuple:
            if args[-1] is ...:
                return st.lists(self.of(args[0]), max_size=2).map(tuple)
            return st.tuples(*[self.of(one) for one in args])
        if origin is frozenset:
            return st.frozensets(self.of(args[0]), max_size=3)
        if origin is collections.abc.Sequence:
            return st.lists(self.of(args[0]), max_size=2)
        if origin is collections.abc.Mapping:
            keys = NAMES if args[0] is str else self.of(args[0])
            return st.dictionaries(keys, self.of(args[1]), max_size=2)
        if origin.__name__ in self._special:
            return self._special[origin.__name__]()
        if issubclass(hint, enum.Enum):
            return st.sampled_from(hint)
        return self._built(hint)

    def _decisions(self) -> st.SearchStrategy[Any]:
        verdicts = record(self.package, "protocol.decisions Verdict")
        return st.one_of(
            self._valid("Decision", batches=self._some("StagedBatch")),
            self._valid("Decision", batches=st.just(()), verdict=st.just(verdicts.ABORT)),
        )

    def _inputs(self) -> st.SearchStrategy[Any]:
        one = self.of(record(self.package, "protocol.event_time AssignerInput"))
        return st.lists(one, max_size=2, unique_by=lambda one: one.assigner).map(tuple)

    def _statistics(self) -> st.SearchStrategy[Any]:
        statuses = record(self.package, "protocol.statistics CheckpointStatus")
        channels = st.lists(self.of(self._class("ChannelStatistics")), max_size=2).map(tuple)
        participants = st.lists(self._valid("ParticipantStatistics", channels=channels), max_size=2).map(
            tuple
        )
        return st.one_of(
            self._valid(
                "CheckpointStatistics",
                failure=self.of(self._class("CheckpointFailure")),
                status=st.just(statuses.FAILED),
                participants=participants,
            ),
            self._valid(
                "CheckpointStatistics",
                failure=st.none(),
                status=st.sampled_from([statuses.COMPLETED, statuses.IN_PROGRESS]),
                participants=participants,
            ),
        )

    @st.composite
    @staticmethod
    def _drawn_history(draw: Any, self: Drawn) -> Any:
        found = self._class("StatisticsHistory")(
            *draw(st.tuples(st.integers(0, 3), COUNTS, st.integers(1, 5)))
        )
        entries = draw(st.lists(self._statistics(), max_size=4, unique_by=lambda one: one.checkpoint))
        for one in sorted((one for one in entries if int(one.checkpoint)), key=lambda one: one.checkpoint):
            found = found.add_triggered(one) if one.status.value == "IN_PROGRESS" else found.add_ended(one)
        if draw(st.booleans()):
            found = found.add_restored(draw(self.of(self._class("RestoredCheckpoint")))).count_refused()
        return found

    def _histories(self) -> st.SearchStrategy[Any]:
        return Drawn._drawn_history(self)

    def _channels(self) -> st.SearchStrategy[Any]:
        module = "protocol.event_time"
        statuses = record(self.package, f"{module} ChannelStatus")
        make = record(self.package, f"{module} ValveChannel")
        return st.one_of(
            st.builds(make, SIGNED, st.just(statuses.ACTIVE), st.booleans()),
            st.builds(make, SIGNED, st.just(statuses.IDLE), st.just(False)),
        )

    def _valves(self, keys: st.SearchStrategy[Any], **fixed: Any) -> st.SearchStrategy[Any]:
        make = record(self.package, "protocol.event_time Valve")
        return st.builds(make, st.dictionaries(keys, self._channels(), max_size=2, **fixed), SIGNED)

    def _assigners(self, ended: st.SearchStrategy[bool] | None = None) -> st.SearchStrategy[Any]:
        make = self._class("AssignerTime")
        times = st.integers(0, 1 << 40)

        def whole(valve: Any, ms: int, has_ended: bool) -> Any:
            return make(ms, valve, {channel: ms + channel for channel in valve.channels}, has_ended)

        return st.builds(
            whole, self._valves(st.integers(0, 20)), times, st.booleans() if ended is None else ended
        )

    def _agendas(self) -> st.SearchStrategy[Any]:
        module = "protocol.timer_index"
        make, timers = record(self.package, f"{module} Agenda"), record(self.package, f"{module} NextTimers")
        found = st.one_of(st.builds(timers, SIGNED, st.none() | SIGNED), st.builds(timers, st.none(), SIGNED))
        return st.dictionaries(st.tuples(NAMES, st.integers(0, 200)), found, max_size=3).map(make)

    def _times(self) -> st.SearchStrategy[Any]:
        make = self._class("EventTime")
        operators = st.dictionaries(
            NAMES,
            self._valid("OperatorTime"),
            max_size=2,
        )

        def whole(running: Any, over: Any, agenda: Any, operators: Any, now_ms: Any, channel: Any) -> Any:
            assigners = {**over, **running}
            valve = record(self.package, "protocol.event_time Valve")(
                {uid: channel for uid, one in assigners.items() if not one.has_ended}, 7
            )
            return make(assigners, valve, now_ms, -5, agenda, operators)

        return st.builds(
            whole,
            st.dictionaries(NAMES, self._assigners(st.just(False)), max_size=2),
            st.dictionaries(NAMES, self._assigners(st.just(True)), max_size=1),
            self._agendas(),
            operators,
            st.none() | st.integers(0, 1 << 40),
            self._channels(),
        )


def plain(value: Any, in_order: bool = False) -> Any:
    """Return a value as JSON that shows all of its fields.

    It is equal exactly for equal values, if mappings are not to keep the order that they have.
    """
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        shown = {one.name: plain(getattr(value, one.name), in_order) for one in fields}
        return {"": type(value).__name__, **shown}
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, Mapping):
        pairs = [[plain(key, in_order), plain(one, in_order)] for key, one in value.items()]
        return {"{}": pairs if in_order else sorted(pairs, key=repr)}
    if isinstance(value, frozenset):
        return {"set": sorted((plain(one) for one in value), key=repr)}
    if isinstance(value, tuple | list):
        return [type(value).__name__, *(plain(one, in_order) for one in value)]
    return value


def made(hint: Any, shown: Any) -> Any:
    """Return the value of which :func:`plain` made `shown`."""
    origin, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is typing.Annotated:
        return made(args[0], shown)
    if origin in (typing.Union, types.UnionType):
        return made(next(one for one in args if _fits(one, shown)), shown)
    if isinstance(shown, dict) and "" in shown:
        hints = typing.get_type_hints(origin)
        return origin(**{name: made(hints[name], one) for name, one in shown.items() if name})
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        return next(one for one in origin if str(one) == shown)
    inner = args or (Any, Any)
    if isinstance(shown, dict) and "{}" in shown:
        return {made(inner[0], key): made(inner[-1], one) for key, one in shown["{}"]}
    if isinstance(shown, dict):
        return frozenset(made(inner[0], one) for one in shown["set"])
    if isinstance(shown, list):
        hints = inner * len(shown) if inner[-1] in (..., Any) or origin is not tuple else inner
        found = [
            made(inner[0] if inner[-1] is ... else one, of) for one, of in zip(hints, shown[1:], strict=False)
        ]
        return tuple(found) if shown[0] == "tuple" else found
    return shown


def _fits(hint: Any, shown: Any) -> bool:
    origin = typing.get_origin(hint) or hint
    if hint is type(None) or shown is None:
        return hint is type(None) and shown is None
    if issubclass(origin, enum.Enum):
        return any(str(one) == shown for one in origin)
    if dataclasses.is_dataclass(origin):
        return isinstance(shown, dict) and shown.get("") == origin.__name__
    if isinstance(shown, dict):
        return ("set" in shown) == (origin is frozenset)
    return not isinstance(shown, str) or origin is str
