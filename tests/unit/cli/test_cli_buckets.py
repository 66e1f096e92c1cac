"""Commands about a job whose directory is in a bucket."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from flinkish_spark.cli.client import Job
from flinkish_spark.cli.transactions import holding
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.job_dir import open_job_dir
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, OwnerEpoch
from tests.support.cli_rig import flinkish
from tests.unit.core.test_records_and_store import commit

pytest.importorskip("obstore")
_NUMBERS = itertools.count()


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> StoreSpec:
    """A bucket in memory, which commands of this process take for one of S3's."""
    memory = StoreSpec.parse(f"memory://cli-{next(_NUMBERS)}/jobs/orders")
    monkeypatch.setattr(StoreSpec, "open_bucket", lambda self: _opened(memory))
    return StoreSpec.parse("s3://bucket/jobs/orders", {"region": "eu-central-1"})


def _opened(memory: StoreSpec) -> Any:
    from flinkish_spark.core import store_spec

    return store_spec._opened(memory)


def test_checkpoints_of_a_job_in_a_bucket_are_listed(place: StoreSpec) -> None:
    job_dir = open_job_dir(place)
    job_dir.read_or_create_job({"job": "orders"}, {"spark": "4.2.0", "shuffle_partitions": 2})
    job_dir.create_decision(commit(3, OwnerEpoch(1)))
    shown = flinkish("checkpoints", "list", place.url, "--store-option", "region=eu-central-1")
    assert shown.exit_code == 0, shown.output
    assert "3" in shown.output
    shown = flinkish("checkpoints", "show", place.url, CheckpointId(3).value)
    assert shown.exit_code == 0, shown.output


def test_what_is_no_job_or_no_place_is_a_wrong_word(place: StoreSpec) -> None:
    for words, says in (
        ((place.url,), "there is no job in"),
        (("s3a://bucket/jobs",), "write s3://"),
        ((place.url, "--store-option", "region"), "is not NAME=VALUE"),
        ((place.url, "--store-option", "secret_access_key=plain"), "is a secret"),
    ):
        shown = flinkish("checkpoints", "list", *words)
        assert shown.exit_code == 2 and says in shown.output, shown.output
        assert "plain" not in shown.output.replace("secret_access_key=plain", "")


def test_transactions_are_ended_by_the_job_itself(place: StoreSpec) -> None:
    job_dir = open_job_dir(place)
    job_dir.read_or_create_job({"job": "orders"}, {"spark": "4.2.0"})
    job = Job(place, job_dir, "orders", JobUuid("1" * 32), SystemClock())
    with pytest.raises(ConfigError, match="start the job: its recovery"), holding(job):
        raise AssertionError("nobody holds it")
