"""The interface of factories of operators for the planner: what each kind of operator tells of itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import types as T

    from flinkish_spark.core.elements import OutputTag
    from flinkish_spark.operators.process import KeyedStreamOperator
    from flinkish_spark.operators.window_loop import LoopedWindows


@dataclass(frozen=True)
class MeaningRules:
    """Rules by which the parts of a specification become facts about the operator's state."""

    #: Fields that may change under the same uid, by class; all others are part of the meaning.
    harmless: Mapping[type, frozenset[str]] = field(default_factory=dict)
    #: Replacements for the values of some fields.
    instead: Mapping[tuple[type, str], Callable[[Any], Any]] = field(default_factory=dict)
    #: Names of parts among several, by class; other parts are numbered.
    part_names: Mapping[type, Callable[[Any], str]] = field(default_factory=dict)

    def merge(self, other: MeaningRules) -> MeaningRules:
        return MeaningRules(
            {**self.harmless, **other.harmless},
            {**self.instead, **other.instead},
            {**self.part_names, **other.part_names},
        )


class OperatorFactory(ABC):
    """A factory that makes an operator at each planning, when the fields of its inputs are known."""

    @property
    def needs_event_time(self) -> bool:
        """True if the operator cannot work without timestamps."""
        return False

    @property
    def display_name(self) -> str:
        return type(self).__name__

    @property
    def meaning_rules(self) -> MeaningRules:
        """Rules for parts of its specification that the planner does not know."""
        return MeaningRules()

    @abstractmethod
    def create(self, *schemas: T.StructType) -> KeyedStreamOperator | LoopedWindows:
        """Return the operator for the fields of its inputs; called at each planning."""

    def find_output(self, *schemas: T.StructType) -> T.StructType | None:
        """Return the fields of the output if none are declared; None for the fields of the first input."""
        return None

    def find_late_outputs(self, *schemas: T.StructType) -> Sequence[tuple[OutputTag, T.StructType]]:
        return ()
