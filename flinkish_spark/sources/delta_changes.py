"""A Delta table as it grows, or its change feed: through Spark's own Delta source, or by its log."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.errors import AnalysisException
from pyspark.sql import functions as F

from flinkish_spark.arguments import instance_of, refused_as_config_errors
from flinkish_spark.bridge import said
from flinkish_spark.engines import Engine
from flinkish_spark.errors import ConfigError
from flinkish_spark.protocol.limits import (
    UNLIMITED,
    Limit,
    Unlimited,
    checked_choice,
    checked_limit,
    checked_whole,
)
from flinkish_spark.runtime.columns import quoted
from flinkish_spark.sources.base import Source
from flinkish_spark.sources.delta_kinds import DeltaChanges, check_versions
from flinkish_spark.sources.delta_records import DeltaRecordsSource
from flinkish_spark.sources.rates import RateLimit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from flinkish_spark.job_dir import JobDir
    from flinkish_spark.runtime.spark_log import LoggedOffsets

_VERSION = "_commit_version"


@dataclass(frozen=True)
class DeltaSource(Source):
    """Reads a Delta table, and goes on with what comes.

    Through Spark's own streaming source, which like a DataFrame cannot be told where to begin in a restore
    from a savepoint. With ``reader="python"`` the log is followed without Spark: then it can, and it can be
    limited by records and aligned; tables with deletion vectors or column mapping are refused.

    Parameters
    ----------
    path
        Of the table.
    changes
        Rows that are added, or the change feed.
    starting_version
        The first version whose changes are read; None for the table as it is at the first start, as rows that
        are added (feed: inserted), and then what comes.
    ending_version
        Of a feed, the last version whose changes are read, which may lie in the future; the job ends behind
        it. None for no end. Rows have an end with the Python reader only. For the rows of one version see
        :class:`~flinkish_spark.sources.delta_table.DeltaTableSource`.
    max_files_per_trigger, max_bytes_per_trigger
        Most files in one micro-batch, and about most bytes. Of a feed that the JVM reads, a version is never
        divided.
    reader
        ``"jvm"`` or ``"python"``: fixed for the life of a job_dir.
    rate
        Most records, with the Python reader.

    Raises
    ------
    ConfigError
        An argument cannot be used.

    Examples
    --------
    >>> DeltaSource("/data/orders", DeltaChanges.FEED, starting_version=3, ending_version=9).is_bounded
    True
    """

    path: str
    changes: DeltaChanges = DeltaChanges.ROWS
    starting_version: int | None = None
    ending_version: int | None = None
    max_files_per_trigger: int = 1_000
    max_bytes_per_trigger: Limit = UNLIMITED
    reader: str | Engine = Engine.JVM
    rate: RateLimit = field(default_factory=RateLimit)
    _known: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    kind = "delta"

    def __post_init__(self) -> None:
        if not instance_of("path", self.path, str, what_to_do='give a table: "/data/orders"'):
            raise ConfigError("path is empty", what_to_do='give a table: "/data/orders"')
        with refused_as_config_errors("see the documentation of DeltaSource"):
            checked_choice("changes", self.changes, DeltaChanges)
            checked_whole("max_files_per_trigger", self.max_files_per_trigger, least=1)
            checked_limit("max_bytes_per_trigger", self.max_bytes_per_trigger, least=1)
            check_versions(self.starting_version, self.ending_version)
        object.__setattr__(self, "reader", Engine.of(self.reader, "reader"))
        what_to_do = "give RateLimit(records_per_second=..., records_per_batch=...)"
        instance_of("rate", self.rate, RateLimit, what_to_do=what_to_do)
        if self.reader is Engine.PYTHON:
            return
        if self.rate != RateLimit():
            raise ConfigError(
                "a Delta source that Spark reads has a limit of records",
                why="Spark's source counts files and bytes",
                what_to_do='set max_files_per_trigger or max_bytes_per_trigger, or add reader="python"',
            )
        if self.ending_version is not None and self.changes is not DeltaChanges.FEED:
            raise ConfigError(
                "a Delta source of rows has an ending_version",
                why="Spark's source cannot stop at a version, and only the feed says which one a row is of",
                what_to_do="read the change feed, or one version of the table with DeltaTableSource; or add "
                'reader="python"',
            )

    def bound(self, uid: str) -> Source:
        """Return this source; of the Python reader, the source of splits that it stands for."""
        if self.reader is not Engine.PYTHON:
            return self
        return DeltaRecordsSource(
            self.path,
            self.changes,
            starting_version=self.starting_version,
            ending_version=self.ending_version,
            max_files_per_batch=self.max_files_per_trigger,
            max_bytes_per_batch=self.max_bytes_per_trigger,
            rate=self.rate,
        ).bound(uid)

    @property
    def plan_name(self) -> str:
        """Tell what is read apart."""
        return f"delta-{self.changes.value.lower()}"

    @property
    def is_bounded(self) -> bool:
        """Whether it was given an end."""
        return self.ending_version is not None

    def has_ended(self, position: LoggedOffsets) -> bool:
        """Whether every scan has read the last version whole."""
        table, end = self._known.get("id"), self.ending_version
        scans = [one for one in position.sources if isinstance(one, dict) and one.get("reservoirId") == table]
        return end is not None and bool(scans) and all(int(one["reservoirVersion"]) > end for one in scans)

    def preflight(self, spark: SparkSession, job_dir: JobDir, uid: str) -> None:
        """Take note of which table it is, by the name that Delta logs."""
        detail: Any = spark.sql(f"DESCRIBE DETAIL delta.{quoted(self.path)}").first()
        self._known["id"] = str(detail["id"])

    def load(self, spark: SparkSession, control_path: str) -> DataFrame:
        """Return the stream with positions in Spark's input partitions."""
        from flinkish_spark.graph.record_stream import with_position

        reader = spark.readStream.format("delta")
        reader = reader.option("maxFilesPerTrigger", str(self.max_files_per_trigger))
        if not isinstance(self.max_bytes_per_trigger, Unlimited):
            reader = reader.option("maxBytesPerTrigger", str(self.max_bytes_per_trigger))
        if self.changes is DeltaChanges.FEED:
            reader = reader.option("readChangeFeed", "true")
        if self.starting_version is not None:
            reader = reader.option("startingVersion", str(self.starting_version))
        try:
            frame = reader.load(self.path)
        except AnalysisException as error:
            raise ConfigError(
                f"the Delta table {self.path} cannot be read",
                why=said(error),
                what_to_do="create it first; for a feed, with delta.enableChangeDataFeed",
            ) from error
        if self.ending_version is not None:
            frame = frame.where(F.col(_VERSION) <= self.ending_version)
        return with_position(frame)
