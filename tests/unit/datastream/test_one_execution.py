"""One environment runs its job once at a time; what others do with it meanwhile does not touch the job."""

from __future__ import annotations

import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from flinkish_spark import ExecutionListener, MasterHook, MemorySink, Standby, StreamExecutionEnvironment
from flinkish_spark.checkpoint.ownership import JobLock
from flinkish_spark.contracts.source import Source
from flinkish_spark.core.errors import ConfigError, JobCancelledError, OwnedElsewhereError
from flinkish_spark.core.job_dir import open_job_dir
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.datastream import environment
from flinkish_spark.job.engine import JobProgress
from flinkish_spark.planning.stream_graph import SinkNode
from flinkish_spark.protocol.job_status import JobStatus
from tests.unit.planning.test_stream_settings import Session

PATIENCE_MS = 20_000


class Nowhere(Source):
    def load(self, spark: Any, control_path: str) -> Any:
        raise NotImplementedError


class Hook(MasterHook):
    """Notes what it is called for."""

    name = "feed"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def trigger(self, checkpoint_id: int) -> None:
        self.calls.append(f"trigger {checkpoint_id}")

    def restore(self, checkpoint_id: int, state: Any) -> None:
        self.calls.append("restore")

    def close(self) -> None:
        self.calls.append("close")


class Running:
    """A supervisor that takes the lock, runs until it is told to end, and ends as the real one does."""

    def __init__(self, engine: Any, settings: Any, job_dir: Any) -> None:
        self.engine, self.settings = engine, settings
        self.control = self
        self.states = self
        self.status, self.ends_as = JobStatus.RUNNING, JobStatus.SUSPENDED
        self.job_id, self.progress = "running", JobProgress()
        self.end, self.is_up, self.may_close = threading.Event(), threading.Event(), threading.Event()
        self.may_close.set()

    def stop_with_checkpoint(self) -> None:
        self.end.set()

    cancel = stop_with_checkpoint

    def run(self, on_left: Any) -> None:
        lock = JobLock(self.settings.job_dir.folder / "owner.lock")
        try:
            lock.acquire()
            self.is_up.set()
            self.end.wait(60)
        finally:
            self.status = self.ends_as
            self.may_close.wait(60)
            lock.release()
            self.settings.hooks.close()


@pytest.fixture(autouse=True)
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "Supervisor", Running)


def made(root: Any, *hooks: MasterHook, job: str = "orders") -> StreamExecutionEnvironment:
    session: Any = Session()
    env = StreamExecutionEnvironment(session, job, str(root))
    env.from_source(Nowhere(), uid="first")
    for hook in hooks:
        env.add_master_hook(hook)
    return env


def up(env: StreamExecutionEnvironment) -> Any:
    client = env.execute_async()
    supervisor: Any = client._supervisor
    assert supervisor.is_up.wait(PATIENCE_MS / 1000)
    return client


def test_a_second_execution_is_refused_and_the_first_never_notices(tmp_path: Any) -> None:
    hook = Hook()
    env = made(tmp_path / "job", hook)
    first = up(env)
    for again in (env.execute_async, env.execute, env.execute_async):
        with pytest.raises(OwnedElsewhereError, match="the job 'orders' of this environment runs") as refused:
            again()
        assert not refused.value.restartable
    assert hook.calls == [] and first.is_running
    first._supervisor.settings.hooks.trigger(7)
    assert hook.calls == ["trigger 7"]
    first.stop_with_checkpoint()
    first.stop_with_checkpoint()
    first.cancel()
    assert first.wait(PATIENCE_MS)
    first.stop_with_checkpoint()
    first.cancel()
    assert hook.calls == ["trigger 7", "close"]


def test_of_two_threads_that_start_at_once_one_is_refused(tmp_path: Any) -> None:
    env, at_once = made(tmp_path / "job"), threading.Barrier(8)
    clients: list[Any] = []
    refusals: list[str] = []

    def start() -> None:
        at_once.wait()
        try:
            clients.append(env.execute_async())
        except OwnedElsewhereError as error:
            refusals.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert (len(clients), len(refusals)) == (1, 7)
    clients[0].cancel()
    assert clients[0].wait(PATIENCE_MS)


