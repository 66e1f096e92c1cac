"""Files, modules, packages and archives that a program's functions need in its workers."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flinkish_spark.bridge.buckets import pass_on
from flinkish_spark.bridge.session import asked_of_executors, runs_tasks_itself
from flinkish_spark.bridge.session_files import (
    OWN_PREFIX,
    add_to_python_path,
    local_copy,
    ship_archive,
    ship_tree,
)
from flinkish_spark.core.errors import ConfigError, EnvironmentFault
from flinkish_spark.core.validation import instance_of, unusable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from flinkish_spark.core.store_spec import StoreSpec

LOG = logging.getLogger(__name__)

_LONGEST_NAME = 200
_FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_MODULE = re.compile(r"[^\W\d]\w*")
#: Packed folders of Python; they are unpacked, so what is compiled in them can be imported, too.
_PACKED = (".zip", ".egg", ".whl")
#: What jobs run on: every worker has it already, and two copies in one process do not go together.
_OWN = ("flinkish-spark", "pyspark", "py4j", "pyarrow", "pandas", "numpy", "kafka-python")
_LINES_OF_PIP = 8
_LOGIN = re.compile(r"//[^/\s]*@")


class Dependencies:
    """Holds what one environment has registered, as it was at the call; a session keeps it until it ends."""

    def __init__(self, spark: SparkSession, place: StoreSpec) -> None:
        self._spark, self._place = spark, place
        self._files: dict[str, str] = {}
        self._has_requirements = False

    @property
    def cached_files(self) -> Mapping[str, str]:
        """Where tasks find registered files below Spark's own, by name."""
        return dict(self._files)

    def register_cached_file(self, file_path: str, name: str, executable: bool) -> None:
        check_cached_name(name, self._files)
        what_to_do = "give executable=True, or leave it out"
        instance_of("executable", executable, bool, what_to_do=what_to_do)
        what = f"the cached file '{name}'"
        with self._local_copy(what, file_path) as place:
            folder = ship_tree(self._spark, what, [(place.name, place)], is_executable=executable)
            self._files[name] = f"{folder}/{place.name}"

    def add_python_file(self, file_path: str) -> None:
        what = f"the Python file {file_path!r:.200}"
        with self._local_copy(what, file_path) as place, tempfile.TemporaryDirectory() as scratch:
            parts = _importable(what, place, Path(scratch))
            # What is elsewhere was copied to a new place.
            origin = file_path if "://" in file_path else str(place)
            add_to_python_path(self._spark, what, origin, ship_tree(self._spark, what, parts))

    def set_python_requirements(self, file_path: str, cache_dir: str | None) -> None:
        if self._has_requirements:
            raise ConfigError(
                "set_python_requirements() was called twice",
                why="what was installed first stays importable until the session ends",
                what_to_do="put all requirements into one file",
            )
        with ExitStack() as stack:
            copied = self._local_copy("the requirements file", file_path)
            requirements = stack.enter_context(copied)
            if not requirements.is_file():
                raise unusable("requirements_file_path", file_path, wanted="a file", what_to_do="name a file")
            cache = None
            if cache_dir is not None:
                copied = self._local_copy("the folder of cached packages", cache_dir)
                cache = stack.enter_context(copied)
                if not cache.is_dir():
                    wanted, what_to_do = "a folder", "name the folder that `pip download -d` has filled"
                    raise unusable("requirements_cache_dir", cache_dir, wanted=wanted, what_to_do=what_to_do)
            installed = Path(stack.enter_context(tempfile.TemporaryDirectory()), "installed")
            installed.mkdir()
            _install(requirements, cache, installed)
            _check_platform(self._spark, installed)
            what = "what pip has installed"
            name = ship_tree(self._spark, what, [("", installed)])
            add_to_python_path(self._spark, what, str(installed), name)
        self._has_requirements = True

    def add_python_archive(self, archive_path: str, target_dir: str | None) -> None:
        what = f"the archive {archive_path!r:.200}"
        with self._local_copy(what, archive_path) as place:
            target = place.name if target_dir is None else target_dir
            _check_folder_name(target)
            ship_archive(self._spark, what, place, target)

    def set_python_executable(self, python_exec: str) -> None:
        what_to_do = 'give a path, for example "./env/bin/python"'
        instance_of("python_exec", python_exec, str, what_to_do=what_to_do)
        context: Any = self._spark.sparkContext
        running = str(context.pythonExec)
        if python_exec != running and _program(python_exec) != _program(running):
            raise ConfigError(
                f"the workers of this session run {running}, and set_python_executable() says {python_exec}",
                why="Spark decides it when the session is made, for all of its jobs",
                what_to_do=f"start it with `flinkish run -D spark.pyspark.python={python_exec}`, or with the "
                "variable PYSPARK_PYTHON; an archive that it lies in goes to spark.archives, since it has to "
                "be there before any Python runs",
                running=running,
            )

    def _local_copy(self, what: str, place: str) -> AbstractContextManager[Path]:
        if not self._place.is_local:
            pass_on(self._spark, self._place)
        return local_copy(self._spark, what, place)


