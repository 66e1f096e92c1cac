"""Which version of Spark may run on a job directory: any patch release, minor versions forward only."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from flinkish_spark.core.errors import EnvironmentFault, JobDirError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore
from flinkish_spark.job.preflight import _record_spark_version, check_spark_version
from flinkish_spark.protocol.versions import VersionStep


@pytest.fixture
def of_4_2_0(tmp_path: Path) -> JobDir:
    job_dir = JobDir(LocalStore(tmp_path))
    job_dir.read_or_create_job({"job": "orders"}, {"spark": "4.2.0"})
    return job_dir


def test_a_patch_release_is_free_in_both_directions(of_4_2_0: JobDir) -> None:
    for version in ("4.2.1", "4.2.0", "4.2.7-vendor"):
        _record_spark_version(of_4_2_0, version)
        assert check_spark_version(of_4_2_0, "4.2.0") is VersionStep.NONE


def test_a_later_minor_version_goes_on_once_and_for_all(
    of_4_2_0: JobDir, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        _record_spark_version(of_4_2_0, "4.3.0")
    assert "Spark 4.3.0 continues a job directory of Spark 4.2" in caplog.text
    caplog.clear()
    _record_spark_version(of_4_2_0, "4.3.1")
    assert not caplog.text
    assert sorted(of_4_2_0.spark_versions()) == ["4.2.0", "4.3.0", "4.3.1"]
    before = of_4_2_0.spark_versions()
    with pytest.raises(JobDirError, match=r"Spark 4\.3\.[01] has run on .* is Spark 4\.2\.9") as caught:
        _record_spark_version(of_4_2_0, "4.2.9")
    assert "start with Spark 4.3 again" in caught.value.what_to_do and "savepoint" in caught.value.what_to_do
    assert caught.value.facts["wanted"] == "4.2.9" and caught.value.why
    assert of_4_2_0.spark_versions() == before, "a refused start leaves nothing behind"


def test_another_major_version_is_refused_both_ways(of_4_2_0: JobDir) -> None:
    for version in ("5.0.0", "3.5.1"):
        with pytest.raises(JobDirError, match="another major version"):
            check_spark_version(of_4_2_0, version)


def test_a_directory_without_a_job_takes_any(tmp_path: Path) -> None:
    assert check_spark_version(JobDir(LocalStore(tmp_path)), "4.2.0") is VersionStep.NONE


def test_a_version_that_cannot_be_compared_is_refused(of_4_2_0: JobDir) -> None:
    with pytest.raises(EnvironmentFault, match="'main' is no version of Spark"):
        check_spark_version(of_4_2_0, "main")


def test_two_processes_that_record_at_once_keep_both(of_4_2_0: JobDir) -> None:
    """Neither rewrites what the other wrote: each version has an object of its own."""
    other = JobDir(of_4_2_0.store)
    assert check_spark_version(of_4_2_0, "4.3.0") is VersionStep.FORWARD
    _record_spark_version(other, "4.2.1")
    _record_spark_version(of_4_2_0, "4.3.0")
    with pytest.raises(JobDirError, match=r"start with Spark 4\.3 again"):
        check_spark_version(other, "4.2.1")
