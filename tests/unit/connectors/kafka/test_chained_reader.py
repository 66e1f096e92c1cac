"""The source of a chained job between brokers, files and Spark: what it asks, logs and tells."""

from __future__ import annotations

import itertools
import json
import logging
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark.checkpoint.control import AlignmentStatus, read_status, write_status
from flinkish_spark.connectors.kafka import stream_offsets as topic_watch
from flinkish_spark.connectors.kafka.chaining.alignment import View
from flinkish_spark.connectors.kafka.chaining.cut_state import CutState
from flinkish_spark.connectors.kafka.chaining.reader import AlignedStreamReader
from flinkish_spark.connectors.kafka.chaining.upstream import SharedPlan, UpstreamJob, describe_status
from flinkish_spark.connectors.kafka.client.barriers import BarrierScan, SeenBarrier
from flinkish_spark.connectors.kafka.client.client import Isolation
from flinkish_spark.connectors.kafka.data_source import FlinkishKafka
from flinkish_spark.connectors.kafka.stream_options import parse_stream
from flinkish_spark.connectors.kafka.stream_reader import KafkaPiece, KafkaStreamReader
from flinkish_spark.core.errors import ConfigError, InternalError
from flinkish_spark.core.stream_readers import TELLS_READERS, ReadAllAvailable, ReadMaxRows
from flinkish_spark.core.upstream_cut import CHANNEL_STATE_KEY, UPSTREAM_KEY, Cut, CutPhase, upstream_cut
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, Place
from flinkish_spark.protocol.input_gate import AlignmentMode, AlignmentSettings
from tests.support.chained_log import JOB, Log, mark
from tests.support.clocks import ManualClock

ALL = ReadAllAvailable()
OTHER = JobUuid("b" * 32)
#: Every start of a query has a control file of its own.
STARTS = itertools.count()


class Brokers:
    """Stands in for OffsetFinder and for the scanner of barriers."""

    def __init__(self, *lines: str) -> None:
        self.log = Log.of(*lines)
        self.known = len(self.log.lines)
        #: Instead of the one that a token stands for, by (partition, offset).
        self.marks: dict[tuple[int, int], Any] = {}
        self.asked_for_first = 0

    def places(self) -> frozenset[Place]:
        return frozenset(self.log.places[: self.known])

    existing_places = places

    def starting(self) -> dict[Place, int]:
        return dict.fromkeys(self.places(), 0)

    def earliest(self, places: Iterable[Place]) -> dict[Place, int]:
        self.asked_for_first += 1
        return dict.fromkeys(places, 0)

    def latest(self, places: Iterable[Place], isolation: Isolation | None = None) -> dict[Place, int]:
        return {place: self.log.visible[place[1]] for place in places}

    def scan(self, place: Place, start: int, end: int) -> BarrierScan:
        seen = self.log.scan(place, start, end)
        barriers = [
            SeenBarrier(s.offset, self.marks.get((place[1], s.offset), s.mark)) for s in seen.barriers
        ]
        return BarrierScan(seen.end, tuple(barriers))


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flinkish_spark.connectors.kafka.stream_reader._ASK_EVERY_S", 0.0)


