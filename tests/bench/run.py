"""`make bench`: the main job beside native Spark and transformWithState, on one topic.

Each variant has a process of its own with a warm session; they run in turn, round after round,
while the others sit idle. CPU seconds are those of the variant's whole process tree.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import psutil
from kafka import KafkaProducer
from rich.console import Console
from rich.table import Table

from flinkish_spark.kafka import KafkaAdmin, KafkaConnection
from flinkish_spark.testing.broker import LocalBroker
from tests.bench import copying, door, keyed

MAIN = (
    "flinkish-kafka",
    "flinkish-kafka-delta",
    "native-aggregate",
    "tws-row",
    "tws-row-tuned",
    "tws-pandas",
)
#: Variants that are measured together, with what they need; a session of each is warm while they are.
GROUPS = {
    "main": (MAIN, {}),
    "door": (door.VARIANTS, {}),
    "copy": (copying.VARIANTS, {"events": 6_000_000, "batch": 200_000}),
    **{
        name: (variants, {"events": 2_500_000, "batch": 500_000, **settings})
        for name, variants, settings in keyed.GROUPS
    },
}
VARIANTS = tuple(dict.fromkeys(variant for variants, _ in GROUPS.values() for variant in variants))
ROOT = Path(__file__).resolve().parents[2]


class Worker:
    """A variant's process."""

    def __init__(self, variant, broker, args):
        command = [
            sys.executable, "-m", "tests.bench.variants", "--variant", variant,
            "--bootstrap-servers", broker.bootstrap_servers, "--source", "bench-orders",
            "--sink", f"bench-{variant}", "--directory", args.directory, "--jars", args.jars,
            "--events", str(args.events), "--batch", str(args.batch),
        ]  # fmt: skip
        environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
        log = open(Path(args.directory) / f"{variant}.log", "w")  # noqa: SIM115 - the child's
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=log, text=True, start_new_session=True,
        )  # fmt: skip
        self.variant = variant
        self._answer()

    def run(self, number):
        before = self._cpu_seconds()
        self.process.stdin.write(f"run {number}\n")
        self.process.stdin.flush()
        answer = self._answer()
        answer["cpu_seconds"] = self._cpu_seconds() - before
        return answer

    def close(self):
        self.process.stdin.close()
        for child in psutil.Process(self.process.pid).children(recursive=True):
            child.kill()
        self.process.kill()
        self.process.wait()

    def _answer(self):
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"{self.variant} ended; see its log in the bench directory")

    def _cpu_seconds(self):
        tree = [psutil.Process(self.process.pid)]
        tree += tree[0].children(recursive=True)
        total = 0.0
        for process in tree:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system + times.children_user + times.children_system
        return total


def at_of(number):
    """Return the event time of an order: one a millisecond."""
    seconds, ms = divmod(number, 1000)
    minutes, seconds = divmod(seconds, 60)
    return f"2026-01-01T{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}.{ms:03d}Z"


def produce(broker, args):
    rng = random.Random(args.seed)
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers, linger_ms=50, batch_size=1 << 18)
    for number in range(args.events):
        user = f"user-{rng.randrange(args.keys)}"
        value = (
            f'{{"user":"{user}","product":"p{rng.randrange(100)}",'
            f'"amount":{rng.randrange(1000)},"at":"{at_of(number)}"}}'
        )
        # Dealt out evenly, so that every micro-batch has as many events and none is left over.
        producer.send("bench-orders", key=user.encode(), value=value.encode(), partition=number % 2)
    producer.flush()
    producer.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--events", type=int, help="default: what the group needs, 600,000 for most")
    parser.add_argument("--batch", type=int, help="records of a micro-batch, at most")
    parser.add_argument("--keys", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--groups", nargs="*", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument(
        "--variants", nargs="*", choices=VARIANTS, help="these alone, as a group of their own"
    )
    parser.add_argument("--directory", default="build/bench")
    parser.add_argument("--jars", default="build/jars")
    parser.add_argument("--broker-jars", default="build/broker-jars")
    args = parser.parse_args()
    groups = [(tuple(args.variants), {})] if args.variants else [GROUPS[name] for name in args.groups]
    for variants, settings in groups:
        known = {"events": 600_000, "batch": 100_000, "keys": 10_000, **settings}
        given = {name: value for name, value in vars(args).items() if value is not None}
        run_group(argparse.Namespace(**{**known, **given, "variants": list(variants)}))


