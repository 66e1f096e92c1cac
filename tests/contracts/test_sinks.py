"""What every sink must hold in a job: one job with all of them goes through all that may happen to one.

The script runs once and notes what readers see behind each phase; a test looks at one sink behind one phase.
What a sink must hold without a job is in `flinkish_spark.testing.sink_contract`, kills are in tests/crash.
"""

from __future__ import annotations

import contextlib
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import flinkish_spark.sinks
from demo.app import RunningTotal
from demo.orders import Order, Total
from flinkish_spark import (
    CheckpointConfig,
    CheckpointPurpose,
    CheckpointStatistics,
    CheckpointStatus,
    DeltaSink,
    FileSink,
    ForeachCheckpointSink,
    ForeachSink,
    IcebergSink,
    JdbcSink,
    JobClient,
    Json,
    KafkaSink,
    KafkaSource,
    MemorySink,
    ParticipantStatistics,
    PrintSink,
    RestoreSettings,
    SinkWithDeadLetters,
    StreamExecutionEnvironment,
    TaskState,
    TwoPhaseCommitSink,
)
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.contracts.sink import Sink
from flinkish_spark.core.steps import SilentObserver, Step
from flinkish_spark.protocol.checkpoint import ParticipantKind
from flinkish_spark.protocol.plan_layout import OWN_KEYS
from flinkish_spark.protocol.savepoints import SavepointMetadata
from tests.contracts.script import FailingOnce, Stumbling, bring, checkpoint
from tests.contracts.sinks import BEFORE_FAILURE, CALLING, SEEN_AGAIN, UIDS, Branches, expected
from tests.crash.families_app import ORDER, TOTAL
from tests.crash.families_rig import Servers
from tests.crash.sweep.places import PARTITIONS
from tests.support import effort
from tests.support.databases import TestDatabase
from tests.support.jobs import await_that, environment, produce, rows
from tests.support.savepoint_support import started, stop, stop_with

#: In their order; each but `idle` has input of its own. `savepoint`: the job has been stopped with one.
#: `scale up`: restored from it into a new directory, with more tasks. At night
#: `scale down`: started again with fewer.
PHASES = ("start", "idle", "failure", "savepoint", "scale up", *(["scale down"] if effort.is_night else []))
_TASKS, _MORE_TASKS, _FEWER_TASKS = 2, 4, 1
_USERS, _ORDERS = 9, 40
#: So short that periodic checkpoints would come in every phase, if they were not switched off.
_INTERVAL_MS = 200
_FAILS_BEHIND = BEFORE_FAILURE[-1]
_AT = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Run:
    """What the script has noted."""

    #: By phase: the orders so far, and what readers of each sink see.
    orders: dict[str, list[bytes]] = field(default_factory=dict)
    seen: dict[str, dict[str, Counter[Any]]] = field(default_factory=dict)
    #: Taken on the idle stream.
    idle: list[CheckpointStatistics] = field(default_factory=list)
    #: Of the first job, before its end.
    rows_by_sink: Mapping[str, int] = field(default_factory=dict)
    tasks: Mapping[str, TaskState] = field(default_factory=dict)
    restarts: int = 0
    while_paused: tuple[CheckpointStatistics, ...] = ()
    resumed: tuple[CheckpointStatistics, ...] = ()
    savepoint: SavepointMetadata | None = None
    #: Rows of each checkpoint of the first job, and what the calling sinks were told a second time.
    by_checkpoint: Mapping[int, list[Total]] = field(default_factory=dict)
    again: list[tuple[int, int]] = field(default_factory=list)
    told_each: Mapping[tuple[int, int], list[Total]] = field(default_factory=dict)


class Totals(RunningTotal):
    """The demo's totals, of which one attempt of a task fails."""

    def __init__(self, failing: FailingOnce) -> None:
        self.failing = failing

    def process_element(self, order: Any, ctx: Any) -> Iterator[Any]:
        for row in super().process_element(order, ctx):
            self.failing.maybe()
            yield row


