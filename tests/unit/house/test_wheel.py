"""What a wheel brings, in an environment where nothing of the checkout is found."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


#: Executes a notebook with this interpreter, and looks where the package of its kernel lies.
EXECUTE = """
import sys, nbformat, nbclient
book = nbformat.read(sys.argv[1], as_version=4)
book.cells.append(nbformat.v4.new_code_cell("import flinkish_spark; print(flinkish_spark.__file__)"))
nbclient.NotebookClient(book, timeout=200).execute()
assert book.cells[-1].outputs[0].text.startswith(sys.argv[2]), book.cells[-1].outputs
"""


def run(folder: Path, *command: object) -> subprocess.CompletedProcess[str]:
    # No JVM could start, so none has; and nothing is found by a path of this process.
    environment = {**os.environ, "JAVA_HOME": str(folder / "no java"), "SPARK_LOCAL_IP": "127.0.0.1"}
    environment.pop("PYTHONPATH", None)
    words = [str(word) for word in command]
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.nightly
def test_a_wheel_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """Its command helps and says what is missing, its JAR is found, and its project's test has no warning."""
    # What an earlier build has left there would be packed, too.
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)
    built = run(ROOT, sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ".")
    (wheel,) = tmp_path.glob("*.whl")
    assert built.returncode == 0, built.stderr
    run(tmp_path, sys.executable, "-m", "venv", "venv")
    (site,) = tmp_path.glob("venv/lib/python3*/site-packages")
    # The libraries are those of this environment; its link to the checkout is not followed from there.
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    installed = run(tmp_path, "venv/bin/python", "-m", "pip", "install", "--no-deps", "--no-index", wheel)
    assert installed.returncode == 0, installed.stderr
    asked = "import flinkish_spark.jars as jars; print(jars.shim_jar())"
    assert run(tmp_path, "venv/bin/python", "-c", asked).stdout.startswith(str(site))
    said = run(tmp_path, "venv/bin/flinkish")
    assert "Commands:" in said.stdout + said.stderr and "Error" not in said.stderr
    no_java = run(tmp_path, "venv/bin/flinkish", "run", wheel)
    assert no_java.returncode == 1 and "there is no Java" in no_java.stderr
    assert "install a JDK" in no_java.stderr and no_java.stderr.count("\n") == 1
    assert run(tmp_path, "venv/bin/flinkish", "new", "orders").returncode == 0
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "error")
    assert run(tmp_path, "venv/bin/flinkish", "course", "lessons").returncode == 0
    assert len([*(tmp_path / "lessons").glob("*.ipynb")]) == 12
    (lesson,) = (tmp_path / "lessons").glob("08_*.ipynb")
    executed = run(tmp_path / "lessons", tmp_path / "venv/bin/python", "-c", EXECUTE, lesson.name, site)
    assert executed.returncode == 0, executed.stderr
    tested = run(tmp_path / "orders", tmp_path / "venv/bin/python", "-m", "pytest", *options)
    assert tested.returncode == 0 and "2 passed" in tested.stdout, tested.stdout + tested.stderr
