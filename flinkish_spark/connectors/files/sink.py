"""The file sink: its settings, and its checks before the job starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

from flinkish_spark.bridge.session import has_avro
from flinkish_spark.connectors.avro_calendar import check_calendar
from flinkish_spark.connectors.files import output_formats as formats
from flinkish_spark.connectors.files.buckets import (
    BucketAssigner,
    check_folder,
    check_levels,
    list_assigners,
    refuse_taken,
)
from flinkish_spark.connectors.files.committer import CommitSettings, FileCommitter
from flinkish_spark.connectors.files.disk import Disk, SinkFiles
from flinkish_spark.connectors.files.ledger import Ledger
from flinkish_spark.connectors.files.output_formats import FileFormat
from flinkish_spark.connectors.files.partitions import PartitionCommit
from flinkish_spark.connectors.files.rolling import (
    Compaction,
    LineMerger,
    Merger,
    Rolling,
    RollingPolicy,
    RollOnCheckpoint,
    SparkMerger,
)
from flinkish_spark.connectors.files.writer import FileWriter, FrameFiles, session_codec
from flinkish_spark.contracts.dataset import Dataset
from flinkish_spark.contracts.sink import Committer, Sink, SinkContext, SinkWriter
from flinkish_spark.core.errors import (
    ConfigError,
    EnvironmentFault,
    FlinkishError,
    SchemaError,
    UserFunctionError,
)
from flinkish_spark.core.fields import check_fields
from flinkish_spark.protocol.durations import PathText

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession
    from pyspark.sql import types as T


def check_folders(
    assigners: Sequence[BucketAssigner], schema: T.StructType, spark: SparkSession, uid: str
) -> None:
    """Compute the folders' columns on an empty frame; refuse columns that cannot name a folder."""
    if not assigners:
        return
    added: dict[str, Column] = {}
    for one in assigners:
        try:
            added.update(one.columns(0))
        except FlinkishError:
            raise
        except Exception as error:
            raise UserFunctionError(
                f"columns() of the {type(one).__name__} of sink '{uid}' failed",
                why=f"{type(error).__name__}: {error}".split("\n")[0],
                what_to_do="correct the assigner",
                uid=uid,
            ) from error
    refuse_taken(tuple(added), schema, uid)
    found, zone = _fields_with(added, schema, spark, uid), str(spark.conf.get("spark.sql.session.timeZone"))
    for name in (name for one in assigners for name in one.names):
        check_folder(name, found, uid, zone)


def _fields_with(
    added: dict[str, Column], schema: T.StructType, spark: SparkSession, uid: str
) -> T.StructType:
    from pyspark.errors import PySparkException

    empty = spark.createDataFrame([], schema)
    try:
        # Together with all fields of the stream, so that an aggregate is refused.
        return empty.select("*", *(column.alias(name) for name, column in added.items())).schema
    except (PySparkException, TypeError, AttributeError) as error:
        raise SchemaError(
            f"the bucket columns {', '.join(added)} of sink '{uid}' do not fit its stream",
            why=str(error).split("\n")[0],
            what_to_do=f"use only the fields {', '.join(schema.names)}, one row at a time",
        ) from error


_LEAVE_OUT = "leave it out for the default"


