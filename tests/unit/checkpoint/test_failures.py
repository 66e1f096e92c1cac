"""Texts that Spark hands back become one typed error each, and only some may be restarted."""

from __future__ import annotations

import json
import sqlite3
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from flinkish_spark.checkpoint.failures import (
    Outage,
    QueryError,
    RepeatableUserError,
    add_place,
    classify,
    classify_alive,
)
from flinkish_spark.core.errors import (
    AuthorizationError,
    BadRecordError,
    ConfigError,
    CorruptObjectError,
    DriverOutOfMemory,
    EnvironmentFault,
    InputLostError,
    MemoryExhaustedError,
    ProcessLostError,
    SchemaError,
    SparkGoneError,
    UserFunctionError,
)
from flinkish_spark.core.foreign_errors import describe_error
from flinkish_spark.job.inputs import DroppedRecords
from flinkish_spark.protocol.process_loss import JobProcess

FAULTS = "flinkish_spark.connectors.kafka.client.faults"
TASK = "org.apache.spark.api.python.PythonException: Traceback (most recent call last):"
PLACE = '{"topic":"orders","partition":3,"offset":17}'


@pytest.mark.parametrize(
    ("text", "kind", "restartable"),
    [
        ("Python worker exited unexpectedly (crashed)", ProcessLostError, True),
        (
            "Lost task 0.0 in stage 1.0 (TID 1) (a executor 1): java.lang.OutOfMemoryError",
            MemoryExhaustedError,
            True,
        ),
        ("java.lang.OutOfMemoryError: Java heap space", DriverOutOfMemory, False),
        ("org.apache.kafka.common.errors.TimeoutException: expired", Outage, True),
        ("java.io.IOException: No space left on device", Outage, True),
        ("java.io.IOException: something nobody named", QueryError, True),
        ("a.b.C: [STREAMING_CHECKPOINT_MISSING_METADATA_FILE] x.", CorruptObjectError, False),
        ("a.b.C: [DIFFERENT_DELTA_TABLE_READ_BY_STREAMING_SOURCE] another table.", InputLostError, False),
        ("a.b.C: [DELTA_SOURCE_TABLE_IGNORE_CHANGES] a data update.", ConfigError, False),
        ("a.b.C: [FAILED_READ_FILE.FILE_NOT_EXIST] a file. SQLSTATE: KD001", InputLostError, False),
        ("a.b.C: [CAST_OVERFLOW] x does not fit. SQLSTATE: 22003", UserFunctionError, True),
        ("a.b.C: [UNRESOLVED_COLUMN.WITH_SUGGESTION] x. SQLSTATE: 42703", SchemaError, False),
        ("a.b.C: [KAFKA_DATA_LOSS.PARTITIONS_DELETED] gone. SQLSTATE: 22000", InputLostError, False),
        ("org.apache.kafka.common.errors.TopicAuthorizationException: no", AuthorizationError, False),
        ("org.apache.kafka.common.errors.SslAuthenticationException: no handshake", QueryError, True),
        ("java.io.IOException: File name too long", BadRecordError, False),
        ("java.lang.NoClassDefFoundError: a/b/C", EnvironmentFault, False),
        ("[DIVIDE_BY_ZERO] Division by zero. SQLSTATE: 22012", UserFunctionError, True),
        ("org.apache.spark.api.python.PythonException: ValueError: no", UserFunctionError, True),
        ("[FLINKISH_BAD_RECORD] a record for topic t takes 9 bytes", BadRecordError, False),
        ("[MALFORMED_RECORD_IN_PARSING.WITHOUT_SUGGESTION] SQLSTATE: 22023", UserFunctionError, True),
        ("[FLINKISH_NOT_AUTHORIZED] lacks WRITE on topics t.", AuthorizationError, False),
        (
            f"{TASK}\n{FAULTS}.RetriableError: no such topic.",
            QueryError,
            True,
        ),
        (
            f"{TASK}\n{FAULTS}.UnavailableError: no broker.",
            Outage,
            True,
        ),
        (f"{TASK}\nflinkish_spark.core.errors.BrokerUnavailableError: none answers.", Outage, True),
        (f"{TASK}\nflinkish_spark.core.errors.InternalError: a rule was broken.", QueryError, True),
        (f"{TASK}\nflinkish_spark.core.errors.CorruptObjectError: no value.", CorruptObjectError, False),
        (f"{TASK}\nflinkish_spark.connectors.splits.SourceUnavailable: asleep.", Outage, True),
        (f"{TASK}\nflinkish_spark.core.errors.RetriableError: no such file.", QueryError, True),
        (f"{TASK}\nflinkish_spark.no_such_module.Gone: of another version.", QueryError, True),
        (f"{TASK}\nflinkish_spark.core.errors.InputLostError: Input is gone.", InputLostError, False),
        (f"{TASK}\nflinkish_spark.core.errors.SchemaError: the state 'x' is an 'INTT'.", SchemaError, False),
        (f"{TASK}\nflinkish_spark.core.errors.ConfigError: ttl is 3.", ConfigError, False),
        ("Some data may have been lost because they are not available", InputLostError, False),
    ],
)
def test_a_text_and_its_error(text, kind, restartable) -> None:
    error = classify(RuntimeError(f"Job aborted.\n{text}\n\tat somewhere"))
    assert isinstance(error, kind) and error.restartable is restartable, repr(error)
    if kind in (QueryError, Outage):
        assert type(error) is kind and error.ends_when_repeated is (kind is QueryError)


