"""Partition commit: settings, triggers and policies that announce a complete partition.

Policies run after the partition's files are visible, again after a crash in between, and again when
late data came to a partition that was committed before: they must be idempotent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Annotated
from zoneinfo import ZoneInfo

from flinkish_spark.connectors.files.buckets import (
    BucketAssigner,
    last_shown_ms,
    letters_of,
    span_of,
    times_of,
    to_ms,
    values_of,
)
from flinkish_spark.connectors.files.disk import Disk
from flinkish_spark.contracts.sink import CompletedCheckpoint
from flinkish_spark.core.errors import ConfigError, InternalError
from flinkish_spark.core.fields import Arity, Range, TextPattern, check_fields
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.durations import Milliseconds
from flinkish_spark.protocol.limits import MOST_MS
from flinkish_spark.types.ddl import quote_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_LEAVE_OUT = "leave it out for the default"
#: Errors of partition values that are no time, or a time that no clock shows.
_NO_TIME = (ValueError, KeyError, IndexError, OverflowError)


@dataclass(frozen=True, slots=True)
class ReadyPartition:
    """A partition whose files are visible, as a policy sees it.

    Parameters
    ----------
    path
        Its folder, absolute.
    values
        Name and value of each of its folders, outermost first; None for null.
    checkpoint
        Number of the checkpoint that commits it.
    """

    path: Path
    values: Mapping[str, str | None]
    checkpoint: int


class PartitionPolicy(ABC):
    """Commit action for a complete partition. Your own subclass needs :meth:`commit` only."""

    @abstractmethod
    def commit(self, partition: ReadyPartition, spark: SparkSession | None) -> None:
        """Commit a partition; called in the coordinator's process, and must be idempotent.

        Raises
        ------
        Exception
            The sink calls it again, after a pause, until it succeeds or the job stops; no further checkpoint
            completes until then.
        """


@dataclass(frozen=True, slots=True)
class SuccessFile(PartitionPolicy):
    """An empty file in the partition's folder.

    Parameters
    ----------
    name
        Of the file; readers skip one that begins with ``_``.
    """

    name: Annotated[str, TextPattern(r"(?!\.{1,2}\Z)[^/\0]+", "a name of a file")] = "_SUCCESS"

    def __post_init__(self) -> None:
        check_fields(self)

    def commit(self, partition: ReadyPartition, spark: SparkSession | None) -> None:
        """Make the file."""
        disk = Disk()
        disk.make_folder(partition.path)
        # A file that another program has written stays as it is.
        if not disk.exists(partition.path / self.name):
            disk.concatenate((), partition.path / self.name)
        disk.sync_folders([partition.path])


@dataclass(frozen=True, slots=True)
class MetastorePartition(PartitionPolicy):
    """A partition of a table in Spark's catalog.

    Parameters
    ----------
    table
        Name of an existing table that is partitioned by the bucket columns, such as ``"sales.orders"``.
    """

    table: str

    def commit(self, partition: ReadyPartition, spark: SparkSession | None) -> None:
        """Add the partition if the table does not have it, and let this session see its new files."""
        if spark is None:
            raise InternalError("there is no Spark session to add a partition with")
        spec = ", ".join(
            f"{quote_name(name)} = {_literal(value)}" for name, value in partition.values.items()
        )
        spark.sql(
            f"ALTER TABLE {self.quoted} ADD IF NOT EXISTS PARTITION ({spec}) "
            f"LOCATION {_literal('file://' + str(partition.path))}"
        )
        spark.catalog.refreshTable(self.quoted)

    @property
    def quoted(self) -> str:
        """The table's name, quoted for SQL."""
        return ".".join(quote_name(part) for part in self.table.split("."))

    def check(self, spark: SparkSession, names: Sequence[str], uid: str) -> None:
        """Raise ConfigError if the table does not exist or is not partitioned by these columns."""
        why, wanted = "there is no such table", ", ".join(names)
        if spark.catalog.tableExists(self.table):
            found = ", ".join(c.name for c in spark.catalog.listColumns(self.table) if c.isPartition)
            is_same = found.lower() == wanted.lower()
            why = "" if is_same else f"it is partitioned by ({found}), the sink by ({wanted})"
        if why:
            raise ConfigError(
                f"sink '{uid}' cannot add its partitions to the table {self.table}",
                why=why,
                what_to_do=f"create it: CREATE TABLE ... USING ... PARTITIONED BY ({wanted}) LOCATION ...",
            )


