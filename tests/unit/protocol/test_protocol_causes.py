"""Texts as Spark, Py4J and Python workers give them: the innermost cause is found, and our frames are not."""

from __future__ import annotations

import pytest

from flinkish_spark.protocol.errors import MOST_MESSAGE, Cause, Chain

PROXY = """An exception was raised by the Python Proxy. Return Message: Traceback (most recent call last):
  File "/opt/lib/python3.11/site-packages/py4j/clientserver.py", line 644, in _call_proxy
    return_value = getattr(self.pool[obj_id], method)(*params)
                   ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/opt/lib/python3.11/site-packages/pyspark/sql/utils.py", line 163, in call
    self.func(DataFrame(jdf, wrapped_session_jdf), batch_id)
  File "/opt/lib/python3.11/site-packages/flinkish_spark/checkpoint/epoch_writer.py", line 115, in __call__
    self._stage(frame, BatchId(batch_id))
"""
OF_OURS = (
    '  File "/opt/lib/python3.11/site-packages/flinkish_spark/connectors/buffer.py", line 253, in stage\n'
    "    found = reports(request.rows, stage)\n"
)
GATEWAY = """  File "/opt/lib/python3.11/site-packages/py4j/protocol.py", line 327, in get_return_value
    raise Py4JJavaError(
py4j.protocol.Py4JJavaError: An error occurred while calling o18962.collectToPython.
"""
FRAMES = "".join(f"\tat org.apache.spark.sql.execution.Step{n}.next(Step.scala:{n})\n" for n in range(40))
FILE = "file:/lake/orders/_change_data/cdc-00000-682dbbd9.c000.snappy.parquet"


def proxied(java: str) -> str:
    """A failure within foreachBatch, as the query's exception has it: far more than 5,000 characters."""
    return PROXY + OF_OURS * 20 + GATEWAY + java


GONE = proxied(
    f": org.apache.spark.SparkException: [FAILED_READ_FILE.FILE_NOT_EXIST] Encountered error while reading "
    f"file {FILE}. File does not exist. It is possible the underlying files have been updated.\n"
    "You can explicitly invalidate the cache in Spark. SQLSTATE: KD001\n"
    f"{FRAMES}Caused by: java.io.FileNotFoundException: File {FILE} does not exist\n{FRAMES}\t... 14 more\n\n"
)
CRASHED = proxied(
    ": org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 4.0 failed 4 "
    "times, "
    "most recent failure: Lost task 0.3 in stage 4.0 (TID 11) (10.0.0.7 executor 2): "
    "org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)\n"
    f"{FRAMES}Caused by: java.io.EOFException\n{FRAMES}\nDriver stacktrace:\n{FRAMES}"
    "Caused by: org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)\n"
    f"{FRAMES}Caused by: java.io.EOFException\n{FRAMES}"
)
WORKER = proxied(
    ": org.apache.spark.SparkException: Job aborted due to stage failure: Task 1 in stage 2.0 failed 4 "
    "times, most "
    "recent failure: Lost task 1.3 in stage 2.0 (TID 9) (10.0.0.7 executor 2): "
    "org.apache.spark.api.python.PythonException: Traceback (most recent call last):\n"
    '  File "/opt/spark/python/lib/pyspark.zip/pyspark/worker.py", line 1247, in main\n    process()\n'
    '  File "/home/ada/jobs/orders.py", line 31, in enrich\n    return rates[order.country]\n'
    '  File "/home/ada/jobs/rates.py", line 7, in __getitem__\n    raise KeyError(name)\n'
    f"KeyError: 'XK'\n\n{FRAMES}\nDriver stacktrace:\n{FRAMES}"
)


@pytest.mark.parametrize(
    ("text", "headline"),
    [
        (GONE, f"FileNotFoundException: File {FILE} does not exist"),
        (CRASHED, "SparkException: Python worker exited unexpectedly (crashed) (EOFException)"),
        (WORKER, "KeyError: 'XK'"),
        # As `query.exception()` has it where Delta's own source failed.
        (
            "[DELTA_SOURCE_TABLE_IGNORE_CHANGES] Detected a data update in version 2.\n\n=== Streaming "
            "Query ===\n"
            "Identifier: [id = 1]\nLogical Plan: secret",
            "[DELTA_SOURCE_TABLE_IGNORE_CHANGES] Detected a data update in version 2",
        ),
        # PySpark repeats what it captured, with the class in front.
        (
            "pyspark.errors.exceptions.captured.AnalysisException: [PATH_NOT_FOUND] Path does not exist: "
            "/in. "
            "SQLSTATE: 42K03\n\nJVM stacktrace:\norg.apache.spark.sql.AnalysisException: "
            "[PATH_NOT_FOUND] Path "
            f"does not exist: /in. SQLSTATE: 42K03\n{FRAMES}",
            "AnalysisException: [PATH_NOT_FOUND] Path does not exist: /in",
        ),
        (
            f"pyspark.errors.X: told\n\nJVM stacktrace:\norg.apache.spark.DeltaAnalysisException\n{FRAMES}",
            "X: told",
        ),
        # The class behind "JVM stacktrace:" says something else.
        ("pyspark.errors.X: told\n\nJVM stacktrace:\na.b.Other: more\n", "Other: more"),
        ("JVM stacktrace:\na.b.Alone: more\n", "Alone: more"),
        # One message behind the other, the class left out.
        (
            "[STREAM_FAILED] Query terminated.\n[CAST_INVALID_INPUT] The value 'a'. SQLSTATE: 22018\n== "
            "SQL ==\ncast(u)",
            "[CAST_INVALID_INPUT] The value 'a'",
        ),
        ("java.lang.NullPointerException\n\tat a.b.c(D.java:1)\n", "NullPointerException"),
        ("a.B\nCaused by: py4j.Py4JException\n", "B"),
        ("py4j.Py4JException: An exception was raised by the Python Proxy.", "Py4JException"),
        ("", ""),
        ("only words", "only words"),
    ],
)
def test_the_innermost_cause_comes_first(text: str, headline: str) -> None:
    assert Chain.of(text).headline == headline


