"""Bucket assigners: they choose the folder below the target for each record.

Folders are Hive style, `name=value`, written by Spark's own `partitionBy` and so escaped as Spark and
Hive do; null becomes ``__HIVE_DEFAULT_PARTITION__``, see `partition_values`.
"""

from __future__ import annotations

import calendar
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated
from urllib.parse import unquote
from zoneinfo import ZoneInfo

from flinkish_spark.connectors.partition_values import NULL_BUCKET, why_no_partition
from flinkish_spark.connectors.plain_formats import find_field
from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.core.fields import Name, TextPattern, check_arguments, check_fields
from flinkish_spark.core.validation import check_function
from flinkish_spark.types.ddl import quote_name
from flinkish_spark.types.schemas import PREFIX

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql import types as T


#: Letters of a date/time pattern, and Python's directives for them.
_LETTERS = {"yyyy": "%Y", "MM": "%m", "dd": "%d", "HH": "%H", "mm": "%M", "ss": "%S"}
#: Their positions in the text of a timestamp: first character and length.
_PLACES = {"yyyy": (1, 4), "MM": (6, 2), "dd": (9, 2), "HH": (12, 2), "mm": (15, 2), "ss": (18, 2)}
_LETTER_RUNS = re.compile(r"([A-Za-z])\1*")


_EPOCH = datetime(1970, 1, 1)
#: No wall clock is further from UTC than this, also at a change of its offset.
_FARTHEST = timedelta(hours=36)
#: Zones change their offset more rarely than this.
_STEP = timedelta(hours=6)


def to_ms(local: datetime, zone: str) -> int:
    """Return the milliseconds since 1970 of a wall clock time, in its own zone if it has one."""
    # If a clock shows the time twice, the first one.
    known = local if local.tzinfo is not None else local.replace(tzinfo=ZoneInfo(zone))
    return (known - _EPOCH.replace(tzinfo=UTC)) // timedelta(milliseconds=1)


def last_shown_ms(begin: datetime, end: datetime, zone: str) -> int | None:
    """Return the last instant until which a zone's wall clock shows times from `begin` to before `end`."""
    latest = None
    for first, after, offset in _stretches(end - _FARTHEST, end + _FARTHEST, ZoneInfo(zone)):
        shown_from, shown_to = max(first, begin - offset), min(after, end - offset)
        if shown_from < shown_to:
            latest = shown_to
    return None if latest is None else (latest - _EPOCH) // timedelta(milliseconds=1)


def _stretches(
    first: datetime, last: datetime, zone: ZoneInfo
) -> Iterator[tuple[datetime, datetime, timedelta]]:
    """Yield stretches of time in UTC in which a zone has one offset, with the offset, in order."""
    since, offset = first, _offset(first, zone)
    at = first
    while at < last:
        following = at + _STEP
        if _offset(following, zone) != offset:
            changed = _change(at, following, zone)
            yield since, changed, offset
            since, offset = changed, _offset(changed, zone)
        at = following
    yield since, at, offset


def _change(before: datetime, after: datetime, zone: ZoneInfo) -> datetime:
    """Return the first time with another offset than `before`."""
    offset, seconds = _offset(before, zone), (after - before) // timedelta(seconds=1)
    # Offsets change at whole seconds.
    at = bisect_left(
        range(seconds), True, key=lambda second: _offset(before + timedelta(seconds=second), zone) != offset
    )
    return before.replace(microsecond=0) + timedelta(seconds=at)


def _offset(utc: datetime, zone: ZoneInfo) -> timedelta:
    found = utc.replace(tzinfo=UTC).astimezone(zone).utcoffset()
    assert found is not None
    return found


_FOLDER_NAME = TextPattern(rf"(?!_|\.|{PREFIX}).+", "a name that begins with a letter")
_FolderName = Annotated[str, _FOLDER_NAME]
_FOLDER_ADVICE = "choose a name that begins with a letter"


class BucketAssigner(ABC):
    """Assigns records to buckets; several assigners make folders in folders. Subclass all three methods.

    Before a job starts, its columns are computed once on an empty frame: an assigner that raises there, or
    returns a column that cannot name folders, is refused.
    """

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The folders' names, outermost first."""

    @abstractmethod
    def check(self, schema: T.StructType, uid: str) -> None:
        """Raise SchemaError for a stream that this assigner cannot work on."""

    @abstractmethod
    def columns(self, now_ms: int) -> Mapping[str, Column]:
        """Return the columns to add to the stream, by name, without those that it has already.

        Parameters
        ----------
        now_ms
            Wall-clock time of the micro-batch.
        """


@dataclass(frozen=True, slots=True)
class ColumnBuckets(BucketAssigner):
    """A folder per value of one or several columns, which are left out of the files.

    Parameters
    ----------
    fields
        Names of fields of the stream.

    Examples
    --------
    >>> ColumnBuckets("country", "city").names
    ('country', 'city')
    """

    fields: tuple[str, ...]

    @check_arguments(fields='name fields: ColumnBuckets("country")')
    def __init__(self, *fields: Name) -> None:
        if not fields:
            raise ConfigError("ColumnBuckets() names no columns", what_to_do='name it: ColumnBuckets("city")')
        object.__setattr__(self, "fields", fields)

    @property
    def names(self) -> tuple[str, ...]:
        """The fields."""
        return self.fields

    def check(self, schema: T.StructType, uid: str) -> None:
        """Refuse missing fields, and fields whose values cannot name folders."""
        for field in self.fields:
            check_folder(field, schema, uid)

    def columns(self, now_ms: int) -> Mapping[str, Column]:
        """Return no columns: the stream has them."""
        return {}


