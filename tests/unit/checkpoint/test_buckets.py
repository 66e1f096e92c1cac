"""Spark's checkpoint in a bucket: taken over by copies, pinned by reference, cleaned by us; and who lives."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from flinkish_spark.checkpoint import ownership as ownership_module
from flinkish_spark.checkpoint import retention
from flinkish_spark.checkpoint.ownership import BeatLease, LivenessUnknown, Ownership, take_over
from flinkish_spark.checkpoint.retention import BucketPins, fence_in_bucket
from flinkish_spark.checkpoint.spark_log import BucketLog, log_of
from flinkish_spark.checkpoint.staging import micro_batch_in
from flinkish_spark.core.errors import CorruptObjectError, FencedError, OwnedElsewhereError, StoreError
from flinkish_spark.core.job_dir import JobDir, open_job_dir
from flinkish_spark.core.object_store import ObjectStore
from flinkish_spark.core.remote_store import requests_of_this_process
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job.engine import Standby
from flinkish_spark.job.standby import LockWait, wait_for_lock
from flinkish_spark.protocol.decisions import Decision, Receipt, RewindIntent
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage, OwnerEpoch
from flinkish_spark.protocol.lineage import RewindKind
from tests.support.clocks import ManualClock
from tests.support.state_folder import SparkFolder

pytest.importorskip("obstore")

ONE, TWO = CheckpointId(1), CheckpointId(2)
_NUMBERS = itertools.count()
_CLEAN_MS = BucketPins.clean_every_ms


class Bucket:
    """A job directory in memory, with what Spark and owners have written into it."""

    def __init__(self, tmp_path: Path) -> None:
        self.place = StoreSpec.parse(f"memory://bucket-{next(_NUMBERS)}/jobs/orders")
        self.store = self.place.open_bucket()
        self.job_dir: JobDir = open_job_dir(self.place)
        self.clock = ManualClock()
        self.disk = tmp_path
        self.uploaded: set[Path] = set()

    def log(self, epoch: int) -> BucketLog:
        folder = f"spark/{epoch}"
        return BucketLog(self.job_dir.store, folder, f"s3a://bucket/{folder}")

    def pins(self, epoch: int) -> BucketPins:
        return BucketPins(self.log(epoch), self.clock)

    def spark(
        self, epoch: int, batches: int, run: str = "a", snapshots: tuple[int, ...] = (3, 7)
    ) -> SparkFolder:
        """Let Spark run micro-batches in an owner's folder."""
        folder = SparkFolder(self.disk / run, epoch)
        for batch in range(batches):
            folder.run(batch, run, snapshot=batch in snapshots)
        (folder.location / "metadata").write_text('{"id":"q"}')
        (folder.location / "sources/0").mkdir(parents=True)
        (folder.location / "sources/0/0").write_text('v1\n{"orders":{"0":5}}')
        self.upload(folder, epoch)
        return folder

    def upload(self, folder: SparkFolder, epoch: int) -> None:
        """Put what is new on the disk into the bucket."""
        for path in folder.location.rglob("*"):
            if path.is_file() and not path.name.endswith(".crc") and path not in self.uploaded:
                self.uploaded.add(path)
                name = path.relative_to(folder.location).as_posix()
                self.store.put(f"spark/{epoch}/{name}", path.read_bytes())

    def decide(self, decision: Decision, *, is_confirmed: bool = True) -> None:
        self.job_dir.create_decision(decision)
        if is_confirmed:
            self.job_dir.create_receipt(Receipt(decision.checkpoint, OwnerEpoch(1), 0, {}))

    def fence(self, epoch: int) -> BucketLog:
        log = self.log(epoch)
        fence_in_bucket(log, self.job_dir, lambda one: BucketPins(one, self.clock))
        return log

    def below(self, folder: str) -> dict[str, bytes]:
        return {name: self.store.read(f"{folder}/{name}") for name in self.store.sizes_below(folder)}


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path)


NEEDED = {
    *(f"0/{p}/{v}_a{v}p{p}.changelog" for p in (0, 1) for v in (5, 6)),
    *(f"0/{p}/4_a4p{p}.zip" for p in (0, 1)),
    *(f"0/{p}/SSTs/004-a4p{p}.sst" for p in (0, 1)),
    "0/0/_metadata/schema",
    "0/_metadata/metadata",
}


# -- pins ---------------------------------------------------------------------------------------------


