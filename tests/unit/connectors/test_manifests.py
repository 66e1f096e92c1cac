"""A manifest in a topic, with a broker that is a list: who writes the record of a checkpoint, and once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flinkish_spark import KafkaManifest
from flinkish_spark.connectors.kafka.client.transactions import Evidence, KafkaCommittable
from flinkish_spark.contracts.manifest import ManifestContext
from flinkish_spark.core.store import LocalStore
from flinkish_spark.protocol.decisions import ManifestRecord
from flinkish_spark.protocol.ids import BatchId, CheckpointId, CheckpointPurpose, JobUuid, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import CommitAnswer, Outcome


class Topic:
    """Transactions by the offset of their evidence."""

    def __init__(self) -> None:
        self.records: list[int] = []
        self.state: list[str] = []
        self.visible: list[int] = []
        self.has_evidence = True

    def stage(self, checkpoint: int) -> KafkaCommittable:
        self.records.append(checkpoint)
        self.state.append("open")
        return KafkaCommittable("id", 7, 0, Evidence("topic", 0, len(self.records) - 1), 1)

    def commit(self, handle: KafkaCommittable) -> CommitAnswer:
        at = handle.evidence.offset
        if not self.has_evidence:
            return CommitAnswer(Outcome.LOST, "nobody knows")
        if self.state[at] == "aborted":
            return CommitAnswer(Outcome.LOST, "aborted", is_proven_aborted=True)
        if self.state[at] == "open":
            self.visible.append(self.records[at])
            self.state[at] = "committed"
        return CommitAnswer(Outcome.COMMITTED)

    def abort(self, handle: KafkaCommittable) -> CommitAnswer:
        at = handle.evidence.offset
        if self.state[at] == "committed":
            return CommitAnswer(Outcome.FENCED, "it is committed")
        self.state[at] = "aborted"
        return CommitAnswer(Outcome.COMMITTED)


def record(checkpoint: int) -> ManifestRecord:
    batch = BatchId(checkpoint)
    plain = CheckpointPurpose.PERIODIC
    return ManifestRecord(CheckpointId(checkpoint), Lineage(0), batch, batch, 0, plain, {}, {})


def owner(tmp_path, topic, epoch, monkeypatch, before_create=lambda: None):
    store = LocalStore(tmp_path)
    store.create_if_absent(f"owners/{epoch}.json", b"{}")
    job = JobUuid("a" * 32)
    context = ManifestContext(job, OwnerEpoch(epoch), "a job", store)
    writer = KafkaManifest("broker:9092", "topic").create_writer(None, context)

    def stage(record):
        handle = topic.stage(int(record.checkpoint))
        before_create()
        return handle

    monkeypatch.setattr(writer, "_client", topic)
    monkeypatch.setattr(writer, "_marks", SimpleNamespace(newest=lambda: None, leave=lambda mark: None))
    monkeypatch.setattr(writer, "_stage", stage)
    return writer


def test_a_record_is_written_once_by_all_owners(tmp_path, monkeypatch) -> None:
    topic = Topic()
    for epoch, checkpoint in [(1, 4), (1, 4), (2, 4), (2, 5)]:
        assert owner(tmp_path, topic, epoch, monkeypatch).write(record(checkpoint)).outcome.is_done
    assert topic.visible == [4, 5]


def test_an_owner_that_wakes_up_behind_a_newer_one_writes_nothing(tmp_path, monkeypatch) -> None:
    """The newer one has forgotten what it staged for the checkpoint: the next one is confirmed."""
    topic = Topic()

    def newer():
        writer = owner(tmp_path, topic, 2, monkeypatch)
        assert [writer.write(record(n)).outcome for n in (4, 5)] == [Outcome.COMMITTED] * 2

    zombie = owner(tmp_path, topic, 1, monkeypatch, before_create=newer)
    assert zombie.write(record(4)).outcome is Outcome.FENCED
    assert topic.visible == [4, 5]
    assert topic.state == ["aborted", "committed", "committed"]


def test_of_two_owners_at_the_same_time_one_stages_the_record(tmp_path, monkeypatch) -> None:
    topic = Topic()

    def newer():
        assert owner(tmp_path, topic, 2, monkeypatch).write(record(4)).outcome is Outcome.COMMITTED

    zombie = owner(tmp_path, topic, 1, monkeypatch, before_create=newer)
    assert zombie.write(record(4)).outcome is Outcome.RETRY
    assert topic.visible == [4]


@pytest.mark.parametrize("is_proven, visible", [(True, [4]), (False, [])])
def test_a_record_that_may_have_been_visible_is_not_written_again(
    tmp_path, monkeypatch, caplog, is_proven, visible
) -> None:
    topic = Topic()
    writer = owner(tmp_path, topic, 1, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(topic, "commit", lambda handle: CommitAnswer(Outcome.RETRY, "nobody answers"))
        assert writer.write(record(4)).outcome is Outcome.RETRY
    topic.state, topic.has_evidence = ["aborted"], is_proven
    assert writer.write(record(4)).outcome.is_done
    assert topic.visible == visible
    assert ("may lack a record" in caplog.text) is not is_proven
