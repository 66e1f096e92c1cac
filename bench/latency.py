"""`make bench-latency`: how long it takes from a record's arrival in Kafka until its result can be read.

A keyed job of ours (a KeyedProcessFunction with a value state, a row per record) reads a topic and writes
another, exactly once. Records come at half of the rate that the job sustains, which is measured first, from
Kafka's own load generator; when the broker has appended a record (`LogAppendTime`) comes out with its
result. A consumer with `read_committed` takes the time when it gets a result. For each interval of
checkpoints, and each number of them that may be in flight, the 50th, 95th and 99th percentile are printed,
and the median of the micro-batches beside them.

    python -m bench.latency --intervals-s 0.5 1 10 --seconds 60
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from bench.results import records_read
from bench.worker import ROOT, Worker, end_on_sigterm

FIELDS = "user STRING, amount LONG"
OUTPUT = "user STRING, total LONG, arrived LONG"
KEYS, PARTITIONS = 10_000, 4
#: Behind the first result so many seconds are left out.
_SETTLING_S = 10
_PATIENCE_S = 300
#: Looked at is one record of so many; all are fetched.
_EVERY = 10
#: How far the aim is above a micro-batch, at checkpoints of a second.
AIM_MS = 300


# -- the job, in a process of its own ------------------------------------------------------------------
class Job:
    def __init__(self, args):
        from bench.variants import session

        self.args = args
        self.spark = session(Path(args.directory).resolve(), args.jars)

    def run(self, request):
        """Run until a line says `stop`, or to the end of what is there; answer with what it took."""
        from pyspark.sql import functions as F

        from bench.variants import Times
        from flinkish_spark import (
            CheckpointConfig,
            Json,
            KafkaSink,
            KafkaSource,
            KeyedProcessFunction,
            StreamExecutionEnvironment,
            ValueStateDescriptor,
        )
        from flinkish_spark.connectors.kafka.offsets import EndAtLatest
        from flinkish_spark.core.job_dir import JobDir
        from flinkish_spark.core.store import LocalStore

        class Total(KeyedProcessFunction):
            def open(self, context):
                self.total = context.get_state(ValueStateDescriptor("total", "LONG", default=0))

            def process_element(self, order, ctx):
                total = self.total.value() + order.amount
                self.total.update(total)
                yield order.user, total, order.arrived

        args, ending = self.args, {"ending": EndAtLatest()} if request["bounded"] else {}
        interval = CheckpointConfig(
            interval_ms=request["interval_ms"], max_concurrent=request.get("concurrent", 1)
        )
        env = StreamExecutionEnvironment(self.spark, "latency", request["folder"], checkpoint=interval)
        source = KafkaSource(
            args.bootstrap_servers,
            [request["source"]],
            value=Json(FIELDS),
            metadata=["timestamp"],
            max_offsets_per_trigger=request["most"],
            **ending,
        )
        arrived = F.unix_millis(F.col("_timestamp")).alias("arrived")
        orders = env.from_source(source, uid="orders")
        orders = orders.transform(lambda df: df.withColumn("arrived", arrived).drop("_timestamp"))
        totals = orders.key_by("user").process(Total(), output=OUTPUT, uid="totals")
        totals.sink_to(KafkaSink(args.bootstrap_servers, request["sink"], key="user"), uid="out")
        if request["bounded"]:
            times = Times(JobDir(LocalStore(Path(request["folder"]))), "out")
            env.observe(times)
            env.execute()
            args.events, args.batch = request["events"], request["most"]
            return times.summary(args)
        client = env.execute_async()
        print(json.dumps({"running": True}), flush=True)
        sys.stdin.readline()
        took = [
            one.durationMs["triggerExecution"]
            for query in self.spark.streams.active
            for one in query.recentProgress
            if records_read(json.loads(one.json)) > 10
        ]
        client.stop_with_checkpoint()
        client.wait()
        return {
            "micro_batch_ms": statistics.median(took[len(took) // 3 :] or [0]),
            "micro_batches": len(took),
        }


def child(args):
    job = Job(args)
    print(json.dumps({"ready": True}), flush=True)
    while line := sys.stdin.readline():
        print(json.dumps(job.run(json.loads(line))), flush=True)


# -- what is around it ---------------------------------------------------------------------------------
def payload(folder):
    """Write the file from which Kafka's load generator draws its records."""
    path = Path(folder) / "payload"
    path.write_text("\n".join(f'{{"user":"user-{n}","amount":{n % 100}}}' for n in range(KEYS)) + "\n")
    return path