def test_the_innermost_message_comes_first_and_then_the_place() -> None:
    def deep(n: int) -> None:
        if n:
            deep(n - 1)
        raise OSError("the innermost thing")

    with pytest.raises(ValueError, match="around it") as caught:
        try:
            deep(50)
        except OSError as error:
            raise ValueError("around it") from error
    add_place(caught.value, "in sink 'out'")
    error = classify(caught.value, "at micro-batch 7")
    assert type(error) is QueryError and error.ends_when_repeated
    assert error.what == "OSError: the innermost thing, in sink 'out', at micro-batch 7"
    assert error.trace.splitlines()[0] == "OSError: the innermost thing"
    assert error.trace.splitlines()[-2] == "ValueError: around it"
    assert "test_failures.py" in error.trace


def test_a_captured_exception_of_pysparks_is_read_to_its_end() -> None:
    """What `query.exception()` returns holds what the JVM raised as exceptions of its own, not as causes."""

    class Java:
        def __init__(self, text: str, cause: object = None) -> None:
            self._text, self._cause = text, cause

        def toString(self) -> str:
            return self._text

        def getCause(self) -> object:
            return self._cause

    class Unreadable(Java):
        def toString(self) -> str:
            raise RuntimeError("the JVM is gone")

    def captured(text: str, inner: object = None, origin: object = None) -> Exception:
        made = type("StreamingQueryException", (Exception,), {"__module__": "pyspark.errors.x"})(text)
        made._desc, made._cause, made._origin = text, inner, origin
        return made

    root = Java("java.io.IOException: no space for it", None)
    known = captured("job failed", origin=Java("org.apache.spark.SparkException: job failed", root))
    whole = captured("query failed", captured("a.b.Unknown: wrapper", known))
    assert classify(whole).what == "IOException: no space for it"
    cut = captured("query failed", origin=Java("a.b.C: read", Unreadable("")))
    assert classify(cut).what == "C: read"


def test_spark_says_that_the_plan_is_refused() -> None:
    refused = type("AnalysisException", (Exception,), {"__module__": "pyspark.errors.x"})("no such thing")
    error = classify(refused)
    assert type(error) is SchemaError and str(error).startswith("no such thing. Spark refuses the plan")


