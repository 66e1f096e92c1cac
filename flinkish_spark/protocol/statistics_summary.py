"""What is summed up over many checkpoints: minimum, average, p50, p99 and maximum of nine quantities."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flinkish_spark.protocol.json_values import list_of, measured, text_of
from flinkish_spark.protocol.statistics import CheckpointStatistics


class Quantity(enum.Enum):
    """What is summed up; the values are the names in JSON."""

    TRIGGER_MS = "trigger_ms"
    START_DELAY_MS = "start_delay_ms"
    ALIGNMENT_MS = "alignment_ms"
    SYNC_MS = "sync_ms"
    ASYNC_MS = "async_ms"
    COMMIT_MS = "commit_ms"
    END_TO_END_MS = "end_to_end_ms"
    ROWS = "rows"
    BYTES_STAGED = "bytes_staged"


#: The quantities of one checkpoint, in the order of :class:`Quantity`; None was not measured.
Sample = tuple[int | None, ...]


def sample_of(statistics: CheckpointStatistics) -> Sample:
    """Return what a summary needs of one checkpoint."""
    known = statistics.durations.to_json() | {
        "rows": statistics.rows,
        "bytes_staged": statistics.bytes_staged,
    }
    return tuple(known[quantity.value] for quantity in Quantity)


def samples_from_json(names: Any, samples: Any) -> tuple[Sample, ...]:
    """Read stored samples, whatever quantities they are of; raise ValueError if they are none.

    Parameters
    ----------
    names
        The quantities of the samples, in their order. One that is not among them was not measured;
        one that nobody knows is left out.
    """
    known = [text_of(name, "a quantity") for name in list_of(names, "quantities")]
    if len(set(known)) != len(known):
        raise ValueError(f"a quantity occurs twice in {known}")
    return tuple(_sample(known, sample) for sample in list_of(samples, "samples"))


def _sample(names: list[str], value: Any) -> Sample:
    stored = list_of(value, "a sample")
    if len(stored) != len(names):
        raise ValueError(f"a sample has {len(names)} numbers, got {len(stored)}")
    numbers = dict(zip(names, stored, strict=True))
    if Quantity.START_DELAY_MS.value not in numbers:
        # The older form had 0 for bytes, and never measured them.
        numbers[Quantity.BYTES_STAGED.value] = numbers.get(Quantity.BYTES_STAGED.value) or None
    return tuple(measured(quantity.value, numbers.get(quantity.value)) for quantity in Quantity)


@dataclass(frozen=True, slots=True)
class Summary:
    """One quantity over several checkpoints, without those where it was not measured.

    p50 and p99 are the smallest value that at least 50 % or 99 % of all values do not exceed, so
    each is a value that really occurred.
    """

    count: int
    minimum: int
    average: float
    p50: int
    p99: int
    maximum: int

    @classmethod
    def of(cls, values: Sequence[int]) -> Summary:
        """Return the summary of at least one value.

        Examples
        --------
        >>> Summary.of([40, 10, 30, 20])
        Summary(count=4, minimum=10, average=25.0, p50=20, p99=40, maximum=40)
        """
        ordered = sorted(values)
        count = len(ordered)
        return cls(
            count,
            ordered[0],
            sum(ordered) / count,
            ordered[_place(count, 50)],
            ordered[_place(count, 99)],
            ordered[-1],
        )


def _place(count: int, percent: int) -> int:
    """Return the index of the percentile; whole numbers, since 0.99 is not a float."""
    return (count * percent + 99) // 100 - 1


def summarize(samples: Iterable[Sample]) -> dict[Quantity, Summary]:
    """Return a summary per quantity; one that was never measured is left out."""
    columns = zip(*samples, strict=True)
    known = {q: [n for n in column if n is not None] for q, column in zip(Quantity, columns, strict=False)}
    return {quantity: Summary.of(numbers) for quantity, numbers in known.items() if numbers}