def test_a_job_that_has_ended_or_is_just_ending_is_executed_again(tmp_path: Any) -> None:
    env = made(tmp_path / "job", Hook())
    first = up(env)
    first._supervisor.may_close.clear()
    first.cancel()
    while first.status is JobStatus.RUNNING:
        threading.Event().wait(0.01)
    threading.Timer(0.3, first._supervisor.may_close.set).start()
    # It is over, and still has the lock.
    second = up(env)
    assert not first.is_running and second.is_running
    second.cancel()
    assert second.wait(PATIENCE_MS)
    third = up(env)
    third.cancel()
    assert third.wait(PATIENCE_MS)


def test_a_job_that_could_not_start_may_be_executed_again(tmp_path: Any) -> None:
    owner = JobLock(tmp_path / "job" / "owner.lock")
    owner.acquire()
    env = made(tmp_path / "job", Hook())
    with pytest.raises(OwnedElsewhereError, match=r"owned by process \d+ on .* \(this one\), which is alive"):
        env.execute()
    owner.release()
    client = up(env)
    client.cancel()
    assert client.wait(PATIENCE_MS)


def test_a_second_start_is_refused_before_there_is_a_session(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_session() -> None:
        raise AssertionError("a JVM was started")

    builder = SimpleNamespace(appName=lambda name: SimpleNamespace(getOrCreate=no_session))
    sessions = SimpleNamespace(getActiveSession=lambda: None, builder=builder)
    monkeypatch.setattr("pyspark.sql.SparkSession", sessions)
    monkeypatch.setattr(environment.session, "check_java", lambda: None)
    begin = StreamExecutionEnvironment.get_execution_environment
    for given in (None, builder):
        with pytest.raises(AssertionError, match="a JVM was started"):
            begin("orders", str(tmp_path / "job"), builder=given)
    assert not (tmp_path / "job").exists()
    owner = JobLock(tmp_path / "job" / "owner.lock")
    owner.acquire()
    with pytest.raises(OwnedElsewhereError, match="which is alive"):
        begin("orders", str(tmp_path / "job"), builder=builder)
    with pytest.raises(AssertionError, match="a JVM was started"):
        begin("orders", str(tmp_path / "job"), standby=Standby.WAIT)
    owner.release()
    with pytest.raises(AssertionError, match="a JVM was started"):
        begin("orders", str(tmp_path / "job"))


def test_a_cancelled_job_raises_where_it_was_waited_for(tmp_path: Any) -> None:
    """So the exit status of its program is not 0."""
    env = made(tmp_path / "job", Hook())
    env.register_job_listener(Cancels())
    with pytest.raises(JobCancelledError, match="the job 'orders' was cancelled") as cancelled:
        env.execute()
    assert "goes on from its last checkpoint" in cancelled.value.what_to_do


class Cancels(ExecutionListener):
    def on_job_submitted(self, client: Any, error: BaseException | None) -> None:
        client._supervisor.ends_as = JobStatus.CANCELED
        client.cancel()


@pytest.mark.parametrize(
    ("cores", "max_parallelism", "partitions"), [(2, 128, 4), (1, 128, 2), (64, 32, 32), (500, 1_024, 200)]
)
def test_a_new_job_has_two_tasks_for_each_core_and_says_so(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], cores: int, max_parallelism: int, partitions: int
) -> None:
    env = made(tmp_path / "job", Hook())
    session: Any = env.spark
    session.conf, session.sparkContext = {}, SimpleNamespace(defaultParallelism=cores)
    env.set_max_parallelism(max_parallelism)
    assert env._partitions() == partitions
    env._say_partitions()
    assert f"'orders' begins with {partitions} shuffle partitions" in capsys.readouterr().err
    # A number that somebody has set counts, and nothing is said of it.
    session.conf["spark.sql.shuffle.partitions"] = "7"
    env._say_partitions()
    assert (env._partitions(), capsys.readouterr().err) == (7, "")


