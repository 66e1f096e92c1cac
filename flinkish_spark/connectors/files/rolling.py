"""Rolling of the file sink: when files are finished, and how small ones are merged."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, ClassVar

from flinkish_spark.connectors.files import output_formats as formats
from flinkish_spark.connectors.files.disk import Disk, bucket_of
from flinkish_spark.connectors.files.output_formats import FileFormat
from flinkish_spark.connectors.files.writer import FrameFiles
from flinkish_spark.core.errors import UnavailableError
from flinkish_spark.core.fields import Range, check_fields
from flinkish_spark.protocol.codec import StoredObject
from flinkish_spark.protocol.durations import Milliseconds
from flinkish_spark.protocol.limits import MOST_MS, UNLIMITED, Limit
from flinkish_spark.transport import columns as C
from flinkish_spark.types.ddl import quote_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql import types as T


_MIB = 1 << 20
_LEAVE_OUT = "leave it out for the default"


@dataclass(frozen=True, slots=True)
class RollOnCheckpoint:
    """Every checkpoint finishes its files; the default.

    Parameters
    ----------
    part_bytes
        Size above which a micro-batch begins another file, up to half as much more; UNLIMITED for a file per
        task and bucket, whatever its size.

    Examples
    --------
    >>> RollOnCheckpoint(part_bytes=64 << 20).part_bytes
    67108864
    """

    part_bytes: Annotated[Limit, Range(1)] = UNLIMITED

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class RollingPolicy:
    """Files stay in progress over checkpoints until one of three limits; the last checkpoint finishes all.

    Records of a decided checkpoint are safe at once, and visible when their part is finished. Limits are
    checked when a checkpoint completes, by the time of its decision.

    Parameters
    ----------
    part_bytes
        Size of a finished file, up to half as much more. A part is finished when the next file would not fit.
    rollover_ms
        Longest time from the checkpoint of a part's first record until it is finished.
    inactivity_ms
        Longest time from the checkpoint of a part's last record until it is finished.

    Examples
    --------
    >>> RollingPolicy(part_bytes=64 << 20, inactivity_ms=30_000).rollover_ms
    900000
    """

    part_bytes: Annotated[int, Range(1)] = 128 * _MIB
    rollover_ms: Annotated[Milliseconds, Range(0, MOST_MS)] = 900_000
    inactivity_ms: Annotated[Milliseconds, Range(0, MOST_MS)] = 60_000

    def __post_init__(self) -> None:
        check_fields(self)


Rolling = RollOnCheckpoint | RollingPolicy


@dataclass(frozen=True, slots=True)
class Compaction:
    """Merge the small files of a checkpoint, per bucket, before they become visible.

    Parameters
    ----------
    part_bytes
        Greatest size of a merged file. Larger files stay as they are.

    Examples
    --------
    >>> Compaction().part_bytes
    134217728
    """

    part_bytes: Annotated[int, Range(1)] = 128 * _MIB

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Chunk(StoredObject):
    """A file of a decided checkpoint that readers do not see yet."""

    IS_CLOSED: ClassVar = True

    root: str
    #: Folder of the micro-batch, below `pending`.
    staged: str
    #: Of the file, relative to that folder, with its bucket.
    name: str
    bytes: int
    #: None where the format does not tell.
    rows: int | None
    checkpoint: int
    #: When that was decided; None until it completes.
    decided_at_ms: int | None = None

    @property
    def bucket(self) -> str:
        return bucket_of(self.name)

    @property
    def extension(self) -> str:
        return "".join(PurePosixPath(self.name).suffixes)


@dataclass(frozen=True, slots=True)
class RollResult:
    parts: tuple[tuple[Chunk, ...], ...]
    open: tuple[Chunk, ...]


def roll(
    chunks: Sequence[Chunk],
    policy: Rolling,
    compaction: Compaction | None,
    now_ms: int,
    due_buckets: frozenset[tuple[str, str]] = frozenset(),
    *,
    rolls_all: bool = False,
) -> RollResult:
    """Return which chunks become a part; with `rolls_all` (last checkpoint, savepoint) all of them."""
    # Pure; `now_ms` is the time of a decision, so that every repetition finds the same.
    parts: list[tuple[Chunk, ...]] = []
    still_open: list[Chunk] = []
    by_bucket = sorted(chunks, key=lambda c: (c.root, c.bucket, c.extension))
    for (root, bucket, _), group in groupby(by_bucket, key=lambda c: (c.root, c.bucket, c.extension)):
        found = list(group)
        if isinstance(policy, RollOnCheckpoint):
            parts += (
                [(c,) for c in found] if compaction is None else _pack_parts(found, compaction.part_bytes)
            )
            continue
        packed = _pack_parts(found, policy.part_bytes)
        last = packed[-1]
        whole = rolls_all or (root, bucket) in due_buckets or _is_over(last, policy, now_ms)
        parts += packed if whole else packed[:-1]
        still_open += () if whole else last
    return RollResult(tuple(parts), tuple(still_open))


def _pack_parts(chunks: Sequence[Chunk], part_bytes: int) -> list[tuple[Chunk, ...]]:
    """Fill parts in order; a chunk that does not fit begins the next."""
    packed: list[tuple[Chunk, ...]] = []
    filling: list[Chunk] = []
    size = 0
    for chunk in chunks:
        if filling and size + chunk.bytes > part_bytes:
            packed.append(tuple(filling))
            filling, size = [], 0
        filling.append(chunk)
        size += chunk.bytes
    packed.append(tuple(filling))
    return packed


def _is_over(part: Sequence[Chunk], policy: RollingPolicy, now_ms: int) -> bool:
    times = [now_ms if chunk.decided_at_ms is None else chunk.decided_at_ms for chunk in part]
    return (
        sum(chunk.bytes for chunk in part) >= policy.part_bytes
        or now_ms - min(times) >= policy.rollover_ms
        or now_ms - max(times) >= policy.inactivity_ms
    )


#: The column that keeps parts apart while Spark merges them; no field may begin with it.
_PART = "_fs_part"
#: Paths are no glob patterns, and no setting of the session may skip a file.
_READ = {"__globPaths__": "false", "ignoreCorruptFiles": "false", "ignoreMissingFiles": "false"}


@dataclass(frozen=True)
class LineMerger:
    """Merges files by concatenation; every record in them ends with its separator."""

    disk: Disk
    #: A header is left out of all files but the first.
    kind: FileFormat
    options: Mapping[str, str]

    def merge(self, merges: Mapping[Path, Sequence[Path]], scratch: Path) -> None:
        """Build the missing targets from their sources; a target is durable and whole once it exists."""
        # The next try replaces files of an interrupted one.
        self.disk.make_folder(scratch)
        for target, sources in merges.items():
            if self.disk.exists(target):
                continue
            half = scratch / uuid.uuid4().hex
            first, *rest = sources
            pieces = [(first, 0), *((source, self._header_bytes(source)) for source in rest)]
            self.disk.concatenate(pieces, half)
            self.disk.rename(half, target)
        self.disk.sync_folders({target.parent for target in merges})

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
    """Merges files by Spark, which reads them and writes all parts in one job, as in a micro-batch."""

    disk: Disk
    spark: SparkSession
    #: A column that the files lack is null.
    schema: T.StructType
    kind: FileFormat
    options: Mapping[str, str]

    def merge(self, merges: Mapping[Path, Sequence[Path]], scratch: Path) -> None:
        """Build the missing targets, as :meth:`LineMerger.merge`."""
        missing = [target for target in merges if not self.disk.exists(target)]
        if not missing:
            return
        attempt = scratch / uuid.uuid4().hex
        for index, target in enumerate(missing):
            # Links, because the folder's name tells Spark which part a record belongs to.
            folder = attempt / "in" / f"{_PART}={index}"
            self.disk.make_folder(folder)
            for count, source in enumerate(merges[target]):
                self.disk.link(source, folder / f"{count}-{source.name}")
        made = self._write_parts(attempt, len(missing))
        for index, target in enumerate(missing):
            found = [name for name in made if name.startswith(f"{_PART}={index}/")]
            if len(found) != 1:
                raise UnavailableError(
                    f"merging small files gave {len(found)} files in {attempt}",
                    what_to_do="check the disk; the job tries again",
                )
            self.disk.rename(attempt / "out" / found[0], target)
        self.disk.sync_folders({target.parent for target in missing})

    def _write_parts(self, attempt: Path, parts: int) -> list[str]:
        from pyspark.sql import functions as F
        from pyspark.sql import types as T

        kind, out = self.kind, attempt / "out"
        fields = formats.read_schema(kind, self.schema)
        schema = T.StructType([*fields, T.StructField(_PART, T.IntegerType())])
        rows = (
            self.spark.read.format(kind.value)
            .schema(schema)
            .options(**_READ)
            .load(f"file://{attempt / 'in'}")
        )
        # Control columns as a sink gets them: all rows are records.
        control = [F.lit(0).alias(name) for name in C.SINK_CONTROL[:-1]]
        hashes = F.lit(0).cast("long").alias(C.HASH)
        named = [F.col(quote_name(name)) for name in schema.names]
        self.disk.make_folder(out)
        frames = FrameFiles.of(self.spark, self.kind, self.options, fields, (_PART,))
        reports = frames.write(rows.select(*control, hashes, *named).repartition(parts, _PART), out)
        return [file["name"] for report in reports for file in report["files"]]


Merger = LineMerger | SparkMerger
