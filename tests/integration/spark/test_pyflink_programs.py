"""Programs written for PyFlink, run as jobs by their own environment."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark.pyflink.datastream import StreamExecutionEnvironment

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("test_streams", "a side output by yield tag, value"),
        ("test_keyed", "reduce without any type"),
        ("test_windows", "tumbling windows, ProcessWindowFunction"),
    ],
)
def test_a_program_of_the_page_runs_as_a_job(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    monkeypatch.setenv("FLINKISH_EXECUTION_CHECKPOINTING_DIR", str(tmp_path))
    program, expected, _ = importlib.import_module(f"tests.unit.pyflink.{module}").P.cases[name]
    env = StreamExecutionEnvironment.get_execution_environment()
    found = list(program(env).execute_and_collect())
    assert sorted(map(repr, found)) == sorted(map(repr, expected))
    assert [folder.name for folder in tmp_path.iterdir()] == [env._environment.job]