@dataclass(frozen=True, slots=True)
class ProcessTime:
    """A partition is complete some time after its first data was decided.

    Parameters
    ----------
    delay_ms
        Time after that decision; 0 commits it at every checkpoint with data for it.
    """

    delay_ms: Annotated[Milliseconds, Range(0, MOST_MS)] = 0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class PartitionTime:
    """A partition is complete when the watermark has passed its time and a delay.

    Parameters
    ----------
    pattern
        Template that makes a time from the folders' values: ``"{dt} {hour}:00:00"``, in a form that
        ``datetime.fromisoformat`` reads. None with :class:`DateTimeBuckets`, which knows its times; several
        of one column and zone give the time together.
    delay_ms
        Time after the begin of the partition: 3,600,000 for hourly partitions, 86,400,000 for daily ones,
        plus the time that late data may take. On days when the zone's clock changes, the delay is adjusted,
        so that it ends as long after the partition's *end* as on other days.
    zone
        Zone of the pattern's times.
    watermark
        Returns the watermark in milliseconds since 1970, or None if there is none yet. By default the
        greatest partition time in decided data. While it raises, or returns another type, it is called again,
        and no checkpoint completes.

    Examples
    --------
    >>> trigger = PartitionTime("{dt} {hour}:00:00", delay_ms=3_600_000)
    >>> trigger.time_ms("dt=2026-03-01/hour=07", ())
    1772348400000
    """

    pattern: str | None = None
    delay_ms: Annotated[Milliseconds, Range(0, MOST_MS)] = 0
    zone: str = "UTC"
    watermark: Annotated[Callable[[CompletedCheckpoint], int | None], Arity(1)] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        try:
            ZoneInfo(self.zone)
            if self.pattern is not None:
                list(Formatter().parse(self.pattern))
        except (KeyError, ValueError, OSError) as error:
            raise ConfigError(
                f"PartitionTime({self.pattern!r}, zone={self.zone!r}) cannot be used",
                why=str(error),
                what_to_do='write it like PartitionTime("{dt} {hour}:00:00", zone="UTC")',
            ) from None

    def time_ms(self, bucket: str, assigners: Sequence[BucketAssigner]) -> int | None:
        """Return when a partition's time begins; None if its values are no time."""
        try:
            begin, _, zone = self._span(bucket, assigners)
            return to_ms(begin, zone)
        except _NO_TIME:
            return None

    def due_ms(self, bucket: str, assigners: Sequence[BucketAssigner]) -> int | None:
        """Return the watermark that completes a partition; None if its values are no time.

        That is `delay_ms` after its begin while the zone's clock does not change. An hour that comes twice
        ends when the second one does, and a day may have 23 or 25 hours: the part of the delay after the
        partition's end stays the same.
        """
        try:
            begin, end, zone = self._span(bucket, assigners)
            delay, from_begin = timedelta(milliseconds=self.delay_ms), to_ms(begin, zone) + self.delay_ms
            # The length of a pattern's partitions is not known: at most the delay, if that is long enough.
            length = max(delay, timedelta(seconds=1)) if end is None else end - begin
            shown = None if begin.tzinfo is not None else last_shown_ms(begin, begin + length, zone)
            if shown is None:
                return from_begin
            from_end = shown + (delay - length) // timedelta(milliseconds=1)
            # A day of 23 hours ends sooner, if the delay covers the whole partition.
            return from_end if end is not None and delay >= length else max(from_begin, from_end)
        except _NO_TIME:
            return None

    def _span(
        self, bucket: str, assigners: Sequence[BucketAssigner]
    ) -> tuple[datetime, datetime | None, str]:
        """Return a partition's first time, its end where it is known, and the zone of both."""
        values = values_of(bucket)
        if self.pattern is not None:
            filled = self.pattern.format(**{name: value or "" for name, value in values.items()})
            return datetime.fromisoformat(filled), None, self.zone
        times = times_of(assigners)
        return *span_of(values, times), times[0].zone

    def check(self, assigners: Sequence[BucketAssigner], uid: str) -> None:
        """Raise ConfigError if the pattern names other folders."""
        names, why = [name for one in assigners for name in one.names], ""
        if self.pattern is not None:
            used = [field for _, field, _, _ in Formatter().parse(self.pattern) if field is not None]
            # "{dt.x}" and "{dt[0]}" would be looked up in the value.
            wrong = [field for field in used if field not in names]
            if wrong:
                why = f"the pattern uses '{wrong[0]}', which no folder has"
            elif not used:
                why = "the pattern uses no value of a folder"
        elif not (times := times_of(assigners)):
            why = "there is no pattern and no DateTimeBuckets"
        elif "yyyy" not in letters_of(times):
            # A folder "dt=07" gets data every year: its time is never over.
            why = "the patterns of DateTimeBuckets have no year"
        if why:
            raise ConfigError(
                f"PartitionTime of sink '{uid}' cannot read the time of a partition from its folder",
                why=why,
                what_to_do="give PartitionTime a pattern with "
                f"{', '.join('{' + name + '}' for name in names)}",
            )


