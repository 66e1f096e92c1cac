"""The file system of a table in a store: delta-rs' own, whose outages are told from damaged files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from deltalake.fs import DeltaStorageHandler
from pyarrow import fs


class StoreDidNotAnswer(ConnectionError):
    """A store refuses or does not answer; what is read of it may be as it should be."""


@contextmanager
def _as_outage() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # delta-rs gives no number to what a store said, and neither does Arrow to what is damaged.
        if type(error) is OSError and error.errno is None:
            raise StoreDidNotAnswer(str(error)) from error
        raise


class _StoreFile:
    """An open file, as Arrow calls it."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        # The store is asked by `read` alone; a place behind the end of the file is one of its content.
        return getattr(self._file, name)

    def read(self, size: int | None = None) -> Any:
        with _as_outage():
            return self._file.read(size)


class _Handler(DeltaStorageHandler):
    def open_input_file(self, path: str) -> Any:
        with _as_outage():
            return pa.PythonFile(_StoreFile(self._handler.open_input_file(path)), mode="r")

    def get_file_info(self, paths: list[str]) -> Any:
        with _as_outage():
            return super().get_file_info(paths)

    def get_file_info_selector(self, selector: fs.FileSelector) -> Any:
        with _as_outage():
            return super().get_file_info_selector(selector)


def store_system(place: str, options: dict[str, str]) -> fs.PyFileSystem:
    return fs.PyFileSystem(_Handler(place, options))
