"""Spark Declarative Pipelines with the door as source and sink, in a Connect server that is killed.

No line of the pipeline is ours: Spark finds the format by the name of a module.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.transactions import TransactionClient
from flinkish_spark.testing import LocalBroker
from tests.support.connect_server import ConnectServer
from tests.support.door_files import sink_uuid
from tests.support.jobs import produce, read_committed
from tests.support.open_transactions import still_open
from tests.support.services import ROOT, scratch

pytestmark = pytest.mark.timeout(600)
#: Where the module is that Spark finds, in a checkout; a wheel has it at the top.
BY_NAME = ROOT / "flinkish_spark" / "connectors" / "kafka" / "format" / "by_name"
_PATIENCE_S = 180.0


class Pipeline:
    """A project of `spark-pipelines` with one sink, into which every topic has a flow of its own."""

    def __init__(self, folder: Path, broker: LocalBroker, topics: Iterable[str], output: str) -> None:
        self._folder, self._servers, self.output = folder, broker.bootstrap_servers, output
        self.topics = tuple(topics)
        (folder / "transformations").mkdir(parents=True)
        (folder / "spark-pipeline.yml").write_text(
            dedent(f"""
            name: totals
            storage: file://{folder}/storage
            libraries:
              - glob:
                  include: transformations/**
            """)
        )
        (folder / "transformations" / "totals.py").write_text(
            dedent(f"""
            from pyspark import pipelines as dp

            kafka = {{"kafka.bootstrap.servers": "{self._servers}"}}
            dp.create_sink("totals", format="flinkish-kafka", options={{**kafka, "topic": "{output}"}})

            def flow(name, topic):
                @dp.append_flow(target="totals", name=name)
                def records():
                    limits = {{"startingOffsets": "earliest", "maxOffsetsPerTrigger": "200"}}
                    records = spark.readStream.format("flinkish-kafka").options(**kafka, **limits)
                    return records.option("subscribe", topic).load().select("key", "value")

            for number, topic in enumerate({list(self.topics)}):
                flow(f"flow_{{number}}", topic)
            """)
        )

    def start(self, server: ConnectServer, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "pyspark.pipelines.cli", "run", *arguments]
        return subprocess.Popen(
            command, cwd=self._folder, env={**os.environ, "SPARK_REMOTE": server.url},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, server: ConnectServer, *arguments: str) -> None:
        """Run to the end; events say how it went, and not the exit status."""
        said, _ = self.start(server, *arguments).communicate(timeout=_PATIENCE_S)
        assert "Run is COMPLETED" in said, said[-3000:]

    def checkpoints(self, number: int) -> list[Path]:
        """The checkpoint with a number of each flow, once its sink was used."""
        found = self._folder.glob(f"storage/_checkpoints/**/{number}/flinkish/job.json")
        return [one.parents[1] for one in sorted(found)]

    def open_transactions(self, number: int = 0) -> list[str]:
        with TransactionClient(KafkaConnection(self._servers)) as client:
            found = [one for sink in self.checkpoints(number) for one in still_open(client, sink_uuid(sink))]
        return [str(one.transactional_id) for one in found]

    def start_and_stage(self, server: ConnectServer, number: int = 0) -> subprocess.Popen[str]:
        """Start a run; returns while a transaction is open."""
        run = self.start(server)
        deadline = time.monotonic() + _PATIENCE_S
        with TransactionClient(KafkaConnection(self._servers)) as client:
            while not any(
                client.list_open_transactions(sink_uuid(sink)) for sink in self.checkpoints(number)
            ):
                assert run.poll() is None, run.communicate()[0][-3000:]
                assert time.monotonic() < deadline, "no transaction was opened"
                time.sleep(0.01)
        return run

    def put(self, count: int) -> None:
        for topic in self.topics:
            produce(self._servers, topic, [f"{topic} {n}".encode() for n in range(count)])

    def found(self) -> Counter[bytes]:
        return Counter(record.value for record in read_committed(self._servers, self.output))

    def sent(self) -> Counter[bytes]:
        return Counter(r.value for topic in self.topics for r in read_committed(self._servers, topic))


