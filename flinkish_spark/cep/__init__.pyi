"""The public names of :mod:`flinkish_spark.cep`, and where they come from."""

from .conditions import ConditionContext as ConditionContext
from .conditions import IterativeCondition as IterativeCondition
from .pattern import Pattern as Pattern
from .stages import AfterMatchSkip as AfterMatchSkip
from .stages import WithinType as WithinType
