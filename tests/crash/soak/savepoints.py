"""A soak's savepoints: taken as a user does, and in the end compared with the input.

At a savepoint's positions each user has a total and a number of orders; its state has to say the same. State
is read in a process of its own, which has a Spark session: ``python -m tests.crash.soak.savepoints FOLDER``
prints, for each savepoint in FOLDER, a line of JSON with its name and the rows of its state.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from demo.orders import Total, newest_totals
from flinkish_spark.savepoints.files import SavepointDir
from flinkish_spark.savepoints.reader import read_state

OPERATOR, STATE, SOURCE = "totals", "total", "orders"
_PATIENCE_S = 300


def take(job_dir: Path, target: Path, environment: Mapping[str, str]) -> str:
    """Take a savepoint with the command line; return why there is none, or an empty text."""
    command = [sys.executable, "-m", "flinkish_spark.cli", "savepoint", "trigger", str(job_dir), str(target)]
    done = subprocess.run(
        command, env=dict(environment), capture_output=True, text=True, timeout=_PATIENCE_S, check=False
    )
    return "" if done.returncode == 0 else (done.stdout + done.stderr).strip()


def find_wrong(folder: Path, records: Iterable[Any], topic: str, environment: Mapping[str, str]) -> list[str]:
    """Return a sentence about each savepoint whose state is not that of the input up to its positions.

    Parameters
    ----------
    folder
        Holds the savepoints.
    records
        The whole input, in the order of each partition.
    topic
        Of the input.
    environment
        Of the process that reads the state.
    """
    paths = sorted(path.parent for path in folder.glob("*/savepoint.json"))
    if not paths:
        return []
    states = _read_states(folder, environment)
    kept = [(record.partition, record.offset, record.value) for record in records]
    wrong = []
    for path in paths:
        ends = _find_positions(path, topic)
        values = [value for partition, offset, value in kept if offset < ends.get(partition, 0)]
        expected, found = newest_totals(values), states.get(path.name, Counter())
        missing, surplus = expected - found, found - expected
        if missing or surplus:
            wrong.append(
                f"savepoint {path.name}: of {len(expected)} keys {len(missing)} are missing or wrong, "
                f"{len(surplus)} are surplus: {sorted(missing | surplus)[:4]}"
            )
    return wrong


def _find_positions(path: Path, topic: str) -> dict[int, int]:
    (chain,) = SavepointDir(path).metadata().chains
    return {int(partition): int(end) for partition, end in chain.positions[SOURCE][topic].items()}


def _read_states(folder: Path, environment: Mapping[str, str]) -> dict[str, Counter[Total]]:
    command = [sys.executable, "-m", "tests.crash.soak.savepoints", str(folder)]
    done = subprocess.run(
        command, env=dict(environment), stdout=subprocess.PIPE, text=True, timeout=_PATIENCE_S, check=True
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["savepoint"]: Counter((user, total, n) for user, total, n in line["rows"]) for line in lines}


def main() -> None:
    from tests.crash.light_session import light_session

    with tempfile.TemporaryDirectory() as scratch:
        spark = light_session("savepoints", Path(scratch))
        for path in sorted(Path(sys.argv[1]).glob("*/savepoint.json")):
            frame = read_state(spark, path.parent, OPERATOR, STATE)
            rows = [list(row) for row in frame.select("key", "total", "orders").collect()]
            print(json.dumps({"savepoint": path.parent.name, "rows": rows}))
        spark.stop()


if __name__ == "__main__":
    main()
