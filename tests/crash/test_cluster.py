"""Failing tasks and a lost executor: Spark repeats tasks, the output stays exact.

Tasks of the job in `tests/crash/test_all_families.py` fail, too, between its kills.
"""

from __future__ import annotations

import random
from pathlib import Path

import psutil
import pytest

from demo.rig import Rig
from tests.crash.cluster_app import FlakyTotal

APP = Path(__file__).with_name("cluster_app.py")
RATE = 1_000.0
#: For each wait; on a machine that others use too, a start alone may take a minute.
_PATIENCE_S = 300


def run(tmp_path, monkeypatch, master, failures, disturb):
    folder = tmp_path / "failures"
    folder.mkdir()
    monkeypatch.setenv("FLINKISH_MASTER", master)
    monkeypatch.setenv("FLINKISH_FAILURES", str(folder))
    monkeypatch.setenv("FLINKISH_FAILURE_COUNT", str(failures))
    with Rig(tmp_path / "run", APP, random.Random(1)) as rig:
        producer = rig.produce(seed=3, rate=RATE)
        rig.job.start()
        rig.wait_for(lambda: rig.confirmed >= 1, "the first checkpoint", _PATIENCE_S)
        disturb(rig)
        # However slow the machine is: input goes on until everything that is to fail has failed.
        rig.wait_for(lambda: len(list(folder.iterdir())) == failures, "the last failing task", _PATIENCE_S)
        producer.stop()
        producer.join(30)
        rig.drain(_PATIENCE_S)
        assert rig.job.terminate(_PATIENCE_S) == 0, rig.job.tail()
        verdict = rig.verify()
    assert verdict.is_exact, verdict
    assert len(list(folder.iterdir())) == failures


def test_a_function_raises_as_often_as_it_is_told_to(tmp_path):
    function = FlakyTotal(tmp_path, count=1, after=3)
    raised = []
    for number in range(1, 10):
        try:
            function.process_element(None, None)
        except RuntimeError:
            raised.append(number)
    assert raised == [3]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.nightly
def test_failing_tasks_are_repeated_and_counted_once(tmp_path, monkeypatch):
    run(tmp_path, monkeypatch, "local[2,4]", 4, lambda rig: None)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_killed_executor_changes_nothing(tmp_path, monkeypatch):
    def kill_an_executor(rig):
        def executors():
            driver = psutil.Process(rig.job._running().pid)
            # The name of a process that is just ending cannot be read; `as_dict` gives None then.
            words = {p: p.as_dict(["cmdline"])["cmdline"] or () for p in driver.children(recursive=True)}
            return [p for p, line in words.items() if any("CoarseGrainedExecutorBackend" in w for w in line)]

        rig.wait_for(lambda: len(executors()) == 2, "both executors", _PATIENCE_S)
        executors()[0].kill()
        newest = rig.confirmed
        rig.wait_for(lambda: rig.confirmed >= newest + 3, "three more checkpoints", _PATIENCE_S)

    run(tmp_path, monkeypatch, "local-cluster[2,1,1024]", 2, kill_an_executor)