def kill(server: ConnectServer, run: subprocess.Popen[str]) -> None:
    """Kill a server and the client of a run, and start another server."""
    server.kill()
    run.kill()
    run.communicate()
    server.start()


@pytest.fixture
def server() -> Iterator[ConnectServer]:
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(BY_NAME)])
    with (
        scratch("test-connect-") as folder,
        ConnectServer(folder, {**os.environ, "PYTHONPATH": path}) as running,
    ):
        yield running


@pytest.fixture
def pipeline(run_directory: Path, broker: LocalBroker, topic: Callable[..., str]) -> Pipeline:
    shutil.rmtree(run_directory, ignore_errors=True)
    return Pipeline(run_directory / "project", broker, [topic(2), topic(2)], topic(2))


def test_a_client_of_spark_connect_is_told_what_works(server: ConnectServer) -> None:
    """By the environment and the doctor alike; the format may be registered although Spark has found it."""
    client = dedent("""
        import sys
        from pyspark.sql import SparkSession
        from flinkish_spark import StreamExecutionEnvironment, doctor, register
        from flinkish_spark.core.errors import EnvironmentFault

        spark = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
        for _ in range(2):
            register(spark)
        what = 'format("flinkish-kafka") works here, as source and as sink'
        try:
            StreamExecutionEnvironment(spark, job="orders", job_dir="/nowhere/job")
        except EnvironmentFault as refused:
            assert "Spark Connect" in str(refused) and what in str(refused), refused
        else:
            raise AssertionError("it was not refused")
        found = doctor(spark, job_dir="/nowhere/job")
        assert not found.is_well and what in str(found), found
        options = {"kafka.bootstrap.servers": "localhost:1", "nonsense": "1"}
        try:
            spark.read.format("flinkish-kafka").options(**options).load().schema
        except Exception as refused:
            assert "nonsense" in str(refused), refused
    """)
    done = subprocess.run([sys.executable, "-c", client, server.url], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr.partition("JVM stacktrace")[0][-3000:] + server.tail()


@pytest.mark.nightly
def test_two_flows_into_one_sink_survive_kills_and_a_full_refresh(
    pipeline: Pipeline, server: ConnectServer
) -> None:
    pipeline.put(400)
    run = pipeline.start_and_stage(server)
    kill(server, run)
    pipeline.run(server)
    assert pipeline.found() == pipeline.sent()
    assert pipeline.open_transactions() == []
    assert len({str(sink_uuid(one)) for one in pipeline.checkpoints(0)}) == 2

    # What a full refresh finds open is ended by it: whole micro-batches of the first time, and all once more.
    pipeline.put(400)
    while not pipeline.open_transactions():
        # What was seen open may end before the shot.
        pipeline.put(100)
        kill(server, pipeline.start_and_stage(server))
    pipeline.run(server, "--full-refresh-all")
    assert pipeline.open_transactions(0) == pipeline.open_transactions(1) == []
    assert len(pipeline.checkpoints(1)) == 2
    found, sent = pipeline.found(), pipeline.sent()
    assert sent <= found <= sent + sent
    pipeline.run(server)
    assert pipeline.found() == found


@pytest.mark.nightly
def test_many_kills_of_servers_and_clients(pipeline: Pipeline, server: ConnectServer) -> None:
    for number in range(6):
        pipeline.put(400)
        run = pipeline.start_and_stage(server)
        if number % 2:
            # A client that dies takes nothing along, and the next run stops what is left of its one.
            run.kill()
            run.communicate()
        else:
            kill(server, run)
        pipeline.run(server)
        assert pipeline.found() == pipeline.sent()


@pytest.mark.nightly
def test_a_full_refresh_by_the_name_of_a_sink_refreshes_nothing(
    pipeline: Pipeline, server: ConnectServer
) -> None:
    """Spark takes it for a table's; if that changes, docs/drop-in.md has to."""
    pipeline.put(200)
    pipeline.run(server)
    found = pipeline.found()
    pipeline.put(200)
    pipeline.run(server, "--full-refresh", "totals")
    assert pipeline.checkpoints(1) == []
    assert pipeline.found() == found
