"""Operators that are made when the fields of their input are known, which is when the job is planned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pyspark.sql import types as T

from flinkish_spark.operators.elements import TimeDomain
from flinkish_spark.operators.keyed_operators import KeyedStreamOperator
from flinkish_spark.operators.window_operator import window_operator
from flinkish_spark.runtime.ddl import ddl_of
from flinkish_spark.windows.spec import WindowComputation, WindowSpec


class OperatorFactory(Protocol):
    """Part of the stream graph, so a value."""

    @property
    def needs_event_time(self) -> bool:
        """Whether it cannot work without timestamps."""

    def create(self, schema: T.StructType) -> KeyedStreamOperator:
        """Return the operator; called at each planning."""


@dataclass(frozen=True)
class Windows:
    """Windows and what is computed on them; an :class:`OperatorFactory`."""

    spec: WindowSpec
    computation: WindowComputation

    @property
    def needs_event_time(self) -> bool:
        """Whether windows go by event time."""
        return self.spec.assigner.clock is TimeDomain.EVENT_TIME

    def create(self, schema: T.StructType) -> KeyedStreamOperator:
        """Return the operator."""
        return window_operator(self.spec, self.computation, ddl_of(schema))
