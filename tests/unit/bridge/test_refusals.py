"""The last line of an error of Spark's that holds a refusal of ours."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from flinkish_spark.bridge.refusals import say_refusals_last

SENTENCE = "the Kafka sink has no option 'topik'. To do: did you mean 'topic'?"
STREAM = f"""[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: [PYTHON_DATA_SOURCE_ERROR] \
Failed when Python data source instance was made: Traceback (most recent call last):
  File "data_source.py", line 64, in streamWriter
flinkish_spark.core.errors.ConfigError: {SENTENCE}
SQLSTATE: 38000
=== Streaming Query ===
Logical Plan:
~WriteToMicroBatchDataSource flinkish-kafka
"""


@pytest.mark.parametrize(
    ("text", "last"),
    [
        (STREAM, SENTENCE),
        (f"flinkish_spark.core.errors.ConfigError: {SENTENCE} SQLSTATE: 38000", SENTENCE),
        (f"flinkish_spark.core.errors.ConfigError: {SENTENCE}\n", SENTENCE),
        ("[TABLE_OR_VIEW_NOT_FOUND] x. SQLSTATE: 42P01", "[TABLE_OR_VIEW_NOT_FOUND] x. SQLSTATE: 42P01"),
    ],
)
def test_a_refusal_is_the_last_line_also_when_the_door_is_registered_twice(
    text: str, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Root(Exception):
        def __str__(self) -> str:
            return text

    found: Any = SimpleNamespace(CapturedException=Root)
    monkeypatch.setitem(sys.modules, "pyspark.errors.exceptions.captured", found)
    say_refusals_last()
    say_refusals_last()
    said = str(Root()).rstrip()
    assert said.splitlines()[-1] == last and said.count(last) <= 2 and said.startswith(text.rstrip()[:200])
