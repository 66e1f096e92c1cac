"""The file system of a table in a store: delta-rs' own, with errors that tell outages from damaged files."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from deltalake.fs import DeltaStorageHandler
from pyarrow import fs

#: Environment variables that delta-rs reads for missing options.
_READ_BY_STORES = ("AWS_", "AZURE_", "GOOGLE_")


@contextmanager
def _as_outage() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # delta-rs gives a store's error no errno; neither does Arrow for damaged content.
        if type(error) is OSError and error.errno is None:
            raise ConnectionError(str(error)) from error
        raise


class _StoreFile:
    """An open file with the methods that Arrow calls."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        # Only `read` makes requests; an error of `seek` is one of the file's content.
        return getattr(self._file, name)

    @_as_outage()
    def read(self, size: int | None = None) -> Any:
        return self._file.read(size)


class _Handler(DeltaStorageHandler):
    get_file_info = _as_outage()(DeltaStorageHandler.get_file_info)
    get_file_info_selector = _as_outage()(DeltaStorageHandler.get_file_info_selector)

    @_as_outage()
    def open_input_file(self, path: str) -> Any:
        return pa.PythonFile(_StoreFile(self._handler.open_input_file(path)), mode="r")


def store_system(place: str, options: Mapping[str, str]) -> fs.PyFileSystem:
    """Return this process's file system of a store: a new one would connect anew, for each file."""
    said = [(name, value) for name, value in os.environ.items() if name.startswith(_READ_BY_STORES)]
    # By process id, since a fork has none of its parent's threads; by variables, since a secret may change.
    return _make(place, tuple(sorted(options.items())), tuple(sorted(said)), os.getpid())


@functools.lru_cache(maxsize=16)
def _make(place: str, options: tuple[tuple[str, str], ...], *_: object) -> fs.PyFileSystem:
    return fs.PyFileSystem(_Handler(place, dict(options)))
