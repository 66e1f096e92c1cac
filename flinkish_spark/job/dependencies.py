"""Files, modules, packages and archives that a program's functions need in its workers."""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from flinkish_spark.bridge.session_files import (
    OWN_PREFIX,
    add_to_python_path,
    local_copy,
    ship_archive,
    ship_tree,
)
from flinkish_spark.bridge.stores import spark_stores
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.fields import check_arguments
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.core.validation import unusable

LOG = logging.getLogger(__name__)

_LONGEST_NAME = 200
_NAME = 'give a name like "model"'
_FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_MODULE = re.compile(r"[^\W\d]\w*")
#: Archives of Python packages; tasks unpack them, because compiled modules cannot be imported from an
#: archive.
_PACKED = (".zip", ".egg", ".whl")


class Dependencies:
    """The files that one environment has registered, as they were at the call; the session keeps them."""

    def __init__(self, spark: SparkSession, place: StoreSpec) -> None:
        self._spark, self._place = spark, place
        self._files: dict[str, str] = {}

    @property
    def cached_files(self) -> Mapping[str, str]:
        """Paths of registered files by name, relative to the directory of Spark's files in a task."""
        return dict(self._files)

    @check_arguments(name=_NAME, executable="give executable=True, or leave it out")
    def register_cached_file(self, file_path: str, name: str, executable: bool) -> None:
        check_cached_name(name, self._files)
        what = f"the cached file '{name}'"
        with self._local_copy(what, file_path) as place:
            folder = ship_tree(self._spark, what, [(place.name, place)], is_executable=executable)
            self._files[name] = f"{folder}/{place.name}"

    def add_python_file(self, file_path: str) -> None:
        what = f"the Python file {file_path!r:.200}"
        with self._local_copy(what, file_path) as place, tempfile.TemporaryDirectory() as scratch:
            parts = _importable(what, place, Path(scratch))
            # A file at any other place was copied to a new one.
            origin = file_path if "://" in file_path else str(place)
            add_to_python_path(self._spark, what, origin, ship_tree(self._spark, what, parts))

    def add_python_archive(self, archive_path: str, target_dir: str | None) -> None:
        what = f"the archive {archive_path!r:.200}"
        with self._local_copy(what, archive_path) as place:
            target = place.name if target_dir is None else target_dir
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
            ship_archive(self._spark, what, place, target)

    @check_arguments(python_exec='give a path, for example "./env/bin/python"')
    def set_python_executable(self, python_exec: str) -> None:
        context: Any = self._spark.sparkContext
        running = str(context.pythonExec)
        if python_exec != running and _program(python_exec) != _program(running):
            raise ConfigError(
                f"the workers of this session run {running}, and set_python_executable() names {python_exec}",
                why="a session has one Python executable for all of its jobs, from its start on",
                what_to_do="start the program with "
                f"`flinkish run -D spark.pyspark.python={python_exec}`, or set the variable PYSPARK_PYTHON; "
                "if the executable is in an archive, name the archive in spark.archives, since workers need "
                "it before any Python runs",
            )

    def _local_copy(self, what: str, place: str) -> AbstractContextManager[Path]:
        if not self._place.is_local:
            spark_stores().pass_on(self._spark, self._place)
        return local_copy(self._spark, what, place)


def check_cached_name(name: str, taken: Iterable[str]) -> None:
    if not name.strip() or len(name) > _LONGEST_NAME or not name.isprintable():
        wanted = f"a text of 1 to {_LONGEST_NAME} characters, not only blanks"
        raise unusable("name", name, wanted=wanted, what_to_do=_NAME)
    if name in taken:
        raise ConfigError(
            f"a cached file '{name}' is registered already", what_to_do="give one of them another name"
        )


def _program(text: str) -> str:
    return os.path.abspath(shutil.which(text) or text)


def _importable(what: str, place: Path, scratch: Path) -> list[tuple[str, Path]]:
    """Return what a folder on `sys.path` must hold so that a module, package or folder can be imported."""
    if place.is_dir():
        # A folder with `__init__.py` is a package, which is imported from its parent folder.
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
                # The filter leaves out members that would lie outside the target.
                archive.extractall(scratch)
        except (zipfile.BadZipFile, OSError) as error:
            raise ConfigError(
                f"{what} cannot be unpacked", why=str(error), what_to_do="zip it again"
            ) from error
        return [("", scratch)]
    raise ConfigError(
        f"{what} cannot be imported by Python",
        why="it is no folder, and its name does not end with .py, .zip, .egg or .whl",
        what_to_do="name the module, the folder or the package; other files go by register_cached_file(), "
        "compiled modules in a folder",
    )


def _check_module(what: str, name: str) -> None:
    if not _MODULE.fullmatch(name):
        raise ConfigError(
            f"{what} cannot be imported",
            why=f"{name!r} is no name of a module",
            what_to_do="give it a name of letters, digits and _",
        )
