"""What join functions are given of a pair."""

from __future__ import annotations

from typing import Any

from flinkish_spark.operators.elements import OutputTag
from flinkish_spark.operators.keyed_context import FunctionContext


class JoinNeedsTime(ValueError):
    """A join by event time was given an element without a timestamp."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} needs elements with a timestamp on both sides; assign timestamps and watermarks to both"
        )


class PairContext:
    """Given to a join function; one object, whose facts change."""

    __slots__ = ("_context", "left_ms", "result_ms", "right_ms")

    def __init__(self, context: FunctionContext) -> None:
        self._context = context
        self.left_ms: int | None = None
        self.right_ms: int | None = None
        self.result_ms: int | None = None

    def left_timestamp(self) -> int | None:
        """Return the left element's event time."""
        return self.left_ms

    def right_timestamp(self) -> int | None:
        """Return the right element's event time."""
        return self.right_ms

    def timestamp(self) -> int | None:
        """Return the time of what is emitted."""
        return self.result_ms

    def output(self, tag: OutputTag, value: Any) -> None:
        """Emit a row to a side output."""
        self._context.emit_to(tag, value, self.result_ms)