def test_a_pin_names_files_where_they_are_and_copies_none(bucket: Bucket) -> None:
    folder = bucket.spark(1, 10)
    before = bucket.below("spark")
    bucket.pins(1).pin(folder.decision(1, 5))
    assert bucket.below("spark") == before
    manifest = json.loads(bucket.store.read("pins/1.json").split(b"\n", 1)[1])
    assert set(manifest["files"]) == NEEDED and manifest["folder"] == "spark/1/state"
    assert bucket.pins(1).why_not_restorable(ONE) == ""
    bucket.pins(1).pin(folder.decision(1, 5))
    assert bucket.pins(1).list_pinned() == {ONE}


def test_a_pin_is_restored_into_another_folder_and_again(bucket: Bucket) -> None:
    folder = bucket.spark(1, 10)
    bucket.pins(1).pin(folder.decision(1, 5))
    for _ in range(2):
        bucket.pins(2).restore(ONE)
        found = bucket.below("spark/2")
        assert {name for name in found if name.startswith("state/")} == {f"state/{name}" for name in NEEDED}
        assert {name for name in found if not name.startswith("state/")} == {
            "offsets/4",
            "offsets/5",
            "commits/5",
        }
    assert found["state/0/0/6_a6p0.changelog"] == folder.files()["0/0/6_a6p0.changelog"]


def test_where_the_files_are_already_a_restore_puts_entries_back_only(bucket: Bucket) -> None:
    folder = bucket.spark(1, 10)
    pins, log = bucket.pins(1), bucket.log(1)
    pins.pin(folder.decision(1, 5))
    log.remove("commits/5")
    state = bucket.below("spark/1/state")
    pins.restore(ONE)
    assert log.read("commits", BatchId(5)) == folder.log.read("commits", BatchId(5))
    assert bucket.below("spark/1/state") == state


@pytest.mark.parametrize("name", ["0/1/4_a4p1.zip", "0/0/SSTs/004-a4p0.sst"])
def test_a_file_that_somebody_deleted_or_changed_is_named(bucket: Bucket, name: str) -> None:
    folder = bucket.spark(1, 10)
    pins = bucket.pins(1)
    pins.pin(folder.decision(1, 5))
    bucket.store.put(f"spark/1/state/{name}", b"?")
    assert f"{name} has 1 bytes instead of" in pins.why_not_restorable(ONE)
    bucket.store.delete(f"spark/1/state/{name}")
    with pytest.raises(CorruptObjectError, match=f"{name} is gone"):
        bucket.pins(2).restore(ONE)
    assert not bucket.below("spark/2")
    with pytest.raises(CorruptObjectError):
        bucket.pins(1).pin(folder.decision(2, 5))


def test_what_a_version_came_out_of_is_known_from_the_pin_before_and_the_log(bucket: Bucket) -> None:
    """Not one changelog is read for the second pin; it names what a process names that has to read them."""
    folder = bucket.spark(1, 10)
    pins = bucket.pins(1)
    pins.pin(folder.decision(1, 5))
    before = requests_of_this_process()["read"]
    pins.pin(folder.decision(2, 8))
    # commits/5, which a running job has kept, commits/6 and 7, offsets/7, and of each store the snapshot.
    assert requests_of_this_process()["read"] == before + 3 + 1 + 2
    second = bucket.store.read("pins/2.json")
    bucket.store.delete("pins/2.json")
    bucket.pins(1).pin(folder.decision(2, 8))
    assert bucket.store.read("pins/2.json") == second


def test_behind_a_rewind_it_is_read_from_the_changelogs(bucket: Bucket) -> None:
    folder = bucket.spark(1, 8, snapshots=(3,))
    pins = bucket.pins(1)
    pins.pin(folder.decision(1, 5))
    pins.pin(folder.decision(2, 7))
    folder.go_back(6)
    for batch in (6, 7, 8):
        folder.run(batch, "b")
    bucket.uploaded.clear()
    bucket.upload(folder, 1)
    pins.pin(folder.decision(3, 8))
    manifest = json.loads(bucket.store.read("pins/3.json").split(b"\n", 1)[1])
    changelogs = sorted(name for name in manifest["files"] if name.startswith("0/1/") and "changelog" in name)
    assert changelogs == [
        "0/1/5_a5p1.changelog", "0/1/6_a6p1.changelog",
        "0/1/7_b7p1.changelog", "0/1/8_b8p1.changelog", "0/1/9_b9p1.changelog",
    ]  # fmt: skip


