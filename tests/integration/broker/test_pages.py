"""The blocks of Python on the pages run as they stand there.

Addresses and folders are those of the test. What a page leaves out it has from here, by its name. A job
that a block describes runs until it has committed rows to each of its sinks.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import datetime
import itertools
import json
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import deltalake
import grpc
import pyarrow as pa
import pytest
from pyspark.sql import functions as F

import flinkish_spark
from flinkish_spark import (
    AnswerKind,
    JobClient,
    Json,
    MemorySink,
    StreamExecutionEnvironment,
    WatermarkStrategy,
    cep,
    read_state,
)
from flinkish_spark.cep import CEP, Pattern, PatternProcessFunction
from flinkish_spark.connectors.kafka.client import KafkaAdmin, KafkaConnection
from flinkish_spark.core.errors import FlinkishError
from flinkish_spark.sources import CollectionSource
from flinkish_spark.testing.broker import LocalBroker
from tests.support.jobs import (
    TOTAL,
    RunningTotal,
    await_that,
    environment,
    eventually,
    orders_source,
    produce,
)
from tests.support.services import BROKER_JARS, BUILD, ROOT
from tests.unit.house.test_docs import python_blocks

pytestmark = pytest.mark.timeout(600)
ORDER = "user STRING, product STRING, region STRING, amount LONG"
#: Topics with orders, and those that pages write.
READ = ("orders", "given")
WRITTEN = ("orders-copy", "orders-late", "orders-refused", "totals", "copies", "large")
#: By page or by what is in the block: who runs it, or why nobody does.
LEFT_OUT = {
    "docs/datastream.md": "tests/integration/spark/test_datastream.py",
    "docs/latency-markers.md": "tests/integration/spark/test_latency_markers.py",
    "docs/windows.md": "tests/integration/broker/test_event_time.py",
    "import Types, WatermarkStrategy": "a program for PyFlink, which needs other packages",
    "LAKE_KEY": "it needs a bucket: such options are in tests/unit/connectors/delta/test_delta_tables.py",
    "builder.remote(": "it needs a Connect server as its only session: tests/crash/test_door.py has one",
}


def pages() -> dict[str, list[str]]:
    """Return the blocks to run, by page; one that is on two pages is run once."""
    found: dict[str, list[str]] = {}
    seen: set[str] = set()
    for place, code in python_blocks():
        page = place.partition(":")[0]
        if page not in LEFT_OUT and code not in seen and not any(word in code for word in LEFT_OUT):
            seen.add(code)
            found.setdefault(page, []).append(code)
    return found


class Page:
    """What the blocks of one page find; each knows what those before it have defined."""

    def __init__(self, name: str, spark: Any, servers: str, folder: Path) -> None:
        self.name, self.spark, self.servers, self.folder = name, spark, servers, folder
        self.number = itertools.count()
        self.ends = contextlib.ExitStack()
        # Classes travel to the workers, as those of a program that is run do.
        self.defined: dict[str, Any] = {"__name__": "__main__"}
        self.given: dict[str, Any] = {}
        # And fewer seeds of the simulation than a unit test has.
        self.own: dict[str, str] = {'"jars"': f'"{BUILD}/jars"', "range(1, 201)": "range(1, 9)"}
        self.started: dict[StreamExecutionEnvironment, JobClient] = {}

    def run(self, code: str) -> None:
        code = self.with_own_addresses(code)
        self.given = {}
        wanted = [name for name in sorted(names_left_out(code)) if self.maker(name)]
        scope = self.defined | {name: self.get(name) for name in wanted}
        given_sinks = {id(env): len(env.graph.sinks) for env in environments(self.given)}
        exec(compile(code, self.name, "exec"), scope)
        AFTERWARDS.get(self.name, lambda names: None)(scope)
        for env in environments(scope | self.given):
            if len(env.graph.sinks) > given_sinks.get(id(env), 0) and env not in self.started:
                env.execute()
        for client in self.started.values():
            to_rows_and_stop(client)
        for query in self.spark.streams.active:
            query.processAllAvailable()
            query.stop()
        self.started.clear()
        self.defined |= {name: one for name, one in scope.items() if name not in self.given}

    def with_own_addresses(self, code: str) -> str:
        code = re.sub(r"(localhost|broker):9092", self.servers, code)
        code = re.sub(r'"(?:s3://[\w-]+|hdfs://\w+)?/(?=[a-z])', f'"{self.folder}/', code)
        for words, own in self.own.items():
            code = code.replace(words, own)
        return code

    def maker(self, name: str) -> Callable[[Page], Any] | None:
        """Return what makes something that the page leaves out; a name of this package is imported."""
        if made := GIVEN.get(f"{self.name}:{name}") or GIVEN.get(name):
            return made
        is_known = name in self.defined or name in vars(builtins) or name.startswith("_")
        modules = [one for one in (flinkish_spark, cep) if not is_known and hasattr(one, name)]
        return (lambda page: getattr(modules[0], name)) if modules else None

    def get(self, name: str) -> Any:
        """Return what pages leave out: the same within one block."""
        if name not in self.given:
            make = self.maker(name)
            assert make is not None
            self.given[name] = make(self)
        return self.given[name]


def names_left_out(code: str) -> set[str]:
    """Return the names that a block uses and does not define."""
    used, defined = set(), set()
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
            case ast.ImportFrom(names=names):
                defined |= {one.asname or one.name for one in names}
    return used - defined


def environments(names: dict[str, Any]) -> list[StreamExecutionEnvironment]:
    found = {id(one): one for one in names.values() if isinstance(one, StreamExecutionEnvironment)}
    return list(found.values())


def to_rows_and_stop(client: JobClient) -> None:
    """Stop the job when it has seen the input, if it does not end by itself."""
    assert eventually(lambda: client.has_ended() or client.progress.batches > 1, within_s=300)
    client.stop_with_checkpoint()
    assert client.wait(timeout_ms=120_000)
    assert client.progress.rows_by_sink and all(client.progress.rows_by_sink.values())


def frame_of(page: Page) -> Any:
    """Return a stream of Spark's own, of orders."""
    reader = page.spark.readStream.format("kafka").option("kafka.bootstrap.servers", page.servers)
    records = reader.option("subscribe", "orders").option("startingOffsets", "earliest").load()
    order = F.from_json(F.col("value").cast("STRING"), ORDER)
    return records.select("key", order.alias("order")).select("key", "order.*")