class Job:
    """Some scans of one source, asked in turn as Spark does."""

    def __init__(
        self,
        folder: Path,
        brokers: Brokers,
        upstream: UpstreamJob | None = None,
        scans: int = 1,
        **options: str,
    ) -> None:
        self.control = folder / "control" / f"1-{next(STARTS)}.json"
        self.control.parent.mkdir(exist_ok=True)
        given = {
            "kafka.bootstrap.servers": "localhost:9092",
            "subscribe": "t",
            "flinkish.control.path": str(self.control),
            "flinkish.first.offsets": str(self.control.parent),
            "flinkish.upstream": (upstream or UpstreamJob()).to_option(),
            **options,
        }
        self.clock = ManualClock()
        self.readers = [
            AlignedStreamReader(parse_stream(given), brokers, brokers.scan, self.clock)  # type: ignore[arg-type]
            for _ in range(scans)
        ]
        self.reader = self.readers[0]

    def offers(self, checkpoint: int, **more: str) -> None:
        self.control.write_text(json.dumps({"checkpoint": checkpoint, **more}))

    def latest(self, start: dict[str, Any], limit: Any = ALL) -> dict[str, Any]:
        """Ask as Spark does: through text."""
        ends = [
            json.loads(json.dumps(r.latestOffset(json.loads(json.dumps(start)), limit))) for r in self.readers
        ]
        assert ends.count(ends[0]) == len(ends)
        return ends[0]

    def run(self, start: dict[str, Any] | None = None, limit: Any = ALL) -> dict[str, Any]:
        offset = start or self.reader.initialOffset()
        while (end := self.latest(offset, limit)) != offset:
            offset = end
        return offset

    @property
    def status(self) -> AlignmentStatus | None:
        return read_status(str(self.control))


def test_a_micro_batch_ends_at_the_cut_and_carries_the_barrier(tmp_path: Path) -> None:
    job = Job(tmp_path, Brokers("a b |1 c", "d |1 e f"))
    job.offers(3)
    start = job.reader.initialOffset()
    end = job.latest(start)
    assert (end["t"], end["flinkish:checkpoint"]) == ({"0": 3, "1": 2}, 3)
    pieces = [p for p in job.reader.partitions(start, end) if isinstance(p, KafkaPiece)]
    assert [(p.range.start, p.range.end) for p in pieces if p.range] == [(0, 3), (0, 2)]
    assert [[checkpoint for _, checkpoint, _, _ in p.rows] for p in pieces] == [[3], [3]]
    [cut] = upstream_cut("v1\n{}\n" + json.dumps(end)).values()
    assert (cut.job, int(cut.checkpoint), cut.channel_state) == (JOB, 1, {})
    assert job.run(end)["t"] == {"0": 4, "1": 4}


def test_scans_of_one_source_end_at_the_same_places(tmp_path: Path) -> None:
    brokers = Brokers("a b |1 c |2", "d |1 e |2")
    job = Job(tmp_path, brokers, scans=3)
    brokers.log.visible = [1, 1]
    offset = job.run()
    for number, visible in enumerate(([3, 1], [3, 3], [5, 4]), 1):
        brokers.log.visible = list(visible)
        job.offers(number)
        offset = job.run(offset)
    assert offset["t"] == {"0": 5, "1": 4}
    # Another start of the query: what the last one left means nothing.
    again = Job(tmp_path, brokers, scans=2)
    assert again.latest(again.reader.initialOffset())["t"] == {"0": 3, "1": 2}


def test_scans_that_come_apart_are_noticed(tmp_path: Path) -> None:
    first, second = SharedPlan(tmp_path / "rounds"), SharedPlan(tmp_path / "rounds")
    assert first.plan_once({"t": 1}, lambda: {"t": 2}) == {"t": 2}
    assert second.plan_once({"t": 1}, lambda: {"t": 99}) == {"t": 2}
    assert second.plan_once({"t": 2}, lambda: {"t": 3}) == {"t": 3}
    with pytest.raises(InternalError, match="not at the same place"):
        first.plan_once({"t": 1}, lambda: {"t": 4})
    third = SharedPlan(tmp_path / "rounds")
    with pytest.raises(InternalError, match="One is in round 2, another in round 1"):
        third.plan_once({"t": 2}, lambda: {"t": 3})


def behind_cut_1(job: Job, brokers: Brokers) -> dict[str, Any]:
    """Draw checkpoint 1 at upstream checkpoint 1, which is the first offset of partitions 0 and 1."""
    brokers.log.visible = [1, 1]
    job.offers(1)
    offset = job.run()
    assert (cut_in(offset).checkpoint, cut_in(offset).phase) == (CheckpointId(1), CutPhase.TAKEN)
    return offset


