"""What came of an execution, and who is told of its beginning and its end."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from flinkish_spark import ExecutionListener, JobExecutionResult, StreamExecutionEnvironment
from flinkish_spark.core.errors import ConfigError, GraphError
from flinkish_spark.job.client import JobClient
from flinkish_spark.job.engine import JobProgress
from flinkish_spark.protocol.job_status import JobStatus
from tests.support.job_graphs import Session


class Supervisor:
    """Runs a job that ends at once, well or with an error."""

    def __init__(self, failure: BaseException | None = None) -> None:
        self.job_id, self.name, self.failure = "a" * 32, "orders", failure
        self.control = self
        self.progress = JobProgress(accumulators={"read": 7})
        self.states = self
        self.status = JobStatus.FINISHED

    def stop_with_checkpoint(self) -> None:
        """Do nothing: it has ended."""

    def run(self, on_left: Any) -> None:
        if self.failure is not None:
            raise self.failure


class Noting(ExecutionListener):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_job_submitted(self, client: Any, error: Any) -> None:
        self.seen.append(("submitted", client, error))

    def on_job_executed(self, result: Any, error: Any) -> None:
        self.seen.append(("executed", result, error))
        raise RuntimeError("a listener of the user's that fails")


def client(*listeners: ExecutionListener, failure: BaseException | None = None) -> JobClient:
    supervisor: Any = Supervisor(failure)
    return JobClient(supervisor, None, listeners)


def test_an_execution_that_ended_says_what_came_of_it() -> None:
    noting = Noting()
    result = client(noting).get_job_execution_result()
    assert isinstance(result, JobExecutionResult)
    assert (result.get_job_id(), result.status) == ("a" * 32, JobStatus.FINISHED)
    assert 0 <= result.get_net_runtime() < 60_000
    assert result.get_accumulator_result("read") == 7
    assert result.get_all_accumulator_results() == {"read": 7}
    with pytest.raises(KeyError):
        result.get_accumulator_result("none")
    assert [(what, error) for what, _, error in noting.seen] == [("executed", None)]
    assert noting.seen[0][1] == result


def test_a_client_has_the_words_of_a_streaming_query() -> None:
    ended = client()
    assert ended.awaitTermination() is None and ended.awaitTermination(0.5) is True
    assert not ended.isActive and ended.exception() is None
    assert (ended.id, ended.name) == ("a" * 32, "orders")
    assert uuid.UUID(ended.runId) != uuid.UUID(client().runId)
    assert ended.lastProgress is None and ended.recentProgress == []
    ended.progress.batches = 3
    assert ended.lastProgress == ended.recentProgress[0]
    assert {"name": "orders", "batches": 3}.items() <= (ended.lastProgress or {}).items()


def test_a_query_that_failed_says_why_and_can_be_stopped() -> None:
    failed = client(failure=ConfigError("it is broken"))
    with pytest.raises(ConfigError, match="it is broken"):
        failed.awaitTermination(10)
    assert str(failed.exception()) == "it is broken."
    failed.stop()


def test_one_that_failed_tells_the_error_and_raises_it() -> None:
    noting, failure = Noting(), GraphError("no")
    failed = client(noting, failure=failure)
    with pytest.raises(GraphError):
        failed.get_job_execution_result()
    assert noting.seen == [("executed", None, failure)]


def test_a_job_that_is_refused_at_once_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = Session()
    env, noting = StreamExecutionEnvironment(session, "job", "/jobs/any"), Noting()
    env.register_job_listener(noting)
    env.set_parallelism(4)
    session.conf["spark.sql.shuffle.partitions"] = "5"
    with pytest.raises(ConfigError) as caught:
        env.execute_async()
    assert noting.seen == [("submitted", None, caught.value)]
    env.clear_job_listeners()
    with pytest.raises(ConfigError):
        env.execute_async()
    assert len(noting.seen) == 1


def test_who_is_no_listener_is_refused() -> None:
    session: Any = Session()
    env = StreamExecutionEnvironment(session, "job", "/jobs/any")
    with pytest.raises(ConfigError, match="ExecutionListener"):
        env.register_job_listener(lambda: None)  # type: ignore[arg-type]
