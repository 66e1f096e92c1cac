"""The public names of :mod:`flinkish_spark.cep`, and where they come from."""

from ..datastream.pattern_stream import CEP as CEP
from ..datastream.pattern_stream import PatternStream as PatternStream
from .conditions import ConditionContext as ConditionContext
from .conditions import IterativeCondition as IterativeCondition
from .conditions import SqlCondition as SqlCondition
from .functions import PatternContext as PatternContext
from .functions import PatternProcessFunction as PatternProcessFunction
from .pattern import Pattern as Pattern
from .patterns_from_stream import PATTERN_RULES as PATTERN_RULES
from .patterns_from_stream import REFUSED_RULES as REFUSED_RULES
from .patterns_from_stream import PatternsFromStream as PatternsFromStream
from .row_patterns_from_stream import MATCH_FIELDS as MATCH_FIELDS
from .row_patterns_from_stream import REFUSED_PATTERNS as REFUSED_PATTERNS
from .row_patterns_from_stream import ROW_PATTERNS as ROW_PATTERNS
from .row_patterns_from_stream import RowPatternsFromStream as RowPatternsFromStream
from .stages import AfterMatchSkip as AfterMatchSkip
from .stages import OpenMatches as OpenMatches
from .stages import Overflow as Overflow
from .stages import WithinType as WithinType
