"""The public API: every name is there, and a worker that needs little imports little."""

from __future__ import annotations

import ast
import configparser
import importlib.util
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from pyspark.sql.datasource import DataSource

import flinkish_spark
import flinkish_spark.cep
import flinkish_spark.joins
import flinkish_spark.sinks
import flinkish_spark.sources
import flinkish_spark.state
import flinkish_spark.testing
import flinkish_spark.windows

ROOT = Path(__file__).resolve().parents[3]
FACES = [
    flinkish_spark,
    flinkish_spark.cep,
    flinkish_spark.joins,
    flinkish_spark.sinks,
    flinkish_spark.sources,
    flinkish_spark.state,
    flinkish_spark.testing,
    flinkish_spark.windows,
]


def listed(face: ModuleType) -> set[str]:
    """Return the names of a face's stub, which is what type checkers see."""
    tree = ast.parse(Path(inspect.getfile(face)).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert all(alias.asname == alias.name for one in imports for alias in one.names)
    return {alias.name for one in imports for alias in one.names}


def loaded_after(code: str) -> list[str]:
    """Return the modules that a new interpreter has loaded behind `code`."""
    command = [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


@pytest.mark.parametrize("face", FACES, ids=lambda one: one.__name__)
def test_every_public_name_is_there_and_documented(face) -> None:
    assert set(face.__all__) == listed(face) <= set(dir(face))
    for name in face.__all__:
        assert getattr(face, name).__doc__, name
    with pytest.raises(AttributeError, match="attribute nothing"):
        _ = face.nothing


def test_a_task_that_writes_kafka_does_not_import_the_driver() -> None:
    loaded = loaded_after(
        "import flinkish_spark.connectors.kafka.format.sink\n"
        "import flinkish_spark.connectors.kafka.client.producer"
    )
    for unwanted in ("pandas", "flinkish_spark.job.supervisor", "flinkish_spark.datastream.environment"):
        assert unwanted not in loaded


def test_names_are_imported_when_they_are_used() -> None:
    assert "flinkish_spark.testing.program_harness" not in loaded_after(
        "from flinkish_spark.testing import LocalBroker"
    )
    loaded = loaded_after(
        "from flinkish_spark import AlignmentMode, CheckpointFailureReason, Tables, UNLIMITED"
    )
    assert "pyspark" not in loaded and "flinkish_spark.datastream.environment" not in loaded


def test_users_meet_one_harness() -> None:
    assert [name for name in flinkish_spark.testing.__all__ if "Harness" in name] == ["ProgramHarness"]
    others = ["BroadcastHarness", "OperatorHarness", "broadcast_harness", "fold_harness", "operator_harness"]
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    # Decisions may tell what was.
    told = {page.name: page.read_text(encoding="utf-8") for page in pages if page.name != "decisions.md"}
    index = told["architecture.md"].partition("<!-- index -->")
    told["architecture.md"] = index[0]
    assert [(page, name) for page, text in told.items() for name in others if name in text] == []


def test_spark_finds_the_format_by_the_name_of_the_module_that_a_wheel_brings() -> None:
    """As Spark looks for it: among the top-level modules of the path."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    (root,) = [
        line.partition("=")[2].strip()
        for line in setup["options"]["package_dir"].splitlines()
        if line.startswith("=")
    ]
    (found,) = pkgutil.iter_modules([str(ROOT / root)])
    assert found.name == setup["options"]["py_modules"] and found.name.startswith("pyspark_")
    spec = found.module_finder.find_spec(found.name, None)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert issubclass(module.DefaultSource, DataSource) and module.DefaultSource.name() == "flinkish-kafka"
