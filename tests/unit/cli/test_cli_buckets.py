"""Commands about a job whose directory is in a bucket."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from flinkish_spark.checkpoint import ownership
from flinkish_spark.checkpoint.ownership import take_over
from flinkish_spark.cli.transactions import hold_lock, lock_of
from flinkish_spark.core.errors import OwnedElsewhereError
from flinkish_spark.core.job_dir import open_job_dir
from flinkish_spark.core.store_spec import StoreSpec, StoreUrl
from flinkish_spark.job.stored_job import StoredJob
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, OwnerEpoch
from tests.support.cli_rig import flinkish
from tests.support.clocks import ManualClock
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
    from flinkish_spark.core.object_store import open_object_store

    return open_object_store(memory, StoreUrl.parse(memory.url))


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


def test_transactions_are_ended_where_nobody_has_the_job(
    place: StoreSpec, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who has said that it ended is not waited for; who is silent is, for its lease; who beats is alive."""
    monkeypatch.setattr(ownership, "process_key", lambda pid: None)
    job_dir = open_job_dir(place)
    job_dir.read_or_create_job({"job": "orders"}, {"spark": "4.2.0"})
    clock = ManualClock()
    job = StoredJob(place, job_dir, "orders", JobUuid("1" * 32), clock)
    take_over(job_dir, clock)
    lock, began_ms = lock_of(job), clock.monotonic_ms()
    with hold_lock(job, lock):
        assert clock.monotonic_ms() - began_ms >= 60_000
        assert "as far as is known" in capsys.readouterr().err
    with hold_lock(job, lock):
        assert clock.monotonic_ms() - began_ms < 65_000, "the second look knows what the first has seen"

    def beat_on(duration_ms: int) -> None:
        job_dir.note_owner(OwnerEpoch(1), "beat", str(clock.monotonic_ms()))
        clock.now_ms += duration_ms

    monkeypatch.setattr(clock, "sleep_ms", beat_on)
    with pytest.raises(OwnedElsewhereError, match="the job 'orders' runs"), hold_lock(job, lock_of(job)):
        raise AssertionError("its owner lives")
    job_dir.note_owner(OwnerEpoch(1), "ended", "")
    with hold_lock(job, lock_of(job)):
        pass
