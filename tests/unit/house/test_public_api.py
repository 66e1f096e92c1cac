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
import flinkish_spark.sinks
import flinkish_spark.sources
import flinkish_spark.testing

FACES = [flinkish_spark, flinkish_spark.sinks, flinkish_spark.sources, flinkish_spark.testing]


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
        "import flinkish_spark.connectors.kafka.format.writer\n"
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
