"""Who runs Nexmark, how each is started, and what each cannot do. No engine is imported here.

An engine is a process that is asked a line at a time, a request as JSON, and answers each with a line of
JSON:

- `query`, `sink` (a topic), `folder` (for checkpoints, made by the engine), `events` (in the input topic),
  `batch` (how many the clock leaves out in front, and a micro-batch has at most), `checkpoint_ms`;
- `bounded`: read what is there, finish, and answer; else run until killed, from the folder's last checkpoint
  if there is one.

The answer has `events_per_s`: from when `batch` events were read until the rest was read and its results
were committed. What an engine knows of its checkpoints is in it, too.
"""

from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import dataclass, field
from pathlib import Path

from bench.nexmark.queries import QUERIES
from bench.worker import ROOT, Worker

PEERS = ROOT / "build" / "peers"
FLINK_CLASSES = ROOT / "build" / "flink-classes"
FLINK_JARS = ROOT / "build" / "flink-cluster-jars"
#: Cores that every engine gets.
CORES = 2


@dataclass(frozen=True)
class Engine:
    """An engine in one of its ways.

    Parameters
    ----------
    kind
        Which worker runs it.
    guarantee
        What its results in Kafka are: exactly once, or at least once.
    closes
        Whether windows that are open when a bounded input ends come out.
    late_ms
        How far behind a window's end one that does not close its last ones needs event time to be.
    cannot
        Why a query is left out.
    """

    name: str
    kind: str
    guarantee: str
    closes: bool
    late_ms: int = 0
    cannot: dict[str, str] = field(default_factory=dict)

    def queries(self):
        return [query for query in QUERIES if query not in self.cannot]


_ONE_KEY = "written for work on single keys: q11, q17, q18"
_PYTHON_CANNOT = {query: _ONE_KEY for query in QUERIES if query not in ("q11", "q17", "q18")}
_PYFLINK_CANNOT = {
    "q11": "came out wrong: PyFlink 2.3.0 loses elements where one joins two sessions (docs/benchmarks.md)"
}
_PANDAS_CANNOT = {
    "q8": "nothing in it is left for a function of Python's: a join of windows",
    "q11": "vectorised aggregates in session windows: Flink has none",
    "q17": "vectorised aggregates without a window: Flink has none in streaming",
    "q18": "nothing in it is left for a function of Python's: the last row of a key",
}
_QUIX_CANNOT = {
    "q5": "windows of windows: group_by() can be called once",
    "q7": "not written: one key per window, in a topic in between",
    "q8": "not written: two kinds of events in one window",
    "q11": "sessions came apart: event time goes by the newest record of a partition, whoever sent it late",
    "q12": "windows by processing time: there are none",
}
ENGINES = {
    one.name: one
    for one in (
        Engine("ours", "spark", "exactly once", closes=True),
        # With the JVM's classes of an earlier process, for what is about starts.
        Engine("ours-archived", "spark", "exactly once", closes=True),
        Engine(
            "native",
            "spark",
            "at least once",
            closes=False,
            cannot={"q12": "windows by processing time that close: there are none"},
        ),
        Engine("per-key", "spark", "at least once", closes=False, cannot=_PYTHON_CANNOT),
        Engine("tws-row", "spark", "at least once", closes=False, cannot=_PYTHON_CANNOT),
        Engine("tws-pandas", "spark", "at least once", closes=False, cannot=_PYTHON_CANNOT),
        Engine("flink-sql", "flink", "exactly once", closes=True),
        Engine("pyflink", "flink", "exactly once", closes=True, cannot=_PYFLINK_CANNOT),
        Engine("pyflink-pandas", "flink", "exactly once", closes=True, cannot=_PANDAS_CANNOT),
        Engine("quix", "processes", "exactly once", closes=False, late_ms=40_000, cannot=_QUIX_CANNOT),
        Engine(
            "bytewax",
            "processes",
            "at least once",
            closes=True,
            cannot={"q12": "windows by the clock are cut off when a bounded input ends"},
        ),
    )
}


def command(engine, bootstrap_servers, args):
    """Return what starts an engine."""
    place = ["--bootstrap-servers", bootstrap_servers, "--source", args.topic]
    module = [sys.executable, "-m", f"bench.nexmark.{engine.kind}_worker", *place]
    if engine.kind == "spark":
        name, *archived = engine.name.split("-archived")
        own = ["--engine", name, "--directory", f"{args.directory}/{engine.name}", "--jars", args.jars]
        return [*module, *own, *(["--class-archive", f"{args.directory}/classes"] if archived else [])]
    if engine.kind == "flink":
        return [*module, "--", *_FLINK[engine.name]]
    python = PEERS / engine.name / "bin" / "python"
    return [*module, "--", str(python), str(Path(__file__).parent / f"{engine.name}_job.py")]


CONNECTOR = str(FLINK_JARS / "flink-sql-connector-kafka-5.0.0-2.2.jar")
_OPENED = [
    f"--add-opens=java.base/{package}=ALL-UNNAMED"
    for package in (
        "java.lang",
        "java.lang.reflect",
        "java.util",
        "java.util.concurrent",
        "java.net",
        "java.time",
    )
]
_FLINK = {
    "flink-sql": [
        "java", "-Xmx3g", *_OPENED, "-cp", f"{FLINK_CLASSES}:{FLINK_JARS}/*", "FlinkSql",
    ],
    **{
        name: [
            str(PEERS / "pyflink" / "bin" / "python"), str(Path(__file__).parent / "pyflink_job.py"), mode,
            CONNECTOR,
        ]
        for name, mode in (("pyflink", "process"), ("pyflink-pandas", "pandas"))
    },
}  # fmt: skip


def started(engine, bootstrap_servers, args):
    """Start an engine."""
    return Worker(engine.name, command(engine, bootstrap_servers, args), args.directory)


def versions(names):
    """Return which versions are measured, by engine; the JVM's engines with its own."""
    found = {}
    for name in names:
        engine = ENGINES[name]
        if engine.kind == "spark":
            found[name] = f"PySpark {importlib.metadata.version('pyspark')}"
        elif name == "flink-sql":
            found[name] = (
                f"Flink {_jar('flink-runtime')}, Kafka connector {_jar('flink-sql-connector-kafka')}"
            )
        else:
            package = _PACKAGES[name]
            # Of another environment, so nothing of it is imported here.
            site = next((PEERS / package[0] / "lib").glob("python3*/site-packages"), PEERS)
            own = importlib.metadata.Distribution.discover(name=package[1], path=[str(site)])
            version = next((one.version for one in own), None)
            if version is None:
                raise SystemExit(f"{name} is not installed: run `make bench-peers-env`")
            found[name] = f"{package[1]} {version}"
    return found


_PACKAGES = {
    "pyflink": ("pyflink", "apache-flink"),
    "pyflink-pandas": ("pyflink", "apache-flink"),
    "quix": ("quix", "quixstreams"),
    "bytewax": ("bytewax", "bytewax"),
}


def _jar(name):
    found = [one.stem.removeprefix(f"{name}-") for one in FLINK_JARS.glob(f"{name}-[0-9]*.jar")]
    if not found:
        raise SystemExit(f"{FLINK_JARS} has no {name}: run `make bench-peers-env`")
    return found[0]