@pytest.mark.parametrize("text", [GONE, CRASHED, WORKER])
def test_frames_of_py4j_and_of_this_package_never_come_out(text: str) -> None:
    assert len(text) > 5_000
    chain = Chain.of(text)
    said = f"{chain.headline}\n{chain.trace}"
    for word in ("Python Proxy", "py4j", "Py4J", "flinkish_spark", "clientserver", "org.apache", "\tat "):
        assert word not in said, word
    assert len(said) < 1_500


def test_frames_of_the_users_program_are_kept() -> None:
    assert Chain.of(WORKER).trace.splitlines()[:3] == [
        "KeyError: 'XK'",
        "  at rates.py:7 in __getitem__",
        "  at orders.py:31 in enrich",
    ]


def test_what_was_raised_from_another_error_stands_outside_of_it() -> None:
    """Python prints the inner error first; of three, the first is the innermost."""
    link = "\nThe above exception was the direct cause of the following exception:\n\n"
    one = 'Traceback (most recent call last):\n  File "job.py", line {}, in f\n    x()\n{}\n'
    text = link.join(
        [one.format(1, "OSError: gone"), one.format(2, "ValueError: b"), one.format(3, "RuntimeError: c")]
    )
    chain = Chain.of(text)
    assert [str(cause) for cause in chain.causes] == ["RuntimeError: c", "ValueError: b", "OSError: gone"]
    # What failed in an except clause is the error; what it handled is not.
    text = text.replace(link, "\nDuring handling of the above exception, another exception occurred:\n\n")
    assert str(Chain.of(text).root) == "RuntimeError: c"


def test_a_java_error_that_a_python_error_was_raised_from_is_innermost() -> None:
    text = (
        f"{PROXY}{GATEWAY}: org.apache.spark.SparkException: outer\n{FRAMES}Caused by: "
        "java.io.IOException: no room\n"
        f"{FRAMES}\n\nThe above exception was the direct cause of the following exception:\n\n"
        'Traceback (most recent call last):\n  File "job.py", line 3, in f\n    x()\nDeltaStagingError: '
        "staging\n"
    )
    chain = Chain.of(text)
    assert [str(cause) for cause in chain.causes] == [
        "DeltaStagingError: staging",
        "Py4JJavaError",
        "SparkException: outer",
        "IOException: no room",
    ]


def test_a_users_words_are_no_condition() -> None:
    traceback = 'Traceback (most recent call last):\n  File "j.py", line 1, in f\n'
    text = f"{traceback}ValueError: see\n[DIVIDE_BY_ZERO] of mine"
    (cause,) = Chain.of(text).causes
    assert (cause.condition, cause.message) == ("", "see [DIVIDE_BY_ZERO] of mine")
    assert Cause.of("ValueError", "[DIVIDE_BY_ZERO] mine. SQLSTATE: 22012").condition == ""


def test_condition_sqlstate_and_length() -> None:
    cause = Cause.of("a.b$C", "[A_B.C_D] It  failed\nhere. SQLSTATE: 22012")
    assert (cause.name, cause.condition, cause.sqlstate, cause.message) == (
        "C",
        "A_B.C_D",
        "22012",
        "It failed here.",
    )
    long = Cause.of("a.B", "x" * 9_000)
    assert long.message == "x" * MOST_MESSAGE + " ..."


def test_a_failure_is_known_again_whatever_its_numbers() -> None:
    """Task numbers, temporary files and addresses differ each time; words do not."""
    said = "a.B: cannot {} part-{} of task {} in stage {} at {}"
    first = said.format("read", "00000-682dbbd9-5dd0-4a15-b352-1dc62ff63473", 17, "3.0", "0x7f39d2bb")
    again = said.format("read", "00001-953e53ef-0123-4567-89ab-000000000001", 4, "12.0", "0x55e0aa10")
    other = said.format("write", "00000-682dbbd9-5dd0-4a15-b352-1dc62ff63473", 17, "3.0", "0x7f39d2bb")
    assert Chain.of(first).identity == Chain.of(again).identity != Chain.of(other).identity


def test_the_exceptions_of_a_group_are_read_one_by_one() -> None:
    text = (
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File "job.py", line 9, in main\n  |     gather()\n  | ExceptionGroup: g (2 sub-exceptions)\n'
        "  +-+---------------- 1 ----------------\n    | Traceback (most recent call last):\n"
        "    |   File \"job.py\", line 4, in f\n    |     rates[key]\n    | KeyError: 'XK'\n"
        "    +---------------- 2 ----------------\n    | OSError: gone\n    +----------------\n"
    )
    chain = Chain.of(text)
    assert [str(cause) for cause in chain.causes] == [
        "ExceptionGroup: g (2 sub-exceptions)",
        "KeyError: 'XK' OSError: gone",
    ]
    assert chain.root.frames == ("job.py:4 in f",)


def test_a_trace_has_no_end_of_its_own() -> None:
    text = "".join(f"Caused by: a.E{n}: words {n}\n\tat x.y(Z.java:1)\n" for n in range(90))
    assert len(Chain.of(text).trace.splitlines()) == 12