def test_a_savepoint_is_offered_with_its_purpose(tmp_path: Path) -> None:
    """behaviour 59."""
    brokers = Brokers("|1 a |2 b", "|1 c d e |2")
    job = Job(tmp_path, brokers, UpstreamJob(AlignmentMode.UNALIGNED))
    offset = behind_cut_1(job, brokers)
    brokers.log.visible = [3, 2]
    offset = job.run(offset)
    job.offers(2, purpose="SAVEPOINT")
    assert job.latest(offset) == offset
    job.offers(3, purpose="PERIODIC")
    end = job.latest(offset)
    assert (end["flinkish:checkpoint"], end[CHANNEL_STATE_KEY]) == (3, {"t": {"1": [2, None]}})


def test_a_new_process_replays_channel_state_first(tmp_path: Path) -> None:
    brokers = Brokers("|1 a |2 b", "|1 c d e |2 f")
    job = Job(tmp_path, brokers, UpstreamJob(AlignmentMode.UNALIGNED))
    offset = behind_cut_1(job, brokers)
    brokers.log.visible = [3, 2]
    job.offers(2)
    drawn = job.run(offset)
    brokers.log.visible = [4, 6]
    assert job.latest(drawn)["t"] == {"0": 4, "1": 5}
    again = Job(tmp_path, brokers, UpstreamJob(AlignmentMode.UNALIGNED))
    first = again.latest(drawn)
    assert first["t"] == {"0": 3, "1": 5}
    assert CHANNEL_STATE_KEY not in first
    assert again.latest(first)["t"] == {"0": 4, "1": 6}


def test_partitions_that_were_added_are_looked_for_when_a_barrier_tells_of_them(tmp_path: Path) -> None:
    brokers = Brokers("a |1/2 b |2/3", "c |1/2 |2/3", "n |2/3")
    brokers.known = 2
    job = Job(tmp_path, brokers)
    job.offers(1)
    offset = job.run()
    assert offset["t"] == {"0": 3, "1": 2}
    brokers.known = 3
    job.offers(2)
    offset = job.run(offset)
    assert (offset["t"], offset["flinkish:checkpoint"]) == ({"0": 4, "1": 3, "2": 2}, 2)


def test_where_an_added_partition_begins_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_watch, "_LOOK_FOR_PARTITIONS_S", -1.0)
    brokers = Brokers("a |1/2 b", "c |1/2", "n")
    brokers.known = 2
    job = Job(tmp_path, brokers)
    job.offers(1)
    offset = job.run()
    brokers.known = 3
    for _ in range(5):
        assert job.latest(offset) == offset
    assert brokers.asked_for_first == 1


def test_a_limit_per_micro_batch_is_kept(tmp_path: Path) -> None:
    job = Job(tmp_path, Brokers("a b c d e |1", "f |1"))
    job.offers(1)
    end = job.latest(job.reader.initialOffset(), ReadMaxRows(3))
    assert sum(end["t"].values()) <= 4


# -- who is upstream ------------------------------------------------------------------------------------


def test_two_upstream_jobs_are_refused_unless_one_is_named(tmp_path: Path) -> None:
    brokers = Brokers("a |1 b |1", "|1 |1")
    brokers.marks = {(0, 3): mark(1, job=OTHER), (1, 1): mark(1, job=OTHER)}
    job = Job(tmp_path, brokers)
    job.offers(1)
    with pytest.raises(ConfigError, match=f"two jobs, {JOB} and {OTHER}"):
        job.run()
    for wanted, end in ((JOB, {"0": 2, "1": 1}), (OTHER, {"0": 4, "1": 2})):
        folder = tmp_path / str(wanted)
        folder.mkdir()
        named = Job(folder, brokers, UpstreamJob(job=str(wanted)))
        drawn = named.latest(named.reader.initialOffset())
        assert (drawn["t"], drawn[UPSTREAM_KEY]["job"]) == (end, str(wanted))


