#!/usr/bin/env python3
"""Try this checkout with other versions: of Spark, Python, pandas, Kafka's client and the broker.

    python tools/matrix.py                                all rows and lanes, an environment for each row
    python tools/matrix.py --rows newest --lanes unit broker
    python tools/matrix.py --install                      make the environments, run nothing
    python tools/matrix.py --table                        print what docs/where-it-runs.md quotes, there

A row is an environment below build/matrix/, and the JARs of its broker. A lane is a choice of tests, or the
move of a job to the row from another one. What came of each is in docs/versions.json, which is committed: the
table says what ran, and of nothing else that it works. Standard library only: it runs before anything is
installed. The JARs for Spark, and ours, are those that `make jars shim` has left.
"""

from __future__ import annotations

import argparse
import configparser
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MATRIX = ROOT / "build" / "matrix"
RESULTS = ROOT / "docs" / "versions.json"
PAGE = ROOT / "docs" / "where-it-runs.md"
PINNED = "pinned"
BEGIN, END = "<!-- versions -->\n", "<!-- end of versions -->\n"


@dataclass(frozen=True)
class Row:
    """Versions that are tried together; `before` is the row whose job goes on here."""

    name: str
    python: str
    pyspark: str
    pandas: str
    kafka_python: str
    broker: str
    pyarrow: str = "26.0.1"
    before: str = ""
    #: Whether it is tried although pip does not bring it: setup.cfg says why.
    is_beyond: bool = False

    @property
    def minor(self) -> str:
        """The minor version of Spark."""
        return ".".join(self.pyspark.split(".")[:2])

    @property
    def interpreter(self) -> Path:
        """The Python of its environment; of the first row, what `make` has installed."""
        folder = ROOT / "build" / "venv" if self.name == PINNED else MATRIX / self.name
        return folder / "bin" / "python"

    def versions(self) -> dict[str, str]:
        """Return what was tried together, by name."""
        return {
            "python": self.python,
            "pyspark": self.pyspark,
            "pandas": self.pandas,
            "pyarrow": self.pyarrow,
            "kafka-python": self.kafka_python,
            "broker": self.broker,
        }

    def packages(self) -> list[str]:
        """Return the requirements that differ between rows."""
        return [
            f"pyspark=={self.pyspark}",
            f"pandas=={self.pandas}",
            f"kafka-python[crc32c]=={self.kafka_python}",
            f"pyarrow=={self.pyarrow}",
        ]


#: The first is what `make` installs and `make test` runs whole. Together they have both ends of each range.
ROWS = (
    Row(PINNED, "3.11", "4.2.0", "2.3.3", "3.0.12", "4.1.1"),
    Row("oldest", "3.11", "4.2.0", "2.2.2", "3.0.5", "3.9.2", pyarrow="24.0.0", before="spark-4.1"),
    Row("spark-4.1", "3.12", "4.1.4", "2.3.3", "3.0.12", "4.1.1"),
    Row("spark-4.2.1", "3.13", "4.2.1", "2.3.3", "3.0.12", "3.9.2", before=PINNED),
    Row("newest", "3.14", "4.3.0", "3.1.1", "3.0.12", "4.4.0", before=PINNED, is_beyond=True),
)

#: Stands for how many processes of pytest there are.
WORKERS = "-n"
#: What each lane runs. No file of the first three needs Delta, so that they are the same for every version.
LANES = {
    "unit": [WORKERS, "--dist=worksteal", "tests/unit"],
    "broker": [
        WORKERS,
        "--dist=loadfile",
        "--no-loadscope-reorder",
        "tests/integration/spark/test_timers.py",
        "tests/integration/broker/test_kafka_sink_commits.py",
        "tests/integration/broker/test_kafka_transactions.py",
        "tests/integration/broker/test_engines.py",
        "tests/integration/broker/test_door.py",
        "tests/integration/broker/test_two_ways.py",
        "tests/integration/broker/test_range_reader.py",
    ],
    "crash": [
        "-n0",
        *(f"tests/crash/test_{name}.py" for name in ("event_time", "door", "pipelines")),
        "tests/integration/broker/test_replay.py::test_rows_that_come_out_otherwise_stop_the_job",
    ],
    "delta": [
        "-n0",
        "tests/integration/spark/test_delta_sink_job.py",
        "tests/integration/spark/test_without_delta.py",
    ],
    "move": [],
}
#: The same where there is no JAR of Delta Lake.
NO_DELTA = ["-n0", "tests/integration/spark/test_without_delta.py"]
#: Steps of `tests/support/version_move.py`, and in whose environment each runs.
MOVES = (
    ("begin", "before"),
    ("go-on", "here"),
    ("restore", "here"),
    ("back", "before"),
    ("refused", "before"),
)
_SUMMARY = re.compile(r"(\d+) (passed|failed|errors?|skipped|deselected)")
_NO_RESULT = "not run"


