"""DataFrame functions that run Python over records, and name the record in their errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from flinkish_spark.runtime.keyed_operator import Origins


class LocatedTransform(ABC):
    """A DataFrame function that the planner tells where records come from."""

    @abstractmethod
    def located(self, origins: Origins) -> Self:
        """Return the same for records of which it is known where they come from."""

    @abstractmethod
    def __call__(self, frame: DataFrame) -> DataFrame:
        """Return the transformed frame; called by the planner, or once per micro-batch."""
