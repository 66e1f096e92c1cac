import hashlib
import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from flinkish_spark.checkpoint.ownership import JobLock, seal_open_ids, take_over
from flinkish_spark.checkpoint.spark_log import SparkLog, fence_spark_folder
from flinkish_spark.core.errors import (
    CorruptObjectError,
    FencedError,
    JobDirError,
    OwnedElsewhereError,
    StoreError,
)
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.store import CreateResult, LocalStore, ObjectMissing
from flinkish_spark.protocol.decisions import Decision, Receipt, RewindIntent, TriggerRecord, Verdict
from flinkish_spark.protocol.envelope import NewerFormatError, seal, unseal
from flinkish_spark.protocol.ids import BatchId, CheckpointId, CheckpointPurpose, Lineage, OwnerEpoch
from flinkish_spark.protocol.lineage import RewindKind, Tables
from flinkish_spark.protocol.records import Barrier, Committable, Outcome, SinkAck, StagedBatch, TaskAck
from tests.support.clocks import ManualClock

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


def trigger(number: int, owner_epoch: int = 1) -> TriggerRecord:
    return TriggerRecord(CheckpointId(number), OwnerEpoch(owner_epoch), CheckpointPurpose.PERIODIC, 7)


def commit(number: int, owner_epoch: OwnerEpoch) -> Decision:
    return Decision(CheckpointId(number), Verdict.COMMIT, owner_epoch, 0, batches=(STAGED,))


@pytest.mark.parametrize(
    "value",
    [
        STAGED,
        DECISION,
        Decision(CheckpointId(2), Verdict.ABORT, OwnerEpoch(1), 5, "expired"),
        replace(
            DECISION,
            purpose=CheckpointPurpose.FINAL_SAVEPOINT,
            triggered_at_ms=4,
            finished=("orders",),
            hook_states={"catalog": {"version": 3}, "empty": None},
        ),
        TriggerRecord(CheckpointId(3), OwnerEpoch(2), CheckpointPurpose.SAVEPOINT, 9),
        Receipt(CheckpointId(1), OwnerEpoch(1), 5, {"kafka": ["COMMITTED"]}, {"g": {"t": {"0": 7}}}),
        RewindIntent(BatchId(3), Lineage(1), "dead", {"commits/3": "v1\n{}"}),
        RewindIntent(
            BatchId(0), Lineage(2), "", {}, RewindKind.PLAIN, CheckpointId(1), Tables.RESTORE, "order-1"
        ),
    ],
)
def test_records_survive_their_stored_form(value):
    stored = json.loads(json.dumps(value.to_json()))
    assert type(value).from_json(stored) == value


def test_a_decision_knows_its_batch_and_what_each_sink_staged_in_batch_order():
    later = replace(STAGED, batch=BatchId(4), committables=(Committable("delta", {}), *STAGED.committables))
    decision = replace(DECISION, batches=(STAGED, later))
    assert decision.batch == BatchId(4)
    assert [int(batch.batch) for batch, _ in decision.group_by_sink()["kafka"]] == [3, 4]
    assert decision.group_by_sink()["delta"] == [(later, Committable("delta", {}))]
    assert decision.group_by_sink().keys() == {"kafka", "delta"}
    assert (STAGED.checkpoints, STAGED.acks[0].rows) == ({CheckpointId(1)}, 5)
    assert STAGED.acks[0].digest == 2**64 - 9


def test_an_intent_says_what_the_history_will_say():
    intent = RewindIntent(BatchId(3), Lineage(2), "", {}, RewindKind.PLAIN, CheckpointId(1))
    past = intent.to_finished_rewind()
    assert (past.lineage, past.kind, past.target) == (Lineage(2), RewindKind.PLAIN, CheckpointId(1))


def test_outcomes_that_need_no_further_call():
    assert {outcome for outcome in Outcome if outcome.is_done} == {
        Outcome.COMMITTED,
        Outcome.ALREADY_COMMITTED,
    }


