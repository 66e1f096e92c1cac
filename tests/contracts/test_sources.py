"""What every source must hold in a job: one job over all of them goes through all that may happen to one.

The script runs once and notes what has come out behind each phase; a test looks at one source behind one
phase. What a source cannot do by its nature is asserted as the documents say it. Kills are in tests/crash.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import flinkish_spark.sources
from flinkish_spark import (
    CheckpointConfig,
    CheckpointStatistics,
    CheckpointStatus,
    JobClient,
    KeyedProcessFunction,
    MemorySink,
    NonRestoredState,
    RestoreSettings,
    StreamExecutionEnvironment,
    TaskState,
    UnpositionedSources,
    ValueStateDescriptor,
)
from flinkish_spark.contracts.source import Source
from flinkish_spark.core.errors import InputLostError, UserError
from flinkish_spark.core.steps import SilentObserver, Step
from flinkish_spark.latency import LatencyGranularity
from flinkish_spark.protocol.restore import Misfit
from flinkish_spark.protocol.savepoints import SavepointMetadata
from flinkish_spark.sources import (
    CollectionSource,
    DataGeneratorSource,
    DeltaSource,
    DeltaTableSource,
    FileSource,
    HybridSource,
    IcebergSource,
    KafkaRecordsSource,
    KafkaSource,
    SocketTextSource,
    SplitSource,
)
from tests.contracts.script import FailingOnce, Stumbling, bring, checkpoint
from tests.contracts.sources import BEGINNING_ANEW, BOUNDED, LINES, PARTS, POSITIONED, UIDS, Inputs, Lines
from tests.support import effort
from tests.support.jobs import await_that, environment
from tests.support.savepoint_support import failure, started, stop, stop_with

#: In their order. `failure`: a task has failed, and the query in front of a micro-batch's end. `savepoint`:
#: stopped with one. `scale up`: restored from it with more tasks. At night `scale down`: with fewer.
PHASES = ("start", "idle", "failure", "savepoint", "scale up", *(["scale down"] if effort.is_night else []))
_TASKS, _MORE_TASKS, _FEWER_TASKS = 2, 3, 1
NUMBERED = "source STRING, origin STRING, place LONG, line STRING"
#: Whose offsets are numbers of records.
COUNTED = ("kafka", "kafka-records", "generator", "collection", "own")
_TRUST = UnpositionedSources.BEGIN_WHERE_THEY_ARE


class Numbering(KeyedProcessFunction):
    """Puts a record's place among those of its origin beside it; one attempt of a task fails."""

    def __init__(self, failing: FailingOnce) -> None:
        self.failing = failing

    def open(self, context: Any) -> None:
        self.count = context.get_state(ValueStateDescriptor("count", "LONG", default=0))

    def process_element(self, record: Any, ctx: Any) -> Iterator[Any]:
        place = self.count.value()
        self.count.update(place + 1)
        yield record.source, record.origin, place, record.line
        self.failing.maybe()


@dataclass
class Run:
    """What the script has noted."""

    #: By phase: what each source has brought by then, and what it had to bring.
    seen: dict[str, dict[str, Lines]] = field(default_factory=dict)
    wanted: dict[str, dict[str, Lines]] = field(default_factory=dict)
    #: Taken on the idle stream.
    idle: list[CheckpointStatistics] = field(default_factory=list)
    #: Of the first job: before its end, and its savepoint.
    tasks: Mapping[str, TaskState] = field(default_factory=dict)
    measured: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    savepoint: SavepointMetadata | None = None
    books: dict[str, dict[str, int]] = field(default_factory=dict)
    #: How a restore ends as if nothing were special, and how with trust in Spark's own readers.
    restored_at_once: Exception | None = None
    restored_with_trust: Exception | None = None