@dataclass(frozen=True)
class FileSink(Sink):
    """Write files that readers see with their checkpoint, exactly once.

    Parameters
    ----------
    path
        Absolute path, or ``file:`` URI, of a folder that this process and the executors mount. The first
        records create it.
    format
        Of the files; Avro needs the JAR of spark-avro.
    options
        Options by the names of Spark's writer, such as ``{"compression": "gzip"}``. Options that would change
        the text of values are refused: times are in UTC with microseconds, and texts keep their blanks.
    bucket_by
        One :class:`BucketAssigner`, or several for folders in folders; None for one folder.
    rolling
        :class:`RollOnCheckpoint` or :class:`RollingPolicy`.
    compaction
        Merges small files of a checkpoint before they are seen; with :class:`RollingPolicy` parts are merged
        anyway.
    partition_commit
        How complete partitions are committed; None for not at all.

    Examples
    --------
    >>> from flinkish_spark import ColumnBuckets, FileFormat, FileSink
    >>> FileSink("/lake/orders", FileFormat.JSON, bucket_by=ColumnBuckets("country")).path
    '/lake/orders'
    """

    path: PathText
    format: FileFormat = FileFormat.PARQUET
    options: Mapping[str, str] = field(default_factory=dict)
    bucket_by: BucketAssigner | Sequence[BucketAssigner] | None = None
    rolling: Rolling = RollOnCheckpoint()  # noqa: RUF009
    compaction: Compaction | None = None
    partition_commit: PartitionCommit | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        local_path(self.path)
        if self.compaction is not None and isinstance(self.rolling, RollingPolicy):
            what = "a file sink has both a RollingPolicy and a Compaction, and the first merges files itself"
            raise ConfigError(what, what_to_do="leave compaction out")
        check_levels(self._assigners)
        formats.check_options(self.format, self.options)
        self._check_mergeable(())

    def _check_mergeable(self, columns: Sequence[str]) -> None:
        if self.compaction is not None or isinstance(self.rolling, RollingPolicy):
            formats.check_mergeable(self.format, self.options, columns)

    @property
    def _assigners(self) -> tuple[BucketAssigner, ...]:
        return list_assigners(self.bucket_by)

    def datasets(self) -> tuple[Dataset, ...]:
        """Return the folder."""
        return (Dataset.from_path(self.path),)

    def why_needs_session(self) -> str:
        """Return why: Spark computes folders, encodes Avro, checks lines of text and merges other files."""
        if self._assigners or self.format in (FileFormat.AVRO, FileFormat.TEXT):
            return "Spark makes its folders" if self._assigners else f"Spark makes its {self.format.value}"
        merges = self.compaction is not None or isinstance(self.rolling, RollingPolicy)
        return "Spark merges its files" if merges and not self.format.is_lines else ""

    def preflight(self, spark: SparkSession, context: SinkContext) -> None:
        """Refuse fields, folders and tables that do not fit, and a path that cannot be written."""
        for assigner in self._assigners:
            assigner.check(context.schema, context.uid)
        check_folders(self._assigners, context.schema, spark, context.uid)
        folders = [name for one in self._assigners for name in one.names]
        formats.check_columns(self.format, context.schema, folders, context.uid)
        self._check_mergeable(context.schema.names)
        if self.partition_commit is not None:
            self.partition_commit.check(self._assigners, spark, context.uid)
        if self.format is FileFormat.AVRO and not has_avro(spark):
            raise EnvironmentFault(
                f"sink '{context.uid}' writes Avro and this Spark session has no Avro data source",
                what_to_do="start the session with flinkish_spark.configure_spark_with_jars(...)",
            )
        if self.format is FileFormat.AVRO:
            check_calendar(spark, context.schema, f"sink '{context.uid}'")
        if formats.codec_of(self.format, formats.lower_names(self.options)) is None:
            formats.check_codec(self.format, session_codec(spark, self.format), "the session's setting")
        # Raise EnvironmentFault unless the nearest existing folder of a path is writable.
        root = local_path(self.path)
        there = next(path for path in (root, *root.parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise EnvironmentFault(
                f"sink '{context.uid}' cannot write to {root}",
                why=f"{there} is {'not writable for this user' if there.is_dir() else 'no folder'}",
                what_to_do="choose another path, or give this user the right to write there",
            )

    def create_writer(self, spark: SparkSession, context: SinkContext) -> SinkWriter:
        """Return the staging half."""
        limit = self.rolling.part_bytes
        part_bytes = limit if isinstance(limit, int) else None
        folders = tuple(name for one in self._assigners for name in one.names)
        written = self.format, self.options, self._select_file_fields(context.schema), folders, part_bytes
        frames = FrameFiles.of(spark, *written)
        return FileWriter(self._files(context), frames, self._assigners, context, Disk(), spark)

    def create_committer(self, spark: SparkSession, context: SinkContext) -> Committer:
        """Return the committing half."""
        settings = CommitSettings(self.rolling, self.compaction, self.partition_commit, self._assigners)
        disk = Disk()
        merger: Merger = LineMerger(disk, self.format, self.options)
        if not self.format.is_lines:
            merger = SparkMerger(
                disk, spark, self._select_file_fields(context.schema), self.format, self.options
            )
        files, ledger = self._files(context), Ledger(context.place.open())
        return FileCommitter(settings, files, context.owner_epoch, ledger, merger, spark, context.timeline)

    def _files(self, context: SinkContext) -> SinkFiles:
        return SinkFiles(local_path(self.path), context.job, context.uid)

    def _select_file_fields(self, schema: T.StructType) -> T.StructType:
        from pyspark.sql import types as T

        folders = {name.lower() for one in self._assigners for name in one.names}
        return T.StructType([f for f in schema.fields if f.name.lower() not in folders])


def local_path(path: str) -> Path:
    text = str(path)
    parsed = urlparse(text)
    if "://" in text or text.startswith("file:"):
        if parsed.scheme.lower() != "file" or parsed.netloc not in ("", "localhost"):
            what = f"the file sink cannot write to {text!r}, which has no renames of a file system"
            raise ConfigError(what, what_to_do="give a path that all machines mount, or use a DeltaSink")
        text = unquote(parsed.path)
    if not os.path.isabs(text) or "\0" in text:
        raise ConfigError(f"the path {text!r} of a file sink is relative", what_to_do="give an absolute path")
    return Path(os.path.normpath(text))