def run_group(args):
    """Measure some variants, round by round."""
    shutil.rmtree(args.directory, ignore_errors=True)
    Path(args.directory).mkdir(parents=True)
    with LocalBroker(Path(args.directory) / "broker", jars_dir=args.broker_jars) as broker:
        with KafkaAdmin(KafkaConnection(broker.bootstrap_servers)) as admin:
            admin.create_topic("bench-orders", 2)
            for variant in args.variants:
                admin.create_topic(f"bench-{variant}", 2)
        produce(broker, args)
        workers = [Worker(variant, broker, args) for variant in args.variants]
        results = {variant: [] for variant in args.variants}
        try:
            for number in range(args.rounds + 1):
                # Each comes first once in a while, and what one wrote is on the disk before the next begins.
                first = number % len(workers)
                for worker in workers[first:] + workers[:first]:
                    os.sync()
                    answer = worker.run(number)
                    print(f"round {number} {worker.variant}: {answer}", file=sys.stderr, flush=True)
                    if number:  # round 0 warms up
                        results[worker.variant].append(answer)
        finally:
            for worker in workers:
                worker.close()
    report(results, args)


#: For each variant, whom it is compared with.
_MAIN_PEERS = ("tws-row", "tws-pandas")
_DOOR_PEERS = ("spark-source", "spark-sink")


def report(results, args):
    """Print a table of the jobs, one of the door, and all of it as JSON."""
    title = f"{args.events:,} events, {args.batch:,} a micro-batch, {args.keys:,} keys"
    groups = [(MAIN, _MAIN_PEERS), (door.VARIANTS, _DOOR_PEERS), (copying.VARIANTS, ())]
    for work, peers in keyed.PEERS.items():
        groups.append(([v for v in keyed.VARIANTS if v.startswith(f"{work}-")], peers))
    for names, peers in groups:
        chosen = {v: rs for v, rs in results.items() if v in names}
        if chosen:
            Console(width=120).print(table_of(title, chosen, peers, args))
    found = {variant: summary_of(runs, args) for variant, runs in results.items()}
    for variant, peer in copying.PEERS.items():
        if variant in found and peer in found:
            # Round by round: what disturbs the machine disturbs both of a pair.
            pairs = zip(results[variant], results[peer], strict=True)
            ratio = statistics.median(a["events_per_s"] / b["events_per_s"] for a, b in pairs)
            found[variant]["ratio_to_spark"] = round(ratio, 3)
            print(f"{variant}: {ratio:.2f} times the rate of {peer}, median of the pairs")
    print(json.dumps(found))


def table_of(title, results, peers, args):
    table = Table(title=title)
    table.add_column("variant")
    ratios = [f"{what} to {peer}" for peer in peers for what in ("rate", "per CPU")]
    for name in ("events/s", "min-max", "events per CPU-second", *ratios):
        table.add_column(name, justify="right")
    found = {variant: summary_of(runs, args) for variant, runs in results.items()}
    for variant, one in found.items():
        compared = [
            f"{one[key] / found[peer][key]:.2f}" if peer in found else ""
            for peer in peers
            for key in ("events_per_s", "events_per_cpu_s")
        ]
        spread = f"{one['min']:,}-{one['max']:,}"
        table.add_row(variant, f"{one['events_per_s']:,}", spread, f"{one['events_per_cpu_s']:,}", *compared)
    return table


def summary_of(runs, args):
    rates = [run["events_per_s"] for run in runs]

    def median_of(name):
        values = [ms for run in runs for ms in run.get(name, [])]
        return round(statistics.median(values)) if values else None

    return {
        "events_per_s": round(statistics.median(rates)),
        "min": round(min(rates)),
        "max": round(max(rates)),
        "events_per_cpu_s": round(statistics.median(args.events / run["cpu_seconds"] for run in runs)),
        **{
            name: median_of(name) for name in ("trigger_to_decision_ms", "decision_to_visible_ms", "batch_ms")
        },
    }


if __name__ == "__main__":
    main()