def test_an_upstream_job_is_replaced_by_another_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its checkpoints count from 1 again."""
    brokers = Brokers("a |9 b |1", "|9 c |1")
    brokers.marks = {(0, 3): mark(1, job=OTHER), (1, 2): mark(1, job=OTHER)}
    brokers.log.visible = [2, 1]
    job = Job(tmp_path, brokers)
    job.offers(1)
    offset = job.run()
    assert (cut_in(offset).checkpoint, cut_in(offset).phase) == (CheckpointId(9), CutPhase.TAKEN)
    brokers.log.visible = [4, 3]
    with pytest.raises(ConfigError, match="two jobs"):
        job.latest(offset)
    job = Job(tmp_path, brokers, UpstreamJob(job=str(OTHER)))
    job.offers(2)
    with caplog.at_level(logging.WARNING):
        offset = job.run(offset)
    assert "the upstream job is" in caplog.text
    assert (cut_in(offset).checkpoint, cut_in(offset).phase) == (CheckpointId(1), CutPhase.TAKEN)
    assert offset["t"] == {"0": 4, "1": 3}


def cut_in(offset: dict[str, Any]) -> Cut:
    return Cut.from_json(offset[UPSTREAM_KEY]["cut"])


def test_two_sinks_of_one_job_are_refused(tmp_path: Path) -> None:
    brokers = Brokers("a |1 b |1", "|1 |1")
    brokers.marks = {(0, 3): mark(1, sink="second"), (1, 1): mark(1, sink="second")}
    job = Job(tmp_path, brokers)
    job.offers(1)
    with pytest.raises(ConfigError, match="the sink 'second' wrote the second one"):
        job.run()


# -- what it tells --------------------------------------------------------------------------------------


def test_the_status_says_what_is_waited_for(tmp_path: Path) -> None:
    brokers = Brokers("a b |1 c", "d e |1")
    brokers.log.visible = [0, 0]
    job = Job(tmp_path, brokers)
    assert job.status is None
    offset = job.run()
    assert job.status == AlignmentStatus(False, "stands at the beginning; nothing new is there")
    brokers.log.visible = [1, 1]
    offset = job.run(offset)
    assert job.status is not None
    assert "has seen no barrier record yet. The upstream job's Kafka sink needs" in job.status.text
    brokers.log.visible = [3, 1]
    offset = job.run(offset)
    text = "waits for the barrier of upstream checkpoint 1 on t-1 (not visible yet, read up to 1)"
    assert job.status == AlignmentStatus(False, text)
    brokers.log.visible = [4, 3]
    offset = job.run(offset)
    text = "stands at upstream checkpoint 1 and waits for a checkpoint of this job"
    assert job.status == AlignmentStatus(True, text, cut=1)
    job.offers(1)
    offset = job.run(offset)
    assert job.status == AlignmentStatus(False, "reads on to the next upstream checkpoint behind 1", drawn=1)


def test_an_unaligned_checkpoint_is_asked_for(tmp_path: Path) -> None:
    brokers = Brokers("|1 a |2", "|1 b c d |2")
    job = Job(tmp_path, brokers, UpstreamJob(AlignmentMode.ALIGNED_WITH_TIMEOUT, 1_000))
    offset = behind_cut_1(job, brokers)
    brokers.log.visible = [3, 2]
    offset = job.run(offset)
    assert job.status is not None
    assert not job.status.wants_checkpoint
    job.clock.now_ms = 1_000
    assert job.latest(offset) == offset
    assert (job.status.wants_checkpoint, job.status.cut) == (True, 2)


def test_no_unaligned_checkpoint_is_asked_for_before_the_first_cut(tmp_path: Path) -> None:
    brokers = Brokers("a |1", "b c d |1")
    brokers.log.visible = [2, 1]
    job = Job(tmp_path, brokers, UpstreamJob(AlignmentMode.UNALIGNED))
    offset = job.run()
    job.offers(1)
    assert job.latest(offset) == offset
    text = "waits for the barrier of upstream checkpoint 1 on t-1 (not visible yet, read up to 1)"
    assert job.status == AlignmentStatus(False, text)


def test_the_status_says_what_has_to_be_read_first(tmp_path: Path) -> None:
    brokers = Brokers("|1 a |2 b", "|1 c d e |2 f")
    job = Job(tmp_path, brokers, UpstreamJob(AlignmentMode.UNALIGNED))
    offset = behind_cut_1(job, brokers)
    brokers.log.visible = [3, 2]
    job.offers(2)
    offset = job.run(offset)
    assert job.status == AlignmentStatus(False, "reads on to the next upstream checkpoint behind 2", drawn=2)
    again = Job(tmp_path, brokers, UpstreamJob(AlignmentMode.UNALIGNED))
    assert again.latest(offset) == offset
    assert again.status == AlignmentStatus(
        False, "reads the channel state of upstream checkpoint 2 first", drawn=2
    )


def test_the_status_tells_a_source_that_may_read_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flinkish_spark.connectors.kafka.chaining.upstream.MOST_MICRO_BATCHES", 3)
    monkeypatch.setattr("flinkish_spark.connectors.kafka.chaining.alignment.MOST_MICRO_BATCHES", 3)
    brokers = Brokers("|1 a b c d e f", "|1")
    job = Job(tmp_path, brokers)
    offset = behind_cut_1(job, brokers)
    brokers.log.visible = [7, 1]
    job.run(offset, ReadMaxRows(1))
    assert job.status is not None
    assert job.status.text.startswith("has read 3 micro-batches since the last checkpoint of this job and")


def test_the_status_of_a_source_that_only_counts_names_the_barrier(tmp_path: Path) -> None:
    brokers = Brokers("a |1 b", "c |1")
    brokers.log.visible = [3, 1]
    job = Job(tmp_path, brokers, UpstreamJob(AlignmentMode.AT_LEAST_ONCE))
    job.run()
    text = "waits for the barrier of upstream checkpoint 1 on t-1 (not visible yet, read up to 1)"
    assert job.status == AlignmentStatus(False, text)


def test_many_partitions_are_not_all_listed(tmp_path: Path) -> None:
    settings = AlignmentSettings(AlignmentMode.ALIGNED)
    places = [("t", p) for p in range(9)]
    state = CutState.create_at_start(dict.fromkeys(places, 0), settings)
    log = Log.of("|1", *["a |1"] * 8)
    gate, _ = state.gate.on_barrier("t/0", _gate_barrier(), 0, 0)
    view = View(dict.fromkeys(places, 0), {p: log.scan(p, 0, 1) for p in places}, CheckpointId(0), None, 0)  # type: ignore[arg-type]
    text = describe_status(CutState(gate, JOB), view, "t").text
    assert text.endswith("t-5 (not visible yet, read up to 0) and 3 more")
    seen = View(
        view.begin, {p: log.scan(p, 0, len(log.lines[p[1]])) for p in places}, CheckpointId(0), None, 0
    )  # type: ignore[arg-type]
    assert "t-1 (at offset 1, read up to 0)" in describe_status(CutState(gate, JOB), seen, "t").text


def _gate_barrier() -> Any:
    from flinkish_spark.protocol.input_gate import CheckpointBarrier

    return CheckpointBarrier(CheckpointId(1), 0)


def test_a_checkpoint_that_waits_for_long_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    brokers = Brokers("a b", "c")
    job = Job(tmp_path, brokers)
    job.offers(1)
    with caplog.at_level(logging.WARNING):
        offset = job.run()
        job.clock.now_ms = 29_999
        job.latest(offset)
        assert not caplog.text
        job.clock.now_ms = 30_000
        job.latest(offset)
        job.latest(offset)
    assert (
        caplog.text.count("checkpoint 1 has to wait: the source has read records of t and has seen no") == 1
    )


def test_cuts_that_are_given_up_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(tmp_path, Brokers("a |1 b |2", "c |2"))
    job.offers(1)
    with caplog.at_level(logging.WARNING):
        job.run()
    assert "no checkpoint of this job will name the upstream checkpoint 1" in caplog.text


def test_a_status_is_replaced(tmp_path: Path) -> None:
    control = str(tmp_path / "1.json")
    for text in ("a", "b"):
        write_status(control, AlignmentStatus(True, text))
        assert read_status(control) == AlignmentStatus(True, text)
    assert len(list(tmp_path.iterdir())) == 1


# -- beginnings -----------------------------------------------------------------------------------------


def seeded(folder: Path, brokers: Brokers, position: dict[str, Any], upstream: UpstreamJob) -> Job:
    """A job that begins where another one's checkpoint was; partitions added since begin at 0."""
    starts = {("t", int(p)): offset for p, offset in position["t"].items()}
    brokers.starting = lambda: {**dict.fromkeys(brokers.places(), 0), **starts}  # type: ignore[method-assign]
    folder.mkdir()
    return Job(folder, brokers, upstream, **{"flinkish.upstream.start": json.dumps(position)})