@dataclass(frozen=True, slots=True)
class DateTimeBuckets(BucketAssigner):
    """A folder per hour, day or other period of a pattern, by a time column or by the time of staging.

    Parameters
    ----------
    pattern
        Made of ``yyyy``, ``MM``, ``dd``, ``HH``, ``mm``, ``ss`` and characters that are no letters.
    column
        A field with timestamps or dates; None for the wall-clock time at which a micro-batch is staged.
    name
        The folder's name before the time.
    zone
        Zone of the times in folders' names; dates and timestamps without zone are not converted.

    Examples
    --------
    >>> DateTimeBuckets("yyyy-MM-dd--HH", column="at").parse("2026-03-01--07")
    1772348400000
    """

    pattern: str = "yyyy-MM-dd--HH"
    column: str | None = None
    name: _FolderName = "dt"
    zone: str = "UTC"

    def __post_init__(self) -> None:
        check_fields(self, name=_FOLDER_ADVICE)
        runs = [match[0] for match in _LETTER_RUNS.finditer(self.pattern)]
        is_known = bool(runs) and not set(runs) - _LETTERS.keys() and len(set(runs)) == len(runs)
        if not is_known or not set(self.pattern).isdisjoint("/'%"):
            what = f"the pattern {self.pattern!r} of DateTimeBuckets cannot be used"
            to_do = f"put it together of {', '.join(_LETTERS)}, each once, and characters like '-' and '_'"
            raise ConfigError(what, what_to_do=to_do)
        try:
            ZoneInfo(self.zone)
        except (KeyError, ValueError, OSError):
            what = f"the time zone {self.zone!r} of DateTimeBuckets is not known"
            raise ConfigError(what, what_to_do='name one like "UTC" or "Europe/Berlin"') from None

    @property
    def names(self) -> tuple[str, ...]:
        """The one name."""
        return (self.name,)

    def check(self, schema: T.StructType, uid: str) -> None:
        """Refuse a column without times, and a name that is taken."""
        refuse_taken(self.names, schema, uid)
        if self.column is not None:
            whose = f"the time of the buckets of sink '{uid}'"
            find_field(schema, self.column, whose, ("timestamp", "timestamp_ntz", "date"))

    def columns(self, now_ms: int) -> Mapping[str, Column]:
        """Return the folder's column."""
        from pyspark.sql import functions as F

        if self.column is None:
            return {self.name: F.lit(self._format(now_ms))}
        # Spark formats in the session's zone, in which some wall clock times of other zones do not exist. So
        # the time is converted to a timestamp without zone, and the pattern is filled from its text.
        column = F.col(quote_name(self.column))
        seconds = (F.unix_micros(column.cast("timestamp")) / 1_000_000).cast("decimal(18, 6)")
        utc = F.lit("1970-01-01 00:00:00").cast("timestamp_ntz") + F.make_dt_interval(secs=seconds)
        local = F.convert_timezone(F.lit("UTC"), F.lit(self.zone), utc)
        clock = F.when(F.typeof(column) == "timestamp", local).otherwise(column.cast("timestamp_ntz"))
        text = clock.cast("string")
        parts = [F.substring(text, *_PLACES[p]) if p in _PLACES else F.lit(p) for p in self._pieces()]
        return {self.name: F.concat(*parts)}

    def _pieces(self) -> list[str]:
        return [piece for piece in re.split(r"(yyyy|MM|dd|HH|mm|ss)", self.pattern) if piece]

    def parse(self, value: str) -> int:
        """Return the milliseconds since 1970 at which a bucket's time begins; the first, if it comes twice.

        Raises
        ------
        ValueError
            The value does not have this pattern.
        """
        return to_ms(datetime.strptime(value, self._strptime()), self.zone)

    def parts(self, value: str) -> dict[str, int]:
        """Return the numbers in a folder's value, by their letters in the pattern.

        Raises
        ------
        ValueError
            The value does not have this pattern.
        """
        pieces = [f"(?P<{p}>[0-9]{{{len(p)}}})" if p in _LETTERS else re.escape(p) for p in self._pieces()]
        found = re.fullmatch("".join(pieces), value)
        if found is None:
            raise ValueError(f"{value!r} is no time like {self.pattern}")
        return {letters: int(digits) for letters, digits in found.groupdict().items()}

    def _format(self, now_ms: int) -> str:
        return datetime.fromtimestamp(now_ms / 1000, ZoneInfo(self.zone)).strftime(self._strptime())

    def _strptime(self) -> str:
        return _LETTER_RUNS.sub(lambda match: _LETTERS[match[0]], self.pattern)