def test_a_commit_without_a_batch_is_refused():
    with pytest.raises(ValueError, match="COMMIT without a batch"):
        Decision.from_json({**DECISION.to_json(), "batches": []})


def test_an_envelope_shows_every_kind_of_damage():
    data = seal("receipt", {"a": 1})
    assert unseal("receipt", data) == {"a": 1}
    damage = "not a sealed receipt|expected a receipt|checksum of this receipt|written in format"
    for at in range(0, len(data), 7):
        torn = data[:at]
        with pytest.raises(ValueError, match=damage):
            unseal("receipt", torn)
        flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(ValueError, match=damage):
            unseal("receipt", flipped)
    with pytest.raises(ValueError, match="expected a decision"):
        unseal("decision", data)
    with pytest.raises(NewerFormatError):
        unseal("receipt", data.replace(b'"format": 1', b'"format": 2'))
    with pytest.raises(ValueError):
        seal("receipt", {"a": float("nan")})
    # Well sealed, and still no object.
    digest = hashlib.sha256(b"receipt\n1\n[]").hexdigest()
    head = json.dumps({"kind": "receipt", "format": 1, "sha256": digest})
    with pytest.raises(ValueError, match="is not an object"):
        unseal("receipt", f"{head}\n[]\n".encode())


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
    uuid, _ = job_dir.read_or_create_job({"job": "orders", "max_parallelism": 128})
    assert job_dir.read_or_create_job({"job": "orders", "max_parallelism": 128})[0] == uuid
    with pytest.raises(JobDirError, match=r"written with max_parallelism = 128, and this job has 64"):
        job_dir.read_or_create_job({"job": "orders", "max_parallelism": 64})


def test_each_version_of_spark_is_recorded_once_beside_that_of_the_first_start(tmp_path):
    job_dir = JobDir(LocalStore(tmp_path))
    assert job_dir.spark_versions() == ()
    job_dir.read_or_create_job({}, {"spark": "4.2.0"})
    before = (tmp_path / "job.json").read_bytes()
    for version in ("4.2.0", "4.2.1", "4.3.0", "4.2.1", "4.3.0 (of a/vendor)"):
        job_dir.record_spark(version)
    assert sorted(job_dir.spark_versions()) == ["4.2.0", "4.2.1", "4.3.0", "4.3.0 (of a/vendor)"]
    assert (tmp_path / "job.json").read_bytes() == before
    assert len(list((tmp_path / "spark-versions").iterdir())) == 3


def test_a_newer_format_and_a_torn_file_are_told_apart(tmp_path):
    """Behaviour 72: corrupt newest is an error, never a silent older restore."""
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
    """Behaviour 72."""
    job_dir = JobDir(LocalStore(tmp_path))
    for number in (2, 10, 9, 1):
        job_dir.create_decision(Decision(CheckpointId(number), Verdict.ABORT, OwnerEpoch(1), 0))
    assert [int(c) for c in job_dir.list_checkpoint_ids()] == [1, 2, 9, 10]
    assert job_dir.newest_commit() is None


