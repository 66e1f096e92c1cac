"""`make bench-start`: from `python app.py` to the first confirmed checkpoint, beside plain Spark.

A keyed Kafka-to-Kafka job of ours and the same query with Spark's own sources, state and sinks, in turn, each
in a process of its own, against one broker whose input topic is filled before. Its phases, by milestones that
the process notes:

- `session`: from the start of the process to a SparkSession;
- `running`: from there until the query runs: `execute` to RUNNING, or `start()` with all in front of it;
- `first`: from there to the first confirmed checkpoint, or the first committed micro-batch;
- `restart`: in the same session, from an exception in the user's function until the query runs again by the
  restart strategy (plain Spark: until `start()` has returned again);
- `again`: from the exception until the next micro-batch is committed by Spark;
- `confirmed`: from the exception to the next confirmed checkpoint;
- `cpu`: CPU seconds of the process, its JVM and its workers until the first checkpoint.

    python -m bench.start --rounds 5
    python -m bench.start --rounds 1 --variants ours --debug   # with the job's spans, in its log
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
#: A default install without any JAR, the JARs, these with an archive of classes, and Spark's own.
VARIANTS = ("bare", "ours", "ours-archived", "plain")
PHASES = ("session", "running", "first", "total", "cpu", "restart", "again", "confirmed")
SCHEMA = "user STRING, product STRING, amount LONG, at TIMESTAMP"
OUTPUT = "user STRING, total LONG, orders LONG"
RECORDS, KEYS = 1_000, 100
_PATIENCE_S = 180
#: Milliseconds between two looks at what a query has committed.
_LOOK_S = 0.01


#: Milestones at which `--debug` prints what has used the processors.
_SHOWN = ("session", "running", "staged", "first", "running-again", "confirmed")


class Milestones:
    """When a process of the bench came to what: seconds of the monotonic clock, which all processes share."""

    def __init__(self, is_debug) -> None:
        self.is_debug = is_debug
        self._times, self._noted = {}, threading.Condition()
        #: Of this process, its JVM and its workers, up to each milestone.
        self.cpu_s = {}

    def note(self, name):
        """Note that a milestone is reached; only the first time counts."""
        now = time.monotonic()
        with self._noted:
            if name in self._times:
                return
            self._times[name] = now
            self.cpu_s[name] = _cpu_s()
            if self.is_debug and name in _SHOWN:
                print_threads(name)
            self._noted.notify_all()

    def has(self, name):
        return name in self._times

    def wait(self, name):
        with self._noted:
            if not self._noted.wait_for(lambda: name in self._times, _PATIENCE_S):
                raise SystemExit(f"'{name}' did not come within {_PATIENCE_S} s; there are {self._times}")

    def seconds(self):
        return dict(self._times)


def print_threads(name):
    """Print the CPU seconds of the JVM's threads and of each Python process, up to now."""
    tick = os.sysconf("SC_CLK_TCK")
    print(f"---- {name}", file=sys.stderr)
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.Error, OSError):
            times, found = process.cpu_times(), {}
            if process.name() == "java":
                for task in Path(f"/proc/{process.pid}/task").iterdir():
                    text = (task / "stat").read_text()
                    end = text.rindex(")")
                    thread, fields = text[text.index("(") + 1 : end], text[end:].split()
                    kind = thread.rstrip("0123456789-#")
                    found[kind] = found.get(kind, 0) + (int(fields[12]) + int(fields[13])) / tick
            most = sorted(found.items(), key=lambda one: -one[1])[:16]
            own = f"{times.user + times.system:6.1f} s + {times.children_user + times.children_system:.1f} s"
            print(own, process.pid, " ".join(process.cmdline()[-4:])[-80:], file=sys.stderr)
            print("".join(f"    {s:6.1f} s {kind}\n" for kind, s in most), end="", file=sys.stderr)


def _cpu_s():
    me, total = psutil.Process(), 0.0
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            # Those of workers that have ended are their daemon's.
            total += times.user + times.system + times.children_user + times.children_system
    return total


class Stumble:
    """Raises once in a worker, as soon as a file is there; the time of that is written into another one."""

    def __init__(self, folder):
        self.order, self.when = Path(folder) / "stumble", Path(folder) / "stumbled"

    def look(self):
        if self.order.exists():
            with contextlib.suppress(FileNotFoundError):
                self.order.unlink()
                self.when.write_text(str(time.monotonic()))
                raise RuntimeError("a fault of the bench's")