def test_a_job_without_state_is_pinned_and_restored_without_a_listing(bucket: Bucket) -> None:
    log = bucket.log(1)
    for batch in range(3):
        log.restore("offsets", BatchId(batch), f"v1\n{{}}\n{batch}")
        log.restore("commits", BatchId(batch), 'v1\n{"nextBatchWatermarkMs":0}')
    staged = SparkFolder(bucket.disk / "x").decision(1, 2)
    texts = {"offsets_text": log.read("offsets", BatchId(2)), "commits_text": log.read("commits", BatchId(2))}
    decision = Decision.from_json({**staged.to_json(), **texts})
    asked = requests_of_this_process()["list"]
    bucket.pins(1).pin(decision)
    bucket.pins(2).restore(ONE)
    assert requests_of_this_process()["list"] == asked
    assert set(bucket.below("spark/2")) == {"offsets/1", "offsets/2", "commits/2"}


def base(group: int, batch: int) -> str:
    return f"sums/sums/{group}-{batch}-00112233445566ff"


def test_bases_stay_where_they_are_and_go_when_no_checkpoint_can_need_them(bucket: Bucket) -> None:
    folder, pins = bucket.spark(1, 10, snapshots=(3, 7)), bucket.pins(1)
    for name in (base(1, 2), base(1, 4), base(1, 8), base(2, 1)):
        bucket.store.put(f"bases/{name}", b"x")
    pins.pin(replace(folder.decision(1, 5), bases=(base(1, 4), base(2, 1))))
    bucket.clock.sleep_ms(_CLEAN_MS)
    pins.clean(lambda: None)
    bucket.clock.sleep_ms(_CLEAN_MS)
    pins.clean(lambda: None)
    assert len(bucket.below("bases")) == 4, "no checkpoint was made since they were seen"
    pins.pin(replace(folder.decision(2, 8), bases=(base(1, 8), base(2, 1))))
    bucket.clock.sleep_ms(_CLEAN_MS)
    pins.clean(lambda: None)
    assert set(bucket.below("bases")) == {base(1, 4), base(1, 8), base(2, 1)}
    assert bucket.pins(2).why_not_restorable(ONE) == "" == bucket.pins(2).why_not_restorable(TWO)
    bucket.pins(2).restore(TWO)
    assert len(bucket.below("bases")) == 3, "a new owner copies none"
    pins.unpin(ONE)
    bucket.decide(folder.decision(2, 8))
    pins.pin(replace(folder.decision(3, 9), bases=(base(1, 8), base(2, 1))))
    bucket.clock.sleep_ms(_CLEAN_MS)
    pins.clean(lambda: None)
    assert set(bucket.below("bases")) == {base(1, 8), base(2, 1)}
    bucket.store.delete(f"bases/{base(2, 1)}")
    assert "2-1-00112233445566ff is gone" in bucket.pins(2).why_not_restorable(TWO)


def test_who_has_lost_the_job_deletes_no_base(bucket: Bucket) -> None:
    folder, pins = bucket.spark(1, 10), bucket.pins(1)
    bucket.store.put(f"bases/{base(1, 2)}", b"x")
    pins.pin(replace(folder.decision(1, 5), bases=(base(1, 4),)))
    bucket.clock.sleep_ms(_CLEAN_MS)
    pins.clean(lambda: None)
    pins.pin(replace(folder.decision(2, 8), bases=(base(1, 4),)))
    bucket.clock.sleep_ms(_CLEAN_MS)

    def lost() -> None:
        raise FencedError("a newer owner")

    with pytest.raises(FencedError):
        pins.clean(lost)
    assert set(bucket.below("bases")) == {base(1, 2)}


# -- what nobody needs --------------------------------------------------------------------------------


def passed(pins: BucketPins, clock: ManualClock, times: int = 1) -> None:
    for _ in range(times):
        clock.now_ms += _CLEAN_MS
        pins.clean(lambda: None)


