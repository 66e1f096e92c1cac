"""What is shipped, under which name, and what is refused, without Spark."""

from __future__ import annotations

import os
import stat
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flinkish_spark.bridge import session_files
from flinkish_spark.core.errors import ConfigError, EnvironmentFault
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job.dependencies import Dependencies


class Context:
    """Stands for Spark's context: unpacks archives, as Spark does on each host."""

    pythonExec = "python3"  # noqa: N815

    def __init__(self, folder: Path) -> None:
        self._temp_dir, self.root = str(folder / "temp"), folder / "files"
        self._python_includes: list[str] = []
        self.listArchives: list[str] = []

    def addArchive(self, path: str) -> None:
        archive, _, name = path.partition("#")
        local = Path(archive.removeprefix("file://"))
        with tarfile.open(local) if ".t" in local.name else zipfile.ZipFile(local) as opened:
            opened.extractall(self.root / name)
        self.listArchives.append(f"spark://driver:1/files/{local.name}#{name}")


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    made = Context(tmp_path)
    monkeypatch.setattr(session_files, "find_shipped", lambda name: made.root / name)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return made


@pytest.fixture
def dependencies(context: Context) -> Dependencies:
    session: Any = SimpleNamespace(sparkContext=context)
    return Dependencies(session, StoreSpec("/jobs/orders"))


def archives(context: Context) -> list[Path]:
    return sorted(Path(context._temp_dir, "flinkish-files").glob("*.zip"))


def modes(archive: Path) -> dict[str, int]:
    with zipfile.ZipFile(archive) as opened:
        return {info.filename: info.external_attr >> 16 for info in opened.infolist()}


# -- cached files -----------------------------------------------------------------------------------------


def test_a_file_keeps_its_name_and_the_same_content_travels_once(
    dependencies: Dependencies, context: Context, tmp_path: Path
) -> None:
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.onnx").write_text("weights")
    dependencies.register_cached_file(str(tmp_path / "a" / "model.onnx"), "one", False)
    dependencies.register_cached_file((tmp_path / "b" / "model.onnx").as_uri(), "two", False)
    places = dependencies.cached_files
    assert places["one"] == places["two"] and places["one"].endswith("/model.onnx")
    assert (context.root / places["one"]).read_text() == "weights"
    assert len(archives(context)) == len(context.listArchives) == 1


def test_other_content_or_another_right_is_another_name(
    dependencies: Dependencies, context: Context, tmp_path: Path
) -> None:
    file = tmp_path / "tool"
    file.write_text("one")
    dependencies.register_cached_file(str(file), "first", False)
    dependencies.register_cached_file(str(file), "may run", True)
    file.write_text("two")
    dependencies.register_cached_file(str(file), "second", False)
    places = dependencies.cached_files
    assert len(set(places.values())) == 3
    assert [(context.root / places[name]).read_text() for name in ("first", "second")] == ["one", "two"]
    told = {places[name].split("/")[0]: name for name in places}
    found = {told[one.stem]: bool(modes(one)["tool"] & stat.S_IXUSR) for one in archives(context)}
    assert found == {"first": False, "may run": True, "second": False}


