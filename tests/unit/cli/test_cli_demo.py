"""`flinkish demo`: what its count finds, and what it says where it cannot run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from flinkish_spark.bridge.session import check_java
from flinkish_spark.cli import demo, doctor
from flinkish_spark.cli.demo import Count, count
from flinkish_spark.core.errors import EnvironmentFault
from tests.support.cli_rig import flinkish

EXACT = [
    {"id": 0, "user": "ann", "amount": 5, "total": 5},
    {"id": 1, "user": "bob", "amount": 7, "total": 7},
    {"id": 2, "user": "ann", "amount": 2, "total": 7},
]


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (EXACT, Count(orders=3, rows=3, lost=0, twice=0, wrong_totals=0)),
        (EXACT[::-1], Count(orders=3, rows=3, lost=0, twice=0, wrong_totals=0)),
        (EXACT[:2], Count(orders=3, rows=2, lost=1, twice=0, wrong_totals=0)),
        # The same row again: its total is not that of the one before, and its amount.
        ([*EXACT, EXACT[2]], Count(orders=3, rows=4, lost=0, twice=1, wrong_totals=1)),
        # A state that forgot ann's first order.
        ([*EXACT[:2], {**EXACT[2], "total": 2}], Count(orders=3, rows=3, lost=0, twice=0, wrong_totals=1)),
        # A state that added it twice.
        ([*EXACT[:2], {**EXACT[2], "total": 12}], Count(orders=3, rows=3, lost=0, twice=0, wrong_totals=1)),
        ([], Count(orders=3, rows=0, lost=3, twice=0, wrong_totals=0)),
    ],
)
def test_what_is_lost_twice_or_wrong_is_counted(rows: list[dict[str, object]], found: Count) -> None:
    assert count(rows, 3) == found
    assert str(found).startswith("EXACTLY ONCE") is found.is_exact is (rows in (EXACT, EXACT[::-1]))


def test_hidden_and_unfinished_files_are_no_rows(tmp_path: Path) -> None:
    totals = tmp_path / "data" / "totals"
    (totals / "_flinkish" / "uid").mkdir(parents=True)
    (totals / "_flinkish" / "uid" / "part.json").write_text('{"id": 1}\n')
    (totals / "part-0.json").write_text('{"id": 2}\n{"id": 3}\n')
    assert [row["id"] for row in demo.rows_in(tmp_path)] == [2, 3]


@pytest.mark.parametrize("command", [("demo",), ("doctor",), ("run", __file__), ("jars", "{}/jars")])
def test_without_java_it_says_what_to_install(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    command = tuple(word.format(tmp_path) for word in command)
    result = flinkish(*command)
    assert result.exit_code == 1 and "there is no Java" in result.stderr and "install a JDK" in result.stderr
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "PATH has none" in flinkish(*command).stderr
    # A script of Spark's says where it is.
    (tmp_path / "spark-env.sh").touch()
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    check_java()


def test_a_java_that_does_not_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").write_bytes(b"\x7fELF of another machine")
    (tmp_path / "bin" / "java").chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(EnvironmentFault, match=f"{tmp_path}/bin/java does not run") as refused:
        check_java()
    assert "install a JDK, 17 or newer" in refused.value.what_to_do


def test_what_spark_says_when_it_starts_does_not_stand_before_the_doctor_s_table(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with doctor._errors_in_file() as said:
        os.write(2, b"noise of the JVM")
        said.seek(0)
        assert said.read() == b"noise of the JVM"
    os.write(2, b"what is said behind it")
    assert capfd.readouterr().err == "what is said behind it"


@pytest.mark.parametrize(
    ("version", "is_old"), [("1.8.0_402", True), ("11.0.2", True), ("17", False), ("21.0.5", False)]
)
def test_an_old_java_is_named(
    version: str, is_old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2024-01-16' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    if is_old:
        with pytest.raises(EnvironmentFault, match="is too old"):
            check_java()
    else:
        check_java()


def test_a_job_that_fails_is_said_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "job.py").write_text("import sys\nprint('the reason')\nsys.exit(7)\n")

    monkeypatch.setattr(demo, "write_project", write)
    monkeypatch.setattr("flinkish_spark.bridge.session.check_java", lambda: None)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    result = flinkish("demo", tmp_path / "demo")
    assert result.exit_code == 1
    assert all(part in result.stderr for part in ("ended with status 7", "the reason", "job.log", "doctor"))


def test_a_folder_with_files_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flinkish_spark.bridge.session.check_java", lambda: None)
    (tmp_path / "mine").write_text("mine")
    result = flinkish("demo", tmp_path)
    assert result.exit_code == 2 and [path.name for path in tmp_path.iterdir()] == ["mine"]
