"""The reader of a chained stream: its micro-batches end at checkpoints of the upstream job."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flinkish_spark.checkpoint.control import AlignmentStatus, read_control, to_control_offset, write_status
from flinkish_spark.connectors.kafka.chaining.alignment import MicroBatchPlan, Offer, View, plan_micro_batch
from flinkish_spark.connectors.kafka.chaining.cut_state import CutState, place_of
from flinkish_spark.connectors.kafka.chaining.upstream import (
    BarrierFinder,
    PassedBarrier,
    Scan,
    SharedPlan,
    UpstreamJob,
    describe_status,
)
from flinkish_spark.connectors.kafka.client.barriers import BarrierScan, BarrierScanner, SeenBarrier
from flinkish_spark.connectors.kafka.stream_offsets import OffsetFinder
from flinkish_spark.connectors.kafka.stream_options import SourceOptions
from flinkish_spark.connectors.kafka.stream_reader import KafkaStreamReader, parse_offset
from flinkish_spark.core.clock import Clock, SystemClock
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.stream_readers import ReadLimit, ReadMaxRows
from flinkish_spark.protocol.control_offset import ControlOffset, TimeOffer
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose, JobUuid, Place
from flinkish_spark.protocol.input_gate import BarrierKind

LOG = logging.getLogger(__name__)
_CLOCK = SystemClock()
#: How long an offered checkpoint may wait for its cut before a warning.
_PATIENCE_MS = 30_000


class AlignedStreamReader(KafkaStreamReader):
    def __init__(
        self,
        options: SourceOptions,
        finder: OffsetFinder | None = None,
        scan: Scan | None = None,
        clock: Clock = _CLOCK,
    ) -> None:
        super().__init__(options, finder)
        self._upstream = UpstreamJob.from_option(options.upstream)
        self._settings = self._upstream.settings
        self._clock = clock
        scan = scan or BarrierScanner(options.connection, options.reader).scan
        self._look = BarrierFinder(_keep_barriers_of(scan, self._upstream.wanted))
        self._shared = SharedPlan(Path(options.control_path).with_suffix(".rounds"))
        self._first_offsets: dict[Place, int] = {}
        #: Whether channel state of the first start offset is still being replayed; None at first.
        self._is_replaying: bool | None = None
        self._status: AlignmentStatus | None = None
        self._waiting_for, self._waiting_since_ms = CheckpointId(0), 0

    def initialOffset(self) -> dict[str, Any]:
        first = super().initialOffset()
        positions, _ = parse_offset(first)
        # The channels are those of the restored position; partitions added since wait for their cut.
        state = CutState.from_json(json.loads(self._options.upstream_start or "{}"), self._settings)
        if state is None:
            state = CutState.create_at_start(positions, self._settings)
        elif not {place_of(channel) for channel in state.gate.channels} <= positions.keys():
            # A topic was removed, so the restored position is no cut of the remaining ones.
            state = CutState.create_midway(positions, self._settings)
        return {**first, **state.to_json(positions)}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return where the next micro-batch ends; `start` if there should be none now."""
        self._wait_a_little()
        return self._shared.plan_once(start, lambda: self._plan(start, limit))

    def _plan(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        begin, drawn = parse_offset(start)
        state = CutState.from_json(start, self._settings) or CutState.create_midway(begin, self._settings)
        state = self._follow_wanted_job(state, begin)
        # Spark asks for a new end only after the micro-batch before it is in commits/.
        self._group.commit(begin)
        ends = self._newest = self._watch.ends(begin)
        view = View(
            begin=(begin := self._add_new_partitions(begin, ends)),
            ahead={p: self._find_ahead(state, p, begin[p], max(ends.get(p, 0), begin[p])) for p in begin},
            drawn=CheckpointId(drawn),
            offer=_parse_offer(content := read_control(self._options.control_path), drawn),
            now_ms=self._clock.wall_ms(),
            most=limit.max_rows if isinstance(limit, ReadMaxRows) else None,
            held=self._find_held(state, begin),
        )
        seen_jobs = (seen.mark.job for _, ahead in sorted(view.ahead.items()) for seen in ahead.barriers)
        state = replace(state, job=state.job or next(seen_jobs, None))
        for place, ahead in view.ahead.items():
            _check_writers(place, state.job, state.passed.get(place), ahead.barriers)
        if any(
            s.mark.partitions > view.partitions(t) for (t, _), a in view.ahead.items() for s in a.barriers
        ):
            self._watch.look_again()
        planned = plan_micro_batch(state, view, self._settings)
        self._report(state, view, planned)
        before = TimeOffer.from_json(start)
        time = before.merge_max(TimeOffer.from_json(content))
        if planned is None:
            # Processing time advances while the source stands still.
            return start if time == before else {**start, **time.to_json()}
        drained = to_control_offset(content).drained
        drawn = int(planned.drawn)
        said = ControlOffset(
            drawn, time, drained=drawn if drawn == drained else ControlOffset.from_json(start).drained
        )
        return {**self._to_offset(planned.end, said), **planned.state.to_json(planned.end)}

    def _add_new_partitions(self, begin: Mapping[Place, int], ends: Mapping[Place, int]) -> dict[Place, int]:
        """Add new partitions to `begin`; they may have to wait for their cut."""
        known = {**begin, **{p: o for p, o in self._first_offsets.items() if p not in begin and p in ends}}
        found = self._watch.add_new_partitions(known, ends)
        self._first_offsets = {place: offset for place, offset in found.items() if place not in begin}
        return found

    def _find_ahead(self, state: CutState, place: Place, begin: int, end: int) -> BarrierScan:
        checkpoint = state.passed.get(place)
        passed = None if checkpoint is None or state.job is None else PassedBarrier(state.job, checkpoint)
        return self._look.find_ahead(place, begin, end, passed)

    def _follow_wanted_job(self, state: CutState, begin: Mapping[Place, int]) -> CutState:
        """Return the state, or a new one if the user now names another upstream job."""
        wanted = self._upstream.wanted
        if wanted is None or state.job in (None, wanted):
            return state
        LOG.warning("the upstream job is %s now and was %s; cuts of the old one end here", wanted, state.job)
        return replace(CutState.create_midway(begin, self._settings), job=wanted)

    def _find_held(self, state: CutState, begin: Mapping[Place, int]) -> frozenset[Place]:
        if self._is_replaying is not False:
            self._is_replaying = bool(state.channel_state)
        return frozenset(begin.keys() - state.channel_state.keys()) if self._is_replaying else frozenset()

    def _report(self, state: CutState, view: View, planned: MicroBatchPlan | None) -> None:
        if planned is not None:
            state, view = planned.state, replace(view, begin=planned.end, drawn=planned.drawn)
            for checkpoint in planned.skipped:
                LOG.warning("no checkpoint of this job will name the upstream checkpoint %s", checkpoint)
        topics = ", ".join(sorted({topic for topic, _ in view.begin}))
        status = describe_status(state, view, topics)
        if status != self._status:
            write_status(self._options.control_path, status)
            self._status = status
        offered, now_ms = view.offer.checkpoint, self._clock.monotonic_ms()
        if not view.is_offered or offered != self._waiting_for:
            self._waiting_for, self._waiting_since_ms = offered, now_ms
        elif now_ms - self._waiting_since_ms >= _PATIENCE_MS:
            LOG.warning("checkpoint %s has to wait: the source %s", offered, status.text)
            self._waiting_since_ms = now_ms


def _parse_offer(control: Mapping[str, Any], drawn: int) -> Offer:
    if "checkpoint" not in control:
        return Offer(CheckpointId(drawn))
    purpose = CheckpointPurpose(control.get("purpose", CheckpointPurpose.PERIODIC.value))
    kind = BarrierKind.SAVEPOINT if purpose.is_savepoint else BarrierKind.CHECKPOINT
    return Offer(CheckpointId(int(control["checkpoint"])), kind)


def _keep_barriers_of(scan: Scan, wanted: JobUuid | None) -> Scan:
    def scan_wanted(place: Place, start: int, end: int) -> BarrierScan:
        seen = scan(place, start, end)
        return replace(seen, barriers=tuple(s for s in seen.barriers if wanted in (None, s.mark.job)))

    return scan_wanted


def _check_writers(
    place: Place, job: JobUuid | None, passed: CheckpointId | None, barriers: tuple[SeenBarrier, ...]
) -> None:
    """Refuse barriers of two jobs, or of two sinks of one job, in a partition."""
    for seen in barriers:
        mark = seen.mark
        if job not in (None, mark.job):
            raise ConfigError(
                f"the topic '{place[0]}' has barrier records of two jobs, {job} and {mark.job}",
                why="a source can follow the checkpoints of one upstream job only",
                what_to_do="name one of them: UpstreamJob(job=...) with the uuid in its job.json; "
                "if the upstream job was replaced, name the new job",
            )
        if mark.checkpoint == passed:
            raise ConfigError(
                f"the topic '{place[0]}' has two barrier records of checkpoint {passed}; "
                f"the sink '{mark.sink}' wrote the second one",
                why="records of the checkpoint may follow the first barrier record",
                what_to_do="find the sinks of the upstream job that write this topic, and give "
                "barriers=BarrierRecords.EACH_CHECKPOINT only to the last one",
            )
        job, passed = mark.job, mark.checkpoint
