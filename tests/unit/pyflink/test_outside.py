"""Where the job of a PyFlink program lives, and how it is named, with settings from outside."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from flinkish_spark import CheckpointConfig
from flinkish_spark.datastream import environment as own
from flinkish_spark.pyflink.common import Configuration
from flinkish_spark.pyflink.datastream import StreamExecutionEnvironment


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> list[tuple[str, str]]:
    """Return the names and directories of the environments that programs make."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["/programs/word_count.py"])
    found: list[tuple[str, str]] = []

    def make(job: str = "", job_dir: str = "") -> Any:
        found.append((job, job_dir))
        return SimpleNamespace(checkpoint=CheckpointConfig(timeout_ms=7_000))

    monkeypatch.setattr(own.StreamExecutionEnvironment, "get_execution_environment", make)
    return found


def test_the_directory_of_jobs_may_come_from_outside(
    made: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setenv("FLINKISH_EXECUTION_CHECKPOINTING_DIR", "/data/jobs")
    StreamExecutionEnvironment.get_execution_environment()
    monkeypatch.setenv("FLINKISH_PIPELINE_NAME", "counts")
    StreamExecutionEnvironment.get_execution_environment()
    assert made == [("word_count", ""), ("counts", "")] and not caplog.text


def test_the_program_wins(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLINKISH_EXECUTION_CHECKPOINTING_DIR", "/data/jobs")
    monkeypatch.setenv("FLINKISH_PIPELINE_NAME", "counts")
    given = Configuration()
    given.set_string("pipeline.name", "my words").set_string("execution.checkpointing.dir", "/own/")
    StreamExecutionEnvironment.get_execution_environment(given)
    assert made == [("my-words", "/own/my-words")]


def test_without_a_directory_the_state_is_lost_and_the_log_says_so(
    made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    StreamExecutionEnvironment.get_execution_environment()
    assert made[0][0] == "word_count" and made[0][1].endswith("/word_count")
    assert "FLINKISH_EXECUTION_CHECKPOINTING_DIR" in caplog.text


def test_an_interval_changes_nothing_else(made: Any) -> None:
    env = StreamExecutionEnvironment.get_execution_environment()
    env.enable_checkpointing(500)
    assert env._environment.checkpoint == CheckpointConfig(interval_ms=500, timeout_ms=7_000)