class Script:
    """Runs the job through the phases."""

    def __init__(self, spark: Any, directory: Path, servers: Servers, topic: str, branches: Branches) -> None:
        self._spark, self._directory, self._topic, self._branches = spark, directory, topic, branches
        self._servers = servers.broker.bootstrap_servers
        self._failing = FailingOnce(directory / "armed")
        self._sent: list[bytes] = []
        self.run = Run()

    def play(self) -> Run:
        stumbling, savepoint = Stumbling(), self._directory / "savepoint"
        self._send()
        with started(self._job("first", stumbling), partitions=_TASKS) as client:
            client.pause_periodic_checkpoints()
            self._bring(client, 1)
            self._note("start")
            self.run.idle = [checkpoint(client) for _ in range(2)]
            self._note("idle")
            self._fail(client, stumbling)
            self._measure(client)
            client.pause_periodic_checkpoints()
            self._send()
            self._bring(client, 3)
            self.run.savepoint = stop_with(client, savepoint)
        self._note("savepoint")
        self._branches.called.start += 1
        restore = RestoreSettings(str(savepoint))
        self._again("scale up", _MORE_TASKS, restore)
        if effort.is_night:
            self._branches.called.start += 1
            self._again("scale down", _FEWER_TASKS)
        return self.run

    def _fail(self, client: JobClient, stumbling: Stumbling) -> None:
        """Let a task's attempt fail, and the query between the commits of two sinks."""
        stumbling.left.append(("after", Step.SINK_COMMIT, _FAILS_BEHIND))
        self._failing.arm()
        self._send()
        self._bring(client, 2)
        assert not stumbling.left and not self._failing.is_armed
        self._note("failure")
        called = self._branches.called
        self.run.by_checkpoint = self._branches.memory.rows_by_checkpoint()
        self.run.again, self.run.told_each = list(called.again), called.rows_by_checkpoint()

    def _measure(self, client: JobClient) -> None:
        self.run.rows_by_sink, self.run.tasks = dict(client.progress.rows_by_sink), client.tasks
        self.run.restarts = client.progress.restarts
        self.run.while_paused = client.statistics.entries
        client.resume_periodic_checkpoints()
        await_that(lambda: _periodic(client), client)
        self.run.resumed = client.statistics.entries

    def _again(self, phase: str, tasks: int, restore: RestoreSettings | None = None) -> None:
        self._send()
        with started(self._job("second", SilentObserver()), restore, tasks) as client:
            client.pause_periodic_checkpoints()
            self._bring(client, 1)
            stop(client)
        self._note(phase)

    def _job(self, name: str, observer: Any) -> StreamExecutionEnvironment:
        env = environment(
            self._spark,
            self._directory / name,
            checkpoint=CheckpointConfig(interval_ms=_INTERVAL_MS),
            max_parallelism=8,
        )
        env.observe(observer)
        source = KafkaSource(self._servers, [self._topic], value=Json(ORDER))
        orders = env.from_source(source, uid="orders").key_by("user")
        totals = orders.process(Totals(self._failing), output=TOTAL, uid="totals")
        for uid in UIDS:
            totals.sink_to(self._branches.make(uid), uid=uid)
        return env

    def _send(self) -> None:
        """Put orders of every user into the topic, each user's into one partition."""
        first = len(self._sent)
        at = range(first, first + _ORDERS)
        made = [Order(f"user-{n % _USERS}", "apple", n, _AT) for n in at]
        for partition in range(PARTITIONS):
            values = [order.value for order in made if int(order.user[-1]) % PARTITIONS == partition]
            produce(self._servers, self._topic, values, partition=partition)
        self._sent += [order.value for order in made]

    def _bring(self, client: JobClient, rounds: int) -> None:
        """Wait until so many rounds of orders are committed in every sink by this start."""
        wanted = rounds * _ORDERS
        bring(client, lambda: all(rows(client, uid) >= wanted for uid in UIDS))

    def _note(self, phase: str) -> None:
        self.run.orders[phase], self.run.seen[phase] = list(self._sent), self._branches.look()


def _periodic(client: JobClient) -> list[CheckpointStatistics]:
    return [one for one in client.statistics.entries if one.purpose is CheckpointPurpose.PERIODIC]


@pytest.fixture(scope="module")
def mariadb(service: Callable[[str], Any]) -> Iterator[TestDatabase | None]:
    """A database of its own; by night."""
    if not effort.is_night:
        yield None
        return
    server, name = service("mariadb"), f"contract_{uuid.uuid4().hex[:12]}"
    with server.connect() as connection, connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
    found = TestDatabase(server.url.replace(f"/{server.database}", f"/{name}"), server.user, server.password)
    yield found
    found.close()


