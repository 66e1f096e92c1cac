"""Patterns in streams: what is looked for, its automaton, and the matcher. Knows nothing of Spark.

docs/cep.md explains them. The public names, which `__init__.pyi` lists too, are imported when they are first
used: what a program calls is above this package.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    "flinkish_spark",
    submod_attrs={
        "cep.conditions": ["ConditionContext", "IterativeCondition", "SqlCondition"],
        "cep.pattern": ["Pattern"],
        "cep.stages": ["AfterMatchSkip", "OpenMatches", "Overflow", "WithinType"],
        "datastream.pattern_stream": ["CEP", "PatternStream"],
        "functions.pattern_rules": ["PATTERN_RULES", "REFUSED_RULES", "PatternsFromStream"],
        "functions.patterns": ["PatternContext", "PatternProcessFunction"],
        "functions.row_patterns": [
            "MATCH_FIELDS",
            "REFUSED_PATTERNS",
            "ROW_PATTERNS",
            "RowPatternsFromStream",
        ],
    },
)
