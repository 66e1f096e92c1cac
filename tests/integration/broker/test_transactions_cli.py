"""`flinkish transactions` on a real broker: a job that left transactions of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from kafka import KafkaProducer

from flinkish_spark.connectors.kafka.client.transactions import Evidence, KafkaCommittable
from flinkish_spark.connectors.kafka.writer import KafkaSinkCommittable
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage, OwnerEpoch, TransactionalId
from flinkish_spark.protocol.records import Committable, StagedBatch
from tests.support.cli_rig import JobOnDisk, flinkish, said
from tests.support.jobs import read_committed


class Left:
    """A job directory of owner 2, and what lies open on a broker."""

    def __init__(self, root: Path, servers: str) -> None:
        self.on_disk, self.servers = JobOnDisk(root, owners=2), servers
        self.job_dir: JobDir = self.on_disk.job_dir
        self.producers: list[KafkaProducer] = []

    def open(self, topic: str, block: int, owner: int = 2, job: JobUuid | None = None) -> KafkaCommittable:
        """Write three records and leave the transaction open, as a task does."""
        name = str(TransactionalId(job or self.on_disk.uuid, OwnerEpoch(owner), block, 0, 0))
        producer = KafkaProducer(
            bootstrap_servers=self.servers, transactional_id=name, acks="all", transaction_timeout_ms=60_000
        )
        self.producers.append(producer)
        producer.init_transactions()
        producer.begin_transaction()
        sent = [producer.send(topic, b"%d" % block, partition=0) for _ in range(3)]
        producer.flush()
        grant = producer._transaction_manager.producer_id_and_epoch
        place = Evidence(topic, 0, sent[-1].get(timeout=10).offset)
        return KafkaCommittable(name, grant.producer_id, grant.epoch, place, 3)

    def staged(self, batch: int, *payloads: KafkaSinkCommittable) -> StagedBatch:
        committables = tuple(Committable("out", one.to_payload()) for one in payloads)
        return StagedBatch(Lineage(0), BatchId(batch), OwnerEpoch(2), batch, (), committables)

    def decide(self, checkpoint: int, *batches: StagedBatch) -> None:
        self.job_dir.create_decision(
            Decision(CheckpointId(checkpoint), Verdict.COMMIT, OwnerEpoch(2), 1, batches=batches)
        )

    def run(self, verb: str, *words: object) -> Result:
        where = ("--bootstrap-servers", self.servers)
        return flinkish("transactions", verb, self.on_disk.root, *words, *where)

    def said(self, verb: str, *words: object, status: int = 0) -> Any:
        result = self.run(verb, *words, "--json")
        assert result.exit_code == status, result.output
        return said(result)


@pytest.fixture
def left(broker, tmp_path: Path) -> Iterator[Left]:
    made = Left(tmp_path / "job", broker.bootstrap_servers)
    yield made
    for producer in made.producers:
        producer.close(timeout=1)


def values(left: Left, topic: str) -> list[bytes]:
    return [record.value for record in read_committed(left.servers, topic)]


def test_what_a_job_left_is_listed_committed_and_aborted(left: Left, topic) -> None:
    """Decided, staged, of an older owner, of the newest one; a stranger's of a like name is never touched."""
    out = topic()
    decided, staged, old, newest = (left.open(out, block, owner) for block, owner in
                                    ((11, 2), (12, 2), (13, 1), (14, 2)))  # fmt: skip
    stranger = left.open(out, 15, job=JobUuid("f" * 32))
    left.decide(7, left.staged(3, KafkaSinkCommittable(decided)))
    left.job_dir.write_staged(left.staged(4, KafkaSinkCommittable(staged)))
    names = [one.transactional_id for one in (decided, staged, old, newest)]

    listed = {one["transactional_id"]: one for one in left.said("list")["transactions"]}
    assert listed.keys() == set(names)
    assert [listed[name]["standing"] for name in names] == [
        "DECIDED",
        "STAGED",
        "LEFTOVER",
        "OF_NEWEST_OWNER",
    ]
    one = listed[decided.transactional_id]
    assert (one["state"], one["checkpoint"], one["sink"], one["batch"]) == ("Ongoing", 7, "out", 3)
    assert (one["producer_id"], one["producer_epoch"]) == (decided.producer_id, decided.producer_epoch)
    assert one["timeout_ms"] == 60_000 and 0 <= one["age_ms"] < 60_000
    assert names[0] in left.run("list").stdout

    # Nothing is done by saying what would be done.
    assert [o["outcome"] for o in left.said("commit", "--dry-run")["transactions"]] == [None]
    assert len(left.said("abort", "--dry-run")["transactions"]) == 2 and values(left, out) == []
    # What is not decided is not committed, and what is named is not aborted, whoever asks.
    refused = left.said("commit", *names[1:], "nonsense", "--yes", status=1)
    assert [bool(o["refusal"]) for o in refused["transactions"]] == [True] * 3
    assert refused["unknown"] == ["nonsense"]
    refused = left.said("abort", *names[:2], stranger.transactional_id, "--yes", status=1)
    assert [o["outcome"] for o in refused["transactions"]] == [None, None]
    assert refused["unknown"] == [stranger.transactional_id]

    done = left.said("commit", "--yes")["transactions"]
    assert [(o["transactional_id"], o["outcome"]) for o in done] == [(names[0], "COMMITTED")]
    again = left.said("commit", "--yes")["transactions"]
    assert [o["outcome"] for o in again] == ["COMMITTED"], "as often as one likes, until there is a receipt"
    done = left.said("abort", "--yes")["transactions"]
    assert {(o["transactional_id"], o["outcome"]) for o in done} == {(n, "COMMITTED") for n in names[2:]}
    assert left.said("abort", "--yes")["transactions"] == []
    everything = {o["transactional_id"]: o["state"] for o in left.said("list", "--all")["transactions"]}
    # To abort is to begin a new epoch: the id is empty, or its abort is being finished.
    assert everything[names[0]] == "CompleteCommit" and everything[names[1]] == "Ongoing"
    assert everything[names[2]] != "Ongoing" and len(everything) == 4
    # The stranger's and what is staged still hide what lies behind them; the first is in front of both.
    assert values(left, out)[:3] == [b"11"] * 3
    left.producers[1].abort_transaction()
    left.producers[4].abort_transaction()
    assert values(left, out) == [b"11"] * 3