def test_a_folder_travels_with_all_that_is_in_it(
    dependencies: Dependencies, context: Context, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    (folder / "empty").mkdir(parents=True)
    (folder / "below").mkdir()
    (folder / "below" / "ünï code.txt").write_text("text")
    (folder / ".hidden").write_text("seen")
    (folder / "run.sh").write_text("")
    (folder / "run.sh").chmod(0o755)
    (folder / "linked.txt").symlink_to(folder / ".hidden")
    (folder / "linked").symlink_to(folder / "below")
    dependencies.register_cached_file(f"{folder}/", "data", False)
    found = context.root / dependencies.cached_files["data"]
    assert found.name == "data" and (found / "empty").is_dir()
    assert (found / "linked" / "ünï code.txt").read_text() == "text"
    assert (found / "linked.txt").read_text() == (found / ".hidden").read_text() == "seen"
    assert modes(archives(context)[0])["data/run.sh"] == stat.S_IFREG | 0o755


def test_a_relative_path_is_one_of_this_process(
    dependencies: Dependencies, context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "below").mkdir(parents=True)
    (tmp_path / "here" / "word").write_text("word")
    monkeypatch.chdir(tmp_path / "here" / "below")
    dependencies.register_cached_file("../word", "word", False)
    dependencies.register_cached_file("..", "all", False)
    assert (context.root / dependencies.cached_files["word"]).read_text() == "word"
    assert (context.root / dependencies.cached_files["all"] / "word").read_text() == "word"


@pytest.mark.parametrize("name", ["", " ", "a\nb", "x" * 201, None, 3, b"model"])
def test_a_name_that_is_none_is_refused(dependencies: Dependencies, tmp_path: Path, name: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="name is"):
        dependencies.register_cached_file(str(tmp_path / "file"), name, False)


def test_two_of_one_name_are_refused(dependencies: Dependencies, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    dependencies.register_cached_file(str(tmp_path / "file"), "model", False)
    with pytest.raises(ConfigError, match="'model' is registered already"):
        dependencies.register_cached_file(str(tmp_path / "file"), "model", False)


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("missing", "is not at .*missing"),
        ("file:///missing/there", "is not at /missing/there"),
        ("x" * 5000, "is not at"),
        ("", "the path of the cached file 'a' is ''"),
        (None, "file_path is None"),
        ("a\0b", "the path of"),
        ("https://there/model", "at a URL of https.*download it"),
        ("ftp://there/model", "at a URL of ftp"),
        ("hdfs://me:hidden@there/model", "has a password in it"),
    ],
)
def test_a_file_that_cannot_be_is_refused(dependencies: Dependencies, place: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        dependencies.register_cached_file(place, "a", False)
    assert "hidden" not in str(raised.value)
    assert not dependencies.cached_files
    with pytest.raises(ConfigError, match=r"executable is 'yes'|file_path is None"):
        dependencies.register_cached_file(place, "a", "yes")  # type: ignore[arg-type]


def test_what_does_not_travel_is_named(dependencies: Dependencies, context: Context, tmp_path: Path) -> None:
    for number, make in enumerate(
        (
            lambda folder: os.mkfifo(folder / "pipe"),
            lambda folder: (folder / "broken").symlink_to(folder / "nothing"),
            lambda folder: (folder / "round").symlink_to(folder),
            lambda folder: (folder / "two\nlines").touch(),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder)
        with pytest.raises(ConfigError, match="cannot be shipped") as raised:
            dependencies.register_cached_file(str(folder), "data", False)
        assert any(word in str(raised.value) for word in ("pipe", "broken", "round", "two")), raised.value
    with pytest.raises(ConfigError, match="neither a file nor a folder"):
        dependencies.register_cached_file(str(tmp_path / "0" / "pipe"), "pipe", False)
    assert not context.listArchives and not list(Path(context._temp_dir).rglob("*.tmp"))


def test_a_disk_without_room_is_said(
    dependencies: Dependencies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(session_files, "_pack", full)
    with pytest.raises(EnvironmentFault, match=r"No space left.*spark\.local\.dir"):
        dependencies.register_cached_file(str(tmp_path / "file"), "a", False)


# -- Python files -----------------------------------------------------------------------------------------


def test_what_can_be_imported_lies_on_the_path_newest_first(
    dependencies: Dependencies, context: Context, tmp_path: Path
) -> None:
    (tmp_path / "rules.py").write_text("")
    (tmp_path / "lib" / "__pycache__").mkdir(parents=True)
    (tmp_path / "lib" / "__init__.py").write_text("")
    (tmp_path / "lib" / "__pycache__" / "x.pyc").touch()
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "more.py").write_text("")
    for place in ("rules.py", "lib", "modules"):
        dependencies.add_python_file(str(tmp_path / place))
    names = context._python_includes
    found = [sorted(p.name for p in (context.root / name).rglob("*")) for name in names]
    assert found == [["rules.py"], ["__init__.py", "lib"], ["more.py"]]
    assert sys.path[1:4] == [str(context.root / name) for name in reversed(names)]
    dependencies.add_python_file(str(tmp_path / "rules.py"))
    assert context._python_includes == names


def test_a_module_that_has_changed_in_a_session_is_refused(
    dependencies: Dependencies, context: Context, tmp_path: Path
) -> None:
    (tmp_path / "rules.py").write_text("LIMIT = 1\n")
    dependencies.add_python_file(str(tmp_path / "rules.py"))
    (tmp_path / "rules.py").write_text("LIMIT = 2\n")
    with pytest.raises(ConfigError, match=r"rules\.py' has changed since.*restart the program"):
        dependencies.add_python_file(str(tmp_path / "rules.py"))
    assert len(context._python_includes) == 1


@pytest.mark.parametrize("name", ["model.onnx", "rules.so", "rules", "my-rules.py", "3.py"])
def test_what_python_does_not_import_is_refused(
    dependencies: Dependencies, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match=r"cannot be imported by Python|is no name of a module"):
        dependencies.add_python_file(str(tmp_path / name))
    (tmp_path / "broken.whl").write_text("no zip")
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        dependencies.add_python_file(str(tmp_path / "broken.whl"))


# -- archives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz", "tgz"])
def test_an_archive_is_unpacked_under_its_own_name_or_another(
    dependencies: Dependencies, context: Context, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "word").write_text("word")
    archive = tmp_path / f"model.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(archive, "w") as opened:
            opened.write(tmp_path / "word", "word")
    else:
        with tarfile.open(archive, "w" if kind == "tar" else "w:gz") as tar:
            tar.add(tmp_path / "word", "word")
    dependencies.add_python_archive(str(archive), None)
    dependencies.add_python_archive(str(archive), "other-1")
    for name in (f"model.{kind}", "other-1"):
        assert (context.root / name / "word").read_text() == "word"
    assert not any(one.endswith(".tar#model.tar") for one in context.listArchives)


def test_an_archive_that_is_none_or_leaves_its_folder_is_refused(
    dependencies: Dependencies, context: Context, tmp_path: Path
) -> None:
    (tmp_path / "plain.txt").write_text("text")
    (tmp_path / "broken.zip").write_text("text")
    (tmp_path / "broken.tar.gz").write_text("text")
    for number, name in enumerate(("../out", "/etc/out", "a/../../out")):
        with zipfile.ZipFile(tmp_path / f"{number}.zip", "w") as archive:
            archive.writestr(name, "")
    for name in ("plain.txt", "broken.zip", "broken.tar.gz", "0.zip", "1.zip", "2.zip"):
        with pytest.raises(ConfigError, match="no archive that Spark unpacks"):
            dependencies.add_python_archive(str(tmp_path / name), "target")
    with zipfile.ZipFile(tmp_path / "good.zip", "w") as archive:
        archive.writestr("word", "")
    for target in ("", "a/b", "..", ".hidden", "a b", "a#b", "flinkish-1", 3):
        with pytest.raises(ConfigError, match="target_dir"):
            dependencies.add_python_archive(str(tmp_path / "good.zip"), target)  # type: ignore[arg-type]
    assert not context.listArchives


# -- the interpreter -------------------------------------------------------------------------------------


def test_the_session_s_own_python_is_taken_under_any_of_its_names(
    dependencies: Dependencies, context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python3").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    dependencies.set_python_executable("python3")
    dependencies.set_python_executable(str(tmp_path / "python3"))
    # What it is a link to is another environment.
    with pytest.raises(ConfigError, match="run python3, and set_python_executable"):
        dependencies.set_python_executable(sys.executable)
    with pytest.raises(ConfigError, match="python_exec"):
        dependencies.set_python_executable(None)  # type: ignore[arg-type]
