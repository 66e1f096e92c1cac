"""`flinkish new`: what it writes works as it is, and nothing of the user's is touched."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.cli_rig import flinkish

FILES = {"README.md", "job.ipynb", "job.py", "test_job.py"}


def test_the_test_of_a_new_project_passes_without_spark(tmp_path: Path) -> None:
    folder = tmp_path / "a folder" / "orders"
    result = flinkish("new", folder)
    assert result.exit_code == 0 and str(folder) in result.stdout
    assert {path.name for path in folder.iterdir()} == FILES
    # No JVM could start, so none has.
    environment = {**os.environ, "JAVA_HOME": str(tmp_path / "no java"), "SPARK_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


def test_its_notebook_is_one_that_is_clean_and_runs_the_job(tmp_path: Path) -> None:
    flinkish("new", tmp_path / "orders")
    content = json.loads((tmp_path / "orders" / "job.ipynb").read_text(encoding="utf-8"))
    assert (content["nbformat"], content["metadata"]["kernelspec"]["name"]) == (4, "python3")
    ids = [cell["id"] for cell in content["cells"]]
    assert len(set(ids)) == len(ids)
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)
    code = "\n".join("".join(cell["source"]) for cell in cells)
    job = ast.parse((tmp_path / "orders" / "job.py").read_text(encoding="utf-8"))
    defined = {node.name for node in job.body if isinstance(node, ast.FunctionDef)}
    used = {
        node.attr
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "job"
    }
    assert used and used <= defined


def test_a_directory_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".hidden").write_text("mine")
    result = flinkish("new", tmp_path)
    assert result.exit_code == 2 and "has files in it" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == [".hidden"]
    (tmp_path / "file").write_text("mine")
    assert flinkish("new", tmp_path / "file").exit_code == 2
    (tmp_path / "empty").mkdir()
    assert flinkish("new", tmp_path / "empty").exit_code == 0
