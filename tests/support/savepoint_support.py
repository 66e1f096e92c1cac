"""What tests of savepoints share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flinkish_spark import JobClient, KeyedProcessFunction, StreamExecutionEnvironment, ValueStateDescriptor
from flinkish_spark.protocol.savepoints import SavepointMetadata
from flinkish_spark.savepoints.files import RestoreSettings, SavepointDir
from tests.support.jobs import end

COUNT = "user STRING, n LONG"


class Count(KeyedProcessFunction):
    """Emits how many rows each user had."""

    def open(self, context):
        self.count = context.get_state(ValueStateDescriptor("n", "LONG"))

    def process_element(self, row, ctx):
        count = (self.count.value() or 0) + 1
        self.count.update(count)
        yield row.user, count


def take(client: JobClient, target: Path) -> SavepointMetadata:
    """Take a savepoint of a running job; return what it says about itself."""
    answer = client.trigger_savepoint(str(target)).wait(90_000)
    assert answer is not None and answer.is_completed, answer
    return SavepointDir(target).metadata()


def stop_with(client: JobClient, target: Path) -> SavepointMetadata:
    """Stop a job with a savepoint."""
    answer = client.stop_with_savepoint(str(target)).wait(90_000)
    assert answer is not None and answer.is_completed, answer
    assert client.wait(60_000), "the job did not stop"
    return SavepointDir(target).metadata()


def stop(client: JobClient) -> None:
    """Stop a job with a checkpoint."""
    client.stop_with_checkpoint()
    assert client.wait(60_000), "the job did not stop"


@contextmanager
def started(
    env: StreamExecutionEnvironment, restore: RestoreSettings | None = None, partitions: int = 2
) -> Iterator[JobClient]:
    """Start a job; whatever still runs at the end of the block is cancelled."""
    name, env.restore = "spark.sql.shuffle.partitions", restore
    before = env.spark.conf.get(name)
    env.spark.conf.set(name, str(partitions))
    try:
        client = env.execute_async()
    finally:
        env.spark.conf.set(name, before)
    try:
        yield client
    finally:
        end(client)


def failure(
    env: StreamExecutionEnvironment, restore: RestoreSettings | None = None, partitions: int = 2
) -> Exception:
    """Start a job and return the error with which it ends."""
    with started(env, restore, partitions) as client:
        try:
            ended = client.wait(120_000)
        except Exception as error:
            return error
    raise AssertionError(f"the job {'ended' if ended else 'runs'} without an error")
