"""Which JARs a session gets, by the version of Spark that runs; above all Delta's, which has one for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import jars
from flinkish_spark.bridge import session
from flinkish_spark.jars import JarMissing, find_pinned, find_pinned_jars, spark_minors
from tests.support.cli_rig import flinkish

EXTENSION = "spark.sql.extensions"


class Builder:
    """SparkSession.Builder, as far as it is asked."""

    def __init__(self) -> None:
        self._options: dict[str, Any] = {}

    def config(self, map: dict[str, str]) -> Builder:
        self._options |= map
        return self


def runs(monkeypatch: pytest.MonkeyPatch, minor: str, directory: Path, *more: str) -> Path:
    """Let Spark be of a version; return a directory with what is pinned for it, and more."""
    monkeypatch.setattr(jars, "running_minor", lambda: minor)
    monkeypatch.setattr(session, "running_minor", lambda: minor)
    monkeypatch.setattr(session, "shim_jar", lambda: directory / "shim.jar")
    names = ["{1}-{2}.jar".format(*one.split(":")) for one in find_pinned("spark", minor)]
    for name in (*names, *more):
        (directory / name).touch()
    return directory


def configured(directory: Path) -> dict[str, Any]:
    return session.configure_spark_with_jars(Builder(), directory)._options  # type: ignore[arg-type]


def test_each_minor_version_has_its_own_delta_or_none() -> None:
    for minor in spark_minors():
        found = [one.split(":")[1] for one in find_pinned("spark", minor) if ":delta-spark_" in one]
        assert found in ([], [f"delta-spark_{minor}_2.13"])


def test_a_version_that_nobody_has_tried_is_refused() -> None:
    with pytest.raises(JarMissing, match=r"no JARs are pinned for Spark 4\.99.*4\.2"):
        find_pinned("spark", "4.99")


def test_pinned_delta_comes_with_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = configured(runs(monkeypatch, "4.2", tmp_path))
    assert "delta-spark_4.2_2.13-" in options["spark.jars"]
    assert EXTENSION in options


def test_jars_that_are_there_are_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = runs(monkeypatch, "4.2", tmp_path)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "none"))
    result = flinkish("jars", "--packages")
    assert result.exit_code == 0
    options = dict(line.split(" ", 1) for line in result.stdout.splitlines())
    assert options["--packages"].split(",") == find_pinned("spark", "4.2")
    assert f"--conf spark.jars={directory / 'shim.jar'}\n" in result.stdout
    assert "--conf spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension\n" in result.stdout
    assert [one.name for one in jars.download(directory)] == [one.name for one in find_pinned_jars(directory)]
    monkeypatch.setattr(session, "check_java", lambda: None)
    result = flinkish("jars", directory)
    assert "7 JARs are in" in result.stderr
    assert f"--conf {spark_jars(result.stdout)}" in result.stdout and "--packages" not in result.stdout
    assert flinkish("jars", "--packages", directory).exit_code == 2


def spark_jars(printed: str) -> str:
    (line,) = [line for line in printed.splitlines() if "spark.jars=" in line]
    named = line.removeprefix("--conf ")
    assert len(named.removeprefix("spark.jars=").split(",")) == 8
    return named


def test_what_the_resolver_says_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jars, "running_minor", lambda: "4.2")
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho ':: USE VERBOSE'\necho 'WARN: host is down'\nexit 1\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JarMissing, match=r"the JARs cannot be put into .*/jars") as refused:
        jars.download(tmp_path / "jars")
    assert refused.value.why == "WARN: host is down" and "network" in refused.value.what_to_do


def test_where_none_is_served_a_session_starts_without_delta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delta's settings would name a catalog that cannot be loaded."""
    directory = runs(monkeypatch, "4.3", tmp_path, "delta-spark_4.2_2.13-4.4.0.jar")
    options = configured(directory)
    assert "delta-" not in options["spark.jars"] and EXTENSION not in options
    with pytest.raises(
        JarMissing, match=r"no JAR of Delta Lake for Spark 4\.3.*none was served.*use Spark .*4\.2"
    ):
        find_pinned_jars(directory, group="io.delta")


def test_the_newest_delta_that_lies_in_the_directory_is_taken_where_none_is_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [f"delta-spark_4.3_2.13-4.{minor}.0.jar" for minor in (5, 10, 9)]
    directory = runs(monkeypatch, "4.3", tmp_path, *own, "delta-storage-4.10.0.jar")
    options = configured(directory)
    given = [Path(jar).name for jar in options["spark.jars"].split(",")]
    taken = [name for name in given if name.startswith("delta")]
    assert taken == ["delta-spark_4.3_2.13-4.10.0.jar", "delta-storage-4.10.0.jar"]
    assert EXTENSION in options
    assert [jar.name for jar in find_pinned_jars(directory, group="io.delta")] == taken
    (directory / "delta-storage-4.10.0.jar").unlink()
    with pytest.raises(JarMissing, match=r"does not hold delta-storage-4\.10\.0\.jar"):
        find_pinned_jars(directory)


def test_delta_among_the_packages_that_the_user_names_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs(monkeypatch, "4.3", tmp_path)
    for packages, counts in (([], False), (["io.delta:delta-spark_4.3_2.13:4.5.0"], True)):
        builder: Any = session.configure_spark_with_packages(Builder(), extra_packages=packages)  # type: ignore[arg-type]
        assert (EXTENSION in builder._options) is counts
