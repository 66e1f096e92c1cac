"""A misspelt word suggests the one that was meant."""

from __future__ import annotations

import pytest

from flinkish_spark.core.suggestions import closest


@pytest.mark.parametrize(
    ("word", "known", "says"),
    [
        ("KafkaSorce", ["KafkaSource", "KafkaSink"], "Did you mean 'KafkaSource'?"),
        ("compresion.type", ["compression.type", "linger.ms"], "Did you mean 'compression.type'?"),
        ("FALTEN", ["FLATTEN", "TEXT"], "Did you mean 'FLATTEN'?"),
        ("flatten", ["FLATTEN", "TEXT"], "Did you mean 'FLATTEN'?"),
        ("", ["a"], ""),
        ("banana", ["FLATTEN"], ""),
        ("banana", [], ""),
    ],
)
def test_the_nearest_known_word_is_suggested(word: str, known: list[str], says: str) -> None:
    assert closest(word, known) == says
