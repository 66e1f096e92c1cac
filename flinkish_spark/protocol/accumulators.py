"""Accumulators of a job's functions: how their values are added to, merged and stored.

JSON can hold each value. The order of merging does not matter for whole numbers; floats are merged in the
order of the tasks, which is the same each time.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flinkish_spark.protocol.codec import StoredObject


class AccumulatorKind(enum.Enum):
    """How an accumulator combines values, by the name of Flink's class."""

    INT_COUNTER = "IntCounter"
    LONG_COUNTER = "LongCounter"
    DOUBLE_COUNTER = "DoubleCounter"
    AVERAGE = "AverageAccumulator"
    LONG_MINIMUM = "LongMinimum"
    LONG_MAXIMUM = "LongMaximum"
    DOUBLE_MINIMUM = "DoubleMinimum"
    DOUBLE_MAXIMUM = "DoubleMaximum"
    HISTOGRAM = "Histogram"


_WHOLE = {
    AccumulatorKind.INT_COUNTER,
    AccumulatorKind.LONG_COUNTER,
    AccumulatorKind.LONG_MINIMUM,
    AccumulatorKind.LONG_MAXIMUM,
    AccumulatorKind.HISTOGRAM,
}


def add_value(kind: AccumulatorKind, held: Any, given: Any) -> Any:
    """Return the accumulator's content after one more value."""
    wanted = int if kind in _WHOLE else (int, float)
    if isinstance(given, bool) or not isinstance(given, wanted):
        number = "whole number" if kind in _WHOLE else "number"
        raise TypeError(f"a {kind.value} takes a {number}, not {given!r:.100}")
    if kind is AccumulatorKind.AVERAGE:
        return merge_values(kind, held, [float(given), 1])
    if kind is AccumulatorKind.HISTOGRAM:
        return merge_values(kind, held, {given: 1})
    return merge_values(kind, held, given if kind in _WHOLE else float(given))


def merge_values(kind: AccumulatorKind, held: Any, other: Any) -> Any:
    """Merge the content of two accumulators of the same kind; None stands for an empty one."""
    if held is None or other is None:
        return other if held is None else held
    match kind:
        case AccumulatorKind.AVERAGE:
            return [held[0] + other[0], held[1] + other[1]]
        case AccumulatorKind.HISTOGRAM:
            return dict(sorted((Counter(held) + Counter(other)).items()))
        case AccumulatorKind.LONG_MINIMUM | AccumulatorKind.DOUBLE_MINIMUM:
            return min(held, other)
        case AccumulatorKind.LONG_MAXIMUM | AccumulatorKind.DOUBLE_MAXIMUM:
            return max(held, other)
    return held + other


def compute_result(kind: AccumulatorKind, held: Any) -> Any:
    match kind:
        case AccumulatorKind.AVERAGE:
            return None if held is None or not held[1] else held[0] / held[1]
        case AccumulatorKind.HISTOGRAM:
            return {} if held is None else dict(held)
        case AccumulatorKind.INT_COUNTER | AccumulatorKind.LONG_COUNTER:
            return 0 if held is None else held
        case AccumulatorKind.DOUBLE_COUNTER:
            return 0.0 if held is None else held
    return held


@dataclass(frozen=True, slots=True)
class AccumulatorValue(StoredObject):
    kind: AccumulatorKind
    #: As text: whole numbers in decimal, floats exactly, as `float.hex` writes them. An average is a sum and
    #: a count; a histogram alternates between a number and its count.
    numbers: tuple[str, ...]

    def __post_init__(self) -> None:
        # Raises ValueError if the numbers cannot be parsed.
        _ = self.held

    @classmethod
    def of(cls, kind: AccumulatorKind, held: Any) -> AccumulatorValue:
        match kind:
            case AccumulatorKind.AVERAGE:
                return cls(kind, (held[0].hex(), str(held[1])))
            case AccumulatorKind.HISTOGRAM:
                return cls(kind, tuple(str(part) for pair in sorted(held.items()) for part in pair))
        return cls(kind, (str(held) if kind in _WHOLE else held.hex(),))

    @property
    def held(self) -> Any:
        kind, numbers = self.kind, self.numbers
        wanted = {AccumulatorKind.AVERAGE: 2, AccumulatorKind.HISTOGRAM: len(numbers) // 2 * 2}.get(kind, 1)
        if len(numbers) != wanted:
            raise ValueError(f"{numbers!r:.200} is nothing that a {kind.value} holds")
        match kind:
            case AccumulatorKind.AVERAGE:
                return [float.fromhex(numbers[0]), int(numbers[1])]
            case AccumulatorKind.HISTOGRAM:
                whole = list(map(int, numbers))
                return dict(zip(whole[::2], whole[1::2], strict=True))
        return int(numbers[0]) if kind in _WHOLE else float.fromhex(numbers[0])

    @property
    def value(self) -> Any:
        return compute_result(self.kind, self.held)

    def merge(self, other: AccumulatorValue) -> AccumulatorValue:
        if self.kind is not other.kind:
            raise ValueError(f"it is a {self.kind.value} and a {other.kind.value}")
        return AccumulatorValue.of(self.kind, merge_values(self.kind, self.held, other.held))


#: By the accumulator's name.
AccumulatorValues = Mapping[str, AccumulatorValue]


def merge_accumulators(parts: Iterable[AccumulatorValues]) -> dict[str, AccumulatorValue]:
    found: dict[str, AccumulatorValue] = {}
    for part in parts:
        for name, value in part.items():
            try:
                found[name] = found[name].merge(value) if name in found else value
            except ValueError as error:
                raise ValueError(f"the accumulator '{name}' was added twice: {error}") from None
    return dict(sorted(found.items()))