def session(args):
    from pyspark.sql import SparkSession

    from flinkish_spark import configure_spark_with_jars
    from flinkish_spark.jars import find_pinned_jars

    builder = (
        SparkSession.builder.master("local[2]")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "2g")
        .config("spark.local.dir", f"{args.directory}/local")
        .config("spark.sql.warehouse.dir", f"{args.directory}/warehouse")
    )
    if args.event_log:
        Path(args.event_log).mkdir(parents=True, exist_ok=True)
        builder = builder.config("spark.eventLog.enabled", "true")
        builder = builder.config("spark.eventLog.dir", args.event_log)
        builder = builder.config("spark.eventLog.rolling.enabled", "false")
        builder = builder.config("spark.eventLog.compress", "false")
    if args.variant == "ours":
        builder = configure_spark_with_jars(builder, args.jars)
    elif args.variant == "ours-archived":
        folder = Path(args.directory).parent / "classes"
        builder = configure_spark_with_jars(builder, args.jars, class_archive=folder)
    elif args.variant == "plain":
        # What the query needs, and nothing of ours or of Delta's.
        wanted = ("spark-sql-kafka", "spark-token-provider-kafka", "kafka-clients", "commons-pool2")
        jars = [str(jar) for jar in find_pinned_jars(args.jars) if jar.name.startswith(wanted)]
        builder = builder.config("spark.jars", ",".join(jars))
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def run_ours(args, marks, stumble):
    from flinkish_spark import (
        CheckpointConfig,
        FixedDelay,
        Json,
        KafkaSink,
        KafkaSource,
        KeyedProcessFunction,
        QuietListener,
        StreamExecutionEnvironment,
        ValueStateDescriptor,
    )
    from flinkish_spark.core.steps import SilentObserver, Step
    from flinkish_spark.protocol.job_status import JobStatus, JobStatusChange

    class Total(KeyedProcessFunction):
        def open(self, context):
            self.total = context.get_state(ValueStateDescriptor("total", "total LONG, orders LONG"))

        def process_element(self, order, ctx):
            stumble.look()
            total, orders = self.total.value() or (0, 0)
            total, orders = total + order.amount, orders + 1
            self.total.update((total, orders))
            yield order.user, total, orders

    class Listener(QuietListener):
        def on_change(self, change):
            if isinstance(change, JobStatusChange) and change.after is JobStatus.RUNNING:
                marks.note("running-again" if marks.has("running") else "running")
            if isinstance(change, JobStatusChange) and change.after is JobStatus.RESTARTING:
                marks.note("restarting")

    class Observer(SilentObserver):
        def on_step_start(self, step, subject):
            if step is Step.SPARK_COMMIT and marks.has("running-again"):
                # Spark writes its commit log next; before that the micro-batch is staged durably.
                marks.note("again")
            elif step is Step.SPARK_COMMIT:
                marks.note("staged")

        def on_step_end(self, step, subject):
            if step is Step.RECEIPT:
                marks.note("confirmed" if marks.has("running-again") else "first")

    marks.note("imported")
    spark = session(args)
    marks.note("session")
    env = StreamExecutionEnvironment(
        spark,
        job="start",
        job_dir=f"{args.directory}/job",
        checkpoint=CheckpointConfig(interval_ms=args.interval_ms),
        restart_strategy=FixedDelay(attempts=3, delay_ms=0),
    )
    source = KafkaSource(
        args.bootstrap_servers, [args.source], group_id=f"group-{args.sink}", value=Json(SCHEMA)
    )
    orders = env.from_source(source, uid="orders")
    totals = orders.key_by("user").process(Total(), output=OUTPUT, uid="totals")
    totals.sink_to(KafkaSink(args.bootstrap_servers, args.sink, key="user", value=Json()), uid="out")
    env.add_listener(Listener())
    env.observe(Observer())
    marks.note("execute")
    client = env.execute_async()

    def wait(name):
        while not marks.has(name):
            client.wait(20)  # Raises if the job has failed for good.

    wait("first")
    if args.restart:
        _stumble(args, stumble)
        wait("confirmed")
    client.stop_with_checkpoint()
    client.wait()