def load(args, servers, topic, records, rate):
    """Start Kafka's load generator: so many records, a second at most `rate` of them; -1 for any."""
    return subprocess.Popen(
        [
            "java", "-Xmx256m", "-cp", f"{args.broker_jars}/*", "org.apache.kafka.tools.ProducerPerformance",
            "--topic", topic, "--num-records", str(records), "--throughput", str(rate),
            "--payload-file", str(payload(args.directory)),
            "--producer-props", f"bootstrap.servers={servers}", "linger.ms=5", "acks=1",
        ],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip


def latencies(servers, topic, seconds):
    """Return how many milliseconds behind its arrival each result was read.

    Counted are those that arrived in so many seconds, from ten behind the first result on: by then the job
    has caught up with what came while it began.
    """
    from kafka import KafkaConsumer, TopicPartition

    consumer = KafkaConsumer(
        bootstrap_servers=servers, isolation_level="read_committed", enable_auto_commit=False,
        auto_offset_reset="earliest", fetch_max_wait_ms=5, max_poll_records=50_000,
    )  # fmt: skip
    found, first_ms, newest_ms, now_ms = [], None, [0] * PARTITIONS, time.time() * 1_000
    deadline_ms = now_ms + _PATIENCE_S * 1_000
    try:
        consumer.assign([TopicPartition(topic, one) for one in range(PARTITIONS)])
        # Until each partition has results of what arrived behind those seconds, however late that is.
        while now_ms < deadline_ms and (first_ms is None or min(newest_ms) < first_ms + seconds * 1_000):
            polled = consumer.poll(50)
            now_ms = time.time() * 1_000
            if polled and first_ms is None:
                first_ms = now_ms + _SETTLING_S * 1_000
                deadline_ms = first_ms + (seconds + _PATIENCE_S) * 1_000
            for place, records in polled.items():
                # By offset: of small batches as many as of big ones.
                chosen = [one.value for one in records if one.offset % _EVERY == 0]
                arrived = [json.loads(value)["arrived"] for value in chosen]
                found += [(at, now_ms - at) for at in arrived]
                newest_ms[place.partition] = max([newest_ms[place.partition], *arrived])
    finally:
        consumer.close()
    if first_ms is None:
        raise SystemExit(f"no result came in {_PATIENCE_S} s")
    last_ms = first_ms + seconds * 1_000
    if min(newest_ms) < last_ms:
        raise SystemExit(
            f"results are more than {_PATIENCE_S} s late: the job does not keep up with the load"
        )
    return np.array([late for arrived, late in found if first_ms <= arrived < last_ms])


def measure(args, broker, worker):
    from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
    from flinkish_spark.connectors.kafka.client.connection import KafkaConnection

    def topics(name):
        with KafkaAdmin(KafkaConnection(broker.bootstrap_servers)) as admin:
            for one in (f"in-{name}", f"out-{name}"):
                admin.create_topic(one, PARTITIONS, {"message.timestamp.type": "LogAppendTime"})
        return {
            "source": f"in-{name}",
            "sink": f"out-{name}",
            "folder": f"{Path(args.directory).resolve()}/{name}",
        }

    servers, rate = broker.bootstrap_servers, args.rate
    if rate is None:
        for name in ("cold", "rate"):
            asked = topics(name)
            load(args, servers, asked["source"], args.backlog, -1).wait()
            asked |= {
                "bounded": True,
                "interval_ms": 1_000,
                "most": args.backlog // 5,
                "events": args.backlog,
            }
            sustained = worker.ask(json.dumps(asked))["events_per_s"]
        rate = round(sustained / 2)
        print(f"sustained: {sustained:,.0f} records/s; records come at {rate:,}", flush=True)
    print("| checkpoints | at once | records/s | p50 ms | p95 ms | p99 ms | micro-batch ms | results | aim |")
    print("|---|---|---|---|---|---|---|---|---|")
    for interval_s, concurrent in itertools.product(args.intervals_s, args.concurrent):
        asked = topics(f"every-{interval_s:g}s-{concurrent}")
        asked |= {"bounded": False, "interval_ms": round(interval_s * 1_000), "most": 10 * rate}
        asked["concurrent"] = concurrent
        worker.ask(json.dumps(asked))
        sending = load(args, servers, asked["source"], 1 << 31, rate)
        try:
            counted = latencies(servers, asked["sink"], args.seconds)
        finally:
            sending.kill()
            sending.wait()
        said = worker.ask("stop")
        p50, p95, p99 = np.percentile(counted, [50, 95, 99])
        line = {
            "interval_s": interval_s, "concurrent": concurrent, "rate": rate,
            "p50_ms": round(p50), "p95_ms": round(p95), "p99_ms": round(p99), **said,
            "results": len(counted) * _EVERY,
        }  # fmt: skip
        aim = ""
        if interval_s == 1:
            aim = "met" if p50 <= said["micro_batch_ms"] + AIM_MS else "missed"
        if line["results"] < 0.95 * rate * args.seconds:
            aim = "void: the load was less"
        print(
            f"| {interval_s:g} s | {concurrent} | {rate:,} | {p50:,.0f} | {p95:,.0f} | {p99:,.0f} | "
            f"{said['micro_batch_ms']:,.0f} | {line['results']:,} | {aim} |",
            flush=True,
        )
        with (Path(args.results) / "latency.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--intervals-s", type=float, nargs="+", default=[0.5, 1, 10])
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 2], help="checkpoints in flight")
    parser.add_argument("--seconds", type=int, default=60, help="that are measured, for each interval")
    parser.add_argument("--rate", type=int, help="records a second; half of what is sustained by default")
    parser.add_argument("--backlog", type=int, default=500_000, help="from which that is measured")
    parser.add_argument("--directory", default="build/bench-latency", help="made anew")
    parser.add_argument("--results", default="build/bench-results")
    parser.add_argument("--jars", default=str(ROOT / "build" / "jars"))
    parser.add_argument("--broker-jars", default=str(ROOT / "build" / "broker-jars"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--bootstrap-servers", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    end_on_sigterm()
    from flinkish_spark.testing.broker import LocalBroker

    shutil.rmtree(args.directory, ignore_errors=True)
    for folder in (args.directory, args.results):
        Path(folder).mkdir(parents=True, exist_ok=True)
    forever = {"log.retention.ms": "-1"}
    with LocalBroker(
        Path(args.directory) / "broker", jars_dir=args.broker_jars, extra_properties=forever
    ) as broker:
        command = [
            sys.executable, "-m", "bench.latency", "--child", "--directory", args.directory,
            "--jars", args.jars, "--bootstrap-servers", broker.bootstrap_servers,
        ]  # fmt: skip
        worker = Worker("latency", command, args.directory)
        with contextlib.closing(worker):
            worker.wait_until_ready()
            measure(args, broker, worker)


if __name__ == "__main__":
    main()