def test_a_seeded_job_begins_between_the_same_cuts(tmp_path: Path) -> None:
    brokers, upstream = Brokers("|1 a |2 b", "|1 c d e |2 f"), UpstreamJob(AlignmentMode.UNALIGNED)
    first = Job(tmp_path, brokers, upstream)
    offset = behind_cut_1(first, brokers)
    brokers.log.visible = [3, 2]
    first.offers(2)
    drawn = first.run(offset)
    brokers.log.visible = [4, 6]
    job = seeded(tmp_path / "seeded", brokers, drawn, upstream)
    start = job.reader.initialOffset()
    assert start == {**drawn, "flinkish:checkpoint": 0}
    assert job.latest(start)["t"] == {"0": 3, "1": 5}


def test_partitions_that_were_added_since_a_savepoint_wait_for_the_cut_that_holds_them(
    tmp_path: Path,
) -> None:
    """What they hold was written behind every barrier that they have not got."""
    brokers = Brokers("|1/2 a |2/2 b |3/3", "|1/2 c |2/2 |3/3", "n |3/3")
    brokers.known = 2
    first = Job(tmp_path, brokers)
    drawn = behind_cut_1(first, brokers)
    brokers.known, brokers.log.visible = 3, [3, 3, 1]
    job = seeded(tmp_path / "seeded", brokers, drawn, UpstreamJob())
    offset = job.reader.initialOffset()
    assert offset[UPSTREAM_KEY]["outside"] == {"t": [2]}
    job.offers(2)
    offset = job.run(offset)
    assert (offset["t"], cut_in(offset).checkpoint) == ({"0": 3, "1": 3, "2": 0}, CheckpointId(2))
    brokers.log.visible = [5, 4, 2]
    job.offers(3)
    offset = job.run(offset)
    assert (offset["t"], cut_in(offset).checkpoint) == ({"0": 5, "1": 4, "2": 2}, CheckpointId(3))


