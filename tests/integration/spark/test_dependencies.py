"""What functions need beside themselves: sent by Spark, found by functions of every kind."""

from __future__ import annotations

import subprocess
import sys
import uuid
import zipfile
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkFiles

from flinkish_spark.core.errors import ConfigError, EnvironmentFault
from flinkish_spark.datastream.data_stream import DataStream
from flinkish_spark.sinks import MemorySink
from tests.support.dependent import EXPECTED, FOUND, Imports, finding, make_files, register
from tests.support.jobs import environment


@pytest.fixture
def name() -> str:
    """A name of a module that this session has not seen."""
    return f"made_{uuid.uuid4().hex[:12]}"


def found_by(streams: dict[str, DataStream], env: Any, root: Path) -> dict[str, set[str]]:
    """Run streams to the end of their input; return what each has found."""
    sinks = {name: MemorySink(f"{root}/{name}") for name in streams}
    for name, stream in streams.items():
        stream.sink_to(sinks[name], uid=f"out-{name}")
    env.execute()
    return {name: {row.found for row in sink.rows()} for name, sink in sinks.items()}


def records_of(env: Any) -> DataStream:
    stream: DataStream = env.from_collection(
        [(f"u{n}", n) for n in range(9)], "user STRING, n LONG", uid="in"
    )
    return stream


def test_functions_of_each_kind_find_files_folders_and_programs(spark: Any, tmp_path: Path) -> None:
    make_files(tmp_path / "files")
    env = environment(spark, tmp_path / "job")
    register(env, tmp_path / "files")
    # What is registered is a copy: a later change reaches nobody in this program.
    (tmp_path / "files" / "word.txt").write_text("another")
    (tmp_path / "files" / "tool.sh").unlink()
    assert found_by(finding(records_of(env)), env, tmp_path) == {
        kind: {found} for kind, found in EXPECTED.items()
    }


def test_a_program_that_registers_a_changed_file_has_the_new_one(spark: Any, tmp_path: Path) -> None:
    for word in ("first", "second"):
        make_files(tmp_path / word, word)
        env = environment(spark, tmp_path / f"job {word}")
        register(env, tmp_path / word)
        streams = {"map": finding(records_of(env))["map"]}
        assert found_by(streams, env, tmp_path / word) == {"map": {word}}


def test_workers_and_driver_import_files_packages_folders_and_wheels(
    spark: Any, tmp_path: Path, name: str
) -> None:
    kinds = [f"{name}_{kind}" for kind in ("file", "package", "folder", "zip", "whl")]
    file, package, folder, zipped, wheel = kinds
    (tmp_path / f"{file}.py").write_text("SAYS = 'file'\n")
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("from .inner import SAYS\n")
    (tmp_path / package / "inner.py").write_text("SAYS = 'package'\n")
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / f"{folder}.py").write_text("SAYS = 'folder'\n")
    for kind, module in (("zip", zipped), ("whl", wheel)):
        with zipfile.ZipFile(tmp_path / f"packed.{kind}", "w") as archive:
            # It reads a file beside it, which a module inside of a zip could not.
            beside = "import pathlib\nSAYS = (pathlib.Path(__file__).parent / 'said.txt').read_text()\n"
            archive.writestr(f"{module}/__init__.py", beside)
            archive.writestr(f"{module}/said.txt", kind)
    env = environment(spark, tmp_path / "job")
    for place in (f"{file}.py", package, "modules", "packed.zip", "packed.whl"):
        env.add_python_file(str(tmp_path / place))
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.writestr("said.txt", "archive")
    env.add_python_archive(str(tmp_path / "model.zip"), name)
    streams = {"import": records_of(env).map(Imports(*kinds, archive=name), output=FOUND)}
    assert found_by(streams, env, tmp_path) == {"import": {"file package folder zip whl archive"}}
    # And the driver, which has the functions' modules to import, too.
    assert [__import__(kind).SAYS for kind in kinds] == ["file", "package", "folder", "zip", "whl"]
    assert (Path(SparkFiles.get(name)) / "said.txt").read_text() == "archive"
    # Again the same is nothing new; another one of that name is refused.
    env.add_python_archive(str(tmp_path / "model.zip"), name)
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("said.txt", "other")
    with pytest.raises(ConfigError, match=f"another archive '{name}'"):
        env.add_python_archive(str(tmp_path / "other.zip"), name)


def made_wheel(folder: Path, name: str, requires: str = "") -> None:
    """Write a wheel with one module, as a package index would have it."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "SAYS = 'required'\n")
        wheel.writestr(f"{info}/METADATA", metadata + (f"Requires-Dist: {requires}\n" if requires else ""))
        tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tag)
        wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


def test_what_pip_puts_into_a_folder_can_be_imported(spark: Any, tmp_path: Path, name: str) -> None:
    """The way that docs/running.md names for requirements."""
    made_wheel(tmp_path / "wheels", name, requires=f"{name}_below")
    made_wheel(tmp_path / "wheels", f"{name}_below")
    (tmp_path / "requirements.txt").write_text(f"{name}==1.0\n")
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--find-links", str(tmp_path / "wheels")]
    pip += ["--target", str(tmp_path / "packages"), "--requirement", str(tmp_path / "requirements.txt")]
    subprocess.run(pip, check=True, capture_output=True)
    env = environment(spark, tmp_path / "job")
    env.add_python_file(str(tmp_path / "packages"))
    streams = {"import": records_of(env).map(Imports(name, f"{name}_below"), output=FOUND)}
    assert found_by(streams, env, tmp_path) == {"import": {"required required"}}


def test_another_python_than_the_session_s_is_refused(spark: Any, tmp_path: Path) -> None:
    env = environment(spark, tmp_path / "job")
    env.set_python_executable(spark.sparkContext.pythonExec)
    with pytest.raises(ConfigError, match=r"set_python_executable\(\) names /other/python.*flinkish run -D"):
        env.set_python_executable("/other/python")


def test_what_hadoop_does_not_know_is_refused(spark: Any, tmp_path: Path) -> None:
    env = environment(spark, tmp_path / "job")
    with pytest.raises(EnvironmentFault, match=r"the cached file 'a' at nofs://there/thing cannot be read"):
        env.register_cached_file("nofs://there/thing", "a")
