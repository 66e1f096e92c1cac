"""Pattern matching on streams: patterns, their automata, and the matcher. Independent of Spark.

See docs/cep.md. The public names, which `__init__.pyi` lists, too, are imported on first use, since some of
them are in packages above this one.
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
