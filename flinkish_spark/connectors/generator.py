"""Generated records: seeded, limited in rate, and the same in every replay.

Generators have no state: each value is a pure function of the seed, the field and the record's number.
"""

from __future__ import annotations

import datetime
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.connectors.rates import RateLimit
from flinkish_spark.connectors.splits import SplitSource
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.fields import Range, check_arguments, check_fields
from flinkish_spark.core.validation import check_methods, raise_config_errors, unusable
from flinkish_spark.protocol.durations import Milliseconds
from flinkish_spark.protocol.limits import UNLIMITED, Limit, NoLimit, check_factor, check_whole
from flinkish_spark.types.schemas import check_field_names

_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_MOST_LONG = (1 << 63) - 1
#: 10,000 years: longer than the time between any two timestamps.
_MOST_TIMES_MS = 10_000 * 366 * 24 * 3_600_000
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz0123456789", dtype=np.uint8)
_LETTERS_AT_ONCE = 1 << 17
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def random_bits(seed: int, stream: int, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return 64 random bits per number (SplitMix64, started at seed and stream)."""
    first = _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64))
    first = _mix(first ^ np.uint64(stream))
    return _mix(first + numbers.astype(np.uint64) * _MIX[0])


def _mix(z: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    # Overflow is part of the algorithm.
    z = (z ^ (z >> np.uint64(30))) * _MIX[1]
    z = (z ^ (z >> np.uint64(27))) * _MIX[2]
    mixed: np.ndarray[Any, Any] = z ^ (z >> np.uint64(31))
    return mixed


def _refuse_beyond_long(field: Field, start: int, step: int, places: np.ndarray[Any, Any]) -> None:
    # NumPy would wrap around.
    for place in (int(places.min()), int(places.max())) if len(places) else ():
        if abs(start + step * place) > _MOST_LONG or step * place > _MOST_LONG:
            raise ValueError(f"{field!r} goes beyond what a record can hold, at record {place}")


class Field(ABC):
    """One field of a generated record.

    Its `repr` must describe its values and be the same in every process: at its next start a job compares it
    to see that the records are still the same. A frozen dataclass has such a `repr`.
    """

    @property
    @abstractmethod
    def type(self) -> T.DataType:
        """Spark's type."""

    @abstractmethod
    def values(self, numbers: np.ndarray[Any, Any], seed: int, stream: int) -> pa.Array:
        """Return the values of the records with these numbers.

        Parameters
        ----------
        numbers
            Numbers of records, from 0.
        stream
            Number of the field in the record: fields of the same kind get different values.

        Raises
        ------
        ValueError
            The type cannot hold one of the values.
        """


@dataclass(frozen=True)
class Counting(Field):
    """`start`, `start + step`, ...; begins again after `cycle` records, if given."""

    start: Annotated[int, Range(-_MOST_LONG, _MOST_LONG)] = 0
    step: Annotated[int, Range(-_MOST_LONG, _MOST_LONG)] = 1
    cycle: Annotated[int | None, Range(1, _MOST_LONG)] = None

    def __post_init__(self) -> None:
        check_fields(self, "give whole numbers")

    type = T.LongType()

    def values(self, numbers: np.ndarray[Any, Any], seed: int, stream: int) -> pa.Array:
        places = numbers if self.cycle is None else numbers % self.cycle
        _refuse_beyond_long(self, self.start, self.step, places)
        return pa.array(self.start + self.step * places, pa.int64())


@dataclass(frozen=True)
class RandomLong(Field):
    """A whole number from `least` to `most`, both included."""

    least: int
    most: int

    def __post_init__(self) -> None:
        with raise_config_errors("give two whole numbers, the smaller one first"):
            check_whole("least", self.least, least=-_MOST_LONG, most=_MOST_LONG)
            check_whole("most", self.most, least=self.least, most=_MOST_LONG)
            check_whole("most - least", self.most - self.least, least=0, most=_MOST_LONG)

    type = T.LongType()

    def values(self, numbers: np.ndarray[Any, Any], seed: int, stream: int) -> pa.Array:
        bits = random_bits(seed, stream, numbers)
        return pa.array((bits % np.uint64(self.most - self.least + 1)).astype(np.int64) + self.least)


@dataclass(frozen=True)
class RandomDouble(Field):
    """A number from `least` to below `most`."""

    least: float = 0.0
    most: float = 1.0

    def __post_init__(self) -> None:
        with raise_config_errors("give two numbers, the smaller one first"):
            check_factor("least", self.least, -1e300, 1e300)
            check_factor("most", self.most, self.least, 1e300)

    type = T.DoubleType()

    def values(self, numbers: np.ndarray[Any, Any], seed: int, stream: int) -> pa.Array:
        unit = (random_bits(seed, stream, numbers) >> np.uint64(11)).astype(np.float64) / float(1 << 53)
        # Rounding can reach the upper end, which is excluded.
        below = np.nextafter(self.most, self.least)
        return pa.array(np.minimum(self.least + unit * (self.most - self.least), below))


@dataclass(frozen=True)
class RandomText(Field):
    """`length` letters and digits."""

    length: Annotated[int, Range(1, 100_000)] = 10

    def __post_init__(self) -> None:
        check_fields(self, "give a number of characters")

    type = T.StringType()

    def values(self, numbers: np.ndarray[Any, Any], seed: int, stream: int) -> pa.Array:
        row = random_bits(seed, stream, numbers)
        places = np.arange(self.length, dtype=np.uint64) * _MIX[2]
        letters = np.empty((len(numbers), self.length), dtype=np.uint8)
        # Each letter takes several times eight bytes while it is computed.
        step = max(1, _LETTERS_AT_ONCE // self.length)
        for at in range(0, len(numbers), step):
            bits = _mix(row[at : at + step, None] + places[None, :])
            letters[at : at + step] = _LETTERS[(bits % np.uint64(len(_LETTERS))).astype(np.int64)]
        ends = np.arange(len(numbers) + 1, dtype=np.int32) * np.int32(self.length)
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(letters)]
        return pa.Array.from_buffers(pa.string(), len(numbers), buffers)


@dataclass(frozen=True, init=False)
class RandomChoice(Field):
    """One of several values of one type: str, int, float or bool."""

    choices: tuple[Any, ...]

    def __init__(self, choices: Sequence[str] | Sequence[int] | Sequence[float] | Sequence[bool]) -> None:
        what_to_do = 'give a list of values of one type: ["red", "green"], or [1, 2]'
        # The order of a set differs in the next process.
        if isinstance(choices, str | bytes | Mapping | Set) or not isinstance(choices, Iterable):
            raise unusable("choices", choices, wanted="a list", what_to_do=what_to_do)
        given = tuple(choices)
        why = ""
        try:
            pa.array(given)
        except (pa.ArrowInvalid, OverflowError, UnicodeEncodeError) as error:
            why = f"a value cannot be held: {error}"
        if why or len({type(one) for one in given}) != 1 or type(given[0]) not in _CHOICES:
            raise ConfigError(f"choices is {choices!r}", why=why, what_to_do=what_to_do)
        object.__setattr__(self, "choices", given)

    @property
    def type(self) -> T.DataType:
        return _CHOICES[type(self.choices[0])]

    def values(self, numbers: np.ndarray[Any, Any], seed: int, stream: int) -> pa.Array:
        places = random_bits(seed, stream, numbers) % np.uint64(len(self.choices))
        return pa.array(self.choices).take(pa.array(places.astype(np.int64)))


_CHOICES: dict[type, T.DataType] = {
    str: T.StringType(),
    int: T.LongType(),
    float: T.DoubleType(),
    bool: T.BooleanType(),
}


@dataclass(frozen=True)
class Times(Field):
    """Timestamps from `start` on, `step_ms` apart, each earlier by a random time of at most `jitter_ms`.

    So records are out of order by up to `jitter_ms`.
    """

    start: datetime.datetime
    step_ms: Annotated[Milliseconds, Range(0, _MOST_TIMES_MS)] = 1_000
    jitter_ms: Annotated[Milliseconds, Range(0, _MOST_TIMES_MS)] = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.start.tzinfo is None:
            what = f"start is {self.start!r}, which has no time zone"
            raise ConfigError(what, what_to_do="give for example datetime(2026, 1, 1, tzinfo=UTC)")

    type = T.TimestampType()

    def values(self, numbers: np.ndarray[Any, Any], seed: int, stream: int) -> pa.Array:
        first = (self.start - _EPOCH) // datetime.timedelta(microseconds=1)
        _refuse_beyond_long(self, first, self.step_ms * 1_000, numbers)
        times = first + numbers * (self.step_ms * 1_000)
        late = random_bits(seed, stream, numbers) % np.uint64(self.jitter_ms * 1_000 + 1)
        return pa.array(times - late.astype(np.int64), pa.timestamp("us", tz="UTC"))


#: Most rows, and most characters of random texts, in an Arrow batch.
_ROWS_AT_ONCE, _TEXT_AT_ONCE = 10_000, 1 << 22
#: Records that a micro-batch takes from each split if no rate limits it.
_AT_ONCE = 100_000
#: The address in the default repr of an object or function.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")


_BY_NAME = 'give fields by name: {"id": Counting()}'


class DataGeneratorSource(SplitSource):
    """Generates records: the n-th is a pure function of seed and n, in every process and replay.

    Parameters
    ----------
    fields
        Generators of the fields, by field name; see `docs/sources.md`. A field's values depend on its
        position.
    records
        Number of records; the job ends after them. UNLIMITED for no end.
    seed
        Another seed generates other records.
    rate
        Most records per second and per micro-batch, over all splits. Without it a micro-batch has 100,000 of
        each split.
    splits
        Number of parts that are generated in parallel; records are dealt to them round-robin.

    Examples
    --------
    >>> from flinkish_spark.connectors.generator import Counting, RandomChoice
    >>> orders = DataGeneratorSource({"id": Counting(), "user": RandomChoice(["ann", "bob"])}, records=100)
    >>> next(orders.read("0", 7, 9)).to_pylist()
    [{'id': 7, 'user': 'ann'}, {'id': 8, 'user': 'ann'}]
    """

    kind = "generator"

    @check_arguments(fields=_BY_NAME)
    def __init__(
        self,
        fields: Mapping[str, Field],
        *,
        records: Annotated[Limit, Range(0, (1 << 63) - 1)] = UNLIMITED,
        seed: Annotated[int, Range(-(1 << 63), (1 << 63) - 1)] = 0,
        rate: RateLimit | None = None,
        splits: Annotated[int, Range(1, 10_000)] = 1,
    ) -> None:
        if not fields:
            raise ConfigError("fields is empty", what_to_do=_BY_NAME)
        for name, field in fields.items():
            check_methods(field, Field, f"fields[{name!r}]")
            if type(field).__module__ != Field.__module__ and _ADDRESS.search(repr(field)):
                what = f"fields[{name!r}] is {field!r}, with an address that differs at the next start"
                to_do = f"define __repr__ in {type(field).__name__}, with all that its values depend on"
                raise ConfigError(what, what_to_do=to_do)
            # Generators of users' own may not be defined at the last record.
            if isinstance(field, Counting | Times) and not isinstance(records, NoLimit) and records:
                with raise_config_errors(f"correct fields[{name!r}], or give it fewer records"):
                    field.values(np.array([records - 1], dtype=np.int64), 0, 0)
        self.schema = T.StructType([T.StructField(name, field.type) for name, field in fields.items()])
        check_field_names(self.schema, "a data generator")
        self.rate = RateLimit() if rate is None else rate
        self._fields, self._records, self._seed, self._parts = dict(fields), records, seed, splits

    @property
    def is_bounded(self) -> bool:  # type: ignore[override]
        return not isinstance(self._records, NoLimit)

    def splits(self) -> Sequence[str]:
        return [str(number) for number in range(self._parts)]

    def end(self, split: str) -> int | None:
        records = self.record_count()
        return None if records is None else max(0, -(-(records - int(split)) // self._parts))

    def record_count(self) -> int | None:
        return None if isinstance(self._records, NoLimit) else self._records

    def latest(self, split: str, start: int, limit: int | None) -> int:
        wanted, end = start + (_AT_ONCE if limit is None else limit), self.end(split)
        return wanted if end is None else min(wanted, end)

    def read(self, split: str, start: int, end: int) -> Iterator[pa.RecordBatch]:
        texts = sum(field.length for field in self._fields.values() if isinstance(field, RandomText))
        rows = max(1, min(_ROWS_AT_ONCE, _TEXT_AT_ONCE // max(1, texts)))
        for first in range(start, end, rows):
            places = np.arange(first, min(end, first + rows), dtype=np.int64)
            numbers = places * self._parts + int(split)
            columns = [
                field.values(numbers, self._seed, stream)
                for stream, field in enumerate(self._fields.values())
            ]
            yield pa.RecordBatch.from_arrays(columns, names=list(self._fields))

    def fingerprint(self) -> Mapping[str, Any]:
        """Return what the records depend on; their number and rate may change."""
        fields = [[name, repr(field)] for name, field in self._fields.items()]
        return {"fields": fields, "seed": self._seed, "splits": self._parts}
