"""Pattern matching on streams: patterns, their automata, the matcher, and the operators that run it.

See docs/cep.md. No package below `datastream` imports this one. The public names, which `__init__.pyi` lists,
too, are imported on first use, since some of them are above this package.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    "flinkish_spark",
    submod_attrs={
        "cep.conditions": ["ConditionContext", "IterativeCondition", "SqlCondition"],
        "cep.pattern": ["Pattern"],
        "cep.stages": ["AfterMatchSkip", "OpenMatches", "Overflow", "WithinType"],
        "datastream.pattern_stream": ["CEP", "PatternStream"],
        "cep.patterns_from_stream": ["PATTERN_RULES", "REFUSED_RULES", "PatternsFromStream"],
        "cep.functions": ["PatternContext", "PatternProcessFunction"],
        "cep.row_patterns_from_stream": [
            "MATCH_FIELDS",
            "REFUSED_PATTERNS",
            "ROW_PATTERNS",
            "RowPatternsFromStream",
        ],
    },
)
