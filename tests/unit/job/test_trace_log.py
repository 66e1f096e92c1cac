"""Errors for people: our message comes last, and the trace is in a file that it names, without secrets."""

from __future__ import annotations

import re
import stat
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flinkish_spark import StreamExecutionEnvironment
from flinkish_spark.checkpoint.failures import QueryError
from flinkish_spark.core.errors import ConfigError, FlinkishError, UserFunctionError, raise_translated
from flinkish_spark.core.secrets import hide_secrets
from flinkish_spark.job.client import JobClient
from flinkish_spark.job.engine import JobProgress
from flinkish_spark.job.trace_log import write_trace_file
from flinkish_spark.protocol.job_status import JobStatus
from tests.support.job_graphs import Session


def failed() -> FlinkishError:
    """Return an error as it comes out of a query of Spark's."""
    try:
        try:
            raise ValueError("java.lang.X: Trace of Spark, sasl.password=hunter2")
        except ValueError as inner:
            known = QueryError("the query failed", what_to_do="look", trace="of a task; token: 'hunter2'")
            raise_translated(known, inner)
    except FlinkishError as error:
        return error


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_trace_is_in_a_file_of_this_user(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = write_trace_file(failed(), "orders")
    (file,) = folder.iterdir()
    shown = "".join(traceback.format_exception(error)).splitlines()
    assert shown == ["flinkish_spark.checkpoint.failures.QueryError: the query failed. To do: look."]
    assert capsys.readouterr().err == f"flinkish: the trace, with Spark's, is in {file}\n"
    assert re.fullmatch(r"flinkish-orders-\w+\.log", file.name)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    text = file.read_text(encoding="utf-8")
    assert "Trace of Spark, sasl.password=***" in text and "of a task; token: ***" in text
    assert "hunter2" not in text and "test_trace_log.py" in text


def test_what_the_supervisor_does_not_show_is_in_the_file_too(folder: Path) -> None:
    hidden = UserFunctionError("the function failed")
    hidden.__context__, hidden.__suppress_context__ = ValueError("Spark's own"), True
    write_trace_file(hidden, "orders")
    (file,) = folder.iterdir()
    text = file.read_text(encoding="utf-8")
    assert text.index("Spark's own") < text.index("the function failed")


def test_what_comes_from_nothing_stays_as_it_is(folder: Path) -> None:
    error = ConfigError("a setting is wrong")
    assert write_trace_file(error, "orders") is error and not hasattr(error, "__notes__")
    assert not list(folder.iterdir())


def test_where_no_file_can_be_written_the_error_has_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    error = write_trace_file(failed(), "orders")
    assert "Trace of Spark" in "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        (
            'sasl.jaas.config=org.X required password="hunter2";',
            "sasl.jaas.config=*** required password=***;",
        ),
        ("{'fs.s3a.secret.key': 'hunter2', 'region': 'eu'}", "{'fs.s3a.secret.key': ***, 'region': 'eu'}"),
        ("Authorization: Bearer abcdefgh.ijk", "Authorization: Bearer ***"),
        (
            "jdbc:x://ann:hunter2@db:5432/orders?sslpassword=hunter2&a=1",
            "jdbc:x://***@db:5432/orders?sslpassword=***&a=1",
        ),
        ("KeyError: 'user' at file:///lake/orders", "KeyError: 'user' at file:///lake/orders"),
    ],
)
def test_secrets_are_hidden_and_nothing_else(text: str, hidden: str) -> None:
    assert hide_secrets(text) == hidden


# -- execute ----------------------------------------------------------------------------------------
class Supervisor:
    """Runs a job that fails at once."""

    job_id, progress, status = "a" * 32, JobProgress(), JobStatus.FAILED

    def __init__(self, error: FlinkishError | None) -> None:
        self.states, self.vertices, self.error = self, (), error

    def run(self, on_left: Any) -> None:
        if self.error is None:
            raise failed()
        raise self.error from ValueError("Trace of a worker")


def executed(
    env: StreamExecutionEnvironment, monkeypatch: pytest.MonkeyPatch, error: FlinkishError | None = None
) -> str:
    """Return what Python would print of the error of `execute`."""
    supervisor: Any = Supervisor(error)
    monkeypatch.setattr(env, "execute_async", lambda ui, until: JobClient(supervisor))
    with pytest.raises(FlinkishError) as caught:
        env.execute()
    return "".join(traceback.format_exception(caught.value))


def test_a_notebook_ends_with_our_message_and_a_log_has_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that no terminal of whoever runs the tests counts.
    monkeypatch.setenv("TERM", "dumb")
    # Another test of this process may have had a kernel.
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    spark: Any = Session()
    env = StreamExecutionEnvironment(spark, "orders", str(folder / "job"))
    assert "Trace of Spark" in executed(env, monkeypatch)
    assert not list(folder.glob("*.log"))
    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
    shown = executed(env, monkeypatch)
    (file,) = folder.glob("*.log")
    assert "Trace of Spark" not in shown and shown.endswith("the query failed. To do: look.\n")
    assert "supervisor" not in shown and file.exists()


def test_a_user_s_error_ends_with_our_message_in_a_log_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    spark: Any = Session()
    env = StreamExecutionEnvironment(spark, "orders", folder / "job")
    shown = executed(
        env, monkeypatch, UserFunctionError("the function failed", why="ValueError: no such user")
    )
    (file,) = folder.glob("*.log")
    assert shown.splitlines()[-1] == (
        "flinkish_spark.core.errors.UserFunctionError: the function failed. ValueError: no such user. To do: "
        "correct the function or the record; the job goes on from the last checkpoint."
    )
    assert "Trace of a worker" not in shown and "Trace of a worker" in file.read_text()
    assert capsys.readouterr().err == f"flinkish: the trace, with Spark's, is in {file}\n"
