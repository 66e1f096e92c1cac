"""The public names of :mod:`flinkish_spark.cep`, and where they come from."""

from ..datastream.pattern_stream import CEP as CEP
from ..datastream.pattern_stream import PatternStream as PatternStream
from ..functions.pattern_rules import PATTERN_RULES as PATTERN_RULES
from ..functions.pattern_rules import REFUSED_RULES as REFUSED_RULES
from ..functions.pattern_rules import PatternsFromStream as PatternsFromStream
from ..functions.patterns import PatternContext as PatternContext
from ..functions.patterns import PatternProcessFunction as PatternProcessFunction
from ..functions.row_patterns import MATCH_FIELDS as MATCH_FIELDS
from ..functions.row_patterns import REFUSED_PATTERNS as REFUSED_PATTERNS
from ..functions.row_patterns import ROW_PATTERNS as ROW_PATTERNS
from ..functions.row_patterns import RowPatternsFromStream as RowPatternsFromStream
from .conditions import ConditionContext as ConditionContext
from .conditions import IterativeCondition as IterativeCondition
from .conditions import SqlCondition as SqlCondition
from .pattern import Pattern as Pattern
from .stages import AfterMatchSkip as AfterMatchSkip
from .stages import OpenMatches as OpenMatches
from .stages import Overflow as Overflow
from .stages import WithinType as WithinType
