"""The streaming source of a job that is chained behind another one: micro-batches that end at its cuts.

What a plan is, is decided by `chaining/cut_plan.py`; here are the brokers, the files and the clock.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows

from flinkish_spark.chaining.cut_plan import Planned, plan_micro_batch
from flinkish_spark.chaining.cut_state import CutState, place_of
from flinkish_spark.chaining.cut_view import Offer, View
from flinkish_spark.chaining.describing import described
from flinkish_spark.chaining.look_ahead import LookAhead, Passed, Scan
from flinkish_spark.chaining.shared_plan import SharedPlan
from flinkish_spark.chaining.status import AlignmentStatus, write_status
from flinkish_spark.clock import Clock, SystemClock
from flinkish_spark.drop_in.finder import OffsetFinder
from flinkish_spark.drop_in.source_options import SourceOptions
from flinkish_spark.drop_in.stream_reader import KafkaStreamReader, parsed_offset
from flinkish_spark.errors import ConfigError
from flinkish_spark.kafka.answers import Place
from flinkish_spark.kafka.barrier_scan import BarrierScanner, Scanned, SeenBarrier
from flinkish_spark.protocol.control_offset import ControlOffset, TimeOffer
from flinkish_spark.protocol.gate_values import BarrierKind
from flinkish_spark.protocol.ids import CheckpointId, JobUuid
from flinkish_spark.protocol.purpose import CheckpointPurpose
from flinkish_spark.runtime.control_source import offered_by, read_control

LOG = logging.getLogger(__name__)
_CLOCK = SystemClock()
#: How long an offered checkpoint may wait for its cut before that is worth a warning.
_PATIENCE_MS = 30_000


class AlignedStreamReader(KafkaStreamReader):
    """The source of a chained job; see `docs/chained-jobs.md`.

    Parameters
    ----------
    options
        Of the source, with an upstream job.
    finder
        Asks the brokers; None to connect as the options say.
    scan
        Finds barrier records; None as well.
    clock
        Time, replaceable in tests.
    """

    def __init__(
        self,
        options: SourceOptions,
        finder: OffsetFinder | None = None,
        scan: Scan | None = None,
        clock: Clock = _CLOCK,
    ) -> None:
        super().__init__(options, finder)
        assert options.upstream is not None
        self._upstream, self._settings = options.upstream, options.upstream.settings
        self._clock = clock
        scan = scan or BarrierScanner(options.connection, options.reader).scan
        self._look = LookAhead(_of_job(scan, self._upstream.wanted))
        self._shared = SharedPlan(Path(options.control_path).with_suffix(".rounds"))
        self._first_offsets: dict[Place, int] = {}
        #: Whether the channel state that the first start offset has is still being replayed.
        self._is_replaying: bool | None = None
        self._status: AlignmentStatus | None = None
        self._waiting_for, self._waiting_since_ms = CheckpointId(0), 0

    def initialOffset(self) -> dict[str, Any]:
        """Return where the job began, with nothing read yet, or what its seed says."""
        first = super().initialOffset()
        positions, _ = parsed_offset(first)
        return {**first, **self._state_at_first(positions).to_json(positions)}

    def _state_at_first(self, positions: Mapping[Place, int]) -> CutState:
        # The channels are those of the seed's position: what was added since waits for its turn.
        seeded = CutState.from_json(json.loads(self._options.upstream_start or "{}"), self._settings)
        if seeded is None:
            return CutState.at_beginning(positions, self._settings)
        if not {place_of(channel) for channel in seeded.gate.channels} <= positions.keys():
            # A topic is read no more, so what was read is no cut of what is read.
            return CutState.somewhere(positions, self._settings)
        return seeded

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return where the next micro-batch ends; `start` if nothing is to be run now.

        Raises
        ------
        InputLostError
            Records that the job has not read are gone.
        ConfigError
            The barrier records in the topics are not those of one upstream job and sink.
        """
        self._wait_a_little()
        return self._shared.agreed(start, lambda: self._planned(start, limit))

    def _planned(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        begin, drawn = parsed_offset(start)
        state = CutState.from_json(start, self._settings) or CutState.somewhere(begin, self._settings)
        state = self._of_wanted_job(state, begin)
        # Spark asks for a new end only after the micro-batch before it is in commits/.
        self._group.commit(begin)
        ends = self._newest = self._watch.ends(begin)
        view = View(
            begin=(begin := self._with_new(begin, ends)),
            ahead={p: self._ahead(state, p, begin[p], max(ends.get(p, 0), begin[p])) for p in begin},
            drawn=CheckpointId(drawn),
            offer=_offered(content := read_control(self._options.control_path), drawn),
            now_ms=self._clock.wall_ms(),
            most=limit.max_rows if isinstance(limit, ReadMaxRows) else None,
            held=self._held(state, begin),
        )
        state = replace(state, job=state.job or _first_job(view.ahead))
        for place, ahead in view.ahead.items():
            _check_writers(place, state.job, state.passed.get(place), ahead.barriers)
        if any(
            s.mark.partitions > view.partitions(t) for (t, _), a in view.ahead.items() for s in a.barriers
        ):
            self._watch.look_again()
        planned = plan_micro_batch(state, view, self._settings)
        self._report(state, view, planned)
        before = TimeOffer.from_json(start)
        time = before.raised_to(TimeOffer.from_json(content))
        if planned is None:
            # Time goes on where the source stands.
            return start if time == before else {**start, **time.to_json()}
        drained = offered_by(content).drained
        drawn = int(planned.drawn)
        said = ControlOffset(drawn, time, drained=drawn if drawn == drained else _drained(start))
        return {**self._logged(planned.end, said), **planned.state.to_json(planned.end)}

    # -- what there is --------------------------------------------------------------------------
    def _with_new(self, begin: Mapping[Place, int], ends: Mapping[Place, int]) -> dict[Place, int]:
        """Return `begin` with the partitions that were added, which may have to wait for their turn."""
        known = {**begin, **{p: o for p, o in self._first_offsets.items() if p not in begin and p in ends}}
        found = self._watch.with_new(known, ends)
        self._first_offsets = {place: offset for place, offset in found.items() if place not in begin}
        return found

    def _ahead(self, state: CutState, place: Place, begin: int, end: int) -> Scanned:
        checkpoint = state.passed.get(place)
        passed = None if checkpoint is None or state.job is None else Passed(state.job, checkpoint)
        return self._look.ahead(place, begin, end, passed)

    def _of_wanted_job(self, state: CutState, begin: Mapping[Place, int]) -> CutState:
        """Return the state, or a new one if it is about another job than the user names now."""
        wanted = self._upstream.wanted
        if wanted is None or state.job in (None, wanted):
            return state
        LOG.warning("the upstream job is %s now and was %s; cuts of the old one end here", wanted, state.job)
        return replace(CutState.somewhere(begin, self._settings), job=wanted)

    def _held(self, state: CutState, begin: Mapping[Place, int]) -> frozenset[Place]:
        """Return the partitions that wait until the channel state has been replayed after a start."""
        if self._is_replaying is not False:
            self._is_replaying = bool(state.channel_state)
        return frozenset(begin.keys() - state.channel_state.keys()) if self._is_replaying else frozenset()

    # -- telling --------------------------------------------------------------------------------
    def _report(self, state: CutState, view: View, planned: Planned | None) -> None:
        if planned is not None:
            state, view = planned.state, replace(view, begin=planned.end, drawn=planned.drawn)
            for checkpoint in planned.skipped:
                LOG.warning("no checkpoint of this job will name the upstream checkpoint %s", checkpoint)
        topics = ", ".join(sorted({topic for topic, _ in view.begin}))
        status = described(state, view, topics)
        if status != self._status:
            write_status(self._options.control_path, status)
            self._status = status
        offered, now_ms = view.offer.checkpoint, self._clock.monotonic_ms()
        if not view.is_offered or offered != self._waiting_for:
            self._waiting_for, self._waiting_since_ms = offered, now_ms
        elif now_ms - self._waiting_since_ms >= _PATIENCE_MS:
            LOG.warning("checkpoint %s has to wait: the source %s", offered, status.text)
            self._waiting_since_ms = now_ms


def _drained(offset: Mapping[str, Any]) -> int:
    return ControlOffset.from_json(offset).drained


def _offered(control: Mapping[str, Any], drawn: int) -> Offer:
    """Return the checkpoint that a control file offers."""
    if "checkpoint" not in control:
        return Offer(CheckpointId(drawn))
    purpose = CheckpointPurpose(control.get("purpose", CheckpointPurpose.PERIODIC.value))
    kind = BarrierKind.SAVEPOINT if purpose.is_savepoint else BarrierKind.CHECKPOINT
    return Offer(CheckpointId(int(control["checkpoint"])), kind)


def _of_job(scan: Scan, wanted: JobUuid | None) -> Scan:
    """Return a scan that sees the barriers of one job only, if one is wanted."""

    def scan_wanted(place: Place, start: int, end: int) -> Scanned:
        seen = scan(place, start, end)
        return replace(seen, barriers=tuple(s for s in seen.barriers if wanted in (None, s.mark.job)))

    return scan_wanted


def _first_job(ahead: Mapping[Place, Scanned]) -> JobUuid | None:
    """Return the job of the first barrier that is seen at all."""
    return next((s.mark.job for _, seen in sorted(ahead.items()) for s in seen.barriers), None)


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
                what_to_do="name the one to follow: UpstreamJob(job=...) with the uuid of its job.json; "
                "if the upstream job was replaced, that is the new one's",
                topic=place[0],
            )
        if mark.checkpoint == passed:
            raise ConfigError(
                f"the topic '{place[0]}' has two barrier records of checkpoint {passed}, "
                f"the second one by the sink '{mark.sink}'",
                why="behind the first one there may be records that belong to the checkpoint",
                what_to_do="let only the last of the upstream job's sinks that write the topic have "
                "barriers=BarrierRecords.EACH_CHECKPOINT",
                topic=place[0],
            )
        job, passed = mark.job, mark.checkpoint
