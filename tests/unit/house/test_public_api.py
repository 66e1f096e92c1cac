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
import flinkish_spark.functions
import flinkish_spark.sinks
import flinkish_spark.sources
import flinkish_spark.testing
from flinkish_spark.moved import INSTEAD, MOVED, MOVED_NAMES

ROOT = Path(__file__).resolve().parents[3]
FACES = [
    flinkish_spark,
    flinkish_spark.cep,
    flinkish_spark.sinks,
    flinkish_spark.sources,
    flinkish_spark.testing,
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


@pytest.mark.parametrize("old", MOVED)
def test_a_module_that_has_moved_is_found_under_its_old_name(old: str) -> None:
    new = importlib.import_module(f"flinkish_spark.{MOVED[old]}")
    instead = INSTEAD.get(MOVED[old], "")
    with pytest.warns(
        DeprecationWarning, match=f"flinkish_spark.{old} has moved to {new.__name__}.*{instead}$"
    ):
        module = importlib.import_module(f"flinkish_spark.{old}")
    public = [name for name in vars(new) if not name.startswith("_")]
    assert public and all(getattr(module, name) is getattr(new, name) for name in public)
    # Old names hide nothing that is there.
    assert importlib.import_module(f"flinkish_spark.{MOVED[old]}") is new
    del sys.modules[f"flinkish_spark.{old}"]


@pytest.mark.parametrize("old", MOVED_NAMES)
def test_a_name_that_is_not_listed_any_more_is_found_where_it_was(old: str) -> None:
    package, _, name = old.rpartition(".")
    place = MOVED_NAMES[old]
    face = importlib.import_module(f"flinkish_spark.{package}")
    says = f"flinkish_spark.{old} has moved to flinkish_spark.{place}.*{INSTEAD[place]}$"
    with pytest.warns(DeprecationWarning, match=says):
        found = getattr(face, name)
    assert found is getattr(importlib.import_module(f"flinkish_spark.{place}"), name)
    assert name not in face.__all__ and name not in dir(face)


def test_old_names_of_harnesses_warn_the_line_that_imports_them() -> None:
    code = (
        "import warnings\n"
        "with warnings.catch_warnings(record=True) as warned:\n"
        "    warnings.simplefilter('default')\n"
        "    from flinkish_spark.testing import OperatorHarness\n"
        "    from flinkish_spark.testing.fold_harness import FoldHarness\n"
        "    from flinkish_spark.testing import operator_harness\n"
        "assert operator_harness.OperatorHarness is OperatorHarness\n"
        "assert operator_harness.FoldHarness is FoldHarness\n"
        "assert all('ProgramHarness' in str(one.message) for one in warned)\n"
        "print(*((one.filename, one.lineno) for one in warned))\n"
    )
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.split("\n")[0] == "('<string>', 4) ('<string>', 5) ('<string>', 6)"


def test_users_meet_one_harness() -> None:
    assert [name for name in flinkish_spark.testing.__all__ if "Harness" in name] == ["ProgramHarness"]
    others = [old.rpartition(".")[2] for old in [*MOVED_NAMES, *MOVED] if old.startswith("testing.")]
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    # Decisions may tell what was.
    told = {page.name: page.read_text(encoding="utf-8") for page in pages if page.name != "decisions.md"}
    index = told["architecture.md"].partition("<!-- index -->")
    told["architecture.md"] = index[0]
    assert [(page, name) for page, text in told.items() for name in others if name in text] == []


def test_functions_are_found_where_they_were() -> None:
    assert flinkish_spark.functions.KeyedProcessFunction is flinkish_spark.KeyedProcessFunction


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
