"""Several files become one: lines are put one behind the other, the rest goes through Spark once more."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from flinkish_spark.errors import EnvironmentFault
from flinkish_spark.sinks.files import formats
from flinkish_spark.sinks.files.disk import Disk
from flinkish_spark.sinks.files.formats import FileFormat
from flinkish_spark.sinks.files.names import is_hidden, task_file

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql import types as T

#: The column that keeps parts apart while Spark merges them; no field may begin like it.
_PART = "_fs_part"
#: A path is no pattern, whatever is in its names; and no setting of the session may leave out a file.
_READ = {"__globPaths__": "false", "ignoreCorruptFiles": "false", "ignoreMissingFiles": "false"}


class NotMergedError(EnvironmentFault):
    """Spark did not write what was expected of a merge; it is tried again."""

    restartable = True


@dataclass(frozen=True, slots=True)
class Merge:
    """One file to make.

    Parameters
    ----------
    sources
        Absolute paths, in order.
    target
        Absolute path; durable and whole once it exists.
    """

    sources: tuple[Path, ...]
    target: Path


class Merger(Protocol):
    """Makes files of files. What half a try left is replaced by the next."""

    def merge(self, merges: Sequence[Merge], scratch: Path) -> None:
        """Make the targets that are not there yet.

        Parameters
        ----------
        scratch
            A folder for what is half done, on the same file system; removed by the caller.
        """


@dataclass(frozen=True)
class LineMerger:
    """Puts files one behind the other; every record in them ends with its separator.

    Parameters
    ----------
    disk
        Where they are.
    kind, options
        As given to the sink; a header is left out of all files but the first.
    """

    disk: Disk
    kind: FileFormat
    options: Mapping[str, str]

    def merge(self, merges: Sequence[Merge], scratch: Path) -> None:
        """Make the targets; see :class:`Merger`."""
        self.disk.make_folder(scratch)
        for merge in merges:
            if self.disk.exists(merge.target):
                continue
            half = scratch / uuid.uuid4().hex
            first, *rest = merge.sources
            pieces = [(first, 0), *((source, self._header_bytes(source)) for source in rest)]
            self.disk.concatenate(pieces, half)
            self.disk.rename(half, merge.target)
        self.disk.sync_folders({merge.target.parent for merge in merges})

    def _header_bytes(self, source: Path) -> int:
        if not formats.has_header(self.kind, self.options):
            return 0
        separator = formats.line_separator(self.options)
        with open(source, "rb") as file:
            head = b""
            while separator not in head:
                block = file.read(65_536)
                if not block:
                    return len(head)
                head += block
        return head.index(separator) + len(separator)


@dataclass(frozen=True)
class SparkMerger:
    """Lets Spark read and write once more, all parts in one Spark job.

    Parameters
    ----------
    disk, spark
        Where the files are, and who writes them.
    kind, options
        As given to the sink.
    schema
        Of the records in the files; a column that older files do not have is null.
    """

    disk: Disk
    spark: SparkSession
    kind: FileFormat
    schema: T.StructType
    options: Mapping[str, str] = field(default_factory=dict)

    def merge(self, merges: Sequence[Merge], scratch: Path) -> None:
        """Make the targets; see :class:`Merger`."""
        missing = [merge for merge in merges if not self.disk.exists(merge.target)]
        if not missing:
            return
        attempt = scratch / uuid.uuid4().hex
        for index, merge in enumerate(missing):
            # Links, because the folder's name tells Spark which part a record belongs to.
            folder = attempt / "in" / f"{_PART}={index}"
            self.disk.make_folder(folder)
            for count, source in enumerate(merge.sources):
                self.disk.link(source, folder / f"{count}-{source.name}")
        self._write(attempt, len(missing))
        for index, merge in enumerate(missing):
            (made,) = self._made(attempt / "out" / f"{_PART}={index}")
            self.disk.sync_files([made])
            self.disk.rename(made, merge.target)
        self.disk.sync_folders({merge.target.parent for merge in missing})

    def _write(self, attempt: Path, parts: int) -> None:
        from pyspark.sql import types as T

        schema = T.StructType(
            [*formats.read_schema(self.kind, self.schema), T.StructField(_PART, T.IntegerType())]
        )
        reader = self.spark.read.format(self.kind.value).schema(schema).options(**_READ)
        rows = reader.load(f"file://{attempt / 'in'}")
        writer = rows.repartition(parts, _PART).write.format(self.kind.value).options(**self.options)
        writer.option("maxRecordsPerFile", 0).partitionBy(_PART).save(f"file://{attempt / 'out'}")

    def _made(self, folder: Path) -> list[Path]:
        names = [name for name in self.disk.folders(folder) if not is_hidden(name) and task_file(name)]
        if len(names) != 1:
            raise NotMergedError(
                f"merging small files gave {len(names)} files in {folder}",
                why="one is expected",
                what_to_do="see to the disk; the job tries again",
            )
        return [folder / name for name in names]