def requirements(extra: str) -> list[str]:
    """Return what setup.cfg lists: of the package itself, or of an extra."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    text = (
        setup["options.extras_require"][extra] if extra else setup["options"]["install_requires"]
    ).splitlines()
    return [line.strip() for line in text if line.strip() and not line.strip().startswith("#")]


def python_of(version: str) -> str:
    """Return an interpreter of a version; exit where there is none."""
    roots = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = shutil.which(f"python{version}")
    managed = sorted(roots.glob(f"{version}.*/bin/python"))
    for candidate in (*managed, *([found] if found else [])):
        check = [str(candidate), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        asked = subprocess.run(check, capture_output=True, text=True, check=False)
        if asked.stdout.strip() == version:
            return str(candidate)
    sys.exit(f"there is no Python {version} on the PATH or in pyenv's versions: install it")


def install(row: Row) -> None:
    """Make the environment of a row, and fetch its broker, where they are not there yet."""
    if row.name == PINNED:
        if not row.interpreter.exists():
            sys.exit("the environment of `make` is missing: run `make setup`")
        return
    done = MATRIX / row.name / ".stamp"
    own = row.packages()
    names = {re.split(r"[\[=<>]", one)[0] for one in own}
    more = [
        one for one in (*requirements(""), *requirements("test")) if re.split(r"[\[=<>]", one)[0] not in names
    ]
    # Of what stands in both, the exact one.
    exact = {re.split(r"[\[=<>]", one)[0]: one for one in more}
    wanted = "\n".join([*own, *exact.values()])
    if not done.exists() or done.read_text(encoding="utf-8") != wanted:
        print(f"{row.name}: making the environment", flush=True)
        if not row.interpreter.exists():
            subprocess.run([python_of(row.python), "-m", "venv", str(MATRIX / row.name)], check=True)
        pip = [str(row.interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *own, *exact.values()], check=True)
        done.write_text(wanted, encoding="utf-8")
    jars = broker_jars(row)
    if not any(jars.glob("kafka_2.13-*.jar")):
        resolver = [sys.executable, str(ROOT / "tools" / "resolve_jars.py"), "broker", str(jars)]
        subprocess.run([*resolver, "--kafka", row.broker], check=True)


def broker_jars(row: Row) -> Path:
    """Return where the JARs of a row's broker are."""
    return ROOT / "build" / "broker-jars" if row.name == PINNED else MATRIX / f"broker-{row.broker}"


def environment(row: Row) -> dict[str, str]:
    """Return the environment of what a row runs."""
    leaks = {"SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS", "PYTHONHOME", "VIRTUAL_ENV"}
    python = str(row.interpreter)
    return {
        **{name: value for name, value in os.environ.items() if name not in leaks},
        "PYTHONPATH": str(ROOT),
        "PYSPARK_PYTHON": python,
        "PYSPARK_DRIVER_PYTHON": python,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "FLINKISH_BROKER_JARS": str(broker_jars(row)),
    }


