"""`make bench-operators`: whole micro-batches of jobs with 1, 2, 4 and 8 keyed operators, each with a sink.

One source of Kafka's; behind it sliding windows, sessions, tumbling windows and a KeyedProcessFunction, in
turn, each into a topic of its own, exactly once. Each job runs in a process of its own, against one broker.
What Spark says of each whole micro-batch behind the first ones is kept, as a budget that adds up: planning,
the logs, and its jobs by what their stages do, out of Spark's event log. Then the input stands still, and
checkpoints are asked for: the *idle barrier*.

    python -m bench.operators --operators 1 4 --records 6000
    python -m bench.operators --operators 4 --records 6000 --filters 4
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from bench.results import records_read
from bench.start import ROOT, session

FIELDS = "user STRING, amount LONG, at TIMESTAMP"
KEYS = 2_000
#: Records come a second apart by their times, so that windows close while the job runs.
_MEASURED = 9
_PATIENCE_S = 600
#: Spark's names for parts of a micro-batch beside its jobs, and what they are called here.
PARTS = {
    "latestOffset": "sources asked",
    "walCommit": "offsets logged",
    "queryPlanning": "planning",
    "commitOffsets": "commit logged",
}
#: What jobs take, in the order of a micro-batch. What is between them is the driver's: plans of sinks, their
#: acks, the staged file.
IN_JOBS = ("scans, packing", "operators, first sink", "other sinks", "between jobs")
CPU = "CPU of tasks in the JVM"


def _is_kept(rest, order):
    return order.amount % 10 != rest


def job(args, spark):
    from bench.keyed import WINDOWED, Amounts, KeyAndWindowBounds
    from flinkish_spark import (
        CheckpointConfig,
        Json,
        KafkaSink,
        KafkaSource,
        KeyedProcessFunction,
        StreamExecutionEnvironment,
        ValueStateDescriptor,
        WatermarkStrategy,
    )
    from flinkish_spark.windows import (
        EventTimeSessionWindows,
        SlidingEventTimeWindows,
        TumblingEventTimeWindows,
    )

    class Total(KeyedProcessFunction):
        def open(self, context):
            self.total = context.get_state(ValueStateDescriptor("total", "LONG", default=0))

        def process_element(self, order, ctx):
            self.total.update(self.total.value() + order.amount)
            yield order.user, self.total.value()

    env = StreamExecutionEnvironment(
        spark,
        job="operators",
        job_dir=f"{args.directory}/job",
        checkpoint=CheckpointConfig(interval_ms=2_000),
    )
    source = KafkaSource(
        args.bootstrap_servers,
        [args.source],
        group_id=args.source,
        value=Json(FIELDS),
        max_offsets_per_trigger=args.records,
    )
    orders = env.from_source(source, uid="orders")
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(5_000).with_timestamp_assigner("at")
    timed = orders.assign_timestamps_and_watermarks(strategy)
    windows = (
        SlidingEventTimeWindows(60_000, 20_000),
        EventTimeSessionWindows(30_000),
        TumblingEventTimeWindows(60_000),
    )
    for number in range(args.operators):
        kind = number % 4
        some = timed if args.filters is None else timed.filter(partial(_is_kept, number % args.filters))
        by_user = some.key_by("user")
        if kind < 3:
            rows = by_user.window(windows[kind]).aggregate(
                Amounts(),
                KeyAndWindowBounds(),
                accumulator="LONG",
                output=WINDOWED,
                uid=f"operator{number}",
            )
            key = None
        else:
            rows = by_user.process(Total(), output="user STRING, total LONG", uid=f"operator{number}")
            key = "user"
        sink = KafkaSink(args.bootstrap_servers, f"{args.source}-{number}", key=key, value=Json())
        rows.sink_to(sink, uid=f"out{number}")
    return env


def child(args):
    """Run one job in this process, and print what its micro-batches took."""
    from flinkish_spark.job import preflight

    if args.bundles is not None:
        # What a new log gets.
        preflight.BUNDLES_PER_PARTITION = args.bundles or None
    args.event_log = f"{args.directory}/events"
    spark = session(args)
    client = job(args, spark).execute_async()
    deadline, found = time.monotonic() + _PATIENCE_S, {}
    wanted = args.warm + _MEASURED - 1
    while len([one for one in found.values() if records_read(one) >= args.records]) < wanted:
        if time.monotonic() > deadline:
            raise SystemExit(f"{wanted} micro-batches took more than {_PATIENCE_S} s")
        for query in spark.streams.active:
            found.update((one["batchId"], json.loads(one.json)) for one in query.recentProgress)
        client.wait(100)
    whole = [one for one in found.values() if records_read(one) >= args.records][args.warm :]
    took = [one["durationMs"]["triggerExecution"] for one in whole]
    # Until nothing is under way any more.
    client.trigger_checkpoint().wait(60_000)
    idle = []
    for _ in range(args.idle):
        began_s = time.monotonic()
        answer = client.trigger_checkpoint().wait(60_000)
        if answer is None or answer.kind.name != "COMPLETED":
            raise SystemExit(f"a checkpoint did not complete: {answer}")
        idle.append(round((time.monotonic() - began_s) * 1_000))
    said = {
        "operators": args.operators,
        "records": args.records,
        "bundles": args.bundles,
        "micro_batch_ms": statistics.median(took),
        "least_ms": min(took),
        "most_ms": max(took),
        "idle_barrier_ms": statistics.median(idle[-10:]),
    }
    client.cancel()
    with contextlib.suppress(Exception):
        client.wait(10_000)
    spark.stop()
    said["parts_ms"] = budget(whole, Path(args.event_log))
    print(json.dumps(said), flush=True)
    # Nothing of this process matters any more.
    os._exit(0)


def budget(whole, folder):
    """Return where the time of micro-batches goes: medians by part, in ms."""
    (log,) = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    jobs, stages, cpu_ms = {}, {}, {}
    for line in log.open():
        event = json.loads(line)
        match event["Event"]:
            case "SparkListenerJobStart":
                batch = event.get("Properties", {}).get("streaming.sql.batchId")
                jobs.setdefault(batch, []).append((event["Job ID"], event["Stage IDs"]))
            case "SparkListenerStageCompleted":
                info = event["Stage Info"]
                stages[info["Stage ID"]] = (info["Submission Time"], info["Completion Time"])
            case "SparkListenerTaskEnd":
                used = (event.get("Task Metrics") or {}).get("Executor CPU Time", 0) / 1e6
                cpu_ms[event["Stage ID"]] = cpu_ms.get(event["Stage ID"], 0) + used
    rows = []
    for one in whole:
        durations = one["durationMs"]
        row = {name: durations.get(of, 0) for of, name in PARTS.items()}
        (_, first), *others = sorted(jobs[str(one["batchId"])])
        *scans, last = sorted(stage for stage in first if stage in stages)
        of_sinks = [stage for _, ids in others for stage in ids if stage in stages]
        times = [covered_ms([stages[at] for at in ids]) for ids in (scans, [last], of_sinks)]
        row |= zip(IN_JOBS, [*times, durations.get("addBatch", 0) - sum(times)], strict=True)
        row["rest"] = durations["triggerExecution"] - sum(row.values())
        row[CPU] = sum(cpu_ms.get(at, 0) for at in (*scans, last, *of_sinks))
        rows.append(row)
    return {name: round(statistics.median(row[name] for row in rows)) for name in rows[0]}


def covered_ms(times):
    """Return how long at least one of some stages ran."""
    found, until = 0, 0
    for began, ended in sorted(times):
        found += max(0, ended - max(began, until))
        until = max(until, ended)
    return found


def fill(servers, topic, records):
    """Send what all micro-batches of a job read."""
    from kafka import KafkaProducer

    producer = KafkaProducer(bootstrap_servers=servers, linger_ms=20)
    began_s = int(time.time()) - records // 100
    for number in range(records):
        user = f"user-{number * 7919 % KEYS}"
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(began_s + number // 100))
        value = f'{{"user":"{user}","amount":{number % 100},"at":"{at}.000Z"}}'
        producer.send(topic, key=user.encode(), value=value.encode(), partition=number % 2)
    producer.flush()
    producer.close()


def measure(args, broker, operators, records, bundles, number):
    """Run one job in a fresh process; return what it said."""
    from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
    from flinkish_spark.connectors.kafka.client.connection import KafkaConnection

    folder = Path(args.directory) / f"job-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    source = f"orders-{number}"
    with KafkaAdmin(KafkaConnection(broker.bootstrap_servers)) as admin:
        for topic in (source, *(f"{source}-{one}" for one in range(operators))):
            admin.create_topic(topic, partitions=2)
    fill(broker.bootstrap_servers, source, records * (args.warm + _MEASURED))
    command = [
        sys.executable, "-m", "bench.operators", "--child", "--jars", args.jars,
        "--bootstrap-servers", broker.bootstrap_servers, "--source", source, "--directory", str(folder),
        "--operators", str(operators), "--records", str(records), "--variant", args.variant,
        "--warm", str(args.warm), "--idle", str(args.idle),
        *([] if bundles is None else ["--bundles", str(bundles)]),
        *([] if args.filters is None else ["--filters", str(args.filters)]),
    ]  # fmt: skip
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    log = folder.with_suffix(".log")
    with log.open("w") as stderr:
        output = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True}
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False, **output)
    if done.returncode != 0:
        raise SystemExit("\n".join(log.read_text().splitlines()[-40:]))
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--operators", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--records", type=int, nargs="+", default=[1_500, 6_000], help="of a micro-batch")
    parser.add_argument("--bundles", type=int, nargs="+", help="of a partition; 0: each key group alone")
    parser.add_argument("--warm", type=int, default=60, help="micro-batches before those that count")
    parser.add_argument("--idle", type=int, default=60, help="idle barriers, of which the last ten count")
    parser.add_argument("--filters", type=int, help="each operator reads through one of so many filters")
    parser.add_argument(
        "--variant", default="bare", choices=("bare", "ours"), help="a default install; or the package's JARs"
    )
    parser.add_argument("--directory", default=str(ROOT / "build" / "bench-operators"))
    parser.add_argument("--jars", default=str(ROOT / "build" / "jars"))
    parser.add_argument("--broker-jars", default=str(ROOT / "build" / "broker-jars"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--bootstrap-servers", help=argparse.SUPPRESS)
    parser.add_argument("--source", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        (args.operators,), (args.records,) = args.operators, args.records
        args.bundles = None if args.bundles is None else args.bundles[0]
        child(args)
    from flinkish_spark.testing.broker import LocalBroker

    forever = {"log.retention.ms": "-1"}
    folder = Path(args.directory) / "broker"
    shutil.rmtree(folder, ignore_errors=True)
    header = [
        "operators",
        "records",
        "bundles",
        "micro-batch",
        "least",
        "most",
        *PARTS.values(),
        *IN_JOBS,
        "rest",
        CPU,
        "idle barrier",
    ]
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    with LocalBroker(folder, jars_dir=Path(args.broker_jars), extra_properties=forever) as broker:
        number = 0
        for records in args.records:
            for operators in args.operators:
                for bundles in args.bundles or [None]:
                    number += 1
                    said = measure(args, broker, operators, records, bundles, number)
                    cells = [operators, records, "default" if bundles is None else bundles or "none"]
                    cells += [said[f"{name}_ms"] for name in ("micro_batch", "least", "most")]
                    cells += [*said["parts_ms"].values(), said["idle_barrier_ms"]]
                    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
