"""Watermark strategies, and timestamp assigners that are classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from flinkish_spark.functions.watermark_strategy import WatermarkStrategy as WatermarkStrategy


class TimestampAssigner(ABC):
    """A function that returns the event time of an element, for `with_timestamp_assigner`."""

    @abstractmethod
    def extract_timestamp(self, value: Any, record_timestamp: int) -> int:
        """Return milliseconds since 1970."""

    def __call__(self, value: Any, record_timestamp: Any) -> int:
        return self.extract_timestamp(value, record_timestamp)