class Script:
    """Runs the job through the phases."""

    def __init__(self, spark: Any, directory: Path, inputs: Inputs) -> None:
        self._spark, self._directory, self._inputs = spark, directory, inputs
        self._failing = FailingOnce(directory / "armed")
        self._memory = MemorySink(f"{directory}-numbered")
        self._plain = {uid: MemorySink(f"{directory}-{uid}") for uid in UIDS if uid not in POSITIONED}
        #: What jobs that have ended have read of sources that begin anew.
        self._before: dict[str, Lines] = {uid: defaultdict(list) for uid in BEGINNING_ANEW}
        self.run = Run()

    def play(self) -> Run:
        savepoint, again = self._directory / "savepoint", self._directory / "again"
        stumbling = Stumbling()
        self._inputs.grow()
        with started(self._job("first", "socket", stumbling), partitions=_TASKS) as client:
            client.pause_periodic_checkpoints()
            self._inputs.send(connection=1)
            self._bring(client)
            self._note("start")
            self.run.idle = [checkpoint(client) for _ in range(2)]
            self._note("idle")
            self._fail(client, stumbling)
            self._inputs.grow()
            self._inputs.send(connection=2)
            self._bring(client)
            self._measure(client)
            self.run.savepoint = stop_with(client, savepoint)
        self._note("savepoint")
        self._refusals(savepoint)
        with self._restored("second", savepoint, _MORE_TASKS, connection=3) as client:
            stop_with(client, again)
        self._note("scale up")
        if effort.is_night:
            with self._restored("third", again, _FEWER_TASKS, connection=4) as client:
                stop(client)
            self._note("scale down")
        return self.run

    def _fail(self, client: JobClient, stumbling: Stumbling) -> None:
        # What came over the socket and was not written down is lost with the query; everything else is not.
        self._inputs.send(connection=1)
        wanted = 2 * LINES
        await_that(lambda: self._inputs.received(self._directory / "first") == wanted, client)
        self._failing.arm()
        stumbling.left.append(("before", Step.STAGED_FILE, ""))
        self._inputs.grow()
        self._bring(client)
        assert not stumbling.left and not self._failing.is_armed
        self._note("failure")

    def _measure(self, client: JobClient) -> None:
        self.run.tasks, self.run.restarts = client.tasks, client.progress.restarts
        for at, histogram in client.latencies.group_by(LatencyGranularity.OPERATOR).items():
            self.run.measured[str(at.source)] = histogram.count

    def _refusals(self, savepoint: Path) -> None:
        """Try what does not work with these sources: nothing of it is to leave a trace."""
        allow = NonRestoredState.ALLOW
        at_once = RestoreSettings(str(savepoint), non_restored=allow)
        trusting = RestoreSettings(str(savepoint), non_restored=allow, unpositioned=_TRUST)
        self.run.restored_at_once = failure(self._job("none", "socket", is_whole=False), at_once)
        self.run.restored_with_trust = failure(self._job("none", "socket", is_whole=False), trusting)
        assert not (self._directory / "none").exists()

    @contextlib.contextmanager
    def _restored(self, name: str, savepoint: Path, tasks: int, connection: int) -> Iterator[JobClient]:
        """Run a job from a savepoint until it has brought another round of input."""
        for uid in BEGINNING_ANEW:
            for origin, lines in self._inputs.lines[uid].items():
                self._before[uid][origin] += lines
        settings = RestoreSettings(str(savepoint), unpositioned=_TRUST, non_restored=NonRestoredState.ALLOW)
        self._inputs.grow()
        with started(self._job(name, f"socket-{name}"), settings, tasks) as client:
            client.pause_periodic_checkpoints()
            self._inputs.send(connection)
            self._bring(client)
            yield client

    def _job(
        self, name: str, socket_uid: str, observer: Any = None, is_whole: bool = True
    ) -> StreamExecutionEnvironment:
        """Return the job, or that part of it whose sources have no place in savepoints."""
        env = environment(
            self._spark,
            self._directory / name,
            checkpoint=CheckpointConfig(interval_ms=1_000),
            max_parallelism=8,
            latency_tracking_interval_ms=1,
        )
        env.observe(observer or SilentObserver())
        uids = [uid for uid in UIDS if uid not in PARTS and (is_whole or uid in self._plain)]
        streams = dict(self._inputs.streams(env, uids, socket_uid))
        if is_whole:
            first, *others = (streams[uid] for uid in uids if uid in POSITIONED)
            numbered = first.union(*others).key_by("source", "origin")
            numbered = numbered.process(Numbering(self._failing), output=NUMBERED, uid="numbered")
            numbered.sink_to(self._memory, uid="all-out")
        for uid, sink in self._plain.items():
            streams[uid].sink_to(sink, uid=f"{uid}-out")
        return env

    # -- looking ----------------------------------------------------------------------------------
    def _bring(self, client: JobClient) -> None:
        wanted = {uid: _count(lines) for uid, lines in self._wanted().items()}
        bring(client, lambda: {uid: _count(lines) for uid, lines in self._seen().items()} == wanted)

    def _wanted(self) -> dict[str, Lines]:
        found = {uid: {o: list(ls) for o, ls in lines.items()} for uid, lines in self._inputs.lines.items()}
        for uid, lines in self._before.items():
            for origin, earlier in lines.items():
                found[uid][origin] = earlier + found[uid].get(origin, [])
        return found

    def _seen(self) -> dict[str, Lines]:
        """Return what came out, of the sources that are numbered in the order of the numbers."""
        found: dict[str, Lines] = {uid: defaultdict(list) for uid in UIDS}
        rows = sorted(self._memory.rows(), key=lambda row: row.place)
        for row in [*rows, *(row for sink in self._plain.values() for row in sink.rows())]:
            found[row.source][row.origin].append(row.line)
        return found

    def _note(self, phase: str) -> None:
        self.run.seen[phase], self.run.wanted[phase] = self._seen(), self._wanted()
        self.run.books[phase] = self._inputs.told()
        for row in self._memory.rows():
            assert row.place < len(self.run.seen[phase][row.source][row.origin]), row


