"""What functions of a job have counted: values that can be added to, merged and stored.

A value is what tasks of one kind of accumulator have put in, as JSON can hold it. Merging does not depend on
the order for whole numbers; floats are merged in the order of the tasks, which is the same each time.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flinkish_spark.protocol.codec import Stored


class AccumulatorKind(enum.Enum):
    """What an accumulator makes of what it is given; the names are those of Flink's classes."""

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


def added(kind: AccumulatorKind, held: Any, given: Any) -> Any:
    """Return what is held behind one more value."""
    wanted = int if kind in _WHOLE else (int, float)
    if isinstance(given, bool) or not isinstance(given, wanted):
        number = "whole number" if kind in _WHOLE else "number"
        raise TypeError(f"a {kind.value} takes a {number}, not {given!r:.100}")
    if kind is AccumulatorKind.AVERAGE:
        return merged(kind, held, [float(given), 1])
    if kind is AccumulatorKind.HISTOGRAM:
        return merged(kind, held, {given: 1})
    return merged(kind, held, given if kind in _WHOLE else float(given))


def merged(kind: AccumulatorKind, held: Any, other: Any) -> Any:
    """Return what two of the same kind hold together; None stands for nothing yet."""
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


def result(kind: AccumulatorKind, held: Any) -> Any:
    """Return the value that an accumulator shows."""
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
class AccumulatorValue(Stored):
    """What one accumulator holds, over all tasks."""

    kind: AccumulatorKind
    #: As text: whole ones in decimal, floats exactly, as `float.hex` writes them. An average is a sum and a
    #: count, a histogram its numbers and how often each came, in turn.
    numbers: tuple[str, ...]

    def __post_init__(self) -> None:
        # Whatever cannot be taken apart is refused where it is read.
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
        """What is held; raises ValueError if it is nothing of that kind."""
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
        return result(self.kind, self.held)

    def merged(self, other: AccumulatorValue) -> AccumulatorValue:
        if self.kind is not other.kind:
            raise ValueError(f"it is a {self.kind.value} and a {other.kind.value}")
        return AccumulatorValue.of(self.kind, merged(self.kind, self.held, other.held))


Accumulated = Mapping[str, AccumulatorValue]


def together(parts: Iterable[Accumulated]) -> dict[str, AccumulatorValue]:
    """Return what several parts of a job have counted, by name."""
    found: dict[str, AccumulatorValue] = {}
    for part in parts:
        for name, value in part.items():
            try:
                found[name] = found[name].merged(value) if name in found else value
            except ValueError as error:
                raise ValueError(f"the accumulator '{name}' was added twice: {error}") from None
    return dict(sorted(found.items()))