@dataclass(frozen=True, slots=True)
class ExpressionBuckets(BucketAssigner):
    """A folder per value of an expression of your own.

    Parameters
    ----------
    name
        The folder's name before the value.
    expression
        SQL over the stream's fields, or a function that returns a Column.

    Examples
    --------
    >>> ExpressionBuckets("first", "substr(user, 1, 1)").names
    ('first',)
    """

    name: _FolderName
    expression: str | Callable[[], Column]

    def __post_init__(self) -> None:
        check_fields(self, name=_FOLDER_ADVICE)
        if not isinstance(self.expression, str):
            check_function(self.expression, f"the expression of ExpressionBuckets({self.name!r})", 0)

    @property
    def names(self) -> tuple[str, ...]:
        """The one name."""
        return (self.name,)

    def check(self, schema: T.StructType, uid: str) -> None:
        """Refuse a name that is taken; the sink checks the expressions of all assigners together."""
        refuse_taken(self.names, schema, uid)

    def columns(self, now_ms: int) -> Mapping[str, Column]:
        """Return the expression."""
        from pyspark.sql import functions as F

        return {self.name: F.expr(self.expression) if isinstance(self.expression, str) else self.expression()}


def list_assigners(given: BucketAssigner | Sequence[BucketAssigner] | None) -> tuple[BucketAssigner, ...]:
    return () if given is None else (given,) if isinstance(given, BucketAssigner) else tuple(given)


def check_levels(assigners: Sequence[BucketAssigner]) -> None:
    """Refuse names of folders that Spark's readers skip, and a name of two levels."""
    names = [name for one in assigners for name in one.names]
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(_FOLDER_NAME.pattern, name, re.DOTALL):
            raise ConfigError(f"a bucket folder cannot be called {name!r}", what_to_do=_FOLDER_ADVICE)
    for name, times in Counter(name.lower() for name in names).items():
        if times > 1:
            what = f"two levels of bucket_by have the name '{name}'"
            raise ConfigError(what, what_to_do="give each folder a name of its own")


def values_of(bucket: str) -> dict[str, str | None]:
    """Return the names and values of a bucket's folders, unescaped."""
    pairs = (folder.partition("=") for folder in bucket.split("/") if folder)
    return {unquote(name): None if value == NULL_BUCKET else unquote(value) for name, _, value in pairs}


def times_of(assigners: Sequence[BucketAssigner]) -> tuple[DateTimeBuckets, ...]:
    """Return the assigners that together give a partition's time: the first, and others of its column."""
    times = [one for one in assigners if isinstance(one, DateTimeBuckets)]
    return tuple(one for one in times if (one.column, one.zone) == (times[0].column, times[0].zone))


def letters_of(times: Sequence[DateTimeBuckets]) -> set[str]:
    return {piece for one in times for piece in one._pieces() if piece in _LETTERS}


def span_of(values: Mapping[str, str | None], times: Sequence[DateTimeBuckets]) -> tuple[datetime, datetime]:
    """Return the begin and end of the times, by wall clock, that belong to the folders with these values."""
    given: dict[str, int] = {}
    for one in times:
        given = {**one.parts(values.get(one.name) or ""), **given}
    year, month = given["yyyy"], given.get("MM", 12)
    last_day = calendar.monthrange(year, month)[1]
    hour, minute, second = (given.get(part, 0) for part in ("HH", "mm", "ss"))
    first = datetime(year, given.get("MM", 1), given.get("dd", 1), hour, minute, second)
    hour, minute, second = given.get("HH", 23), given.get("mm", 59), given.get("ss", 59)
    last = datetime(year, month, given.get("dd", last_day), hour, minute, second)
    return first, last + timedelta(seconds=1)


#: Zones in which each wall clock time is one instant.
_UTC = frozenset({"UTC", "Etc/UTC", "GMT", "Z", "+00:00"})


def check_folder(name: str, schema: T.StructType, uid: str, zone: str = "UTC") -> None:
    """Refuse a folder without a column, or with a column whose values cannot be in a folder's name."""
    from pyspark.sql import types as T

    if name not in schema.names:
        raise SchemaError(
            f"the bucket folder '{name}' of sink '{uid}' is a column that its stream does not have",
            what_to_do=f"return it from columns(), or choose from {', '.join(schema.names)}",
        )
    kind = schema[name].dataType
    why = why_no_partition(kind)
    if isinstance(kind, T.TimestampType) and zone not in _UTC:
        why = f"it would be a time of the session's zone, {zone}: not of its readers', and hours come twice"
    if why:
        raise SchemaError(
            f"the column '{name}' cannot give sink '{uid}' its buckets",
            why=why,
            what_to_do="choose strings, numbers or dates; cast it to a string, or use DateTimeBuckets",
        )


def refuse_taken(names: Sequence[str], schema: T.StructType, uid: str) -> None:
    have = {name.lower() for name in schema.names}
    taken = [name for name in names if name.lower() in have]
    if taken:
        raise SchemaError(
            f"the buckets of sink '{uid}' have the name '{taken[0]}', and so has a field of its stream",
            what_to_do="give the assigner another name, or use ColumnBuckets for that field",
        )
