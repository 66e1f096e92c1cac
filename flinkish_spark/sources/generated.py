"""Fields of generated records: each value a pure function of the seed, the field and the record's number.

No generator has a state: a piece of records is the same whoever makes it, and whenever.
"""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.arguments import refused_as_config_errors, unusable
from flinkish_spark.errors import ConfigError
from flinkish_spark.protocol.limits import checked_factor, checked_whole

_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_MOST_LONG = (1 << 63) - 1
#: 10,000 years: further than any time lies from another.
_MOST_TIMES_MS = 10_000 * 366 * 24 * 3_600_000
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz0123456789", dtype=np.uint8)
_LETTERS_AT_ONCE = 1 << 17
_UTC = datetime.UTC


def random_bits(seed: int, stream: int, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return 64 random bits per number (SplitMix64, started at seed and stream).

    Examples
    --------
    >>> random_bits(1, 0, np.arange(2)).tolist() == random_bits(1, 0, np.arange(1, 2)).tolist()
    False
    >>> random_bits(1, 0, np.arange(2))[1] == random_bits(1, 0, np.arange(1, 2))[0]
    np.True_
    """
    first = _mixed(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64))
    first = _mixed(first ^ np.uint64(stream))
    return _mixed(first + numbers.astype(np.uint64) * _MIX[0])


def _mixed(z: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    # Overflow is what makes it work.
    z = (z ^ (z >> np.uint64(30))) * _MIX[1]
    z = (z ^ (z >> np.uint64(27))) * _MIX[2]
    mixed: np.ndarray[Any, Any] = z ^ (z >> np.uint64(31))
    return mixed


def _refuse_beyond_long(field: Field, start: int, step: int, places: np.ndarray[Any, Any]) -> None:
    """Raise ValueError if `start + step * place` is no LONG: NumPy would begin again at the other end."""
    for place in (int(places.min()), int(places.max())) if len(places) else ():
        if abs(start + step * place) > _MOST_LONG or step * place > _MOST_LONG:
            raise ValueError(f"{field!r} goes beyond what a record can hold, at record {place}")


class Field(ABC):
    """One field of a generated record.

    Its `repr` says what it makes, the same in every process: by that a job knows at its next start that the
    records are still the same. A frozen dataclass has one.
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
            Of records, from 0.
        stream
            Tells the field from the others of the record.
        """


@dataclass(frozen=True)
class Counting(Field):
    """`start`, `start + step`, ...: the record's number; over again behind `cycle` records, if given."""

    start: int = 0
    step: int = 1
    cycle: int | None = None

    def __post_init__(self) -> None:
        with refused_as_config_errors("give whole numbers"):
            checked_whole("start", self.start, least=-_MOST_LONG, most=_MOST_LONG)
            checked_whole("step", self.step, least=-_MOST_LONG, most=_MOST_LONG)
            if self.cycle is not None:
                checked_whole("cycle", self.cycle, least=1, most=_MOST_LONG)

    @property
    def type(self) -> T.DataType:
        """LONG."""
        return T.LongType()

    def values(self, numbers: np.ndarray[Any, Any], seed: int, stream: int) -> pa.Array:
        """Return the numbers.

        Raises
        ------
        ValueError
            One of them is no LONG.
        """
        places = numbers if self.cycle is None else numbers % self.cycle
        _refuse_beyond_long(self, self.start, self.step, places)
        return pa.array(self.start + self.step * places, pa.int64())


@dataclass(frozen=True)
class RandomLong(Field):
    """A whole number from `least` to `most`, both included."""

    least: int
    most: int

    def __post_init__(self) -> None:
        with refused_as_config_errors("give two whole numbers, the smaller one first"):
            checked_whole("least", self.least, least=-_MOST_LONG, most=_MOST_LONG)
            checked_whole("most", self.most, least=self.least, most=_MOST_LONG)
            checked_whole("most - least", self.most - self.least, least=0, most=_MOST_LONG)

    @property
    def type(self) -> T.DataType:
        """LONG."""
        return T.LongType()

    def values(self, numbers: np.ndarray[Any, Any], seed: int, stream: int) -> pa.Array:
        """Return the numbers."""
        bits = random_bits(seed, stream, numbers)
        return pa.array((bits % np.uint64(self.most - self.least + 1)).astype(np.int64) + self.least)


@dataclass(frozen=True)
class RandomDouble(Field):
    """A number from `least` to below `most`."""

    least: float = 0.0
    most: float = 1.0

    def __post_init__(self) -> None:
        with refused_as_config_errors("give two numbers, the smaller one first"):
            checked_factor("least", self.least, -1e300, 1e300)
            checked_factor("most", self.most, self.least, 1e300)

    @property
    def type(self) -> T.DataType:
        """DOUBLE."""
        return T.DoubleType()

    def values(self, numbers: np.ndarray[Any, Any], seed: int, stream: int) -> pa.Array:
        """Return the numbers."""
        unit = (random_bits(seed, stream, numbers) >> np.uint64(11)).astype(np.float64) / float(1 << 53)
        # Rounding can reach the upper end, which does not belong to it.
        below = np.nextafter(self.most, self.least)
        return pa.array(np.minimum(self.least + unit * (self.most - self.least), below))


@dataclass(frozen=True)
class RandomText(Field):
    """`length` letters and digits."""

    length: int = 10

    def __post_init__(self) -> None:
        with refused_as_config_errors("give a number of characters"):
            checked_whole("length", self.length, least=1, most=100_000)

    @property
    def type(self) -> T.DataType:
        """STRING."""
        return T.StringType()

    def values(self, numbers: np.ndarray[Any, Any], seed: int, stream: int) -> pa.Array:
        """Return the texts."""
        row = random_bits(seed, stream, numbers)
        places = np.arange(self.length, dtype=np.uint64) * _MIX[2]
        letters = np.empty((len(numbers), self.length), dtype=np.uint8)
        # A letter takes eight bytes, several times, while it is made.
        step = max(1, _LETTERS_AT_ONCE // self.length)
        for at in range(0, len(numbers), step):
            bits = _mixed(row[at : at + step, None] + places[None, :])
            letters[at : at + step] = _LETTERS[(bits % np.uint64(len(_LETTERS))).astype(np.int64)]
        ends = np.arange(len(numbers) + 1, dtype=np.int32) * np.int32(self.length)
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(letters)]
        return pa.Array.from_buffers(pa.string(), len(numbers), buffers)


@dataclass(frozen=True, init=False)
class RandomChoice(Field):
    """One of some values of one type, in an order: texts, whole numbers, numbers or truth values."""

    choices: tuple[Any, ...]

    def __init__(self, choices: Sequence[str] | Sequence[int] | Sequence[float] | Sequence[bool]) -> None:
        what_to_do = 'give a list of values of one type: ["red", "green"], or [1, 2]'
        # The order of a set is another one in the next process.
        if isinstance(choices, str | bytes | Mapping | Set) or not isinstance(choices, Iterable):
            raise unusable("choices", choices, wanted="a list", what_to_do=what_to_do)
        given = tuple(choices)
        if not given or len({type(one) for one in given}) != 1 or type(given[0]) not in _CHOICES:
            raise ConfigError(f"choices is {choices!r}", what_to_do=what_to_do)
        try:
            pa.array(given)
        except (pa.ArrowInvalid, OverflowError, UnicodeEncodeError) as error:
            raise ConfigError(
                f"choices is {choices!r}", why=f"a value cannot be held: {error}", what_to_do=what_to_do
            ) from None
        object.__setattr__(self, "choices", given)

    @property
    def type(self) -> T.DataType:
        """The type of the choices."""
        return _CHOICES[type(self.choices[0])]

    def values(self, numbers: np.ndarray[Any, Any], seed: int, stream: int) -> pa.Array:
        """Return the values."""
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
    """Timestamps from `start` on, `step_ms` apart, each late by a random time of at most `jitter_ms`.

    Late within the record's number: so records come out of order by as much.
    """

    start: datetime.datetime
    step_ms: int = 1_000
    jitter_ms: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.start, datetime.datetime) or self.start.tzinfo is None:
            raise unusable(
                "start",
                self.start,
                wanted="a datetime with a time zone",
                what_to_do="give for example datetime(2026, 1, 1, tzinfo=UTC)",
            )
        with refused_as_config_errors("give whole milliseconds"):
            checked_whole("step_ms", self.step_ms, least=0, most=_MOST_TIMES_MS)
            checked_whole("jitter_ms", self.jitter_ms, least=0, most=_MOST_TIMES_MS)

    @property
    def type(self) -> T.DataType:
        """TIMESTAMP."""
        return T.TimestampType()

    def values(self, numbers: np.ndarray[Any, Any], seed: int, stream: int) -> pa.Array:
        """Return the times.

        Raises
        ------
        ValueError
            One of them is too late for a TIMESTAMP.
        """
        first = (self.start - datetime.datetime(1970, 1, 1, tzinfo=_UTC)) // datetime.timedelta(
            microseconds=1
        )
        _refuse_beyond_long(self, first, self.step_ms * 1_000, numbers)
        times = first + numbers * (self.step_ms * 1_000)
        late = random_bits(seed, stream, numbers) % np.uint64(self.jitter_ms * 1_000 + 1)
        return pa.array(times - late.astype(np.int64), pa.timestamp("us", tz="UTC"))