def test_an_id_is_taken_once(tmp_path):
    """Behaviour 78: of many who want it one gets it."""
    job_dir, results = JobDir(LocalStore(tmp_path)), []
    barrier = threading.Barrier(8)

    def take(epoch):
        barrier.wait()
        results.append(job_dir.create_trigger(trigger(5, epoch)))

    threads = [threading.Thread(target=take, args=(n,)) for n in range(1, 9)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert results.count(CreateResult.CREATED) == 1
    assert [int(c) for c in job_dir.list_checkpoint_ids()] == [5]


def test_a_takeover_seals_the_ids_that_a_zombie_may_decide(tmp_path):
    """Behaviour 11: a pending id of an earlier owner is never used for anything else."""
    job_dir = JobDir(LocalStore(tmp_path))
    first = take_over(job_dir, ManualClock())
    assert (first.epoch, job_dir.list_checkpoint_ids()) == (OwnerEpoch(1), ())
    first.check()
    for number in (2, 3, 10):
        job_dir.create_trigger(trigger(number))
    job_dir.create_decision(commit(3, first.epoch))
    second = take_over(job_dir, ManualClock())
    # The zombie had triggered 2 and 10 and now tries to decide them.
    assert job_dir.create_decision(commit(2, first.epoch)) is CreateResult.EXISTS
    assert job_dir.create_decision(commit(10, first.epoch)) is CreateResult.EXISTS
    assert job_dir.decision(CheckpointId(10)).reason == "sealed by owner 2 when it took the job over"
    with pytest.raises(FencedError, match="owner 2 has taken this job over from owner 1"):
        first.check()
    second.check()


def test_a_zombie_that_decided_first_keeps_its_decision(tmp_path):
    job_dir = JobDir(LocalStore(tmp_path))
    first = take_over(job_dir, ManualClock())
    job_dir.create_trigger(trigger(2))
    job_dir.create_decision(commit(2, first.epoch))
    second = take_over(job_dir, ManualClock())
    assert job_dir.newest_commit().checkpoint == CheckpointId(2)
    assert seal_open_ids(second, ManualClock()) == ()


def test_a_zombie_that_decides_while_the_ids_are_sealed_keeps_its_decision(tmp_path):
    """Whoever creates the decision first has made it; the other one is told so."""

    class Slow(JobDir):
        def create_decision(self, decision):
            if decision.verdict is Verdict.ABORT and decision.checkpoint == CheckpointId(2):
                super().create_decision(commit(2, OwnerEpoch(1)))
            return super().create_decision(decision)

    job_dir = Slow(LocalStore(tmp_path))
    first = take_over(job_dir, ManualClock())
    for number in (2, 4):
        job_dir.create_trigger(trigger(number))
    assert seal_open_ids(first, ManualClock()) == (CheckpointId(4),)
    assert job_dir.decision(CheckpointId(2)).verdict is Verdict.COMMIT


def test_of_two_newcomers_one_becomes_the_owner(tmp_path):
    class Late(JobDir):
        """Sees no owner of before."""

        def newest_owner(self):
            return OwnerEpoch(0)

    store = LocalStore(tmp_path)
    take_over(JobDir(store), ManualClock())
    with pytest.raises(OwnedElsewhereError, match="became owner 1"):
        take_over(Late(store), ManualClock())


def test_a_lock_that_cannot_be_made_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot lock the job directory"):
        JobLock(tmp_path / "file" / "owner.lock").acquire()


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


def test_what_is_no_file_is_not_read_and_keeps_nobody_waiting(tmp_path):
    store = LocalStore(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("fifo", "folder", "device"):
        with pytest.raises(StoreError, match=f"cannot read {name}"):
            store.read(name)


def test_offsets_are_found_by_topic():
    text = 'v1\n{"batchWatermarkMs":0}\n{"flinkish:checkpoint":3}\n{"orders":{"0":5,"1":7}}\n-'
    offsets = LoggedOffsets.parse(text)
    assert offsets.kafka(frozenset({"orders"})) == {"orders": {0: 5, 1: 7}}
    assert offsets.kafka(frozenset({"other"})) == {}
    twice = LoggedOffsets.parse(text + '\n{"orders":{"0":6,"1":2}}')
    assert twice.kafka(frozenset({"orders"})) == {"orders": {0: 5, 1: 2}}
    with pytest.raises(CorruptObjectError):
        LoggedOffsets.parse("v9\n{}\n{}")


def test_partitions_that_were_added_since_are_read_from_their_first_record():
    begin = LoggedOffsets(({"flinkish:checkpoint": 3}, {"orders": {"0": 5}}))
    end = LoggedOffsets(({"flinkish:checkpoint": 4}, {"orders": {"0": 9, "1": 7}, "other": {"0": 2}}))
    assert begin.add_partitions(end).kafka(frozenset({"orders"})) == {"orders": {0: 5, 1: 0}}
    assert begin.add_partitions(end).kafka(frozenset({"other"})) == {}
    assert begin.add_partitions(begin) == begin


def test_a_log_that_began_anew_began_where_its_seed_says(tmp_path):
    """What a Python source recorded for an older log is as old as that."""
    store = LocalStore(tmp_path)
    log = SparkLog(store, "spark/1", tmp_path / "spark/1")

    def recorded(folder, name, offsets):
        store.put(f"{folder}/first-offsets/{name}.json", seal("first-offsets", {"offsets": offsets}))

    recorded("control", "aaaa", {"orders": {"0": 0}})
    recorded("control", "bbbb", {"rates": {"0": 1}})
    recorded("seeds/3/begin/orders-1234", "aaaa", {"orders": {"0": 50}})
    recorded("seeds/3/begin/orders-5678", "aaaa", {"orders": {"0": 40}})
    topics = frozenset({"orders", "rates"})
    assert log.find_first_offsets().kafka(topics) == {"orders": {0: 0}, "rates": {0: 1}}
    assert log.find_first_offsets(Lineage(3)).kafka(topics) == {"orders": {0: 40}, "rates": {0: 1}}


def test_a_finished_rewind_starts_a_lineage(tmp_path):
    job_dir = JobDir(LocalStore(tmp_path))
    assert job_dir.lineage() == Lineage(0)
    intent = RewindIntent(BatchId(3), Lineage(1), "dead", {})
    job_dir.create_rewind(intent)
    assert job_dir.open_rewind() == intent
    job_dir.close_rewind(intent)
    assert job_dir.open_rewind() is None
    assert job_dir.lineage() == Lineage(1)


WHOLE = {
    "metadata": '{"id":"0f2e"}',
    "offsets/7": 'v1\n{"batchTimestampMs":1}\n{"orders":{"0":17}}',
    "offsets/8": 'v1\n{"batchTimestampMs":2}\n{"orders":{"0":34}}\n-',
    "commits/7": 'v1\n{"nextBatchWatermarkMs":0}',
    "commits/8": 'v2\n{"nextBatchWatermarkMs":0,"stateUniqueIds":{}}',
}


def log_of(folder: Path, entries: dict[str, str]) -> SparkLog:
    for name, text in entries.items():
        file = folder / "spark/1" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return SparkLog(LocalStore(folder), "spark/1", folder / "spark/1")


def test_a_whole_log_of_sparks_and_an_empty_one_are_fine(tmp_path: Path) -> None:
    log_of(tmp_path / "whole", WHOLE).check()
    log_of(tmp_path / "empty", {}).check()


@pytest.mark.parametrize("name", list(WHOLE))
@pytest.mark.parametrize("left", [0, 4, -3])
def test_an_entry_of_sparks_log_that_is_cut_off_is_named(tmp_path: Path, name: str, left: int) -> None:
    cut = WHOLE[name].removesuffix("\n-")[:left]
    with pytest.raises(CorruptObjectError, match=f"{tmp_path}/spark/1/{name} of Spark's own log is cut off"):
        log_of(tmp_path, WHOLE | {name: cut}).check()


def test_older_entries_of_sparks_log_are_not_read_when_it_starts(tmp_path: Path) -> None:
    log_of(tmp_path, WHOLE | {"offsets/6": "v1", "commits/6": ""}).check()


@pytest.mark.parametrize("text", ["v1\n{", 'v1\n{}\n{"orders"'])
def test_offsets_that_are_cut_off_are_a_damaged_object(text: str) -> None:
    with pytest.raises(CorruptObjectError, match="is cut off or was changed"):
        LoggedOffsets.parse(text)
