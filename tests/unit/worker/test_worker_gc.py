"""Modules are frozen at the first tasks of a process, and garbage is collected as before."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from flinkish_spark.worker import daemon

CODE = """
import gc, weakref
from flinkish_spark.worker.daemon import freeze_modules

class Node: pass

freeze_modules()
frozen = gc.get_freeze_count()
node = Node(); node.itself = node
gone = weakref.ref(node)
del node
freeze_modules()
print(frozen > 0, gone() is None)
"""


def test_garbage_is_collected_before_anything_is_frozen() -> None:
    answer = subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True)
    assert answer.stdout.split() == ["True", "True"]


def test_what_the_first_tasks_load_is_frozen_and_later_calls_cost_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    frozen: list[int] = []
    monkeypatch.setattr(daemon, "_frozen_in", None)
    monkeypatch.setattr(gc, "collect", lambda: 0)
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(len(asked)))
    while len(asked) < 40:
        asked.append(1)
        daemon.freeze_modules()
    assert frozen == [1, 2, 4, 8, 16, 32]


def test_a_fork_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: 0)
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(1))
    for process in (7, 8):
        monkeypatch.setattr("os.getpid", lambda process=process: process)
        for _ in range(3):
            daemon.freeze_modules()
    assert len(frozen) == 4