def run_plain(args, marks, stumble):
    from pyspark.sql import functions as F
    from pyspark.sql.streaming.state import GroupStateTimeout

    marks.note("imported")
    spark = session(args)
    marks.note("session")
    spark.conf.set(
        "spark.sql.streaming.stateStore.providerClass",
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    )
    spark.conf.set("spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled", "true")
    checkpoint = Path(args.directory) / "checkpoint"

    def total(key, frames, state):
        import pandas as pd

        total, orders = state.getOption or (0, 0)
        for frame in frames:
            stumble.look()
            total, orders = total + int(frame.amount.sum()), orders + len(frame)
        state.update((total, orders))
        yield pd.DataFrame({"user": [key[0]], "total": [total], "orders": [orders]})

    def start():
        frame = (
            spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", args.bootstrap_servers)
            .option("kafka.isolation.level", "read_committed")
            .option("subscribe", args.source)
            .option("startingOffsets", "earliest")
            .load()
        )
        events = frame.select(F.from_json(F.col("value").cast("string"), SCHEMA).alias("e")).select("e.*")
        totals = events.groupBy("user").applyInPandasWithState(
            total, OUTPUT, "total LONG, orders LONG", "update", GroupStateTimeout.NoTimeout
        )
        rows = totals.select(F.col("user").alias("key"), F.to_json(F.struct("*")).alias("value"))
        return (
            rows.writeStream.format("kafka")
            .outputMode("update")
            .option("kafka.bootstrap.servers", args.bootstrap_servers)
            .option("topic", args.sink)
            .option("checkpointLocation", str(checkpoint))
            .start()
        )

    def committed(query):
        """Return how many micro-batches are committed; raise what ended the query."""
        if not query.isActive and query.exception():
            raise query.exception()
        folder = checkpoint / "commits"
        return sum(1 for entry in folder.glob("*") if entry.name.isdigit()) if folder.exists() else 0

    marks.note("execute")
    query = start()
    marks.note("running")
    while not committed(query):
        time.sleep(_LOOK_S)
    marks.note("first")
    if args.restart:
        before = committed(query)
        _stumble(args, stumble)
        with contextlib.suppress(Exception):
            query.awaitTermination()
        marks.note("restarting")
        query = start()
        marks.note("running-again")
        while committed(query) == before:
            time.sleep(_LOOK_S)
        marks.note("again")
        marks.note("confirmed")
    query.stop()


def _stumble(args, stumble):
    """Let the user's function raise on the next record, and send some."""
    stumble.order.touch()
    fill(args.bootstrap_servers, args.source)


def fill(servers, topic):
    from kafka import KafkaProducer

    producer = KafkaProducer(bootstrap_servers=servers, linger_ms=20)
    for number in range(RECORDS):
        user = f"user-{number % KEYS}"
        value = f'{{"user":"{user}","product":"p","amount":{number},"at":"2026-01-01T00:00:00.000Z"}}'
        producer.send(topic, key=user.encode(), value=value.encode(), partition=number % 2)
    producer.flush()
    producer.close()


def child(args):
    """Run one variant in this process and print its phases."""
    if args.debug:
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(threadName)s %(name)s %(message)s")
        logging.getLogger("flinkish_spark").setLevel(logging.DEBUG)
    marks, stumble = Milestones(args.debug), Stumble(args.directory)
    (run_plain if args.variant == "plain" else run_ours)(args, marks, stumble)
    at = marks.seconds()
    found = {
        "imported": at["imported"] - args.began_s,
        "session": at["session"] - args.began_s,
        "running": at["running"] - at["session"],
        "first": at["first"] - at["running"],
        "total": at["first"] - args.began_s,
        "cpu": marks.cpu_s["first"],
        "cpu running": marks.cpu_s["running"] - marks.cpu_s["session"],
        "cpu first": marks.cpu_s["first"] - marks.cpu_s["running"],
    }
    if "staged" in at:
        found["staged"] = at["staged"] - at["running"]
    if args.restart:
        failed_s = float(stumble.when.read_text())
        found["failing"] = at["restarting"] - failed_s
        found["restart"] = at["running-again"] - failed_s
        found["again"] = at["again"] - failed_s
        found["confirmed"] = at["confirmed"] - failed_s
    print(json.dumps(found), flush=True)


