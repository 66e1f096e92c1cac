import json
import threading

import pytest

from flinkish_spark.errors import (
    CorruptObjectError,
    FencedError,
    JobDirError,
    OwnedElsewhereError,
    StoreError,
)
from flinkish_spark.job_dir import JobDir
from flinkish_spark.protocol.decisions import Decision, Receipt, RewindIntent, Verdict
from flinkish_spark.protocol.envelope import EnvelopeError, NewerFormatError, seal, unseal
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import Barrier, Committable, SinkAck, StagedBatch, TaskAck
from flinkish_spark.runtime.ownership import JobLock, seal_next_checkpoint, take_over
from flinkish_spark.runtime.spark_log import LoggedOffsets, SparkLog, fence_spark_folder
from flinkish_spark.store import CreateResult, LocalStore, ObjectMissing


class Clock:
    def monotonic_ms(self):
        return 0

    def wall_ms(self):
        return 1_700_000_000_000

    def sleep_ms(self, duration_ms):
        pass


STAGED = StagedBatch(
    Lineage(0),
    BatchId(3),
    OwnerEpoch(1),
    2,
    (SinkAck("kafka", (TaskAck(0, 5, -9, (Barrier(CheckpointId(1), 0),), 1, 2),)),),
    (Committable("kafka", {"transactional_id": "x", "producer_id": 2**40}),),
    (4,),
)
DECISION = Decision(
    CheckpointId(1), Verdict.COMMIT, OwnerEpoch(1), 5, "", Lineage(0), (STAGED,), "v1", "v2", ("a",)
)


@pytest.mark.parametrize(
    "value",
    [
        STAGED,
        DECISION,
        Decision(CheckpointId(2), Verdict.ABORT, OwnerEpoch(1), 5, "expired"),
        Receipt(CheckpointId(1), OwnerEpoch(1), 5, {"kafka": ["COMMITTED"]}, {"g": {"t": {"0": 7}}}),
        RewindIntent(BatchId(3), Lineage(1), "dead", {"commits/3": "v1\n{}"}),
    ],
)
def test_records_survive_their_stored_form(value):
    stored = json.loads(json.dumps(value.to_json()))
    assert type(value).from_json(stored) == value


def test_a_commit_without_a_batch_is_refused():
    with pytest.raises(ValueError, match="COMMIT without a batch"):
        Decision.from_json({**DECISION.to_json(), "batches": []})


def test_an_envelope_shows_every_kind_of_damage():
    data = seal("receipt", {"a": 1})
    assert unseal("receipt", data) == {"a": 1}
    for at in range(0, len(data), 7):
        torn = data[:at]
        with pytest.raises(EnvelopeError):
            unseal("receipt", torn)
        flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(EnvelopeError):
            unseal("receipt", flipped)
    with pytest.raises(EnvelopeError, match="expected a decision"):
        unseal("decision", data)
    with pytest.raises(NewerFormatError):
        unseal("receipt", data.replace(b'"format": 1', b'"format": 2'))
    with pytest.raises(ValueError):
        seal("receipt", {"a": float("nan")})


def test_of_many_creators_exactly_one_wins(tmp_path):
    store, results = LocalStore(tmp_path), []
    barrier = threading.Barrier(8)

    def create(n):
        barrier.wait()
        results.append(store.create_if_absent("a/b/decision.json", b"%d" % n))

    threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert results.count(CreateResult.CREATED) == 1
    assert store.list("a/b") == ("a/b/decision.json",)


def test_the_store_keeps_its_promises(tmp_path):
    store = LocalStore(tmp_path)
    assert store.list("none") == ()
    with pytest.raises(ObjectMissing):
        store.read("none")
    store.put("x/1", b"a")
    store.put("x/1", b"b")
    assert store.read("x/1") == b"b"
    store.delete("x/1")
    store.delete("x/1")
    assert store.list("x") == ()
    for key in ("/etc/passwd", "../x", "a/../../b", ""):
        with pytest.raises(ValueError):
            store.put(key, b"")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write file/x"):
        store.put("file/x", b"")
    with pytest.raises(ValueError):
        LocalStore(type(tmp_path)("relative"))


def test_job_settings_must_stay_the_same(tmp_path):
    job_dir = JobDir(LocalStore(tmp_path))
    uuid, _ = job_dir.read_or_create_job({"job": "orders", "spark": "4.2.0"})
    assert job_dir.read_or_create_job({"job": "orders", "spark": "4.2.0"})[0] == uuid
    with pytest.raises(JobDirError, match=r"written with spark = '4\.2\.0', and this job has '4\.3\.0'"):
        job_dir.read_or_create_job({"job": "orders", "spark": "4.3.0"})


