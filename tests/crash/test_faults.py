"""What happens to a running job from outside: broker, disk, rights, slow tasks.

A reader polls both sinks before, during and behind each fault, and notes every row that is visible
without a decision; `demo/verify.py` compares the rest when the job has ended. Kills are in
`tests/crash/test_crash.py`, tasks that fail and a lost executor in `tests/crash/test_cluster.py`, and a
zombie owner that wakes up in `tests/integration/broker/test_ownership.py`.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from demo.rig import Rig
from flinkish_spark.testing import LocalBroker, MiniCluster
from tests.crash.faults_app import DAWDLE_VARIABLE, MASTER_VARIABLE, TIMEOUT_VARIABLE, TRANSACTION_TIMEOUT_MS

APP = Path(__file__).with_name("faults_app.py")
RATE = 200.0
_PATIENCE_S = 600.0
_FAULT_S = 6.0


class UnprivilegedRig(Rig):
    """A job that file permissions hold for, also where root runs the tests."""

    def _command(self) -> list[str]:
        command = super()._command()
        if os.geteuid() != 0:
            return command
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            pytest.fail("root needs setpriv (util-linux) to give up the right to write everywhere")
        return [setpriv, "--bounding-set=-dac_override,-dac_read_search", *command]


Fault = Callable[[Rig], None]


def exact_under(directory: Path, *faults: Fault, kind: type[Rig] = UnprivilegedRig) -> None:
    """Run a job, let one thing after the other happen to it, and compare everything in the end."""
    with kind(directory, APP, random.Random(1), interval_ms=1_000) as rig:
        producer = rig.produce(seed=3, rate=RATE)
        rig.job.start()
        await_checkpoints(rig, 2)
        for fault in faults:
            began = time.monotonic()
            fault(rig)
            # A job may end of a fault, as long as it does not end wrongly: then it is started again.
            await_checkpoints(rig, 3)
            print(f"{fault.__name__}: {time.monotonic() - began:.0f} s until it worked again", flush=True)
        producer.stop()
        producer.join(60)
        rig.drain(_PATIENCE_S)
        assert rig.job.terminate(_PATIENCE_S) == 0, rig.job.tail()
        verdict = rig.verify()
    assert verdict.is_exact, verdict
    assert verdict.orders > 0


def await_checkpoints(rig: Rig, count: int) -> None:
    """Wait for checkpoints; whoever ends meanwhile is started again."""
    newest, deadline = rig.confirmed, time.monotonic() + _PATIENCE_S
    while rig.confirmed < newest + count:
        assert time.monotonic() < deadline, rig.job.tail()
        if not rig.job.is_alive:
            rig.job.start()
        time.sleep(0.2)


def a_broker_that_is_killed_and_started_again(rig: Rig) -> None:
    rig.broker.kill()
    time.sleep(_FAULT_S)
    rig.broker.start()


def a_broker_that_sleeps_beyond_the_transaction_timeout(rig: Rig) -> None:
    """What is staged is aborted by the broker when it wakes; the job stages it again."""
    rig.broker.pause()
    time.sleep(TRANSACTION_TIMEOUT_MS / 1_000 + 10)
    rig.broker.resume()


def a_disk_that_is_full_for_a_while(rig: Rig) -> None:
    """No process of the job can write a byte into a file: driver, JVM, workers."""
    limits = {}
    for process in [psutil.Process(rig.job._running().pid), rig.job._jvm()]:
        limits[process] = process.rlimit(resource.RLIMIT_FSIZE)
        process.rlimit(resource.RLIMIT_FSIZE, (0, limits[process][1]))
    seen = rig.confirmed
    time.sleep(_FAULT_S)
    assert rig.confirmed <= seen + 1, "the disk was not full"
    for process, limit in limits.items():
        if process.is_running():
            process.rlimit(resource.RLIMIT_FSIZE, limit)


def a_job_directory_that_cannot_be_written_for_a_while(rig: Rig) -> None:
    folders = [Path(folder) for folder, _, _ in os.walk(rig._job_dir)]
    modes = {folder: folder.stat().st_mode for folder in folders}
    for folder in folders:
        folder.chmod(0o555)
    seen = rig.confirmed
    time.sleep(_FAULT_S)
    assert rig.confirmed <= seen + 1, "the directory could be written"
    for folder, mode in modes.items():
        if folder.exists():
            folder.chmod(mode)


@pytest.mark.nightly
@pytest.mark.timeout(1_800)
def test_one_fault_after_the_other(run_directory: Path) -> None:
    """All in one run: a job that survived one of them badly does not survive the next."""
    exact_under(
        run_directory,
        a_disk_that_is_full_for_a_while,
        a_broker_that_is_killed_and_started_again,
        a_job_directory_that_cannot_be_written_for_a_while,
        a_broker_that_sleeps_beyond_the_transaction_timeout,
    )


def test_a_job_directory_that_was_never_writable_is_refused_with_its_name(
    run_directory: Path, broker: LocalBroker
) -> None:
    # The program never looks for its topics, so it need not know what they are called.
    with UnprivilegedRig(run_directory, APP, random.Random(1), broker=broker, prefix="unwritable-") as rig:
        rig._job_dir.mkdir()
        rig._job_dir.chmod(0o555)
        rig.job.start()
        assert rig.job.wait(120) != 0
        said = rig.job.log.read_text(encoding="utf-8")
        rig._job_dir.chmod(0o755)
    assert str(rig._job_dir) in said
    assert "may be written by this user" in said


class SpeculatingRig(Rig):
    """A job on a standalone cluster: Spark puts a second attempt on another host only, and there are two."""

    def _command(self) -> list[str]:
        suffixes = {"": "true", ".interval": "100ms", ".multiplier": "1.1", ".quantile": "0.1"}
        settings = {f"spark.speculation{name}": value for name, value in suffixes.items()}
        settings["spark.speculation.minTaskRuntime"] = "1s"
        settings["spark.executor.memory"] = "1g"
        words = " ".join(f"--conf {name}={value}" for name, value in settings.items())
        return ["env", f"PYSPARK_SUBMIT_ARGS={words} pyspark-shell", *super()._command()]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_task_that_runs_twice_at_the_same_time(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark starts a second attempt beside one that dawdles; one wins, the other left things behind."""
    dawdle = run_directory.with_name(f"{run_directory.name}-dawdle")
    shutil.rmtree(dawdle, ignore_errors=True)
    dawdle.mkdir(parents=True)
    monkeypatch.setenv(DAWDLE_VARIABLE, str(dawdle))
    # The first micro-batch of a cluster takes longer than a short timeout allows.
    monkeypatch.setenv(TIMEOUT_VARIABLE, "300000")

    def a_dawdling_task(rig: Rig) -> None:
        (dawdle / "may").touch()
        deadline = time.monotonic() + _PATIENCE_S
        while not (dawdle / "slept").exists():
            assert time.monotonic() < deadline, rig.job.tail()
            time.sleep(0.1)
        # Quicker than the one that dawdles: only a second attempt can do that.
        await_checkpoints(rig, 1)
        assert not (dawdle / "woke").exists(), "the first attempt was waited for"

    with MiniCluster(dawdle / "cluster") as cluster:
        monkeypatch.setenv(MASTER_VARIABLE, cluster.master)
        exact_under(run_directory, a_dawdling_task, kind=SpeculatingRig)