def _count(lines: Lines) -> int:
    return sum(map(len, lines.values()))


@pytest.fixture(scope="module")
def run(
    spark: Any, broker: Any, topic: Callable[[int], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    inputs = Inputs(spark, tmp_path_factory.mktemp("inputs"), broker.bootstrap_servers, topic)
    with contextlib.closing(inputs.peer):
        yield Script(spark, tmp_path_factory.mktemp("jobs"), inputs).play()


def test_no_source_is_missing() -> None:
    """Whoever adds a source adds it here."""
    public = {getattr(flinkish_spark.sources, name) for name in dir(flinkish_spark.sources)}
    kinds = {one for one in public if isinstance(one, type) and issubclass(one, Source)}
    bounded = {CollectionSource, DataGeneratorSource, DeltaTableSource}
    growing = {DeltaSource, FileSource, HybridSource, IcebergSource, KafkaRecordsSource, KafkaSource}
    assert kinds == bounded | growing | {SocketTextSource, SplitSource}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("source", UIDS)
def test_the_input_so_far_comes_out_each_record_once(run: Run, source: str, phase: str) -> None:
    """In the order of each split, where the source has one; places count on over restarts and restores.

    Of a source that begins anew in a restored job: the input once more.
    """
    seen, wanted = run.seen[phase][source], run.wanted[phase][source]
    assert wanted and min(map(len, wanted.values()))
    if source in POSITIONED:
        assert seen == wanted
    else:
        assert _counted(seen) == _counted(wanted)


def _counted(lines: Lines) -> dict[str, Counter[str]]:
    return {origin: Counter(own) for origin, own in lines.items()}


def test_a_checkpoint_of_idle_sources_completes_with_nothing_in_it(run: Run) -> None:
    for one in run.idle:
        assert (one.status, one.rows) == (CheckpointStatus.COMPLETED, 0)


def _known_as(source: str) -> str:
    """Return the uid in the job."""
    return "hybrid" if source in PARTS else source


@pytest.mark.parametrize("source", UIDS)
def test_a_source_is_measured(run: Run, source: str) -> None:
    """Its state, and how long its records take: the metrics that there are of a single source.

    One that has ended is said to be running until the job ends.
    """
    assert run.tasks[_known_as(source)] is TaskState.RUNNING
    assert run.measured[_known_as(source)] > 0


def test_the_query_has_failed(run: Run) -> None:
    assert run.restarts >= 1


@pytest.mark.parametrize("source", UIDS)
def test_a_savepoint_has_the_place_of_the_source(run: Run, source: str) -> None:
    assert run.savepoint is not None
    uid = _known_as(source)
    (position,) = [chain.positions[uid] for chain in run.savepoint.chains if uid in chain.positions]
    assert position
    if source in COUNTED:
        offsets, done = _splits(position, source)
        assert sorted(offsets.values()) == sorted(map(len, run.wanted["savepoint"][source].values()))
        assert done == (set(offsets) if source in BOUNDED else set())


def _splits(position: Any, source: str) -> tuple[dict[str, int], set[str]]:
    """Return the offsets of a source's splits, or topics' partitions, and which of them have ended."""
    if "flinkish:splits" not in position:
        return {f"{t} {p}": at for t, own in position.items() for p, at in own.items()}, set()
    begin = f"{1 + PARTS.index(source)}:" if source in PARTS else ""
    splits = {split: at for split, at in position["flinkish:splits"] if split.startswith(begin)}
    return splits, set(splits) & set(position.get("flinkish:done", ()))


@pytest.mark.parametrize("phase", PHASES)
def test_a_source_of_ones_own_is_told_what_is_committed(run: Run, phase: str) -> None:
    assert run.books[phase] == {book: len(lines) for book, lines in run.seen[phase]["own"].items()}


@pytest.mark.parametrize("source", BEGINNING_ANEW)
def test_a_restore_of_a_reader_of_sparks_own_wants_trust(run: Run, source: str) -> None:
    assert isinstance(run.restored_at_once, UserError)
    problems = {problem.subject: problem.misfit for problem in run.restored_at_once.facts["problems"]}
    assert problems == dict.fromkeys(BEGINNING_ANEW, Misfit.NOT_POSITIONABLE)
    assert source in problems


def test_a_restore_of_a_socket_is_refused_under_its_uid(run: Run) -> None:
    """Under another one it goes on with what comes, as the phases behind it show."""
    assert isinstance(run.restored_with_trust, InputLostError), run.restored_with_trust
    assert "'socket' cannot go on where the savepoint stood" in str(run.restored_with_trust)
