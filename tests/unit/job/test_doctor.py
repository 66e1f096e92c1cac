"""What the doctor says of a session, of executors and of a directory, and that it leaves nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.connect.session import SparkSession as ConnectSession

from flinkish_spark import StreamExecutionEnvironment
from flinkish_spark import doctor as public
from flinkish_spark.core.errors import ConfigError, EnvironmentFault
from flinkish_spark.jars import JarMissing
from flinkish_spark.job import doctor
from flinkish_spark.job.doctor import Finding, Health


class Executors:
    """Runs what a task does in this process."""

    defaultParallelism = 1  # noqa: N815
    master = "spark://h:7077"

    def parallelize(self, numbers: Any, tasks: int) -> Any:
        def run(task: Any) -> Any:
            return SimpleNamespace(collect=lambda: [row for _ in range(tasks) for row in task(iter(()))])

        return SimpleNamespace(mapPartitions=run)


def session() -> Any:
    return SimpleNamespace(version="4.2.0", _jvm=object(), sparkContext=Executors())


def test_a_connect_session_is_refused_in_one_line_and_nothing_else_is_asked_of_it() -> None:
    spark: Any = SimpleNamespace(version="4.2.0")
    found = public(spark, job_dir="/somewhere", tables=["/table"])
    assert not found.is_well
    (refused,) = [one for one in found.findings if one.health is Health.REFUSED]
    assert "Spark Connect" in refused.says and "flinkish-kafka" in refused.what_to_do
    assert str(refused) in str(found)


def test_an_environment_says_of_a_connect_session_what_the_doctor_says(tmp_path: Path) -> None:
    session: Any = object.__new__(ConnectSession)
    spark: Any = SimpleNamespace(version="4.2.0")
    (found,) = [one for one in public(spark).findings if one.health is Health.REFUSED]
    with pytest.raises(EnvironmentFault, match="Spark Connect") as refused:
        StreamExecutionEnvironment(session, job="orders", job_dir=str(tmp_path / "job"))
    assert found.what_to_do in str(refused.value)
    assert not (tmp_path / "job").exists()


def test_missing_jars_are_told_with_what_goes_without_them() -> None:
    found = list(doctor._jars("4.2.0", []))
    # Nothing is at fault: a job that needs one is told so, and how to have it.
    assert {one.health for one in found} == {Health.FINE}
    assert "its JAR is in this package; jobs work without it" in found[0].says
    assert 'jobs without a frame of format("kafka") work without it' in found[1].says
    assert all("flinkish jars DIR" in one.what_to_do for one in found)


def test_a_jar_that_cannot_be_had_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise JarMissing("The JAR of flinkish_spark's JVM side is missing", what_to_do="run `make shim`")

    monkeypatch.setattr(doctor, "shim_jar", missing)
    found = list(doctor._jars("4.3.0", ["Spark's Kafka source", "Spark's Avro"]))
    assert [one.health for one in found] == [Health.WARNING, Health.FINE, Health.WARNING, Health.FINE]
    assert found[0].what_to_do == "run `make shim`" and "Spark 4.1 or 4.2" in found[2].what_to_do


def test_executors_like_the_driver_are_fine() -> None:
    (found,) = doctor._executors(session())
    assert found.health is Health.FINE


def test_what_executors_lack_or_have_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not by name: in the matrix the package itself is not installed.
    driver = doctor._versions()
    monkeypatch.setattr(doctor, "_versions", lambda: {**driver, "pandas": "1.0"})
    (other,) = doctor._executors(session())
    assert other.health is Health.WARNING and "pandas" in other.says and "and here 1.0" in other.says
    monkeypatch.setattr(doctor, "_versions", lambda: {**driver, "no-such-package": "1.0"})
    monkeypatch.setattr(doctor, "_PACKAGES", (*doctor._PACKAGES, "no-such-package"))
    (missing,) = doctor._executors(session())
    assert missing.health is Health.REFUSED and "no-such-package missing" in missing.says


def test_a_clock_that_is_off_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    # The driver's clock, and then that of the tasks: they are behind, as long as somebody asks here.
    times = iter([50_000, 0, 0, 51_000])
    monkeypatch.setattr("time.time_ns", lambda: next(times) * 1_000_000)
    fine, clock = doctor._executors(session())
    assert fine.health is Health.FINE
    assert clock.health is Health.WARNING and "50000 ms" in clock.says and "NTP" in clock.what_to_do


def test_what_an_environment_takes_the_doctor_takes(tmp_path: Path) -> None:
    disk, _ = doctor._job_dir(session(), f"file://{tmp_path}")
    assert disk.health is Health.FINE


@pytest.mark.parametrize("given", ["relative/path", "ftp://bucket/job"])
def test_a_path_that_is_none_is_refused(given: str) -> None:
    (found,) = doctor._run_check("job_dir", lambda: doctor._job_dir(session(), given))
    assert found.health is Health.REFUSED and given in found.says


def test_a_directory_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    disk, seen = doctor._job_dir(session(), str(tmp_path / "not" / "there"))
    assert disk.health is Health.FINE and "renames, links and locks work" in disk.says
    assert seen.says == "executors see it"
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_hard_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    found = doctor._probe_folder(tmp_path)
    assert found.health is Health.REFUSED and "hard links" in found.what_to_do
    assert list(tmp_path.iterdir()) == []


def test_what_raises_is_a_finding_and_the_others_follow() -> None:
    def fails() -> Iterator[Finding]:
        yield Finding("first", Health.FINE, "seen")
        raise ConfigError("it is wrong", why="of a reason", what_to_do="mend it")

    first, refused = doctor._run_check("second", fails)
    assert first.about == "first"
    assert (refused.health, refused.says, refused.what_to_do) == (
        Health.REFUSED,
        "it is wrong, because of a reason",
        "mend it",
    )


def test_a_notebook_shows_a_table_in_which_nothing_is_markup() -> None:
    found = doctor.Diagnosis((Finding("topic <b>", Health.FINE, "a & b"),))
    assert "topic &lt;b&gt;" in found._repr_html_() and "a &amp; b" in found._repr_html_()


def test_brokers_that_do_not_answer_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PATIENCE_MS", 300)
    spark: Any = SimpleNamespace(version="4.2.0")
    found = public(spark, bootstrap_servers="127.0.0.1:1", topics=["orders"])
    (brokers,) = [one for one in found.findings if one.about == "brokers"]
    assert brokers.health is Health.REFUSED
