"""Texts that Spark hands back become one typed error each, and only some may be restarted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flinkish_spark.errors import (
    AuthorizationError,
    BadRecordError,
    ConfigError,
    InputLostError,
    SchemaError,
    UserFunctionError,
)
from flinkish_spark.runtime.failures import QueryFailed, UnreadableRecordError, classify
from flinkish_spark.runtime.inputs import DroppedRecords

TASK = "org.apache.spark.api.python.PythonException: Traceback (most recent call last):"
PLACE = '{"topic":"orders","partition":3,"offset":17}'


@pytest.mark.parametrize(
    ("text", "kind", "restartable"),
    [
        ("Python worker exited unexpectedly (crashed)", QueryFailed, True),
        ("org.apache.kafka.common.errors.TimeoutException: expired", QueryFailed, True),
        ("[DIVIDE_BY_ZERO] Division by zero. SQLSTATE: 22012", UserFunctionError, True),
        ("org.apache.spark.api.python.PythonException: ValueError: no", UserFunctionError, True),
        ("[FLINKISH_BAD_RECORD] a record for topic t takes 9 bytes", BadRecordError, False),
        ("[MALFORMED_RECORD_IN_PARSING.WITHOUT_SUGGESTION] SQLSTATE: 22023", UnreadableRecordError, False),
        ("[FLINKISH_NOT_AUTHORIZED] lacks WRITE on topics t.", AuthorizationError, False),
        (f"{TASK}\nflinkish_spark.kafka.staging_faults.StagingFailed: no broker.", QueryFailed, True),
        (f"{TASK}\nflinkish_spark.errors.BrokerUnavailableError: none answers.", QueryFailed, True),
        (f"{TASK}\nflinkish_spark.errors.InputLostError: Input is gone.", InputLostError, False),
        (f"{TASK}\nflinkish_spark.errors.SchemaError: the state 'x' is an 'INTT'.", SchemaError, False),
        (f"{TASK}\nflinkish_spark.errors.ConfigError: ttl is 3.", ConfigError, False),
        ("Some data may have been lost because they are not available", InputLostError, False),
    ],
)
def test_a_text_and_its_error(text, kind, restartable) -> None:
    error = classify(RuntimeError(f"Job aborted.\n{text}\n\tat somewhere"))
    assert isinstance(error, kind) and error.restartable is restartable, repr(error)


def test_the_place_of_an_unreadable_record() -> None:
    error = classify(RuntimeError(f"[USER] [FLINKISH_UNREADABLE_RECORD]{PLACE} SQLSTATE: P0001\nmore"))
    assert "topic orders, partition 3, offset 17" in str(error)
    assert (error.topic, error.partition, error.offset) == ("orders", 3, 17)


def test_a_user_functions_record() -> None:
    facts = '{"uid": "totals", "topic": "orders", "partition": 3, "offset": 17, "error": "ValueError: no"}'
    error = classify(RuntimeError(f"PythonException: [FLINKISH_USER_FUNCTION] {facts} and a traceback"))
    assert "'totals' failed on the record at topic orders, partition 3, offset 17" in str(error)
    assert "ValueError: no" in error.why and error.is_placed
    assert error.record == ("totals", "orders", 3, 17, None, None)


def progress(batch: int, dropped: int | None):
    metrics = {} if dropped is None else {"flinkish_dropped_orders": {"dropped": dropped}, "own": {"x": 9}}
    return SimpleNamespace(batchId=batch, observedMetrics=metrics)


def test_dropped_records_count_once_per_micro_batch() -> None:
    counted = DroppedRecords()
    counted.read(SimpleNamespace(lastProgress=None, recentProgress=[]))
    assert counted.total == 0
    first = [progress(0, 2), progress(1, None), progress(2, 3)]
    for _ in range(2):
        counted.read(SimpleNamespace(lastProgress=first[-1], recentProgress=first))
        assert counted.total == 5
    again = [progress(2, 3), progress(3, 4)]
    counted.read(SimpleNamespace(lastProgress=again[-1], recentProgress=again))
    assert counted.total == 9
    # After a rewind micro-batch 3 runs again and drops the same records.
    counted.read(SimpleNamespace(lastProgress=progress(3, 4), recentProgress=[progress(3, 4)]))
    assert counted.total == 9


def test_dropped_records_of_a_long_run_are_kept() -> None:
    counted = DroppedRecords()
    for batch in range(1_000):
        counted.read(SimpleNamespace(lastProgress=progress(batch, 1), recentProgress=[progress(batch, 1)]))
    assert counted.total == 1_000 and len(counted._open) <= 200


@pytest.mark.parametrize(
    "text",
    [
        "[KAFKA_MALFORMED_RECORD_TIMESTAMP] Record at topic a.b partition 3 offset 17 has timestamp value "
        "1767225600000000000 that overflows when converting. SQLSTATE: 22008",
        '[FLINKISH_BAD_TIME]{"topic":"a.b","partition":3,"offset":17,"timestamp_ms":1767225600000000000}'
        " SQLSTATE: P0001",
    ],
)
def test_a_record_whose_timestamp_is_no_time_is_named_alike(text: str) -> None:
    error = classify(RuntimeError(f"Task 0 failed: java.lang.Exception: {text}\n\tat a line"))
    assert type(error) is BadRecordError and not error.restartable
    assert error.facts == {"topic": "a.b", "partition": 3, "offset": 17}
    assert "topic a.b, partition 3, offset 17 has the timestamp 1767225600000000000" in str(error)