def env_with_a_job(page: Page) -> StreamExecutionEnvironment:
    env = environment(page.spark, page.folder / f"given-{next(page.number)}")
    stream = env.from_source(orders_source(page.servers, "given", value=Json(ORDER)), uid="given")
    stream.key_by("user").sum("amount", uid="sums").sink_to(MemorySink("sums"), uid="sums-out")
    return env


def a_savepoint(page: Page) -> None:
    client = env_with_a_job(page).execute_async()
    await_that(lambda: client.progress.is_running, client)
    answer = client.stop_with_savepoint(f"{page.folder}/savepoints/7").wait(timeout_ms=120_000)
    assert answer is not None and answer.kind is AnswerKind.COMPLETED, answer
    assert client.wait(timeout_ms=240_000)


class Users(PatternProcessFunction):
    def process_match(self, match, ctx):
        yield (match["first"][0].user,)


def a_job_with_partial_matches(page: Page) -> None:
    env = environment(page.spark, page.folder / "jobs" / "alarms")
    orders = env.from_source(page.get("source"), uid="orders").key_by("region")
    pattern = Pattern.begin("first").where("amount >= 50").followed_by("second").where("amount = 100")
    matches = (
        CEP.pattern(orders, pattern.within(3_600_000))
        .in_processing_time()
        .process(Users(), output="user STRING", uid="alarms")
    )
    matches.sink_to(MemorySink("alarms"), uid="out")
    client = env.execute_async()
    to_rows_and_stop(client)
    with pytest.raises(FlinkishError) as told:
        read_state(page.spark, str(page.folder / "jobs" / "alarms"), "alarms", "another")
    (page.own["3f2a90c1"],) = set(re.findall(r"of \(first, second\) (\w+)", str(told.value)))