def check_cached_name(name: str, taken: Iterable[str]) -> None:
    is_text = isinstance(name, str) and 1 <= len(name) <= _LONGEST_NAME and name.isprintable()
    if not is_text or not name.strip():
        wanted = f"a text of 1 to {_LONGEST_NAME} letters, not only blanks"
        raise unusable("name", name, wanted=wanted, what_to_do='give a name like "model"')
    if name in taken:
        raise ConfigError(
            f"a cached file '{name}' is registered already",
            why="functions ask for files by name",
            what_to_do="give one of them another name",
            name=name,
        )


def _check_folder_name(target: object) -> None:
    if not isinstance(target, str) or not _FOLDER_NAME.fullmatch(target) or ".." in target:
        raise unusable(
            "target_dir",
            target,
            wanted="the name of one folder, of letters, digits, dots, - and _",
            what_to_do='give a name like "model"; it is a folder among Spark\'s files',
        )
    if target.startswith(OWN_PREFIX):
        what_to_do = f"give a name that does not begin with {OWN_PREFIX}"
        raise unusable("target_dir", target, wanted="no name of ours", what_to_do=what_to_do)


def _program(text: str) -> str:
    return os.path.abspath(shutil.which(text) or text)


def _importable(what: str, place: Path, scratch: Path) -> list[tuple[str, Path]]:
    """Return what a folder on the path has to hold so that a file, package or folder can be imported."""
    if place.is_dir():
        # A folder with `__init__.py` is a package, which is found in the folder that it lies in.
        is_package = (place / "__init__.py").is_file()
        if is_package:
            _check_module(what, place.name)
        return [(place.name if is_package else "", place)]
    if place.suffix == ".py":
        _check_module(what, place.stem)
        return [(place.name, place)]
    if place.suffix.lower() in _PACKED:
        try:
            with zipfile.ZipFile(place) as archive:
                # It leaves out what would lie outside.
                archive.extractall(scratch)
        except (zipfile.BadZipFile, OSError) as error:
            raise ConfigError(
                f"{what} cannot be unpacked", why=str(error), what_to_do="pack it again, with zip"
            ) from error
        return [("", scratch)]
    raise ConfigError(
        f"{what} is none that Python imports",
        why="it is no folder, and its name does not end with .py, .zip, .egg or .whl",
        what_to_do="name the module, the folder or the package; other files go by register_cached_file(), "
        "compiled modules in a folder",
        path=str(place),
    )


def _check_module(what: str, name: str) -> None:
    if not _MODULE.fullmatch(name):
        raise ConfigError(
            f"{what} cannot be imported",
            why=f"{name!r} is no name of a module",
            what_to_do="give it a name of letters, digits and _",
        )


def _install(requirements: Path, cache: Path | None, target: Path) -> None:
    """Let pip install requirements into a folder, without what every worker has already."""
    constraints = target.with_name("constraints.txt")
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in _installed_own().items()))
    command = [sys.executable, "-m", "pip", "install", "--target", str(target), "--requirement"]
    command += [str(requirements), "--constraint", str(constraints), "--no-compile", "--no-input"]
    command += ["--disable-pip-version-check", "--no-warn-script-location"]
    if cache is not None:
        command += ["--no-index", "--find-links", str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()][-_LINES_OF_PIP:]
        raise EnvironmentFault(
            f"pip did not install the requirements of {requirements}",
            why=_LOGIN.sub("//", " | ".join(lines)) or f"it ended with status {done.returncode}",
            what_to_do="look whether the packages are there for this Python; what jobs run on "
            f"({', '.join(_OWN)}) keeps the version that is installed",
            requirements=str(requirements),
        )
    _remove_own(target)


def _installed_own() -> dict[str, str]:
    found = {}
    for name in _OWN:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _remove_own(target: Path) -> None:
    """Delete the packages that jobs run on: they are installed in the same versions."""
    for package in metadata.distributions(path=[str(target)]):
        if re.sub(r"[-_.]+", "-", package.metadata["Name"]).lower() not in _OWN:
            continue
        for file in package.files or ():
            path = Path(os.path.normpath(target / file))
            if path.is_relative_to(target):
                path.unlink(missing_ok=True)
    for folder, _, _ in os.walk(target, topdown=False):
        if folder != str(target) and not os.listdir(folder):
            os.rmdir(folder)


def _check_platform(spark: SparkSession, installed: Path) -> None:
    """Refuse compiled packages where executors are of another kind than the driver."""
    if runs_tasks_itself(spark) or not any(installed.rglob("*.so")):
        return

    def kind(_: Iterable[int]) -> list[str]:
        import sys
        import sysconfig

        return [f"{sysconfig.get_platform()} {sys.implementation.cache_tag}"]

    (here,) = kind(())
    other = sorted(set(asked_of_executors(spark, kind)) - {here})
    if other:
        raise EnvironmentFault(
            "the requirements have compiled packages, and executors are of another kind",
            why=f"pip has installed for {here}, there is {', '.join(other)}",
            what_to_do="run the driver on such a machine (--deploy-mode cluster), or ship an environment "
            "that was packed there: spark.archives and spark.pyspark.python",
        )
