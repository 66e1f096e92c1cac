"""Errors that Spark, Delta and Kafka's source name are sorted once; the lists come out of the JARs."""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pyspark
import pytest

from flinkish_spark.jars import running_minor
from flinkish_spark.protocol.errors import RULES, Chain, ErrorCategory, find_rule, find_rule_of_condition
from tests.support.services import BUILD

#: JAR and the list in it.
LISTS = {
    "spark-common-utils_*.jar": "error/error-conditions.json",
    "delta-spark_*.jar": "error/delta-error-classes.json",
    "spark-sql-kafka-*.jar": "error/kafka-error-conditions.json",
}
#: A name in the table that Spark 4.1 does not have.
NEW_IN_4_2 = {"STREAMING_CHECKPOINT_MISSING_METADATA_FILE"}


def read_list(pattern: str) -> dict[str, str]:
    """Condition -> SQLSTATE, with the conditions behind a dot, out of a JAR."""
    folders = (BUILD / "jars", Path(pyspark.__file__).parent / "jars")
    jars = [jar for folder in folders for jar in folder.glob(pattern)]
    if not jars:
        pytest.skip(f"{pattern} is not there: make setup")
    found = {}
    # Of Delta and of Kafka's source there is one for each minor version of Spark.
    with zipfile.ZipFile(max(jars)) as jar:
        for name, facts in json.loads(jar.read(LISTS[pattern])).items():
            state = facts.get("sqlState", "")
            found[name] = state
            found |= {f"{name}.{part}": state for part in facts.get("subClass", {})}
    return found


@pytest.fixture(scope="module")
def named() -> Mapping[str, str]:
    return {name: state for pattern in LISTS for name, state in read_list(pattern).items()}


def test_the_lists_are_those_of_the_pinned_versions(named: Mapping[str, str]) -> None:
    # Spark 4.2.0 names 1,322 conditions, 4.1.4 fewer, Delta 4.4.0 511; those behind a dot come on top.
    assert len(named) > 2_300


def test_what_spark_says_of_a_plan_or_a_record_is_sorted_by_its_class(named: Mapping[str, str]) -> None:
    """A plan that is refused is not run again and again, and a record once; what nobody sorted ends, too."""
    wrong = {
        name: find_rule_of_condition(name, state)
        for name, state in named.items()
        if state[:2] in ("42", "22")
    }
    assert len(wrong) > 1_000 and None not in wrong.values()
    may_pass = [name for name, rule in wrong.items() if rule and rule.category is ErrorCategory.OUTAGE]
    assert may_pass == []


def test_each_name_in_the_table_is_one_of_this_version_and_stands_there_once(
    named: Mapping[str, str],
) -> None:
    starts = [start for rule in RULES for start in rule.conditions]
    unknown = {start for start in starts if not any(name.startswith(start) for name in named)}
    assert unknown == (NEW_IN_4_2 if running_minor() == "4.1" else set())
    states = [state for rule in RULES for state in rule.sqlstates]
    classes = [name for rule in RULES for name in rule.classes]
    for given in (starts, states, classes):
        assert [name for name, times in Counter(given).items() if times > 1] == []


