"""Whatever the JVM raises in a call of the bridge comes to an end: a typed error, never its own cause."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from py4j.protocol import Py4JError, Py4JNetworkError

from flinkish_spark.checkpoint.failures import classify
from flinkish_spark.connectors.delta.rows import DeltaRows, translate_error
from flinkish_spark.connectors.delta.table import Append, DeltaConflict, DeltaRuleError, DeltaTableError
from flinkish_spark.connectors.kafka.sink import add_advice
from flinkish_spark.core.errors import ConfigError, FlinkishError, SparkGoneError, causes_of, raise_translated
from flinkish_spark.core.foreign_errors import is_gateway_gone
from tests.support.jvm_errors import FULL_DISK, Throwables
from tests.support.syntax import walk

PACKAGE = Path(__file__).resolve().parents[3] / "flinkish_spark"


def in_time(work: Callable[[], Any]) -> Any:
    """Return what `work` returns; it has five seconds, and whoever takes longer hangs."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(5)
    assert found, "it does not come to an end"
    return found[0]


def caught(work: Callable[[], Any]) -> BaseException:
    try:
        work()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


# -- chains -----------------------------------------------------------------------------------------
def test_a_chain_of_causes_is_gone_through_once() -> None:
    first, second, third = ValueError("1"), KeyError("2"), OSError("3")
    first.__cause__, second.__context__, third.__cause__ = second, third, first
    assert list(causes_of(first)) == [first, second, third]
    first.__cause__ = first
    assert list(causes_of(first)) == [first]


def test_who_looks_for_a_dead_jvm_comes_to_an_end() -> None:
    own = ValueError("its own cause")
    own.__cause__ = own
    assert in_time(lambda: is_gateway_gone(own)) is False
    two = [Py4JError("An error occurred while calling o7.commit. Trace:\nat Main"), ValueError("no")]
    two[0].__cause__, two[1].__cause__ = two[1], two[0]
    assert in_time(lambda: is_gateway_gone(two[1])) is False
    two[0].__cause__ = Py4JNetworkError("Answer from Java side is empty")
    assert in_time(lambda: is_gateway_gone(two[1])) is True
    assert isinstance(classify(two[1]), SparkGoneError)


def test_nothing_becomes_its_own_cause() -> None:
    known, error = KeyError("known"), ValueError("raised")
    assert caught(lambda: raise_translated(known, error)) is known and known.__cause__ is error

    def caught_and_raised_again() -> None:
        try:
            raise error
        except ValueError as again:
            raise_translated(again, again)

    assert caught(caught_and_raised_again) is error
    assert error.__cause__ is None and error.__context__ is None


def test_a_refusal_that_no_advice_helps_is_raised_as_it_is() -> None:
    other = ConfigError("the id is refused")
    assert add_advice(other, "out", 1) is other


# -- what Delta's calls raise -----------------------------------------------------------------------
def rows(error: BaseException) -> DeltaRows:
    spark = MagicMock()
    spark.newSession().sql.side_effect = error
    spark.cloneSession.side_effect = error
    return DeltaRows(spark)


APPENDED = {"mode": Append().to_json(), "schema_evolution": "NONE"}
#: Every call into the JVM that a commit or a rewind of a Delta sink makes.
CALLS: dict[str, Callable[[BaseException], Any]] = {
    "commit": lambda error: rows(error).commit("/t", [APPENDED], "app", 3, "", None),
    "restore": lambda error: rows(error).set_back("/t", 3, "note"),
    "delete_rows": lambda error: rows(error).set_back("/t", None, "note"),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_error_of_the_jvm_that_nobody_expects_ends_in_a_typed_one(call: str) -> None:
    """On the commit before this, the walk over its causes never ended, and with it no cancel was seen."""
    given = Throwables(FULL_DISK).raised()
    error = caught(lambda: CALLS[call](given))
    assert error is given and error.__cause__ is not error
    told = in_time(lambda: classify(error))
    assert isinstance(told, FlinkishError) and told.restartable
    assert "IOException: No space left on device" in str(told)


@pytest.mark.parametrize(
    ("chain", "kind"),
    [
        ((("org.apache.spark.sql.delta.DeltaAnalysisException", "no such column"),), DeltaTableError),
        ((("io.delta.exceptions.ConcurrentAppendException", "faster"),), DeltaConflict),
        (
            (
                ("org.apache.spark.SparkException", "Job aborted"),
                ("org.apache.spark.sql.delta.schema.DeltaInvariantViolationException", "NOT NULL"),
            ),
            DeltaRuleError,
        ),
        # Of Delta's own exceptions these say that a disk is not as it should be; no table refuses anything.
        ((("org.apache.spark.sql.delta.DeltaIOException", "cannot write"),), None),
        ((("org.apache.spark.sql.delta.DeltaFileNotFoundException", "gone"),), None),
        (FULL_DISK, None),
    ],
)
def test_only_what_delta_refuses_is_a_refusal(chain: Any, kind: type[Exception] | None) -> None:
    given = Throwables(chain).raised()
    found = translate_error(given)
    assert found is given if kind is None else type(found) is kind


def test_a_chain_of_java_that_comes_back_to_where_it_was_ends() -> None:
    jvm = Throwables(
        (("java.lang.RuntimeException", "a"), ("java.lang.IllegalStateException", "b")), closed=True
    )
    given = jvm.raised()
    assert in_time(lambda: translate_error(given)) is given
    assert "IllegalStateException: b" in str(in_time(lambda: classify(given)))
    assert jvm.asked < 200


# -- the rule ---------------------------------------------------------------------------------------
@cache
def nodes() -> list[tuple[str, ast.AST]]:
    """Return what the rules look at, with its file; files are parsed once for both."""
    kept = (ast.Raise, ast.FunctionDef, ast.While)
    return [
        (str(file.relative_to(PACKAGE)), node)
        for file in PACKAGE.rglob("*.py")
        for node in walk(file)
        if isinstance(node, kept)
    ]


def name_of(node: ast.expr | None) -> str:
    """Return the last part of a dotted name; empty for anything else."""
    match node:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
    return ""


def may_return_what_it_is_given(function: ast.FunctionDef) -> bool:
    arguments = function.args
    given = {one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return any(isinstance(n, ast.Return) and name_of(n.value) in given - {"self"} for n in ast.walk(function))


def test_no_error_is_raised_from_itself() -> None:
    """`raise f(e) from e` is a hang if `f` may return `e`; `raise_translated` is for that."""
    raised = [(f, n) for f, n in nodes() if isinstance(n, ast.Raise) and isinstance(n.cause, ast.Name)]
    makers = {name_of(node.exc.func) for _, node in raised if isinstance(node.exc, ast.Call)}
    may_be_the_same = {
        node.name
        for _, node in nodes()
        if isinstance(node, ast.FunctionDef) and node.name in makers and may_return_what_it_is_given(node)
    }
    guilty = [
        f"{file}:{node.lineno}"
        for file, node in raised
        # A name is the error itself, unless somebody has looked whether it is.
        if (isinstance(node.exc, ast.Name) and file != "core/errors.py")
        or (isinstance(node.exc, ast.Call) and name_of(node.exc.func) in may_be_the_same)
    ]
    assert not guilty


def test_chains_are_gone_through_in_one_place() -> None:
    """Whoever follows `__cause__` in a loop of its own may never come to its end."""
    loops = [
        file
        for file, node in nodes()
        if isinstance(node, ast.While)
        and any(name_of(n) in ("__cause__", "__context__") for n in ast.walk(node) if isinstance(n, ast.expr))
    ]
    assert loops == ["core/errors.py"]