def test_what_no_pin_needs_goes_when_it_was_found_so_twice(bucket: Bucket) -> None:
    folder = bucket.spark(1, 10)
    pins = bucket.pins(1)
    pins.pin(folder.decision(1, 5))
    pins.clean(lambda: None)
    passed(pins, bucket.clock)
    assert len(bucket.below("spark/1/state")) == len(folder.files()), "only found so once"
    passed(pins, bucket.clock)
    left = set(bucket.below("spark/1"))
    state = {name.removeprefix("state/") for name in left if name.startswith("state/")}
    later = {f"0/{p}/{v}_a{v}p{p}.changelog" for p in (0, 1) for v in range(7, 11)}
    later |= {name for p in (0, 1) for name in (f"0/{p}/8_a8p{p}.zip", f"0/{p}/SSTs/008-a8p{p}.sst")}
    assert state == NEEDED | later
    assert {name for name in left if name.startswith("offsets/")} == {f"offsets/{n}" for n in range(4, 10)}
    assert {"metadata", "sources/0/0"} <= left
    assert pins.why_not_restorable(ONE) == ""


def test_when_the_oldest_pin_goes_its_files_follow(bucket: Bucket) -> None:
    folder = bucket.spark(1, 10)
    pins = bucket.pins(1)
    pins.pin(folder.decision(1, 5))
    pins.pin(folder.decision(2, 9))
    passed(pins, bucket.clock, 2)
    assert pins.why_not_restorable(ONE) == pins.why_not_restorable(TWO) == ""
    pins.unpin(ONE)
    assert bucket.store.sizes_below("spark/1/state").keys() >= NEEDED
    passed(pins, bucket.clock, 2)
    assert pins.why_not_restorable(TWO) == ""
    assert not [name for name in bucket.below("spark/1/state") if "4_a4" in name or "004-" in name]


def test_shared_files_of_a_newer_snapshot_stay_though_no_pin_names_them(bucket: Bucket) -> None:
    """The next pin may: a table is uploaded once, and named by every snapshot that still has it."""
    folder = bucket.spark(1, 10, snapshots=(3,))
    bucket.pins(1).pin(folder.decision(1, 1))
    bucket.store.put("spark/1/state/0/0/SSTs/orphan.sst", b"named by no snapshot")
    pins = bucket.pins(1)
    passed(pins, bucket.clock, 2)
    left = bucket.below("spark/1/state")
    assert "0/0/SSTs/004-a4p0.sst" in left and "0/0/SSTs/orphan.sst" not in left


def test_a_snapshot_that_is_uploaded_behind_its_pin_stays_for_what_follows(bucket: Bucket) -> None:
    """What is written behind it is loaded from it, and from nothing else."""
    folder = bucket.spark(1, 6, snapshots=(3,))
    pins = bucket.pins(1)
    pins.pin(folder.decision(1, 5))
    for partition in (0, 1):
        folder.snapshot(partition)
    bucket.upload(folder, 1)
    passed(pins, bucket.clock, 3)
    for batch in (6, 7, 8):
        folder.run(batch)
    bucket.upload(folder, 1)
    pins.pin(folder.decision(2, 8))
    assert pins.why_not_restorable(ONE) == pins.why_not_restorable(TWO) == ""
    pins.unpin(ONE)
    passed(pins, bucket.clock, 3)
    assert pins.why_not_restorable(TWO) == ""
    assert not [name for name in bucket.below("spark/1/state") if "/4_a4" in name or "/5_a5" in name]


def test_of_earlier_owners_all_goes_that_no_pin_names_and_of_later_ones_nothing(
    bucket: Bucket,
) -> None:
    folder = bucket.spark(1, 10)
    bucket.pins(1).pin(folder.decision(1, 5))
    bucket.decide(folder.decision(1, 5))
    bucket.fence(2)
    bucket.store.put("spark/3/offsets/6", b"a newer owner's")
    bucket.store.put("spark/1/state/0/0/11_z11p0.changelog", b"by a JVM that outlived its driver")
    pins = bucket.pins(2)
    passed(pins, bucket.clock, 2)
    assert {name.removeprefix("state/") for name in bucket.below("spark/1")} == NEEDED
    assert bucket.below("spark/3") == {"offsets/6": b"a newer owner's"}
    assert pins.why_not_restorable(ONE) == ""


def test_checksums_of_sparks_go_with_their_files_and_not_before(bucket: Bucket) -> None:
    folder = bucket.spark(1, 10)
    for name in ("1_a1p0.changelog", "9_a9p0.changelog", "6_a6p0.changelog"):
        bucket.store.put(f"spark/1/state/0/0/{name}.crc", b"sum")
    pins = bucket.pins(1)
    pins.pin(folder.decision(1, 5))
    passed(pins, bucket.clock, 2)
    left = {name for name in bucket.below("spark/1/state") if name.endswith(".crc")}
    assert left == {"0/0/6_a6p0.changelog.crc", "0/0/9_a9p0.changelog.crc"}


