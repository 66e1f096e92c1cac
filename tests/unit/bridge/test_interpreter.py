"""Spark's Python processes take PySpark from its installed folder, and run the user's `sitecustomize`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyspark

from flinkish_spark.bridge import interpreter

PYSPARK = Path(pyspark.__file__).parent
ARCHIVE = PYSPARK / "python" / "lib" / "pyspark.zip"
LOOK = "import pyspark, sys; print(pyspark.__file__, *sys.path, sep='\\n')"


def start(*entries: Path, program: str = LOOK) -> subprocess.CompletedProcess[str]:
    """Run a program with the module path that Spark gives its Python processes."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, entries))}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )


def test_pyspark_comes_from_the_archive_without_the_folder_and_from_its_own_with_it() -> None:
    assert start(ARCHIVE).stdout.startswith(str(ARCHIVE))
    found, *path = start(ARCHIVE, interpreter.FOLDER).stdout.splitlines()
    assert Path(found) == PYSPARK / "__init__.py"
    assert not {str(ARCHIVE), str(interpreter.FOLDER)} & {*path}


def test_another_archive_stays(tmp_path: Path) -> None:
    """It may hold another version than the installed one."""
    other = tmp_path / "pyspark" / "python" / "lib" / "pyspark.zip"
    other.parent.mkdir(parents=True)
    shutil.copyfile(ARCHIVE, other)
    assert start(other, interpreter.FOLDER).stdout.startswith(str(other))


def test_the_users_own_sitecustomize_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.made_by_user = __file__")
    program = "import sys, sitecustomize; print(sys.made_by_user, sitecustomize.__file__)"
    ran = start(ARCHIVE, interpreter.FOLDER, tmp_path, program=program)
    assert ran.stdout.split() == [str(tmp_path / "sitecustomize.py")] * 2


def test_what_the_users_own_sitecustomize_lacks_is_told(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import a_module_that_is_not_there")
    ran = start(ARCHIVE, interpreter.FOLDER, tmp_path, program="print('on')")
    assert "a_module_that_is_not_there" in ran.stderr and ran.stdout == "on\n"
