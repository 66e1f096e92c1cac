"""`make bench`: jobs of ours beside native Spark, applyInPandasWithState and transformWithState, on a topic.

Each variant has a process of its own with a warm session; they run in turn, round after round, while the
others sit idle. CPU seconds are those of the variant's whole process tree. In round 0, which does not count,
each variant's output is read back and compared with what the input comes to.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import random
import shutil
import sys
import time
from pathlib import Path

import numpy as np
from kafka import KafkaProducer

from bench import async_calls, reporting
from bench.checking import DifferentResultsError, Orders, check, work_of
from bench.groups import GROUPS, VARIANTS, picked
from bench.results import Results, revision
from bench.worker import ROOT, Worker, end_on_sigterm
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.testing.broker import LocalBroker

#: Number of the first run that is of no round.
_FIRST_WARM_UP = 1_000
DEFAULTS = {"events": 600_000, "batch": 100_000, "keys": 10_000}


class VariantWorker(Worker):
    """A process of `bench.variants`."""

    def __init__(self, variant, broker, args):
        command = [
            sys.executable, "-m", "bench.variants", "--variant", variant,
            "--bootstrap-servers", broker.bootstrap_servers, "--source", "bench-orders",
            "--sink", f"bench-{variant}", "--directory", args.directory, "--jars", args.jars,
            "--events", str(args.events), "--batch", str(args.batch),
        ]  # fmt: skip
        super().__init__(variant, command, args.directory)

    def check(self, number, orders):
        """Read back what the run wrote, and compare."""
        if work_of(self.variant) is None:
            return "writes nothing, so nothing is compared"
        return f"{check(self.variant, orders, self.ask(f'check {number}')):,} results, as they should be"


def at_of(number):
    """Return the event time of an order: one a millisecond."""
    seconds, ms = divmod(number, 1000)
    minutes, seconds = divmod(seconds, 60)
    return f"2026-01-01T{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}.{ms:03d}Z"


def produce(broker, args):
    """Write the input, and return it."""
    rng = random.Random(args.seed)
    users, amounts = np.empty(args.events, np.int64), np.empty(args.events, np.int64)
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers, linger_ms=50, batch_size=1 << 18)
    for number in range(args.events):
        user, product, amount = rng.randrange(args.keys), rng.randrange(100), rng.randrange(1000)
        users[number], amounts[number] = user, amount
        value = (
            f'{{"user":"user-{user}","product":"p{product}","amount":{amount},"at":"{at_of(number)}"}}'
        ).encode()
        # Dealt out evenly, so that every micro-batch has as many events and none is left over.
        producer.send("bench-orders", key=b"user-%d" % user, value=value, partition=number % 2)
    producer.flush()
    producer.close()
    return Orders(users, amounts, args.batch)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="that count, behind the one that warms up and is checked; 0: that one only",
    )
    parser.add_argument(
        "--warm-up-s",
        type=float,
        default=150.0,
        help="seconds of work that each variant has behind it before the first round that counts",
    )
    parser.add_argument("--events", type=int, help="default: what the group needs, 600,000 for most")
    parser.add_argument("--batch", type=int, help="records of a micro-batch, at most")
    parser.add_argument("--keys", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--groups", nargs="*", default=list(GROUPS), choices=[*GROUPS, "async"])
    parser.add_argument(
        "--variants", nargs="*", choices=VARIANTS, help="these alone, as a group of their own"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the rounds that results/ has")
    parser.add_argument("--directory", default="build/bench", help="of the broker and the jobs; made anew")
    parser.add_argument("--results", default="build/bench-results", help="a file of rounds per group, kept")
    parser.add_argument(
        "--lock", help="a file locked in each round that counts; `flock FILE command` runs in between"
    )
    parser.add_argument("--jars", default="build/jars")
    parser.add_argument("--broker-jars", default="build/broker-jars")
    return parser.parse_args()


def main():
    args = parse_args()
    end_on_sigterm()
    groups = {name: GROUPS[name] for name in args.groups if name in GROUPS}
    if "async" in args.groups:
        # No broker and no rounds by variant: a server is called.
        async_calls.main(["--rounds", str(args.rounds)] if args.rounds else [])
    if args.variants:
        groups = {"picked": picked(args.variants)}
    for name, group in groups.items():
        given = {what: value for what, value in vars(args).items() if value is not None}
        run_group(name, group, argparse.Namespace(**{**vars(args), **DEFAULTS, **group.settings, **given}))


def run_group(name, group, args):
    """Measure what is not measured yet of a group, and report all of it."""
    settings = {what: getattr(args, what) for what in ("events", "batch", "keys", "seed")}
    settings = {**settings, "variants": list(group.variants), "revision": revision(ROOT)}
    results = Results(Path(args.results) / f"{name}.jsonl", settings, args.resume)
    if len(results.rounds) < args.rounds or not args.rounds:
        measure(group.variants, results, args)
    if not results.rounds:
        return
    report = reporting.report_of(group, results.by_variant(group.variants), args.events)
    title = (
        f"{name}: {args.events:,} events, {args.batch:,} a micro-batch, {args.keys:,} keys, "
        f"{len(results.rounds)} rounds"
    )
    page = Path(args.results) / name
    page.with_suffix(".md").write_text(reporting.markdown_of(title, report, group.peers))
    page.with_suffix(".json").write_text(json.dumps({**settings, **report}, indent=1))
    reporting.show(title, report, group.peers)


def measure(variants, results, args):
    """Run round after round; the first one warms up, and is the one whose results are checked."""
    shutil.rmtree(args.directory, ignore_errors=True)
    Path(args.directory).mkdir(parents=True)
    with LocalBroker(Path(args.directory) / "broker", jars_dir=args.broker_jars) as broker:
        with KafkaAdmin(KafkaConnection(broker.bootstrap_servers)) as admin:
            admin.create_topic("bench-orders", 2)
            for variant in variants:
                admin.create_topic(f"bench-{variant}", 2)
        orders = produce(broker, args)
        workers = []
        try:
            for variant in variants:
                workers.append(VariantWorker(variant, broker, args))
            for worker in workers:
                worker.wait_until_ready()
            begun = time.monotonic()
            # Others may use the machine meanwhile: nothing of this counts.
            for worker, _ in _round(workers, 0):
                say(f"check {worker.variant}: {worker.check(0, orders)}")
            for worker in workers if args.rounds else ():
                _warm_up(worker, args.warm_up_s)
            while len(results.rounds) < args.rounds:
                number = len(results.rounds) + 1
                with _alone(args.lock):
                    results.add({worker.variant: answer for worker, answer in _round(workers, number)})
                say(f"round {number} of {args.rounds} is kept, after {time.monotonic() - begun:.0f} s")
        except DifferentResultsError as exc:
            raise SystemExit(str(exc)) from None
        finally:
            for worker in workers:
                worker.close()


@contextlib.contextmanager
def _alone(lock):
    """Keep others from the machine who ask for the same lock."""
    if lock is None:
        yield
        return
    with open(lock, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    # Who waits for it gets it before this process asks again.
    time.sleep(1)


def _warm_up(worker, least_s):
    """Let a variant run until it has worked for so long; JVMs compile for minutes, however fast the work."""
    number = _FIRST_WARM_UP
    while worker.worked_s < least_s:
        say(f"warming up {worker.variant}: {worker.run(f'run {number}')}")
        number += 1


def _round(workers, number):
    # Each comes first once in a while, and what one wrote is on the disk before the next begins.
    first = number % len(workers)
    for worker in workers[first:] + workers[:first]:
        os.sync()
        answer = worker.run(f"run {number}")
        say(f"round {number} {worker.variant}: {answer}")
        yield worker, answer


def say(what):
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
