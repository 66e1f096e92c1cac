"""What a kill costs: each engine's processes are killed with SIGKILL while events come, and started again.

Events come at a steady rate from the first to the last moment. When results have been committed several
times, the whole process tree is killed; it is started again at once, as a supervisor would, with the same
request, and goes on from its last checkpoint. Reported are the seconds from the kill to the first result
that was committed after it; how many results had been written and were written again (they are in
transactions that were aborted, or there twice); and what DuckDB says of all results in the end: lost,
duplicated, wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import sys
import threading
import time
from pathlib import Path

import pandas as pd
from kafka import KafkaConsumer, KafkaProducer, TopicPartition

from bench.nexmark import engines
from bench.nexmark.generator import Model, events
from bench.nexmark.measure import OUT_PARTITIONS, PARTITIONS, framed, machine, say
from bench.nexmark.queries import QUERIES
from bench.nexmark.truth import Truth
from bench.results import revision
from bench.worker import ROOT, end_on_sigterm
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.testing.broker import LocalBroker

_PATIENCE_S = 180
#: How long events go on behind the first result of the second life.
_BEHIND_S = 8
_COMMITS_BEFORE = 3


class Feeder(threading.Thread):
    """Sends events at a steady rate until it is told to stop."""

    def __init__(self, servers, topic, model, rate):
        super().__init__(daemon=True)
        self._servers, self._topic, self._model, self._rate = servers, topic, model, rate
        self._over, self.sent = threading.Event(), 0

    def run(self):
        producer = KafkaProducer(bootstrap_servers=self._servers, linger_ms=5)
        begun = time.monotonic()
        for part in events(self._model):
            for value in part.values:
                if self.sent % 50 == 0:
                    ahead = self.sent / self._rate - (time.monotonic() - begun)
                    if (ahead > 0 and self._over.wait(ahead)) or self._over.is_set():
                        producer.flush()
                        return
                producer.send(self._topic, value=value, partition=self.sent % PARTITIONS)
                self.sent += 1
        producer.flush()

    def stop(self):
        self._over.set()
        self.join()


class Reader(threading.Thread):
    """Reads what is committed, and notes when it came."""

    def __init__(self, servers, topic, isolation):
        super().__init__(daemon=True)
        self._consumer = KafkaConsumer(
            bootstrap_servers=servers, isolation_level=isolation, enable_auto_commit=False,
            auto_offset_reset="earliest", fetch_max_wait_ms=10, max_poll_records=20_000,
        )  # fmt: skip
        self._consumer.assign([TopicPartition(topic, one) for one in range(OUT_PARTITIONS)])
        self._over = threading.Event()
        self.values, self.times_s = [], []

    def run(self):
        while not self._over.is_set():
            polled = [one.value for records in self._consumer.poll(20).values() for one in records]
            if polled:
                self.times_s.append(time.monotonic())
                self.values += [value for value in polled if value is not None]

    def commits(self):
        """Return how often results have come, behind a pause."""
        times = self.times_s[:]
        return sum(b - a > 0.3 for a, b in itertools.pairwise(times)) + bool(times)

    def stop(self):
        self._over.set()
        self.join()
        self._consumer.close()


def _until(what, condition):
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} took more than {_PATIENCE_S} s")
        time.sleep(0.02)


def archive_classes(args, servers, engine):
    """Let a process that ends by itself leave its classes for those that come: a kill leaves none."""
    args.topic, sink = f"in-{engine.name}-first", f"out-{engine.name}-first"
    with KafkaAdmin(KafkaConnection(servers)) as admin:
        admin.create_topic(args.topic, PARTITIONS)
        admin.create_topic(sink, OUT_PARTITIONS)
    model = Model(100_000, args.active, args.seed)
    feeder = Feeder(servers, args.topic, model, 1_000_000)
    feeder.start()
    feeder.join()
    request = {
        "query": "q17", "sink": sink, "folder": str(Path(args.directory).resolve() / engine.name / "first"),
        "events": model.events, "batch": 20_000, "bounded": True, "checkpoint_ms": args.checkpoint_ms,
    }  # fmt: skip
    worker = engines.started(engine, servers, args)
    worker.wait_until_ready()
    worker.ask(json.dumps(request))
    worker.end()


def kill(args, servers, engine, query, number):
    """Kill an engine once, and return what came of it."""
    args.topic, sink = f"in-{engine.name}-{query}-{number}", f"out-{engine.name}-{query}-{number}"
    with KafkaAdmin(KafkaConnection(servers)) as admin:
        admin.create_topic(args.topic, PARTITIONS)
        admin.create_topic(sink, OUT_PARTITIONS)
    folder = Path(args.directory).resolve() / engine.name / f"{query}-{number}"
    model = Model(10_000_000, args.active, args.seed)
    request = json.dumps({
        "query": query, "sink": sink, "folder": str(folder), "events": model.events, "batch": args.batch,
        "bounded": False, "checkpoint_ms": args.checkpoint_ms,
    })  # fmt: skip
    feeder = Feeder(servers, args.topic, model, args.rate)
    committed, all_written = (
        Reader(servers, sink, isolation) for isolation in ("read_committed", "read_uncommitted")
    )
    first = engines.started(engine, servers, args)
    try:
        first.wait_until_ready()
        for thread in (feeder, committed, all_written):
            thread.start()
        first.tell(request)
        _until(f"the first results of {engine.name}", lambda: committed.commits() >= _COMMITS_BEFORE)
        time.sleep(random.Random(f"{args.seed} {number}").random() * args.checkpoint_ms / 1_000)
    finally:
        first.close()
    killed_s = time.monotonic()
    second = engines.started(engine, servers, args)
    try:
        # What had been committed by then may still be on its way to the reader.
        time.sleep(0.3)
        before = len(committed.times_s)
        second.wait_until_ready()
        ready_s = time.monotonic() - killed_s
        second.tell(request)
        _until(f"the first results of {engine.name} behind the kill", lambda: len(committed.times_s) > before)
        recovery_s = committed.times_s[before] - killed_s
        time.sleep(_BEHIND_S)
        feeder.stop()
        verdict = _settled(args, engine, query, feeder.sent, committed)
    finally:
        second.close()
        for thread in (feeder, committed, all_written):
            thread.stop()
    return {
        "recovery_s": round(recovery_s, 2),
        # Of that: until its process took a request, with a session or a JVM in it.
        "ready_s": round(ready_s, 2),
        "written_again": len(all_written.values) - len(set(committed.values)),
        "events": feeder.sent,
        "lost": verdict.missing,
        "duplicated": verdict.duplicated,
        "wrong": verdict.wrong,
        "examples": verdict.examples,
    }


def _settled(args, engine, query, sent, committed):
    """Judge what there is as soon as nothing is missing any more, or in the end."""
    parts = list(events(Model(sent, args.active, args.seed)))
    tables = (pd.concat([getattr(part, name) for part in parts]) for name in ("persons", "auctions", "bids"))
    truth, deadline = Truth(*tables), time.monotonic() + 60
    while True:
        found = framed(committed.values[:], query)
        verdict = truth.judge(query, found, closes=False, late_ms=engine.late_ms)
        if not verdict.missing or time.monotonic() > deadline:
            return verdict
        time.sleep(1)


def main(given=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--engines",
        nargs="*",
        default=["ours", "ours-archived", "native", "flink-sql", "pyflink", "quix", "bytewax"],
    )
    parser.add_argument("--queries", nargs="*", default=["q0", "q17"], choices=QUERIES)
    parser.add_argument("--kills", type=int, default=3, help="of each engine and query")
    parser.add_argument("--rate", type=int, default=4_000, help="events a second")
    parser.add_argument("--active", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=100_000)
    parser.add_argument("--checkpoint-ms", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="leave out kills that results/ has")
    parser.add_argument("--directory", default="build/bench-recovery", help="made anew")
    parser.add_argument("--results", default="build/bench-results")
    parser.add_argument("--jars", default="build/jars")
    parser.add_argument("--broker-jars", default="build/broker-jars")
    args = parser.parse_args(given)
    end_on_sigterm()
    shutil.rmtree(args.directory, ignore_errors=True)
    for folder in (args.directory, args.results):
        Path(folder).mkdir(parents=True, exist_ok=True)
    settings = {"rate": args.rate, "active": args.active, "checkpoint_ms": args.checkpoint_ms}
    settings |= {"revision": revision(ROOT), "machine": machine(), "versions": engines.versions(args.engines)}
    kept = Kept(Path(args.results) / "nexmark-recovery.jsonl", settings, args.resume)
    forever = {"log.retention.ms": "-1"}
    with LocalBroker(
        Path(args.directory) / "broker", jars_dir=args.broker_jars, extra_properties=forever
    ) as broker:
        for engine in map(engines.ENGINES.get, args.engines):
            if "-archived" in engine.name:
                archive_classes(args, broker.bootstrap_servers, engine)
        for number in range(1, args.kills + 1):
            for query in args.queries:
                for name in args.engines:
                    engine = engines.ENGINES[name]
                    if query in engine.cannot or kept.has(name, query, number):
                        continue
                    found = kill(args, broker.bootstrap_servers, engine, query, number)
                    kept.add({"engine": name, "query": query, "kill": number, **found})
                    say(f"kill {number} {query} {name}: {found}")
    kept.show()
    return kept.faults()


class Kept:
    """Kills in a file, a line each."""

    def __init__(self, path, settings, resume):
        self.path, self.kills = path, []
        if resume and path.exists():
            first, *lines = path.read_text().splitlines()
            if json.loads(first) != json.loads(json.dumps(settings)):
                raise SystemExit(f"{path} is of another run; leave out --resume")
            self.kills = [json.loads(line) for line in lines]
        else:
            path.write_text(json.dumps(settings) + "\n")

    def has(self, engine, query, number):
        return any(
            (one["engine"], one["query"], one["kill"]) == (engine, query, number) for one in self.kills
        )

    def add(self, found):
        self.kills.append(found)
        with self.path.open("a") as file:
            file.write(json.dumps(found) + "\n")

    def lines(self):
        """Return the table of what there is, by query and engine."""
        head = ("query", "engine", "promised", "kills", "recovery s", "of it ready", "written again")
        yield "| " + " | ".join((*head, "lost", "duplicated", "wrong")) + " |"
        yield "|" + "---|" * (len(head) + 3)
        for query, name in dict.fromkeys((one["query"], one["engine"]) for one in self.kills):
            own = [one for one in self.kills if (one["query"], one["engine"]) == (query, name)]
            times = [one["recovery_s"] for one in own]
            sums = [sum(one[what] for one in own) for what in ("lost", "duplicated", "wrong")]
            medians = [statistics.median(one[what] for one in own) for what in ("ready_s", "written_again")]
            cells = [query, name, engines.ENGINES[name].guarantee, len(own)]
            cells.append(f"{statistics.median(times):.1f} ({min(times):.1f}-{max(times):.1f})")
            cells += [f"{medians[0]:.1f}", *(f"{one:,.0f}" for one in (medians[1], *sums))]
            yield "| " + " | ".join(map(str, cells)) + " |"

    def show(self):
        page = "\n".join(self.lines()) + "\n"
        self.path.with_suffix(".md").write_text(page)
        print(page)

    def faults(self):
        """Return what engines that promise exactly once have lost, or have twice."""
        return "\n".join(
            f"{one['query']} by {one['engine']}, kill {one['kill']}: {one['examples']}"
            for one in self.kills
            if engines.ENGINES[one["engine"]].guarantee == "exactly once"
            and (one["lost"] or one["duplicated"] or one["wrong"])
        )


if __name__ == "__main__":
    sys.exit(main() or 0)