@pytest.fixture(scope="module")
def run(
    spark: Any,
    service: Callable[[str], Any],
    topic: Callable[..., str],
    mariadb: TestDatabase | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    servers = Servers(service("broker"), service("postgres"))
    branches = Branches(tmp_path_factory.mktemp("sinks"), servers, mariadb)
    with KafkaAdmin(KafkaConnection(servers.broker.bootstrap_servers)) as admin:
        for name in branches.topics:
            admin.create_topic(name, PARTITIONS)
    script = Script(spark, tmp_path_factory.mktemp("job"), servers, topic(PARTITIONS), branches)
    with contextlib.closing(branches), contextlib.redirect_stdout(branches.printed):
        return script.play()


def test_no_sink_is_missing() -> None:
    """Whoever adds a sink adds it here."""
    public = {getattr(flinkish_spark.sinks, name) for name in dir(flinkish_spark.sinks)}
    kinds = {one for one in public if isinstance(one, type) and issubclass(one, Sink)}
    known = {DeltaSink, FileSink, ForeachCheckpointSink, ForeachSink, IcebergSink, JdbcSink, KafkaSink}
    assert kinds == known | {MemorySink, PrintSink, TwoPhaseCommitSink, SinkWithDeadLetters}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("sink", UIDS)
def test_readers_see_the_input_so_far_each_row_once(run: Run, sink: str, phase: str) -> None:
    seen, wanted = run.seen[phase][sink], expected(sink, run.orders[phase])
    missing, surplus = wanted - seen, seen - wanted
    assert not missing
    if sink in SEEN_AGAIN and PHASES.index(phase) >= PHASES.index("failure"):
        # The documents say so: the one checkpoint whose commits were cut off, and all of it.
        assert surplus in [Counter(rows) for rows in run.by_checkpoint.values()]
    else:
        assert not surplus


@pytest.mark.parametrize("sink", UIDS)
def test_a_checkpoint_of_an_idle_stream_completes_with_nothing_in_it(run: Run, sink: str) -> None:
    for one in run.idle:
        mine = _participant(one, sink)
        assert (one.status, mine.is_acknowledged, mine.rows) == (CheckpointStatus.COMPLETED, True, 0)


@pytest.mark.parametrize("sink", CALLING)
def test_a_function_is_told_of_a_cut_off_checkpoint_again_as_a_whole(run: Run, sink: str) -> None:
    """In the same order, with the same id; `Called.together` has compared the rows."""
    (again,) = run.again
    told = run.told_each[again]
    half = len(told) // 2
    assert told[:half] == told[half:]
    assert Counter(told[:half]) == Counter(run.by_checkpoint[again[1]])


@pytest.mark.parametrize("sink", UIDS)
def test_a_sink_is_measured(run: Run, sink: str) -> None:
    """Progress counts every row once, over the restart too; so do the statistics of all checkpoints."""
    staged = len(run.orders["failure"])
    assert run.rows_by_sink[sink] == staged
    assert run.tasks[sink] is TaskState.RUNNING
    mine = [_participant(one, sink) for one in run.while_paused]
    assert all(one.is_acknowledged and one.kind is ParticipantKind.SINK for one in mine)
    assert all(one.barriers == _TASKS for one in mine)
    assert sum(one.rows for one in mine) == staged


def test_the_failure_was_one(run: Run) -> None:
    assert run.restarts >= 1


@pytest.mark.parametrize("sink", UIDS)
def test_a_savepoint_names_the_sink(run: Run, sink: str) -> None:
    assert run.savepoint is not None
    (chain,) = run.savepoint.chains
    assert sink in chain.sinks
    (positions,) = (at for topic, at in chain.positions["orders"].items() if not topic.startswith(OWN_KEYS))
    assert sum(positions.values()) == len(run.orders["savepoint"])


def test_periodic_checkpoints_come_unless_they_are_paused(run: Run) -> None:
    """Those that were asked for came meanwhile, and a restart of the query changed nothing."""
    assert {one.purpose for one in run.while_paused} == {CheckpointPurpose.USER}
    assert len(run.while_paused) > len(run.idle) and run.restarts
    newer = [one for one in run.resumed if one.checkpoint > run.while_paused[-1].checkpoint]
    assert newer and {one.purpose for one in newer} == {CheckpointPurpose.PERIODIC}


def _participant(checkpoint: CheckpointStatistics, uid: str) -> ParticipantStatistics:
    (found,) = [one for one in checkpoint.participants if one.uid == uid]
    return found