def test_of_each_sink_nothing_is_committed_behind_what_is_lost(left: Left, topic) -> None:
    out = topic()
    first, second = left.open(out, 21), left.open(out, 22)
    left.decide(7, left.staged(3, KafkaSinkCommittable(first)), left.staged(4, KafkaSinkCommittable(second)))
    left.producers[0].abort_transaction()
    done = left.said("commit", "--yes", status=1)["transactions"]
    assert [(o["outcome"], bool(o["refusal"])) for o in done] == [("LOST", False), (None, True)]
    assert first.transactional_id in done[1]["refusal"]
    left.producers[1].abort_transaction()


def test_barrier_records_of_an_aborted_checkpoint_are_aborted(left: Left, topic) -> None:
    """They passed to the checkpoint that was decided, which must never show them."""
    out = topic()
    data, stale = left.open(out, 31), left.open(out, 32)
    left.decide(7, left.staged(3, KafkaSinkCommittable(data), KafkaSinkCommittable(stale, CheckpointId(6))))
    left.said("commit", "--yes")
    assert values(left, out) == [b"31"] * 3


def test_somebody_is_asked_before_anything_ends(left: Left, topic) -> None:
    out = topic()
    leftover = left.open(out, 41, owner=1)
    where = ("--bootstrap-servers", left.servers)
    result = flinkish("transactions", "abort", left.on_disk.root, *where, answers="n\n")
    assert result.exit_code == 1 and leftover.transactional_id in result.stderr
    assert [o["state"] for o in left.said("list")["transactions"]] == ["Ongoing"]
    result = flinkish("transactions", "abort", left.on_disk.root, *where, answers="y\n")
    assert result.exit_code == 0 and "COMMITTED" in result.stdout
    assert flinkish("transactions", "abort", left.on_disk.root, *where, "--json").exit_code == 0