def test_a_savepoint_of_more_topics_is_no_cut_of_fewer(tmp_path: Path) -> None:
    brokers = Brokers("|1 a |2", "|1 b |2")
    drawn = behind_cut_1(Job(tmp_path, brokers), brokers)
    state = CutState.from_json({**drawn, "u": {"0": 7}}, AlignmentSettings(AlignmentMode.ALIGNED))
    assert state is not None
    position = {**drawn, "u": {"0": 7}, **state.to_json({("t", 0): 1, ("t", 1): 1, ("u", 0): 7})}
    job = seeded(tmp_path / "seeded", brokers, position, UpstreamJob())
    brokers.log.visible = [3, 3]
    job.offers(2)
    offset = job.run(job.reader.initialOffset())
    assert (offset["t"], cut_in(offset).checkpoint) == ({"0": 3, "1": 3}, CheckpointId(2))


def test_a_job_that_begins_with_a_savepoint_makes_the_folder_of_its_control_file(tmp_path: Path) -> None:
    brokers = Brokers("a |1", "|1")
    job = Job(tmp_path, brokers, **{"flinkish.control.path": str(tmp_path / "new" / "control" / "1-0.json")})
    job.latest(job.reader.initialOffset())
    written = sorted(path.name for path in (tmp_path / "new" / "control").iterdir())
    assert written == ["1-0.alignment", "1-0.rounds"]


