"""Writes the archives: ``python -m tests.golden.make OUT``; see `README.md`.

The job runs in a process of its own, which kills itself and its JVM where most is open: a checkpoint is
decided and one of its sinks has committed, and a further micro-batch is staged.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings

from flinkish_spark import JobClient
from flinkish_spark.core.steps import Step
from flinkish_spark.testing.crash_points import kill_process_group
from tests.conftest import spark_test_conf
from tests.golden import job, orders, programs, records
from tests.golden.place import (
    AT_SAVEPOINT,
    DECIDED,
    ROOT,
    await_position,
    outputs,
    pack,
    place,
    rows_as_text,
    write_packed,
)
from tests.support.services import BUILD
from tests.support.stored_values import RECORDS, Drawn, plain, record

#: Name of the machine in what is kept: files of state say which one wrote them.
HOST = "golden"
_EACH_EIGHT = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=8,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class KillInBetween:
    """Kills when a sink has committed, behind which a micro-batch with further input is staged.

    Parameters
    ----------
    further_input
        Puts it there.
    """

    def __init__(self, further_input: Callable[[], None]) -> None:
        self._further_input = further_input
        self._is_armed, self._staged = threading.Event(), threading.Event()

    def arm(self) -> None:
        self._is_armed.set()

    def on_step_start(self, step: Step, subject: str) -> None:
        pass

    def on_step_end(self, step: Step, subject: str) -> None:
        if not self._is_armed.is_set():
            return
        if step is Step.STAGED_FILE:
            self._staged.set()
        if step is Step.SINK_COMMIT:
            self._staged.clear()
            self._further_input()
            if not self._staged.wait(120):
                _say("nothing was staged behind the decision")
            kill_process_group()


def run_files() -> None:
    """Run the job of `job.py` until it is killed, and take a savepoint on the way."""
    env = job.build(_session(), ROOT)
    killer = KillInBetween(lambda: orders.put(ROOT, DECIDED))
    env.observe(killer)
    client = env.execute_async()
    for file in range(DECIDED):
        orders.put(ROOT, file)
        await_position(ROOT / job.JOB / "job", client, {"orders": file + 1, "payments": file + 1})
        if file + 1 == DECIDED:
            killer.arm()
        if file + 1 != AT_SAVEPOINT:
            _take(client)
            continue
        _answered(client.trigger_savepoint(str(ROOT / "savepoint")))
        (ROOT / "before.json").write_text(rows_as_text(outputs(ROOT / job.JOB)))


def run_without_spark(out: Path) -> None:
    """Write what the programs of `programs.py` store, records of the simulator's jobs, and drawn values."""
    found = {name: programs.kept(program) for name, program in programs.PROGRAMS.items()}
    _write_lines(out / "programs.json.gz", found)
    _write_lines(out / "records.json.gz", records.kept())
    with (out / "stored_forms.jsonl").open("w", encoding="utf-8") as file:
        for name in RECORDS:
            file.writelines(json.dumps(case) + "\n" for case in _stored_forms(name))


def _stored_forms(name: str) -> list[dict[str, Any]]:
    """Draw values of a class; each case has the value and what is stored of it."""
    cases: list[dict[str, Any]] = []

    @settings(_EACH_EIGHT)
    @given(Drawn().of(record("flinkish_spark", name)))
    def note(value: Any) -> None:
        stored = json.dumps(value.to_json(), ensure_ascii=False)
        cases.append({"record": name, "stored": stored, "value": plain(value, in_order=True)})

    note()
    return cases


def _write_lines(path: Path, found: Mapping[str, Any]) -> None:
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in found.items())
    write_packed(path, f"{{{lines}}}\n".encode())


def _session() -> Any:
    from pyspark.sql import SparkSession

    from flinkish_spark.bridge.session import configure_spark_with_jars

    settings = {**spark_test_conf(ROOT / "scratch"), "spark.ui.showConsoleProgress": "false"}
    builder = SparkSession.builder.master("local[2,4]").config(map=settings)
    spark = configure_spark_with_jars(builder, BUILD / "jars").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def _take(client: JobClient) -> None:
    _answered(client.trigger_checkpoint())


def _answered(pending: Any) -> None:
    answer = pending.wait(300_000)
    assert answer is not None and answer.is_completed, answer
    _say(answer)


def _say(what: object) -> None:
    print(f"{time.strftime('%X')} {what}", file=sys.stderr, flush=True)


def _killed(*words: str) -> None:
    """Run a part of this program under another host name; it has to end by being killed."""
    command = [sys.executable, "-m", "tests.golden.make", *words]
    under = ["unshare", "--uts", "sh", "-c", f'hostname {HOST} && exec "$@"', "sh", *command]
    elsewhere = {name: value for name, value in os.environ.items() if name != "SPARK_LOCAL_DIRS"}
    child = subprocess.run(under, start_new_session=True, env=elsewhere, check=False)
    assert child.returncode == -9, f"{words} ended with {child.returncode}"


def main(words: list[str]) -> None:
    match words:
        case ["--files"]:
            return run_files()
        case ["--without-spark", folder]:
            return run_without_spark(Path(folder))
    out = Path(words[0]).absolute()
    out.mkdir(parents=True, exist_ok=True)
    run_without_spark(out)
    with place() as root:
        _killed("--files")
        pack(out / "job.tar.gz", root, [job.JOB])
        pack(out / "savepoint.tar.gz", root, ["savepoint", "before.json"])
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
