"""Nexmark: every engine with the same input, in turn, and each run's results compared with DuckDB's.

A process per engine stays warm while all queries are measured. A round of a query is a run of each engine,
who take turns in coming first. Each run writes to a topic of its own, which is read back and judged behind
it: a round with other results than DuckDB's is not kept, and ends the bench behind the others, with
examples.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import time
from pathlib import Path

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.json
from kafka import KafkaConsumer, KafkaProducer, TopicPartition

from bench.checking import DifferentResultsError
from bench.nexmark import engines, report
from bench.nexmark.generator import Model, events
from bench.nexmark.queries import COLUMNS, QUERIES
from bench.nexmark.truth import Truth
from bench.results import Results, revision
from bench.worker import ROOT, end_on_sigterm
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.testing.broker import LocalBroker

#: Of the input, and of each output.
PARTITIONS, OUT_PARTITIONS = 4, 2
TOPIC = "nexmark"
#: What a quarter of an hour is enough for: engines in Python are ten times as long at work, so for one query.
_CORE = ["ours", "native", "flink-sql"]
DAILY = {query: _CORE for query in QUERIES} | {"q17": [*_CORE, "ours@1s", "pyflink", "quix", "bytewax"]}


def written(bootstrap_servers, model):
    """Write the events of a model, dealt evenly to the partitions; return what they come to."""
    producer = KafkaProducer(bootstrap_servers=bootstrap_servers, linger_ms=50, batch_size=1 << 18)
    parts, number = [], 0
    for part in events(model):
        for value in part.values:
            producer.send(TOPIC, value=value, partition=number % PARTITIONS)
            number += 1
        parts.append(part)
    producer.flush()
    producer.close()
    return Truth(
        *(pd.concat([getattr(part, name) for part in parts]) for name in ("persons", "auctions", "bids"))
    )


def read(bootstrap_servers, topic, query):
    """Return what is committed in an output topic, as a frame with the columns of the query."""
    values = []
    consumer = KafkaConsumer(
        bootstrap_servers=bootstrap_servers, isolation_level="read_committed", enable_auto_commit=False,
        auto_offset_reset="earliest", fetch_max_wait_ms=50, max_poll_records=20_000,
    )  # fmt: skip
    try:
        places = [TopicPartition(topic, one) for one in sorted(consumer.partitions_for_topic(topic))]
        consumer.assign(places)
        ends = consumer.end_offsets(places)
        while any(consumer.position(place) < ends[place] for place in places):
            for records in consumer.poll(200).values():
                values += [record.value for record in records if record.value is not None]
    finally:
        consumer.close()
    return framed(values, query)


def framed(values, query):
    """Return results, as they are in Kafka, as a frame."""
    kinds = {"BIGINT": pa.int64(), "VARCHAR": pa.string()}
    schema = pa.schema([(name, kinds[kind]) for name, kind in COLUMNS[query].items()])
    if not values:
        return schema.empty_table().to_pandas()
    # A day would be made a time, if not told otherwise.
    options = pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    return pa.json.read_json(pa.BufferReader(b"\n".join(values)), parse_options=options).to_pandas()


class Field:
    """A broker with the input, and the engines on it."""

    def __init__(self, args, names):
        self.args = args
        shutil.rmtree(args.directory, ignore_errors=True)
        Path(args.directory).mkdir(parents=True)
        forever = {"log.retention.ms": "-1"}
        self.broker = LocalBroker(
            Path(args.directory) / "broker", jars_dir=args.broker_jars, extra_properties=forever
        )
        self.workers, self._runs, self._names = {}, 0, names

    def __enter__(self):
        self.broker.start()
        try:
            self._admin().create_topic(TOPIC, PARTITIONS)
            begun = time.monotonic()
            self.truth = written(self.broker.bootstrap_servers, self.args.model)
            say(f"{self.args.events:,} events are written, after {time.monotonic() - begun:.0f} s")
            for name in self._names:
                self.workers[name] = engines.started(
                    engines.ENGINES[name], self.broker.bootstrap_servers, self.args
                )
            for worker in self.workers.values():
                worker.wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for worker in self.workers.values():
            worker.close()
        self.broker.stop()

    def _admin(self):
        return KafkaAdmin(KafkaConnection(self.broker.bootstrap_servers))

    def run(self, query, variant):
        """Run a query once, and judge it."""
        name, _, seconds = variant.partition("@")
        self._runs += 1
        sink = f"nexmark-{query}-{name}-{self._runs}"
        folder = Path(self.args.directory).resolve() / name / f"{self._runs}"
        with self._admin() as admin:
            admin.create_topic(sink, OUT_PARTITIONS)
        request = {
            "query": query, "sink": sink, "folder": str(folder), "events": self.args.events,
            "batch": self.args.batch, "bounded": True,
            "checkpoint_ms": int(float(seconds.removesuffix("s")) * 1_000) if seconds else 10_000,
        }  # fmt: skip
        os.sync()
        answer = self.workers[name].run(json.dumps(request))
        found = read(self.broker.bootstrap_servers, sink, query)
        engine = engines.ENGINES[name]
        verdict = self.truth.judge(query, found, closes=engine.closes, late_ms=engine.late_ms)
        if not verdict.is_right:
            say(f"{query} {variant}: {answer}")
        answer["results"] = verdict.or_raise(f"{query} by {variant}")
        shutil.rmtree(folder, ignore_errors=True)
        return answer


def say(what):
    print(what, file=sys.stderr, flush=True)


def machine():
    """Return what figures of two runs must have in common to be put together."""
    with open("/proc/cpuinfo") as file:
        model = next((line.partition(": ")[2].strip() for line in file if line.startswith("model name")), "")
    return f"{os.cpu_count()} cores, {model}, Python {platform.python_version()}, DuckDB {duckdb.__version__}"


def measure(args):
    """Measure what is not measured yet; return the results by query."""
    wanted = {
        query: args.engines or (DAILY[query] if args.is_daily else list(engines.ENGINES))
        for query in args.queries
    }
    names = list(dict.fromkeys(one.partition("@")[0] for own in wanted.values() for one in own))
    settings = {"events": args.events, "batch": args.batch, "active": args.active, "seed": args.seed}
    settings |= {"revision": revision(ROOT), "machine": machine(), "versions": engines.versions(names)}
    results, variants, void = {}, {}, []
    for query in args.queries:
        can = [one for one in wanted[query] if query not in engines.ENGINES[one.partition("@")[0]].cannot]
        if not can:
            continue
        path = Path(args.results) / f"nexmark-{query}.jsonl"
        results[query] = Results(path, {**settings, "variants": can}, args.resume)
        variants[query] = can
    if all(len(one.rounds) >= args.rounds for one in results.values()) and args.rounds:
        return results
    with Field(args, names) as field:
        begun = time.monotonic()
        for number in range(args.rounds + 1):
            for query, kept in results.items():
                # The round in front warms up what is left to be measured.
                if (number and len(kept.rounds) >= number) or len(kept.rounds) >= args.rounds > 0:
                    continue
                answers = {}
                for variant in _in_turn(variants[query], number):
                    try:
                        answers[variant] = field.run(query, variant)
                    except DifferentResultsError as error:
                        void.append(str(error))
                    say(f"round {number} {query} {variant}: {answers.get(variant, 'void')}")
                if number and len(answers) == len(variants[query]):
                    kept.add(answers)
                    say(f"round {number} of {query} is kept, after {time.monotonic() - begun:.0f} s")
    if void:
        raise SystemExit("\n".join(void))
    return results


def _in_turn(variants, number):
    first = number % len(variants)
    return variants[first:] + variants[:first]


def parse_args(given=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--queries", nargs="*", default=list(QUERIES), choices=QUERIES)
    parser.add_argument("--engines", nargs="*", help="`ours@1s` has checkpoints every second; all by default")
    parser.add_argument(
        "--daily", dest="is_daily", action="store_true", help="those that a quarter of an hour is enough for"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="behind the one that warms up; 0: that one only"
    )
    parser.add_argument("--events", type=int, default=500_000)
    parser.add_argument("--batch", type=int, default=100_000)
    parser.add_argument(
        "--active", type=int, default=1_000_000, help="persons, and auctions, that are active"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="go on with the rounds that results/ has")
    parser.add_argument("--directory", default="build/bench-nexmark", help="made anew")
    parser.add_argument("--results", default="build/bench-results")
    parser.add_argument("--jars", default="build/jars")
    parser.add_argument("--broker-jars", default="build/broker-jars")
    args = parser.parse_args(given)
    if args.rounds and args.events < 2 * args.batch:
        parser.error(
            f"--events {args.events} is less than two micro-batches of {args.batch}: rates count what comes "
            "behind the first one. Give more events, a smaller --batch, or --rounds 0"
        )
    args.topic = TOPIC
    args.model = Model(args.events, args.active, args.seed)
    return args


def main(given=None):
    args = parse_args(given)
    end_on_sigterm()
    measure(args)
    if args.rounds:
        say(report.write(args.results))


if __name__ == "__main__":
    main()
