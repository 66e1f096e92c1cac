"""Shooting at a job made of harmless processes: a driver, something called java, and Python below it."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from demo.process import JobFailed, JobProcess, Victim

WORKER = "while True: sum(range(10_000))"
JVM = (
    f"import subprocess, sys, time; subprocess.Popen(['{sys.executable}', '-c', {WORKER!r}]); time.sleep(60)"
)
#: Ends with its "JVM", as the real one does; its JVM has a process group of its own, as the daemon has.
DRIVER = (
    "import os, subprocess, sys; sys.exit(subprocess.call([sys.argv[1], '-c', sys.argv[2]], process_group=0))"
)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[JobProcess]:
    java = tmp_path / "java"
    java.symlink_to(sys.executable)
    command = [sys.executable, "-c", DRIVER, str(java), JVM]
    process = JobProcess(command, dict(os.environ), tmp_path / "driver.log", random.Random(1))
    yield process
    process.reap()


def pids(job: JobProcess) -> dict[str, psutil.Process]:
    """Wait for the tree to stand; return it by role."""
    assert job._driver is not None
    deadline = time.monotonic() + 20
    while len(members := job.members(job._driver.pid)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    driver = psutil.Process(job._driver.pid)
    (jvm,) = driver.children()
    (worker,) = jvm.children()
    assert len(members) == 3
    return {"driver": driver, "jvm": jvm, "worker": worker}


def is_dead(process: psutil.Process) -> bool:
    try:
        process.wait(5)
    except psutil.TimeoutExpired:
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def test_a_driver_that_has_only_begun_is_waited_for(job: JobProcess) -> None:
    for _ in range(3):
        job.start()
        job.kill(Victim.JVM)
        assert not job.is_alive


def test_the_drivers_death_leaves_orphans_until_they_are_reaped(job: JobProcess) -> None:
    job.start()
    tree = pids(job)
    job.kill(Victim.DRIVER)
    assert job.status == -signal.SIGKILL
    assert tree["jvm"].is_running() and tree["worker"].is_running()
    job.start()
    assert pids(job)["jvm"].pid != tree["jvm"].pid
    job.reap()
    assert is_dead(tree["jvm"]) and is_dead(tree["worker"])


def test_the_driver_follows_its_jvm(job: JobProcess) -> None:
    job.start()
    pids(job)
    job.kill(Victim.JVM)
    assert not job.is_alive


def test_a_worker_dies_alone(job: JobProcess) -> None:
    job.start()
    tree = pids(job)
    job.kill(Victim.WORKER)
    assert is_dead(tree["worker"])
    assert job.is_alive


def test_the_group_dies_whole(job: JobProcess) -> None:
    job.start()
    tree = pids(job)
    job.kill(Victim.GROUP)
    assert all(is_dead(process) for process in tree.values())


def test_a_job_that_ended_by_itself_is_an_error_with_its_log(tmp_path: Path) -> None:
    log = tmp_path / "driver.log"
    job = JobProcess(
        [sys.executable, "-c", "print('no more'); raise SystemExit(3)"], {}, log, random.Random(1)
    )
    job.start()
    job.wait(20)
    with pytest.raises(JobFailed, match=r"ended by itself with status 3\n.*driver\.log.*\n.*\n.*no more"):
        job.kill(Victim.DRIVER)


def test_a_job_that_does_not_stop_is_an_error(job: JobProcess, tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    job = JobProcess([sys.executable, "-c", deaf], {}, tmp_path / "deaf.log", random.Random(1))
    job.start()
    while not job.tail().endswith("1"):
        time.sleep(0.05)
    try:
        with pytest.raises(JobFailed, match="did not stop within"):
            job.terminate(timeout_s=0.2)
    finally:
        job.reap()