def test_a_file_that_cannot_be_parsed_is_no_unreadable_record_of_a_topic() -> None:
    text = (
        "a.b.SparkException: [FAILED_READ_FILE.NO_HINT] file:/in/a.csv. SQLSTATE: KD001\n\tat a.b(C:1)\n"
        "Caused by: a.b.C: [MALFORMED_RECORD_IN_PARSING.WITHOUT_SUGGESTION] [a,null]. SQLSTATE: 22023"
    )
    error = classify(RuntimeError(text))
    assert isinstance(
        error, UserFunctionError
    ) and "A record of a file, or a text in a transform, cannot be read" in str(error)


def test_a_reason_of_any_length_hides_no_place() -> None:
    facts = {"topic": "orders", "partition": 3, "offset": 17, "reason": "it is '" + '"\n' * 500}
    error = classify(RuntimeError(f"[USER] [FLINKISH_UNREADABLE_RECORD]{json.dumps(facts)} SQLSTATE: P0001"))
    assert (error.topic, error.offset, error.why) == ("orders", 17, facts["reason"])


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


def raised_by(function: Callable[[], Any], marker: str = "") -> str:
    """What Spark says of a Python worker in which a function raised; with the marker of typed operators."""
    try:
        try:
            function()
        except Exception as error:
            if marker:
                raise RuntimeError(marker) from error
            raise
    except Exception:
        thrown = f"[PYTHON_EXCEPTION] An exception was thrown from it: {traceback.format_exc()}"
        java = "org.apache.spark.api.python.PythonException"
        return f"Job aborted.\n{java}: {thrown}\n SQLSTATE: 38000\n\tat a.b.C(D:1)"
    raise AssertionError("it raises")


def lookup(words: str, kind: Callable[[str], Exception] = RuntimeError) -> None:
    try:
        {}["XK"]
    except KeyError as error:
        raise kind(words) from error


@pytest.mark.parametrize(
    "words",
    [
        "Connection refused",
        "Service Unavailable",
        "No space left on device",
        "Too many open files",
        "x is not a Parquet file",
        "File name too long",
        "data may have been lost",
        "OutOfMemoryError",
    ],
)
def test_a_record_that_speaks_of_a_fault_is_no_fault(words: str) -> None:
    """Words of a record decide nothing about the job: it ends after its one restart, as for any record."""

    class OrderError(Exception):
        pass

    for kind in (ValueError, KeyError, AssertionError, OrderError):

        def raises(kind: Any = kind) -> None:
            raise kind(f"unknown status '{words}' in order 17")

        error = classify(RuntimeError(raised_by(raises)))
        assert type(error) is RepeatableUserError, repr(error)
        assert words in error.what


def test_a_system_that_does_not_answer_a_function_is_an_outage() -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    def locked() -> None:
        raise sqlite3.OperationalError("database is locked")

    def refused() -> None:
        raise ConnectionRefusedError("no")

    for function in (full, locked, refused):
        assert type(classify(RuntimeError(raised_by(function)))) is Outage


def test_what_a_user_function_raised_its_error_from_comes_first() -> None:
    marker = '[FLINKISH_USER_FUNCTION] {"uid": "enrich", "offset": 17, "error": "RuntimeError: no rate"}'
    error = classify(RuntimeError(raised_by(lambda: lookup("no rate"), marker)))
    assert type(error) is RepeatableUserError and error.is_placed
    assert error.why == "KeyError: 'XK', and so RuntimeError: no rate"
    assert error.trace.splitlines()[0] == "KeyError: 'XK'"
    assert "test_failures.py" in error.trace and "FLINKISH" not in error.trace


def test_a_group_of_exceptions_and_one_without_a_text_are_told() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    group = ExceptionGroup("two lookups", [KeyError("XK"), ExceptionGroup("more", [OSError("gone")])])
    assert "KeyError: 'XK'" in str(classify(group)) and "OSError: gone" in str(classify(group))
    try:
        raise group
    except ExceptionGroup as raised:
        assert "KeyError: 'XK'" in str(classify(raised))
    assert describe_error(group) == "KeyError: 'XK', and so ExceptionGroup: two lookups (2 sub-exceptions)"
    assert "Mute: <" in str(classify(Mute()))
    assert describe_error(Mute()) == "Mute: <an exception that has no text>"
    ring = [RuntimeError(str(n)) for n in range(5)]
    for one, cause in zip(ring, [*ring[1:], ring[0]], strict=True):
        one.__cause__ = cause
    assert describe_error(ring[0]).endswith("RuntimeError: 0")


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