def test_each_rule_says_why_and_what_to_do() -> None:
    assert len({rule.why for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert (
            rule.why and rule.what_to_do and not rule.why.endswith(".") and not rule.what_to_do.endswith(".")
        )


@pytest.mark.parametrize(
    ("start", "sort"),
    [
        ("CAST_", ErrorCategory.RECORD),
        ("CANNOT_PARSE_", ErrorCategory.RECORD),
        ("DATETIME_OVERFLOW", ErrorCategory.RECORD),
        ("ARITHMETIC_OVERFLOW", ErrorCategory.RECORD),
        ("NUMERIC_VALUE_OUT_OF_RANGE", ErrorCategory.RECORD),
        ("DIVIDE_BY_ZERO", ErrorCategory.RECORD),
        ("MALFORMED_RECORD_IN_PARSING", ErrorCategory.RECORD),
        ("DELTA_FAILED_RECOGNIZE", ErrorCategory.PLAN),
        ("DELTA_SCHEMA_CHANGED", ErrorCategory.TRANSIENT),
        ("DELTA_SOURCE_", ErrorCategory.SETTING),
        ("DELTA_CONCURRENT_", ErrorCategory.OUTAGE),
        ("DIFFERENT_DELTA_TABLE_READ", ErrorCategory.INPUT_LOST),
        ("KAFKA_DATA_LOSS", ErrorCategory.INPUT_LOST),
        ("STREAMING_STATEFUL", ErrorCategory.DAMAGED),
        ("STREAMING_CHECKPOINT_MISSING", ErrorCategory.DAMAGED),
        ("STATE_STORE_KEY_", ErrorCategory.DAMAGED),
        ("MALFORMED_LOG_FILE", ErrorCategory.DAMAGED),
        ("UNRESOLVED_COLUMN", ErrorCategory.PLAN),
        ("INTERNAL_ERROR_NETWORK", ErrorCategory.OUTAGE),
        ("TABLE_OR_VIEW_NOT_FOUND", ErrorCategory.PLAN),
        ("DELTA_TABLE_NOT_FOUND", ErrorCategory.INPUT_LOST),
        ("PATH_NOT_FOUND", ErrorCategory.INPUT_LOST),
        ("DELTA_UNSUPPORTED_FEATURES_", ErrorCategory.ENVIRONMENT),
        ("FOREACH_BATCH_USER_FUNCTION_ERROR", ErrorCategory.TRANSIENT),
        ("CANNOT_LOAD_STATE_STORE", ErrorCategory.TRANSIENT),
    ],
)
def test_families(named: Mapping[str, str], start: str, sort: ErrorCategory) -> None:
    found = {
        name: find_rule_of_condition(name, state) for name, state in named.items() if name.startswith(start)
    }
    if running_minor() == "4.1" and any(name.startswith(start) for name in NEW_IN_4_2):
        assert found == {}
        return
    assert found and {rule.category for rule in found.values() if rule} == {sort}, found


JAVA = "org.apache.spark.SparkException: {}\n\tat a.b.c(D.java:1)\n"


@pytest.mark.parametrize(
    ("text", "sort"),
    [
        # The innermost counts: a file system that does not answer is an outage, whatever it was read for.
        (
            JAVA.format("[FAILED_READ_FILE.NO_HINT] x") + "Caused by: java.net.ConnectException: no",
            ErrorCategory.OUTAGE,
        ),
        (
            JAVA.format("[FAILED_READ_FILE.FILE_NOT_EXIST] x")
            + "Caused by: java.io.FileNotFoundException: f",
            ErrorCategory.INPUT_LOST,
        ),
        (
            JAVA.format("[FAILED_READ_FILE.CANNOT_READ_FILE_FOOTER] x")
            + "Caused by: java.lang.RuntimeException: file:/in/a is not a Parquet file. Expected magic "
            "number",
            ErrorCategory.INPUT_LOST,
        ),
        # What only wraps is asked last, and then too.
        (
            JAVA.format("[STREAM_FAILED] x. SQLSTATE: XXKST")
            + "Caused by: a.b.ArithmeticException: [DIVIDE_BY_ZERO] y. SQLSTATE: 22012",
            ErrorCategory.RECORD,
        ),
        (JAVA.format("[FOREACH_BATCH_USER_FUNCTION_ERROR] x. SQLSTATE: 39000"), ErrorCategory.TRANSIENT),
        (
            JAVA.format("[FAILED_EXECUTE_UDF] x. SQLSTATE: 39000") + "Caused by: a.b.MatchError: y",
            ErrorCategory.RECORD,
        ),
        (JAVA.format("[NAMED_LATER] x. SQLSTATE: 22999"), ErrorCategory.RECORD),
        (JAVA.format("[NAMED_LATER] Connection refused"), ErrorCategory.OUTAGE),
        (
            "org.apache.spark.api.python.PythonException: Traceback (most recent call last):\n  File "
            '"j.py", line 1, in f\nValueError: no\n',
            ErrorCategory.RECORD,
        ),
        ("java.io.IOException: No space left on device", ErrorCategory.OUTAGE),
        ("java.io.IOException: File name too long", ErrorCategory.VALUE),
        (f"java.io.IOException: Mkdirs failed to create file:/out/u={'a' * 300}", ErrorCategory.VALUE),
        # 100 letters of three bytes each.
        (
            f"java.io.IOException: Mkdirs failed to create file:/out/u={'世' * 100} (exists=false)",
            ErrorCategory.VALUE,
        ),
        ("org.apache.kafka.common.errors.TopicAuthorizationException: Not authorized", ErrorCategory.REFUSED),
        # Renewed certificates pass, with new clients; a password that is refused does not.
        (
            "org.apache.kafka.common.errors.SslAuthenticationException: SSL handshake failed\n"
            "Caused by: javax.net.ssl.SSLHandshakeException: PKIX path validation failed",
            ErrorCategory.TRANSIENT,
        ),
        (
            "org.apache.kafka.common.errors.SaslAuthenticationException: Authentication failed",
            ErrorCategory.REFUSED,
        ),
        ("org.apache.kafka.common.errors.DisconnectException", ErrorCategory.OUTAGE),
        ("psycopg.OperationalError: connection failed: Connection refused", ErrorCategory.OUTAGE),
        ("java.lang.ClassNotFoundException: a.b.C", ErrorCategory.ENVIRONMENT),
        ("java.lang.OutOfMemoryError: Java heap space", ErrorCategory.TRANSIENT),
        # The wrong PYSPARK_PYTHON does not go away by waiting, although it looks like a network.
        (
            "java.net.SocketTimeoutException: Timed out while waiting for the Python worker to connect back",
            ErrorCategory.TRANSIENT,
        ),
        (
            "ExecutorLostFailure (executor 3 exited unrelated to the running tasks) Reason: decommission",
            ErrorCategory.OUTAGE,
        ),
    ],
)
def test_the_innermost_cause_that_is_known_decides(text: str, sort: ErrorCategory) -> None:
    rule = find_rule(Chain.of(text))
    assert rule is not None and rule.category is sort, rule


@pytest.mark.parametrize(
    "text",
    [
        "java.lang.NullPointerException",
        "java.io.IOException: Mkdirs failed to create file:/out/u=a (exists=false, cwd=file:/)",
        "ExecutorLostFailure (executor 3 exited caused by one of the running tasks) Reason: Command "
        "exited with code 137",
        "org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)",
        "a.b.C: [NAMED_LATER] without an SQLSTATE",
        "a.b.C: [INTERNAL_ERROR_STATE_STORE] x. SQLSTATE: XX000",
        "py4j.Py4JException",
    ],
)
def test_what_nobody_named_is_not_sorted(text: str) -> None:
    assert find_rule(Chain.of(text)) is None