class FinalPartitionAction(Choice):
    """Treatment of waiting partitions at the last checkpoint of a job."""

    #: They wait for the next start; for a job that is stopped and resumed.
    WAIT = "WAIT"
    #: All are committed; for a job whose input has ended.
    COMMIT = "COMMIT"


@dataclass(frozen=True, slots=True)
class PartitionCommit:
    """When partitions are complete, and how they are committed.

    Parameters
    ----------
    trigger
        :class:`PartitionTime` or :class:`ProcessTime`.
    policies
        Called in this order for every partition: :class:`SuccessFile`, :class:`MetastorePartition`, or your
        own.
    at_final
        Whether the last checkpoint commits all waiting partitions.

    Examples
    --------
    >>> PartitionCommit(ProcessTime(60_000), policies=(SuccessFile(),)).at_final
    <FinalPartitionAction.WAIT: 'WAIT'>
    """

    trigger: PartitionTime | ProcessTime = ProcessTime()
    policies: tuple[PartitionPolicy, ...] = (SuccessFile(),)
    at_final: FinalPartitionAction = FinalPartitionAction.WAIT

    def __post_init__(self) -> None:
        what_to_do = "give a tuple of policies, such as (SuccessFile(),)"
        check_fields(self, policies=what_to_do)
        if not self.policies:
            raise ConfigError("PartitionCommit has no policies", what_to_do=what_to_do)

    def check(self, assigners: Sequence[BucketAssigner], spark: SparkSession, uid: str) -> None:
        """Raise ConfigError if a setting does not fit the sink's buckets."""
        if not assigners:
            what = f"sink '{uid}' commits partitions and has none"
            raise ConfigError(what, what_to_do="give it bucket_by, or leave partition_commit out")
        if isinstance(self.trigger, PartitionTime):
            self.trigger.check(assigners, uid)
        names = [name for one in assigners for name in one.names]
        for policy in self.policies:
            if isinstance(policy, MetastorePartition):
                policy.check(spark, names, uid)


def _literal(value: str | None) -> str:
    if value is None:
        return "NULL"
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