def test_tasks_on_this_machine_have_this_python(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an environment is used and not activated, python3 is another one."""
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    for master, conf, expected in (
        ("local[2]", {}, sys.executable),
        ("local[2]", {"spark.pyspark.python": "/named"}, "python3"),
        ("spark://there:7077", {}, "python3"),
    ):
        session: Any = Session()
        session.sparkContext = SimpleNamespace(master=master, pythonExec="python3", getConf=dict)
        session._jvm, session.conf = object(), conf
        StreamExecutionEnvironment(session, "orders", str(tmp_path))
        assert session.sparkContext.pythonExec == expected
    monkeypatch.setenv("PYSPARK_PYTHON", "/named")
    session.sparkContext.master = "local[2]"
    StreamExecutionEnvironment(session, "orders", str(tmp_path))
    assert session.sparkContext.pythonExec == "python3"


def test_a_job_directory_keeps_the_number_that_it_has(tmp_path: Any) -> None:
    open_job_dir(StoreSpec(str(tmp_path))).read_or_create_job({"job": "orders"}, {"shuffle_partitions": 5})
    env = made(tmp_path)
    session: Any = env.spark
    session.conf, session.sparkContext = {}, SimpleNamespace(defaultParallelism=8)
    assert env._partitions() == 5
    session.conf["spark.sql.shuffle.partitions"] = "6"
    assert env._partitions() == 6


def test_two_environments_over_one_directory_exclude_each_other(tmp_path: Any) -> None:
    first_hook, second_hook = Hook(), Hook()
    first = up(made(tmp_path / "job", first_hook))
    second = made(tmp_path / "job", second_hook).execute_async()
    with pytest.raises(OwnedElsewhereError, match="stop the job that runs here first"):
        second.wait(PATIENCE_MS)
    assert first.is_running and first_hook.calls == []
    first.cancel()
    assert first.wait(PATIENCE_MS)


def test_one_hook_object_is_in_one_job_at_a_time(tmp_path: Any) -> None:
    hook, other = Hook(), Hook()
    other.name = "other"
    first = up(made(tmp_path / "a", hook))
    second = made(tmp_path / "b", other, hook, job="payments")
    with pytest.raises(ConfigError, match="the master hook 'feed' is in another job that runs"):
        second.execute_async()
    assert hook.calls == [] and first.is_running
    # What the refused job has beside it was not taken.
    beside = up(made(tmp_path / "c", other))
    for client in (beside, first):
        client.cancel()
        assert client.wait(PATIENCE_MS)
    client = up(second)
    client.cancel()
    assert client.wait(PATIENCE_MS)
    assert hook.calls == ["close", "close"]


def test_what_is_declared_while_the_job_runs_belongs_to_the_next_execution(tmp_path: Any) -> None:
    """A restart of the query plans the graph again: it must be the one that was executed."""
    env = made(tmp_path / "job")
    first_source = env.graph.sources[0]
    env.graph.sinks.append(SinkNode("first-sink", first_source, MemorySink("m")))
    first = up(env)
    stream = env.from_source(Nowhere(), uid="second")
    env.graph.sinks.append(SinkNode("second-sink", stream._node, MemorySink("m")))
    assert [node.uid for node in first._supervisor.engine.sources] == ["first"]
    with pytest.raises(OwnedElsewhereError, match="Nobody can add a master hook"):
        env.add_master_hook(Hook())
    first.cancel()
    assert first.wait(PATIENCE_MS)
    second = up(env)
    assert [node.uid for node in second._supervisor.engine.sources] == ["first", "second"]
    second.cancel()
    assert second.wait(PATIENCE_MS)


def test_a_child_that_was_forked_executes_no_job_of_its_parent(tmp_path: Any) -> None:
    env = made(tmp_path / "job")
    child = os.fork()
    if child == 0:
        try:
            env.execute_async()
        except ConfigError as error:
            os._exit(7 if "belongs to another process" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not (tmp_path / "job").exists()