def test_a_job_that_was_not_aligned_before_can_be(tmp_path: Path) -> None:
    job = Job(tmp_path, Brokers("a |1 b", "c |1"))
    job.offers(5)
    end = job.latest({"t": {"0": 1, "1": 0}, "flinkish:checkpoint": 4})
    assert (end["t"], end["flinkish:checkpoint"]) == ({"0": 2, "1": 2}, 5)
    # And the other way round: what is of no use is passed over.
    plain = {"kafka.bootstrap.servers": "localhost:9092", "subscribe": "t"}
    brokers = Brokers("a |1 b", "c |1")
    assert KafkaStreamReader(parse_stream(plain), brokers).latestOffset(end, ALL) == {  # type: ignore[arg-type]
        "t": {"0": 3, "1": 2}
    }


def asked(format: FlinkishKafka) -> Any:
    """Return the reader that answers; in Spark 4.1 another one stands before it."""
    made = format.streamReader(None)  # type: ignore[arg-type]
    return made if TELLS_READERS else made._reader  # type: ignore[attr-defined]


def test_the_format_makes_the_reader_that_its_options_ask_for() -> None:
    plain = {"kafka.bootstrap.servers": "localhost:9092", "subscribe": "t"}
    upstream = {"flinkish.upstream": UpstreamJob().to_option(), "flinkish.control.path": "/x/1.json"}
    assert type(asked(FlinkishKafka(plain))) is KafkaStreamReader
    made = asked(FlinkishKafka({**plain, **upstream}))
    assert type(made) is AlignedStreamReader
    assert vars(pickle.loads(pickle.dumps(made))) == {"_options": made._options}


def test_what_is_no_chained_source_names_no_cut() -> None:
    control = '{"flinkish:checkpoint": 7}'
    assert upstream_cut(f"v1\n{{}}\n-\n{control}\n5") == {}


def test_time_goes_on_where_a_chained_source_stands(tmp_path: Path) -> None:
    job = Job(tmp_path, Brokers("a b |1 c", "d |1 e f"), scans=2)
    at = job.run()
    job.control.write_text(json.dumps({"flinkish:watermark": 60_000}))
    end = job.latest(at)
    assert end == {**at, "flinkish:watermark": 60_000}
    assert job.reader.partitions(at, end) == []
    job.control.write_text(json.dumps({"flinkish:watermark": 70_000, "checkpoint": 3}))
    drawn = job.latest(end)
    assert (drawn["flinkish:watermark"], drawn["flinkish:checkpoint"]) == (70_000, 3)
    job.control.unlink()
    assert job.run(drawn)["flinkish:watermark"] == 70_000


def test_a_chained_source_drains_with_the_cut_that_it_draws(tmp_path: Path) -> None:
    job = Job(tmp_path, Brokers("a b |1 c", "d |1 e f"), scans=2)
    job.control.write_text(json.dumps({"checkpoint": 3, "purpose": "DRAINED_SAVEPOINT"}))
    end = job.run()
    while not end["flinkish:checkpoint"]:
        assert "flinkish:drain" not in end
        end = job.run(end)
    assert (end["flinkish:checkpoint"], end["flinkish:drain"]) == (3, 3)
    job.control.unlink()
    assert job.run(end)["flinkish:drain"] == 3