def measure(args, broker, variant, number):
    """Run one variant in a fresh process; return its phases in seconds."""
    from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
    from flinkish_spark.connectors.kafka.client.connection import KafkaConnection

    folder = Path(args.directory) / f"{variant}-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    source, sink = f"in-{variant}-{number}", f"out-{variant}-{number}"
    with KafkaAdmin(KafkaConnection(broker.bootstrap_servers)) as admin:
        for topic in (source, sink):
            admin.create_topic(topic, partitions=2)
    fill(broker.bootstrap_servers, source)
    command = [
        sys.executable, "-m", "bench.start", "--variant", variant, "--jars", args.jars,
        "--bootstrap-servers", broker.bootstrap_servers, "--source", source, "--sink", sink,
        "--directory", str(folder), "--interval-ms", str(args.interval_ms),
        *(["--debug"] if args.debug else []), *([] if args.restart else ["--no-restart"]),
        *(["--event-log", args.event_log] if args.event_log else []),
    ]  # fmt: skip
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    # As where a package is installed: without it each process would compile all that it imports.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    log = folder.with_suffix(".log")
    with log.open("w") as stderr:
        command += ["--began-s", repr(time.monotonic())]
        output = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True}
        done = subprocess.run(command, cwd=ROOT, env=environment, **output)
    if done.returncode != 0:
        last = "\n".join(log.read_text().splitlines()[-60:])
        raise SystemExit(f"{last}\n{variant} ended with status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def _make_internal_topics(servers):
    """Let the broker make what it makes for the first transaction and the first group of its life."""
    from kafka import KafkaConsumer, KafkaProducer, TopicPartition
    from kafka.structs import OffsetAndMetadata

    from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
    from flinkish_spark.connectors.kafka.client.connection import KafkaConnection

    with KafkaAdmin(KafkaConnection(servers)) as admin:
        admin.create_topic("first", partitions=1)
    producer = KafkaProducer(bootstrap_servers=servers, transactional_id="first")
    producer.init_transactions()
    producer.begin_transaction()
    producer.send("first", b"")
    producer.commit_transaction()
    producer.close()
    consumer = KafkaConsumer(bootstrap_servers=servers, group_id="first")
    consumer.commit({TopicPartition("first", 0): OffsetAndMetadata(1, "", -1)})
    consumer.close()


def _wait_for_archive(folder):
    """Wait until a class archive is there and grows no more."""
    deadline, size = time.monotonic() + _PATIENCE_S, -1
    while time.monotonic() < deadline:
        found = sum(file.stat().st_size for file in folder.glob("*.jsa"))
        if found and found == size:
            return
        size = found
        time.sleep(3)
    raise SystemExit("the JVM has written no class archive")


def table(found):
    """Return medians, least and most of each phase as a table of Markdown."""
    lines = ["| variant | " + " | ".join(PHASES) + " |", "|---|" + "---|" * len(PHASES)]
    for variant, rounds in found.items():
        cells = []
        for phase in PHASES:
            values = [one[phase] for one in rounds if phase in one]
            shown = f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})" if values else ""
            cells.append(shown)
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each variant")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--directory", default=str(ROOT / "build" / "bench-start"))
    parser.add_argument("--jars", default=str(ROOT / "build" / "jars"))
    parser.add_argument("--broker-jars", default=str(ROOT / "build" / "broker-jars"))
    parser.add_argument("--interval-ms", type=int, default=2_000, help="of the checkpoints")
    parser.add_argument("--no-restart", dest="restart", action="store_false")
    parser.add_argument("--debug", action="store_true", help="the job's log at DEBUG, in <variant>-<n>.log")
    parser.add_argument("--event-log", default="", help="a folder for Spark's event logs")
    # Of a variant's process.
    for name in ("variant", "bootstrap-servers", "source", "sink"):
        parser.add_argument(f"--{name}", default="", help=argparse.SUPPRESS)
    parser.add_argument("--began-s", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant:
        child(args)
        return
    from flinkish_spark.testing.broker import LocalBroker

    shutil.rmtree(args.directory, ignore_errors=True)
    found = {variant: [] for variant in args.variants}
    with LocalBroker(Path(args.directory) / "broker", jars_dir=args.broker_jars) as broker:
        _make_internal_topics(broker.bootstrap_servers)
        if "ours-archived" in args.variants:
            # The first JVM writes the archive when it ends, behind its driver.
            measure(args, broker, "ours-archived", "first")
            _wait_for_archive(Path(args.directory) / "classes")
        for number in range(args.rounds):
            for variant in args.variants:
                phases = measure(args, broker, variant, number)
                print(variant, json.dumps({name: round(s, 2) for name, s in phases.items()}), flush=True)
                found[variant].append(phases)
    print(table(found))


if __name__ == "__main__":
    main()