def files(page: Page) -> None:
    for name in ("models/fraud-7.onnx", "countries/ch", "tools/score", "lib/__init__.py", "lib/rules.py"):
        (page.folder / name).parent.mkdir(exist_ok=True)
        (page.folder / name).write_text("")


def databases(page: Page) -> None:
    (page.folder / "data").mkdir()
    with sqlite3.connect(page.folder / "data" / "sums.db") as db:
        db.execute("CREATE TABLE seen (checkpoint INTEGER PRIMARY KEY)")
        db.execute("CREATE TABLE sums (user TEXT, total INTEGER)")


def a_table(page: Page) -> None:
    """A change feed is read when its source is made."""
    rows = pa.table({"user": ["ann"], "amount": [1]})
    configuration = {"delta.enableChangeDataFeed": "true"}
    deltalake.write_deltalake(f"{page.folder}/data/orders", rows, configuration=configuration)


def a_job_with_a_page(page: Page) -> None:
    client = env_with_a_job(page).execute_async(ui=True)
    page.own["http://127.0.0.1:8081"] = client.ui.url
    page.defined["token"] = client.ui.link.rpartition("=")[2]
    page.started.clear()
    page.ends.callback(client.cancel)


class Score(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"0.5")

    def log_message(self, *_: Any) -> None:
        pass


class ScoresStub:
    """As protoc makes it."""

    def __init__(self, channel: Any) -> None:
        self.Score = channel.unary_unary(
            "/Scores/Score",
            request_serializer=lambda request: str(request.id).encode(),
            response_deserializer=lambda answer: SimpleNamespace(score=float(answer)),
        )


def servers_of_scores(page: Page) -> None:
    web = page.ends.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Score))
    threading.Thread(target=web.serve_forever, daemon=True).start()
    page.ends.callback(web.shutdown)
    rpc = grpc.server(ThreadPoolExecutor(1))
    score = grpc.unary_unary_rpc_method_handler(lambda request, context: b"0.5")
    rpc.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("Scores", {"Score": score})])
    page.own["http://scores.internal"] = f"http://127.0.0.1:{web.server_port}"
    page.own["scores.internal:443"] = f"127.0.0.1:{rpc.add_insecure_port('127.0.0.1:0')}"
    rpc.start()
    page.ends.callback(rpc.stop, None)


def a_score_is_asked_for(names: dict[str, Any]) -> None:
    async def answer() -> Any:
        scored = names["Scored"]()
        await scored.open(None)
        found = await scored.async_invoke(SimpleNamespace(id=7))
        closed = scored.close()
        if closed is not None:
            await closed
        return found

    assert asyncio.run(answer()) == [(7, 0.5)]


AT = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
#: What pages leave out, by name, or by page and name.
GIVEN: dict[str, Callable[[Page], Any]] = {
    "spark": lambda page: page.spark,
    "env": lambda page: environment(page.spark, page.folder / f"given-{next(page.number)}"),
    "source": lambda page: orders_source(page.servers, "orders", value=Json(ORDER)),
    "orders": lambda page: page.get("env").from_source(page.get("source"), uid="orders"),
    "totals": lambda page: page.get("orders").key_by("user").sum("amount", uid="totals"),
    "frame": frame_of,
    "df": frame_of,
    "sink": lambda page: MemorySink("out"),
    "client": lambda page: env_with_a_job(page).execute_async(),
    "docs/job-graph.md:env": env_with_a_job,
    "docs/metrics.md:env": env_with_a_job,
    "docs/openlineage.md:env": env_with_a_job,
    "docs/running.md:env": env_with_a_job,
    "docs/ui.md:env": env_with_a_job,
    "docs/kafka-sink.md:source": lambda page: CollectionSource(
        [("ann", 1), ("ben", 2)], "user STRING, amount LONG"
    ),
    "docs/event-time.md:orders": lambda page: WatermarkStrategy.for_monotonous_timestamps(),
    "docs/two-phase-sinks.md:totals": lambda page: (
        page.get("orders").key_by("user").process(RunningTotal(), output=TOTAL, uid="totals")
    ),
    "docs/async.md:aiohttp": lambda page: aiohttp,
    "docs/async.md:grpc": lambda page: grpc,
    "docs/async.md:ScoreRequest": lambda page: SimpleNamespace,
    "docs/async.md:ScoresStub": lambda page: ScoresStub,
    "RunningTotal": lambda page: RunningTotal,
    "docs/migrate/kafka-at-least-once.md:totals": lambda page: frame_of(page).select(
        F.to_json(F.struct("user", "amount")).alias("value")
    ),
    "docs/migrate/flink-datastream.md:totals": lambda page: (
        lambda orders: orders.key_by("user").sum("amount", uid="totals")
    ),
    "docs/spark-queries.md:F": lambda page: F,
    "docs/spark-queries.md:orders": frame_of,
    "docs/spark-queries.md:order_stream": lambda page: page.get("env").from_collection(
        [(1, AT)], "id LONG, ts TIMESTAMP", uid="order-stream"
    ),
    "docs/spark-queries.md:payment_stream": lambda page: page.get("env").from_collection(
        [(1, AT)], "paid LONG, paid_at TIMESTAMP", uid="payment-stream"
    ),
    "docs/spark-queries.md:Trend": lambda page: RunningTotal,
    "docs/job-graph.md:score": lambda page: lambda order: (order.user,),
    "docs/job-graph.md:SCORED": lambda page: "user STRING",
}


