"""The folder in which a driver's JVM keeps its classes: what the JVM is told; the builder is a fake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flinkish_spark.bridge import session
from flinkish_spark.bridge.session import configure_spark_with_jars

OPTIONS = "spark.driver.extraJavaOptions"


class Builder:
    """SparkSession.Builder, as far as it is asked."""

    def __init__(self, **options: str) -> None:
        self._options: dict[str, Any] = {name.replace("_", "."): value for name, value in options.items()}

    def config(self, map: dict[str, str]) -> Builder:
        self._options |= map
        return self


@pytest.fixture
def jars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    jar = tmp_path / "one.jar"
    jar.touch()
    monkeypatch.setattr(session, "find_pinned_jars", lambda directory: [jar])
    monkeypatch.setattr(session, "shim_jar", lambda: jar)
    return jar


def options_of(jars: Path, folder: Path | None, builder: Builder | None = None) -> str:
    builder = Builder() if builder is None else builder
    configured = configure_spark_with_jars(builder, jars.parent, class_archive=folder)  # type: ignore[arg-type]
    return str(configured._options.get(OPTIONS, ""))


def test_without_a_folder_the_jvm_is_told_nothing(jars: Path) -> None:
    assert options_of(jars, None) == ""


def test_the_first_jvm_writes_the_archive_and_the_next_reads_it(jars: Path, tmp_path: Path) -> None:
    folder = tmp_path / "with a space" / "classes"
    first = options_of(jars, folder)
    archive = first.split('"-XX:ArchiveClassesAtExit=')[1].split('"')[0]
    assert Path(archive).parent == folder
    assert folder.is_dir()
    Path(archive).touch()
    assert f'"-XX:SharedArchiveFile={archive}"' in options_of(jars, folder)


def test_other_jars_have_another_archive(jars: Path, tmp_path: Path) -> None:
    before = options_of(jars, tmp_path)
    jars.write_text("another version")
    assert options_of(jars, tmp_path) != before


def test_options_of_the_users_stay(jars: Path, tmp_path: Path) -> None:
    builder = Builder(**{OPTIONS.replace(".", "_"): "-Xss4m"})
    assert options_of(jars, tmp_path, builder).startswith('-Xss4m "-XX:')
