"""Garbage collection of Python workers."""

import gc

import pytest

from flinkish_spark.worker import daemon


def test_what_the_first_tasks_load_is_frozen_and_later_calls_cost_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(daemon, "_frozen_in", None)
    monkeypatch.setattr(gc, "collect", lambda: 0)
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(call))
    for call in range(1, 40):
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
