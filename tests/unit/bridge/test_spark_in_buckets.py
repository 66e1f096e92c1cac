"""What Spark is told of a bucket, and what is refused of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from flinkish_spark.bridge.buckets import _s3a_settings
from flinkish_spark.connectors.socket import SocketTextSource
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.job_dir import job_place, open_job_dir
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.savepoints.files import place_of


def told(**options: str) -> dict[str, str]:
    return _s3a_settings(StoreSpec.parse("s3://bucket/jobs", options))


def test_s3a_is_told_what_the_store_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "s3cret")
    assert told() == {}
    assert told(region="eu-central-1") == {"endpoint.region": "eu-central-1"}
    own = told(endpoint="http://h:1", aws_access_key_id="me", secret_access_key="env:MY_SECRET")
    assert own == {
        "endpoint": "http://h:1",
        "access.key": "me",
        "secret.key": "s3cret",
        "path.style.access": "true",
        "connection.ssl.enabled": "false",
    }
    hosted = told(endpoint="https://h", virtual_hosted_style_request="true")
    assert hosted["path.style.access"] == "false" and hosted["connection.ssl.enabled"] == "true"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("memory://name/folder", "Hadoop has no file system"),
        ("az://container/folder", "write abfss://"),
        ("s3a://bucket/folder", "write s3://"),
        ("webhdfs://host/folder", "There is no store for webhdfs"),
    ],
)
def test_a_place_that_spark_cannot_use_is_no_job_dir(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        job_place(url)


def test_a_place_that_somebody_names_without_a_job() -> None:
    options = {"region": "eu-central-1"}
    assert place_of("file:///savepoints/7", None) == StoreSpec("/savepoints/7")
    assert place_of("savepoints/7", None) == StoreSpec(str(Path("savepoints/7").absolute()))
    assert place_of("s3://bucket/savepoints/7", options) == StoreSpec.parse(
        "s3://bucket/savepoints/7", options
    )
    for wrong, given in (("s3a://bucket/savepoints/7", None), ("/savepoints/7", options)):
        with pytest.raises(ConfigError):
            place_of(wrong, given)


def test_a_socket_needs_a_disk() -> None:
    source = SocketTextSource("localhost", 1)
    job_dir = open_job_dir(StoreSpec.parse("memory://sockets/job"))
    with pytest.raises(ConfigError, match="is no folder on a disk"):
        source.preflight(None, job_dir, "lines")  # type: ignore[arg-type]