def test_who_is_fenced_deletes_nothing(bucket: Bucket) -> None:
    folder = bucket.spark(1, 10)
    pins = bucket.pins(1)
    pins.pin(folder.decision(1, 5))
    passed(pins, bucket.clock)

    def fenced() -> None:
        raise FencedError("owner 2 has the job")

    bucket.clock.now_ms += _CLEAN_MS
    with pytest.raises(FencedError):
        pins.clean(fenced)
    assert len(bucket.below("spark/1/state")) == len(folder.files())


def test_without_a_pin_nothing_is_known_to_be_needed_and_nothing_goes(bucket: Bucket) -> None:
    folder = bucket.spark(1, 10)
    passed(bucket.pins(1), bucket.clock, 3)
    assert len(bucket.below("spark/1/state")) == len(folder.files())


# -- the fence ----------------------------------------------------------------------------------------


def test_the_first_owner_begins_with_nothing(bucket: Bucket) -> None:
    bucket.fence(1)
    assert bucket.below("spark") == {"1.json": bucket.store.read("spark/1.json")}


def test_a_new_owner_goes_on_from_the_newest_decided_checkpoint(bucket: Bucket) -> None:
    folder = bucket.spark(1, 10)
    bucket.fence(1)
    bucket.decide(folder.decision(1, 5))
    log = bucket.fence(2)
    found = set(bucket.below("spark/2"))
    assert {name.removeprefix("state/") for name in found if name.startswith("state/")} == NEEDED
    assert found - {f"state/{name}" for name in NEEDED} == {
        "metadata", "sources/0/0", "offsets/4", "offsets/5", "commits/5"
    }  # fmt: skip
    assert log.batches("commits") == {BatchId(5)}, "what was not decided is run again"
    assert log.first_positions() == {0: {"orders": {"0": 5}}}


def test_what_is_not_confirmed_can_be_staged_again_micro_batch_by_micro_batch(bucket: Bucket) -> None:
    folder = bucket.spark(1, 10)
    bucket.fence(1)
    bucket.decide(folder.decision(1, 2))
    decision = folder.decision(2, 5)
    batches = tuple(Decision.from_json({**folder.decision(2, b).to_json()}).batches[0] for b in (3, 4, 5))
    whole = Decision.from_json({**decision.to_json(), "batches": [one.to_json() for one in batches]})
    bucket.decide(whole, is_confirmed=False)
    assert bucket.fence(2).batches("offsets") == {BatchId(3), BatchId(4), BatchId(5)}


def test_before_the_first_decision_only_the_query_and_its_beginning_go_along(bucket: Bucket) -> None:
    bucket.spark(1, 4)
    bucket.fence(1)
    bucket.fence(2)
    assert set(bucket.below("spark/2")) == {"metadata", "sources/0/0"}


def test_a_log_that_is_to_begin_anew_takes_no_state_along(bucket: Bucket) -> None:
    folder = bucket.spark(1, 10)
    bucket.fence(1)
    bucket.decide(folder.decision(1, 5))
    bucket.job_dir.create_rewind(RewindIntent(BatchId(6), Lineage(1), "rescale", {}, RewindKind.RESEED, ONE))
    log = bucket.fence(2)
    assert log.batches("offsets") == frozenset()
    log.retire(Lineage(1))
    assert not bucket.below("spark/2") and bucket.below("spark/1")


def test_state_that_is_gone_keeps_nobody_from_going_back_further(bucket: Bucket, caplog: Any) -> None:
    folder = bucket.spark(1, 10)
    bucket.fence(1)
    bucket.decide(folder.decision(1, 5))
    bucket.store.delete("spark/1/state/0/0/6_a6p0.changelog")
    bucket.fence(2)
    assert "the job cannot go on from checkpoint" in caplog.text
    assert set(bucket.below("spark/2")) == {"metadata", "sources/0/0"}


class CutOff(Exception):
    """The process died."""


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Let a process die in front of its n-th write into the bucket; n is the list's only element."""
    left = [1 << 30]
    for name in ("put", "copy", "put_new"):
        original = getattr(ObjectStore, name)

        def write(self: Any, *given: Any, original: Any = original) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise CutOff
            return original(self, *given)

        monkeypatch.setattr(ObjectStore, name, write)
    yield left