def test_a_connection_that_another_system_refuses_is_no_jvm_that_is_gone() -> None:
    """What a sink raised in foreachBatch, while Spark's query answers."""
    error = classify_alive(ConnectionRefusedError(111, "Connection refused"), "at micro-batch 7")
    assert type(error) is Outage and not error.ends_when_repeated
    typed = InputLostError("gone")
    assert classify_alive(typed) is typed


def test_a_record_whose_timestamp_is_no_time_is_named_by_sparks_own_source_too() -> None:
    text = (
        "[KAFKA_MALFORMED_RECORD_TIMESTAMP] Record at topic a.b partition 3 offset 17 has timestamp value "
        "1767225600000000000 that overflows when converting. SQLSTATE: 22008"
    )
    error = classify(RuntimeError(f"Task 0 failed: java.lang.Exception: {text}\n\tat a line"))
    assert type(error) is BadRecordError and not error.restartable
    assert error.facts == {"topic": "a.b", "partition": 3, "offset": 17}
    assert "topic a.b, partition 3, offset 17 has the timestamp 1767225600000000000" in str(error)


@pytest.mark.parametrize(
    "raised", ["MemoryError", "MemoryError: x", "numpy._core._exceptions._ArrayMemoryError: x"]
)
def test_a_user_function_without_memory_is_not_the_users_error(raised: str) -> None:
    told = '{"uid":"totals","topic":"orders","partition":3,"offset":17,"error":"' + raised + '"}'
    error = classify(Exception(f"{TASK}\nOperatorFailed: [FLINKISH_USER_FUNCTION] {told}"))
    assert type(error) is MemoryExhaustedError and not isinstance(error, UserFunctionError)
    assert error.what.startswith(
        "the function of operator 'totals' ran out of memory on the record at topic orders"
    )
    facts = error.facts
    assert (facts["process"], facts["uid"], facts["offset"]) == (JobProcess.WORKER, "totals", 17)
    assert error.restartable and error.ends_when_repeated


def test_memory_that_ran_out_behind_a_user_functions_error_counts() -> None:
    def hides_it() -> None:
        try:
            bytearray(1 << 47)
        except MemoryError as error:
            raise ValueError("no row") from error

    told = '{"uid":"totals","error":"ValueError: no row"}'
    error = classify(RuntimeError(raised_by(hides_it, f"[FLINKISH_USER_FUNCTION] {told}")))
    assert type(error) is MemoryExhaustedError
    assert error.why == "MemoryError, and so ValueError: no row"


@pytest.mark.parametrize(
    ("exit_code", "kind", "said_why"),
    [
        (52, DriverOutOfMemory, "it had no memory left (exit code 52)"),
        (
            -9,
            SparkGoneError,
            "it was killed (exit code 137), by the system as a rule, because memory ran out",
        ),
        (1, SparkGoneError, "it has ended by itself (exit code 1)"),
        (None, SparkGoneError, "it was killed or ran out of memory"),
    ],
)
def test_how_the_drivers_jvm_has_ended_is_told(
    monkeypatch: pytest.MonkeyPatch, exit_code: int | None, kind: type, said_why: str
) -> None:
    monkeypatch.setattr("flinkish_spark.checkpoint.failures.exit_code_of_jvm", lambda: exit_code)
    error = classify(EOFError("the connection has ended"))
    assert type(error) is kind and error.why == said_why
    assert error.facts["process"] is JobProcess.DRIVER and not error.restartable
    assert "spark.driver.memory" in error.what_to_do