def test_a_newer_format_and_a_torn_file_are_told_apart(tmp_path):
    job_dir = JobDir(LocalStore(tmp_path))
    job_dir.create_decision(DECISION)
    path = tmp_path / "checkpoints/1/decision.json"
    good = path.read_bytes()
    path.write_bytes(good.replace(b'"format": 1', b'"format": 99'))
    with pytest.raises(JobDirError, match="format 99"):
        job_dir.decision(CheckpointId(1))
    path.write_bytes(good[:-20])
    with pytest.raises(CorruptObjectError, match="never used silently"):
        job_dir.newest_commit()


def test_ids_are_ordered_by_number_not_by_name(tmp_path):
    job_dir = JobDir(LocalStore(tmp_path))
    for number in (2, 10, 9, 1):
        job_dir.create_decision(Decision(CheckpointId(number), Verdict.ABORT, OwnerEpoch(1), 0))
    assert [int(c) for c in job_dir.decided_ids()] == [1, 2, 9, 10]
    assert job_dir.newest_commit() is None


def test_a_takeover_seals_the_id_that_a_zombie_may_decide(tmp_path):
    job_dir = JobDir(LocalStore(tmp_path))
    first = take_over(job_dir, Clock())
    assert (first.epoch, job_dir.decided_ids()) == (OwnerEpoch(1), (CheckpointId(1),))
    first.check()
    second = take_over(job_dir, Clock())
    # The zombie had triggered 2 and now tries to decide it.
    decision = Decision(CheckpointId(2), Verdict.COMMIT, first.epoch, 0, batches=(STAGED,))
    assert job_dir.create_decision(decision) is CreateResult.EXISTS
    with pytest.raises(FencedError, match="owner 2 has taken this job over from owner 1"):
        first.check()
    second.check()


def test_a_zombie_that_decided_first_keeps_its_decision(tmp_path):
    job_dir = JobDir(LocalStore(tmp_path))
    first = take_over(job_dir, Clock())
    job_dir.create_decision(Decision(CheckpointId(2), Verdict.COMMIT, first.epoch, 0, batches=(STAGED,)))
    second = take_over(job_dir, Clock())
    assert job_dir.newest_commit().checkpoint == CheckpointId(2)
    assert job_dir.decision(CheckpointId(3)).verdict is Verdict.ABORT
    assert seal_next_checkpoint(second, Clock()) == CheckpointId(4)


def test_the_lock_is_refused_while_held_and_free_afterwards(tmp_path):
    one, other = JobLock(tmp_path / "owner.lock"), JobLock(tmp_path / "owner.lock")
    one.acquire()
    with pytest.raises(OwnedElsewhereError, match="which is alive"):
        other.acquire()
    one.release()
    one.release()
    other.acquire()
    other.release()


def test_spark_folder_moves_with_the_owner(tmp_path):
    assert fence_spark_folder(tmp_path, OwnerEpoch(1)) == "spark/1"
    (tmp_path / "spark/1/commits").mkdir()
    (tmp_path / "spark/1/commits/0").write_text("v1")
    assert fence_spark_folder(tmp_path, OwnerEpoch(3)) == "spark/3"
    # A JVM of owner 1 writes on: to a folder that nobody reads.
    (tmp_path / "spark/1/commits").mkdir(parents=True)
    (tmp_path / "spark/1/commits/1").write_text("v1")
    assert fence_spark_folder(tmp_path, OwnerEpoch(4)) == "spark/4"
    log = SparkLog(LocalStore(tmp_path), "spark/4", tmp_path / "spark/4")
    assert log.batches("commits") == {BatchId(0)}
    log.remove("commits/0")
    assert log.read("commits", BatchId(0)) is None
    log.restore("commits", BatchId(0), "v1\n{}")
    assert log.read("commits", BatchId(0)) == "v1\n{}"
    with pytest.raises(CorruptObjectError):
        log.remove("../x/1")


def test_offsets_are_found_by_topic():
    text = 'v1\n{"batchWatermarkMs":0}\n{"flinkish:checkpoint":3}\n{"orders":{"0":5,"1":7}}\n-'
    offsets = LoggedOffsets.parse(text)
    assert offsets.kafka(frozenset({"orders"})) == {"orders": {0: 5, 1: 7}}
    assert offsets.kafka(frozenset({"other"})) == {}
    twice = LoggedOffsets.parse(text + '\n{"orders":{"0":6,"1":2}}')
    assert twice.kafka(frozenset({"orders"})) == {"orders": {0: 5, 1: 2}}
    with pytest.raises(CorruptObjectError):
        LoggedOffsets.parse("v9\n{}\n{}")


def test_a_finished_rewind_starts_a_lineage(tmp_path):
    job_dir = JobDir(LocalStore(tmp_path))
    assert job_dir.lineage() == Lineage(0)
    intent = RewindIntent(BatchId(3), Lineage(1), "dead", {})
    job_dir.write_rewind(intent)
    assert job_dir.open_rewind() == intent
    job_dir.close_rewind(intent)
    assert job_dir.open_rewind() is None
    assert job_dir.lineage() == Lineage(1)