def run(row: Row, lane: str, lock: str, workers: int) -> dict[str, Any]:
    """Run a lane of a row; return what came of it."""
    log = MATRIX / f"{row.name}-{lane}.log"
    if lane == "move":
        found = move(row, log, lock)
    else:
        has_no_jar = lane == "delta" and not has_delta(row.minor)
        wanted = NO_DELTA if has_no_jar else LANES[lane]
        tests = [f"-n{workers}" if one == WORKERS else one for one in wanted]
        command = [str(row.interpreter), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        with log.open("w", encoding="utf-8") as out:
            subprocess.run(
                [*locked(lock), *command], cwd=ROOT, env=environment(row), stdout=out, stderr=out, check=False
            )
        found = counted(log.read_text(encoding="utf-8"))
        if has_no_jar:
            found["says"] = "no JAR is served; what needs none"
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return {**found, "on": today}


def locked(lock: str) -> list[str]:
    """Return what stands in front of a command that waits for others on this machine."""
    return ["flock", "--close", lock] if lock else []


def counted(text: str) -> dict[str, Any]:
    """Read the last line of pytest's.

    Examples
    --------
    >>> counted("3 failed, 12 passed, 1 skipped in 9.05s")
    {'passed': 12, 'failed': 3, 'skipped': 1}
    """
    lines = [
        line for line in text.splitlines() if re.search(r"\d+ (passed|failed|error)", line) and " in " in line
    ]
    numbers = {word: int(number) for number, word in _SUMMARY.findall(lines[-1] if lines else "")}
    failed = numbers.get("failed", 0) + numbers.get("error", 0) + numbers.get("errors", 0)
    if not lines:
        return {"passed": 0, "failed": 1, "says": "it ended without a result"}
    return {"passed": numbers.get("passed", 0), "failed": failed, "skipped": numbers.get("skipped", 0)}


def move(row: Row, log: Path, lock: str) -> dict[str, Any]:
    """Let the row before begin a job, and this one go on with its directory and its savepoint."""
    (before,) = [one for one in ROWS if one.name == row.before]
    folder = MATRIX / f"{row.name}-moved"
    shutil.rmtree(folder, ignore_errors=True)
    passed, log_text = 0, ""
    # A patch release is free in both directions.
    steps = [step for step in MOVES if step[0] != "refused" or before.minor != row.minor]
    for step, where in steps:
        who = before if where == "before" else row
        command = [str(who.interpreter), "-m", "tests.support.version_move", step, str(folder)]
        done = subprocess.run(
            [*locked(lock), *command], cwd=ROOT, env=environment(who), capture_output=True, text=True,
            check=False, start_new_session=True,
        )  # fmt: skip
        log_text += (
            f"== {step}, pyspark {who.pyspark}: {done.returncode}\n{done.stdout}\n{done.stderr[-6000:]}\n"
        )
        log.write_text(log_text, encoding="utf-8")
        if done.returncode not in ((-9, 137) if step == "begin" else (0,)):
            return {"passed": passed, "failed": 1, "says": f"{step} ended with {done.returncode}"}
        passed += 1
    return {"passed": passed, "failed": 0, "skipped": 0}


def has_delta(minor: str) -> bool:
    """Whether the pinned list has Delta for a minor version of Spark."""
    lines = (ROOT / "flinkish_spark" / "jars" / "pinned.txt").read_text(encoding="utf-8").splitlines()
    return any(f":delta-spark_{minor}_" in line for line in lines)


def results() -> dict[str, dict[str, Any]]:
    """Return what is known, by row and lane."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def keep(row: Row, lane: str, found: dict[str, Any]) -> None:
    """Add a result to the file; one of other versions under the same name goes."""
    known, versions = results(), row.versions()
    own = known.get(row.name, {})
    lanes = own.get("lanes", {}) if own.get("versions") == versions else {}
    known[row.name] = {"versions": versions, "lanes": {**lanes, lane: found}}
    RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    write_page()


def cell(found: dict[str, Any] | None) -> str:
    """Return what the table says of a lane.

    Examples
    --------
    >>> cell({"passed": 12, "failed": 0, "skipped": 1}), cell({"passed": 3, "failed": 1}), cell(None)
    ('12 passed, 1 skipped', '**1 failed**, 3 passed', 'not run')
    """
    if found is None:
        return _NO_RESULT
    skipped = f", {found['skipped']} skipped" if found.get("skipped") else ""
    failed, passed = found["failed"], f"{found['passed']} passed{skipped}"
    said = f"**{failed} failed**, {passed}" if failed else passed
    return f"{found['says']} ({said})" if "says" in found else said


def moved(row: Row, lanes: dict[str, Any]) -> str:
    """Return what the table says of the move to a row; a row to which nothing is moved has an empty cell."""
    begun = [one.pyspark for one in ROWS if one.name == row.before]
    said = cell(lanes.get("move"))
    return said if said == _NO_RESULT and begun else "".join(f"from {one}: {said}" for one in begun)


def table(known: dict[str, dict[str, Any]]) -> str:
    """Return the table of docs/where-it-runs.md."""
    head = ["pyspark", "Python", "pandas", "kafka-python", "broker", *LANES]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in ROWS:
        lanes = known.get(row.name, {}).get("lanes", {})
        said = [moved(row, lanes) if lane == "move" else cell(lanes.get(lane)) for lane in LANES]
        if row.name == PINNED:
            said = ["`make test`", *[""] * (len(LANES) - 1)]
        own = [row.pyspark, row.python, row.pandas, row.kafka_python, row.broker]
        lines.append(f"| {' | '.join([*own, *said])} |")
    return "\n".join(lines) + "\n"


def write_page() -> None:
    """Put the table between its marks."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}{table(results())}{END}{after}", encoding="utf-8")


def main() -> None:
    """Run what was asked for, and print the table."""
    parser = argparse.ArgumentParser(description="Try this checkout with other versions.")
    names = [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="+", choices=names, default=names[1:])
    parser.add_argument("--lanes", nargs="+", choices=list(LANES), default=list(LANES))
    parser.add_argument("--install", action="store_true", help="make the environments and run nothing")
    parser.add_argument(
        "--table", action="store_true", help="print the table, put it into its page, run nothing"
    )
    parser.add_argument(
        "--workers", type=int, default=2, help="processes of pytest, where a lane takes several"
    )
    parser.add_argument("--lock", default="", help="a file that each lane locks while it runs")
    arguments = parser.parse_args()
    failed = 0
    for row in () if arguments.table else [row for row in ROWS if row.name in arguments.rows]:
        MATRIX.mkdir(parents=True, exist_ok=True)
        install(row)
        for lane in () if arguments.install else arguments.lanes:
            if lane == "move" and not row.before:
                continue
            if lane == "move":
                install(next(one for one in ROWS if one.name == row.before))
            found = run(row, lane, arguments.lock, arguments.workers)
            keep(row, lane, found)
            failed += found.get("failed", 0)
            print(f"{row.name} {lane}: {cell(found)}", flush=True)
    write_page()
    print(table(results()), end="")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