def settings_from_outside(page: Page) -> None:
    (page.folder / "flinkish.toml").write_text(f'execution.checkpointing.dir = "{page.folder}/jobs"')
    (page.folder / "client.properties").write_text(f"bootstrap.servers={page.servers}\nlinger.ms=5")


BEFORE: dict[str, Callable[[Page], None]] = {
    "docs/async.md": servers_of_scores,
    "docs/cep.md": a_job_with_partial_matches,
    "docs/configuration.md": settings_from_outside,
    "docs/job-graph.md": a_savepoint,
    "docs/running.md": files,
    "docs/sources.md": a_table,
    "docs/two-phase-sinks.md": databases,
    "docs/ui.md": a_job_with_a_page,
}
AFTERWARDS: dict[str, Callable[[dict[str, Any]], None]] = {"docs/async.md": a_score_is_asked_for}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A broker of its own, since topics are called as on the pages."""
    with LocalBroker(tmp_path_factory.mktemp("pages"), jars_dir=BROKER_JARS) as broker:
        with KafkaAdmin(KafkaConnection(broker.bootstrap_servers)) as admin:
            for topic in (*READ, *WRITTEN):
                admin.create_topic(topic, 1)
        users = enumerate("abcab")
        orders = [
            {"user": user, "product": f"p{n % 3}", "region": "north", "amount": 50 * n} for n, user in users
        ]
        for topic in READ:
            produce(broker.bootstrap_servers, topic, [json.dumps(one).encode() for one in orders], key=b"k")
        yield broker.bootstrap_servers


@pytest.mark.parametrize("name", pages())
def test_the_blocks_of_the_page_run(
    name: str, spark: Any, servers: str, tmp_path: Path, monkeypatch: Any
) -> None:
    page = Page(name, spark, servers, tmp_path)
    start = StreamExecutionEnvironment.execute_async

    def execute_async(env: StreamExecutionEnvironment, **settings: Any) -> JobClient:
        page.started[env] = start(env, **settings)
        return page.started[env]

    def execute(env: StreamExecutionEnvironment, **settings: Any) -> None:
        to_rows_and_stop(env.execute_async(**settings))

    monkeypatch.setattr(StreamExecutionEnvironment, "execute_async", execute_async)
    monkeypatch.setattr(StreamExecutionEnvironment, "execute", execute)
    monkeypatch.chdir(tmp_path)
    with page.ends:
        BEFORE.get(name, lambda page: None)(page)
        for code in pages()[name]:
            page.run(code)


def test_what_is_left_out_is_on_a_page_and_is_run_where_it_says() -> None:
    texts = [f"{place} {code}" for place, code in python_blocks()]
    for word, where in LEFT_OUT.items():
        assert any(word in text for text in texts), word
        for file in re.findall(r"tests/\S+\.py", where):
            assert (ROOT / file).exists()
