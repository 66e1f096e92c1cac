"""The public API: every name is there, and a worker that needs little imports little."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import flinkish_spark
import flinkish_spark.sources
import flinkish_spark.testing

PACKAGES = [flinkish_spark, flinkish_spark.sources, flinkish_spark.testing]


def annotated(package: ModuleType) -> dict[str, str]:
    """Return what type checkers see: name -> module, of a stub or of the `if TYPE_CHECKING` block."""
    stub = Path(inspect.getfile(package)).with_suffix(".pyi")
    tree = ast.parse(stub.read_text() if stub.exists() else inspect.getsource(package))
    block = next((node for node in tree.body if isinstance(node, ast.If)), tree)
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    prefix = f"{package.__name__}."
    return {alias.name: str(one.module).removeprefix(prefix) for one in imports for alias in one.names}


def loaded_after(code: str) -> list[str]:
    """Return the modules that a new interpreter has loaded behind `code`."""
    command = [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda one: one.__name__)
def test_every_public_name_is_there_and_documented(package) -> None:
    assert set(package.__all__) == set(package._MODULES)
    for name in package.__all__:
        assert getattr(package, name).__doc__, name
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing


@pytest.mark.parametrize("package", PACKAGES, ids=lambda one: one.__name__)
def test_a_type_checker_sees_the_same_names(package) -> None:
    assert annotated(package) == package._MODULES


def test_a_task_that_writes_kafka_does_not_import_the_driver() -> None:
    loaded = loaded_after(
        "import flinkish_spark.connectors.kafka.format.writer, flinkish_spark.connectors.kafka.client.producer"
    )
    for unwanted in ("pandas", "flinkish_spark.job.supervisor", "flinkish_spark.datastream.environment"):
        assert unwanted not in loaded


def test_names_are_imported_when_they_are_used() -> None:
    assert "tests.simulation" not in loaded_after("from flinkish_spark.testing import LocalBroker")
    loaded = loaded_after(
        "from flinkish_spark import AlignmentMode, CheckpointFailureReason, Tables, UNLIMITED"
    )
    assert "pyspark" not in loaded and "flinkish_spark.datastream.environment" not in loaded


def test_the_simulator_is_public() -> None:
    """One seed, as a user's own test would run it."""
    from tests.simulation.runs import RunReport, simulate
    from tests.simulation.surroundings import simulated_surroundings

    with simulated_surroundings():
        report = simulate(1)
    assert isinstance(report, RunReport) and report.broken is None