def test_a_fence_that_is_cut_off_at_any_object_is_done_by_the_next_owner(
    bucket: Bucket, dying: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # One after the other, so that "the n-th" means something.
    monkeypatch.setattr(retention, "_AT_ONCE", 1)
    folder = bucket.spark(1, 10)
    bucket.fence(1)
    bucket.decide(folder.decision(1, 5))
    cut_off = 0
    for epoch in range(2, 60):
        dying[0] = cut_off
        with suppress(CutOff):
            bucket.fence(epoch)
            break
        # It has written as far as it came, and its JVM, if there was one, goes on.
        cut_off += 1
    dying[0] = 1 << 30
    assert cut_off > 10
    found = set(bucket.below(f"spark/{epoch}"))
    assert {f"state/{name}" for name in NEEDED} | {"metadata", "offsets/5", "commits/5"} <= found
    assert bucket.fence(epoch + 1).batches("commits") == {BatchId(5)}
    before = BucketLog.find_newest_complete(bucket.store, OwnerEpoch(epoch))
    assert before == OwnerEpoch(1), "what was begun and not finished counts for nobody"


def test_a_jvm_that_outlived_its_driver_writes_where_nobody_reads(bucket: Bucket) -> None:
    folder = bucket.spark(1, 7)
    bucket.fence(1)
    bucket.decide(folder.decision(1, 5))
    log = bucket.fence(2)
    mine = bucket.below("spark/2")
    for batch in (7, 8):
        folder.run(batch, "z")
    bucket.upload(folder, 1)
    assert bucket.below("spark/2") == mine and log.batches("offsets") == {BatchId(4), BatchId(5)}
    bucket.fence(3)
    assert {k: v for k, v in bucket.below("spark/3").items()} == mine


def test_tasks_keep_no_files_of_their_own_beside_a_log_in_a_bucket(bucket: Bucket) -> None:
    """A path of such a place would be one on the host's disk."""
    log = bucket.log(1)
    log.restore("offsets", BatchId(0), 'v1\n{"batchTimestampMs":7}\n{}')
    assert micro_batch_in(log, BatchId(0)).bases is None


# -- replays ------------------------------------------------------------------------------------------


def test_a_replay_begins_beside_the_log_and_leaves_nothing(bucket: Bucket) -> None:
    bucket.spark(2, 3)
    log = bucket.log(2)
    bucket.store.put("replay/1-4/offsets/0", b"of an earlier owner")
    bucket.store.put("replay/3-4/offsets/0", b"of a later one")
    begun = log.begin_replay(ONE)
    assert begun.folder == "replay/2-1" and begun.location == "s3a://bucket/replay/2-1"
    assert set(bucket.below("replay/2-1")) == {"metadata", "sources/0/0"}
    assert not bucket.below("replay/1-4") and bucket.below("replay/3-4")
    log.end_replay()
    assert not bucket.below("replay/2-1") and bucket.below("replay/3-4")


def test_the_folder_that_spark_is_told_is_a_url_of_hadoops() -> None:
    place, store = StoreSpec.parse("s3://bucket/jobs/orders"), StoreSpec.parse("memory://any").open()
    assert log_of(store, place, OwnerEpoch(3)).location == "s3a://bucket/jobs/orders/spark/3"


# -- who lives ----------------------------------------------------------------------------------------


class Threads:
    """Starts nothing: beats are made by hand."""

    def start(self, name: str, target: Any) -> Any:
        return self

    def join(self) -> None:
        pass


def lease(bucket: Bucket, **given: Any) -> BeatLease:
    return BeatLease(
        bucket.job_dir, bucket.place.url, bucket.clock, Threads(), **{"lease_ms": 60_000, **given}
    )  # type: ignore[arg-type]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners are processes of another machine."""
    monkeypatch.setattr(ownership_module, "process_key", lambda pid: None)


def test_a_directory_without_an_owner_is_free(bucket: Bucket) -> None:
    lease(bucket).acquire()


def test_an_owner_that_has_ended_says_so(bucket: Bucket, elsewhere: None) -> None:
    first = lease(bucket)
    first.on_taken_over(take_over(bucket.job_dir, bucket.clock).epoch)
    first.release()
    first.release()
    lease(bucket).acquire()


def test_an_owner_that_beats_is_alive_whatever_its_clock_says(bucket: Bucket, elsewhere: None) -> None:
    epoch = take_over(bucket.job_dir, bucket.clock).epoch
    newcomer = lease(bucket)
    with pytest.raises(LivenessUnknown, match="not known yet"):
        newcomer.acquire()
    bucket.job_dir.note_owner(epoch, "beat", "17")
    bucket.clock.now_ms += 1_000
    with pytest.raises(OwnedElsewhereError, match="which is alive") as refused:
        newcomer.acquire()
    assert not isinstance(refused.value, LivenessUnknown)


def test_an_owner_of_which_nothing_is_heard_counts_as_dead(bucket: Bucket, elsewhere: None) -> None:
    epoch = take_over(bucket.job_dir, bucket.clock).epoch
    bucket.job_dir.note_owner(epoch, "beat", "17")
    newcomer, asked = lease(bucket, lease_ms=60_000), bucket.store.requests["read"]
    waited = 0
    while True:
        try:
            newcomer.acquire()
            break
        except LivenessUnknown:
            waited += 200
            bucket.clock.now_ms += 200
    assert 60_000 <= waited <= 61_200
    assert bucket.store.requests["read"] - asked < 250, "a standby asks once a second"
    assert take_over(bucket.job_dir, bucket.clock).epoch == OwnerEpoch(2)
    with pytest.raises(FencedError):
        Ownership(bucket.job_dir, epoch).check()


def test_a_start_waits_until_it_is_known_who_lives_and_may_be_told_to_end(
    bucket: Bucket, elsewhere: None
) -> None:
    take_over(bucket.job_dir, bucket.clock)
    settings: Any = SimpleNamespace(standby=Standby.REFUSE, standby_poll_ms=200, clock=bucket.clock)
    told = Event()
    assert wait_for_lock(lease(bucket), settings, told) is LockWait.TAKEN
    assert bucket.clock.now_ms >= 60_000
    told.set()
    assert wait_for_lock(lease(bucket), settings, told) is LockWait.GIVEN_UP


def test_what_a_crash_left_of_a_deletion_is_not_sealed(bucket: Bucket) -> None:
    """An ABORT there would contradict the sinks that got nothing since: they hold that checkpoint."""
    folder = bucket.spark(1, 6)
    for number in (1, 2):
        bucket.decide(folder.decision(number, 3 + number))
    bucket.job_dir.store.delete("checkpoints/1/decision.json")
    take_over(bucket.job_dir, bucket.clock)
    assert bucket.job_dir.decision(ONE) is None and bucket.job_dir.receipt(ONE) is not None


def test_a_process_of_this_machine_that_is_gone_is_not_waited_for(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_over(bucket.job_dir, bucket.clock)
    with pytest.raises(LivenessUnknown):
        lease(bucket).acquire()
    key = ownership_module.process_key(1)
    record = bucket.job_dir.owner(OwnerEpoch(1))
    assert key is not None and record is not None
    machine = record["process"].rsplit("/", 2)[0]
    for ended, process in (
        (True, f"{machine}/4194304/1"),
        (True, f"{machine}/1/0"),
        (False, f"x/{machine}/1"),
    ):
        assert ownership_module.has_ended(process) is ended
    for unreadable in (None, 5, "", "a/b", "a/b/c/d"):
        assert not ownership_module.has_ended(unreadable)
    monkeypatch.setattr(ownership_module, "has_ended", lambda process: True)
    lease(bucket).acquire()


def test_a_process_that_proc_hides_may_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """A /proc with `hidepid` shows nobody the processes of other users."""
    seen = ownership_module.process_key
    key = seen(1)
    assert key is not None
    monkeypatch.setattr(
        ownership_module, "process_key", lambda pid: seen(pid) if pid == os.getpid() else None
    )
    assert not ownership_module.has_ended(key)
    assert ownership_module.has_ended(key.rsplit("/", 2)[0] + "/4194304/1")


def test_a_beat_that_the_bucket_refuses_ends_nobody(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def refuse(self: Any, key: str, data: bytes) -> None:
        raise StoreError("no route to the bucket")

    owner = lease(bucket)
    owner.on_taken_over(OwnerEpoch(1))
    monkeypatch.setattr(ObjectStore, "put", refuse)
    owner._stopping.set()
    owner._beat(OwnerEpoch(1), owner._stopping)
    owner.release()
    assert caplog.text.count("no route to the bucket") == 2
