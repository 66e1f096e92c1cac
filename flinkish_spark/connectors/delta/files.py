"""Files below a Delta table, on a disk or in a bucket, by the client that commits to it."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from flinkish_spark.core.errors import CorruptObjectError
from flinkish_spark.core.store import make_directories, sync_directory
from flinkish_spark.core.store_spec import resolve_options

if TYPE_CHECKING:
    import pyarrow as pa


class StoreStat(NamedTuple):
    """The fields of `os.stat` that readers of tables use."""

    st_size: int
    st_mtime_ns: int
    st_ino: int = 0


#: Folder below the table in which rows wait for their checkpoint: Delta and its VACUUM ignore folders whose
#: names begin with an underscore.
FOLDER = "_flinkish"
#: With three slashes or with one; after two a host begins.
_LOCAL = re.compile(r"^file:(///+|/(?!/))", re.IGNORECASE)


@dataclass(frozen=True)
class TableFiles:
    """The files of a table at a path; sent to tasks, without a secret."""

    path: str
    #: Options of the store; a secret as ``env:NAME``.
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, path: str, options: Mapping[str, str]) -> TableFiles:
        return cls(_LOCAL.sub("/", path, count=1), tuple(options.items()))

    @property
    def root(self) -> Path | None:
        """The folder of a table on a disk; None in a store."""
        return Path(self.path) if self.path.startswith("/") else None

    def store_options(self) -> dict[str, str]:
        return resolve_options(self.options)

    def output(self, name: str) -> Any:
        """Open a file to be written; it is durable after `finish`."""
        if self.root is None:
            return BytesIO()
        path = self.root / name
        make_directories(path.parent)
        return path.open("xb")

    def finish(self, name: str, file: Any) -> None:
        """Make a file that was written durable under its name."""
        if self.root is not None:
            file.flush()
            os.fsync(file.fileno())
            file.close()
            return
        # pyarrow's own stream would pass buffers, and delta-rs takes bytes.
        stream = self._system().handler._handler.open_output_stream(name, None)
        stream.write(file.getvalue())
        stream.close()

    def sync_names(self, folder: str) -> None:
        """Make the names of the files in a folder of the table durable, and that of the folder."""
        if self.root is not None:
            path = self.root / folder
            for one in (path, *path.parents):
                sync_directory(one)
                if one == self.root:
                    break

    def read(self, names: Iterable[str]) -> pa.Table:
        import pyarrow as pa
        import pyarrow.parquet as pq

        tables = []
        for name in names:
            try:
                with self._system().open_input_file(name) as file:
                    tables.append(pq.ParquetFile(file).read())
            except pa.ArrowInvalid as error:
                raise CorruptObjectError(
                    f"the staged file {name} of the Delta table {self.path} cannot be read",
                    why=str(error),
                    what_to_do="put it back from a copy, or rewind the job to the checkpoint before",
                ) from error
        return pa.concat_tables(tables, promote_options="permissive")

    def missing(self, sizes: Mapping[str, int]) -> list[str]:
        """Return the names of files that do not exist with the given size."""
        if not sizes:
            return []
        # A file's name within the table; a file elsewhere keeps its own.
        root = f"{self.path.rstrip('/')}/"
        found = self._system().get_file_info([name.removeprefix(root) for name in sizes])
        return [
            name
            for (name, size), info in zip(sizes.items(), found, strict=True)
            if not info.is_file or info.size != size
        ]

    def folders(self, folder: str) -> list[str]:
        from pyarrow import fs

        found = self._system().get_file_info(fs.FileSelector(folder, allow_not_found=True))
        return [info.base_name for info in found if info.type == fs.FileType.Directory]

    def stats(self) -> dict[str, StoreStat]:
        """Return the stats of all files below the table, by one listing instead of two requests per file."""
        from pyarrow import fs

        found = self._system().get_file_info(fs.FileSelector("", recursive=True))
        # A listing of a bucket may have fractions of seconds, and the stat of one object has none.
        unit = 1 if self.path.lower().startswith("hdfs:") else 1_000_000_000
        return {one.path: StoreStat(one.size, one.mtime_ns // unit * unit) for one in found if one.is_file}

    def delete(self, folder: str) -> None:
        if self.root is None:
            self._system().delete_dir(folder)
        else:
            shutil.rmtree(self.root / folder, ignore_errors=True)

    def open(self, name: str) -> Any:
        return self._system().open_input_file(name)

    def stat(self, name: str) -> StoreStat:
        [info] = self._system().get_file_info([name])
        if not info.is_file:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.path}/{name}")
        return StoreStat(info.size, info.mtime_ns)

    def _system(self) -> Any:
        from pyarrow import fs

        if self.root is not None:
            return fs.SubTreeFileSystem(str(self.root), fs.LocalFileSystem())
        from flinkish_spark.connectors.delta.store_system import store_system

        return store_system(self.path, self.store_options())


@dataclass(frozen=True)
class StorePath:
    """A table in a store, or a file of it, with what readers ask of a `Path`."""

    table: TableFiles
    name: str = ""

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(self.table, f"{self.name}/{name}" if self.name else name)

    def __str__(self) -> str:
        return f"{self.table.path}/{self.name}" if self.name else self.table.path

    def is_dir(self) -> bool:
        # A store has no directories: any name may be one.
        return True

    def exists(self) -> bool:
        try:
            return bool(self.stat())
        except FileNotFoundError:
            return False

    def stat(self) -> StoreStat:
        return self.table.stat(self.name)

    def read_text(self, encoding: str) -> str:
        with self.table.open(self.name) as file:
            text: bytes = file.read()
        return text.decode(encoding)


TablePath = Path | StorePath


def table_path(path: str, options: Mapping[str, str]) -> TablePath:
    # deltalake names files without the slashes that a path may end with.
    files = TableFiles.of(path.replace("s3a://", "s3://", 1).rstrip("/") or "/", options)
    return StorePath(files) if files.root is None else files.root


def why_no_path(path: str) -> str:
    """Return why delta-rs cannot work below a path; empty if it can."""
    if path[:5].lower() == "file:" and not _LOCAL.match(path):
        return "its URI has a host, or a relative path, after file:"
    if "\\" in path:
        return "its path has a \\, which delta-rs reads as /"
    # This holds for a file: URI, too: Spark takes the digits for a part of the name.
    if unquote(path) != path:
        return "its path has a % followed by two digits, which delta-rs reads as one character"
    return ""
