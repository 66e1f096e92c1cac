"""`flinkish transactions` without a broker: what the job directory names, and what may be ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from flinkish_spark.checkpoint.ownership import JobLock
from flinkish_spark.cli.client import connection_of
from flinkish_spark.cli.transactions import plan_aborts, plan_commits
from flinkish_spark.connectors.kafka.client.properties import parse_properties
from flinkish_spark.connectors.kafka.job_transactions import (
    UNKNOWN_STATE,
    FoundTransaction,
    NamedTransaction,
    NamedTransactions,
    Standing,
)
from flinkish_spark.core.errors import CorruptObjectError
from flinkish_spark.protocol.decisions import Decision, Receipt, RewindIntent, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage, OwnerEpoch, TransactionalId
from flinkish_spark.protocol.lineage import RewindKind
from flinkish_spark.protocol.records import Committable, StagedBatch
from tests.support.cli_rig import JobOnDisk, flinkish

EVERYTHING: frozenset[str] = frozenset()
NOWHERE = ("--bootstrap-servers", "127.0.0.1:19")


class Transactions:
    """A job directory of owner 2 that names transactions."""

    def __init__(self, root: Path) -> None:
        self.on_disk = JobOnDisk(root, owners=2)
        self.job_dir, self.uuid = self.on_disk.job_dir, self.on_disk.uuid

    def name(self, block: int, owner: int = 2, task: int = 0) -> TransactionalId:
        return TransactionalId(self.uuid, OwnerEpoch(owner), block, task, 0)

    def staged(self, batch: int, *blocks: int, lineage: int = 0, sink: str = "out") -> StagedBatch:
        committables = tuple(
            Committable(sink, {"transactional_id": str(self.name(b)), "producer_id": b, "producer_epoch": 3})
            for b in blocks
        )
        more = (Committable("table", {"path": "/t"}),)
        return StagedBatch(
            Lineage(lineage), BatchId(batch), OwnerEpoch(2), batch, (), (*committables, *more), blocks
        )

    def commit(self, checkpoint: int, *batches: StagedBatch, receipt: bool = False) -> None:
        self.job_dir.create_decision(
            Decision(
                CheckpointId(checkpoint),
                Verdict.COMMIT,
                OwnerEpoch(2),
                1,
                lineage=batches[-1].lineage,
                batches=batches,
            )
        )
        if receipt:
            self.job_dir.create_receipt(Receipt(CheckpointId(checkpoint), OwnerEpoch(2), 2))

    def standing(self, block: int, producer_epoch: int = 3, owner: int = 2) -> str:
        names, name = NamedTransactions.read(self.job_dir), self.name(block, owner)
        return names.standing_of(name, names.find((str(name), block, producer_epoch))).value

    def found(self, block: int, state: str = "Ongoing", epoch: int = 3, owner: int = 2) -> FoundTransaction:
        names, name = NamedTransactions.read(self.job_dir), self.name(block, owner)
        named = names.find((str(name), block, epoch))
        return FoundTransaction(name, state, block, epoch, 1, 2, names.standing_of(name, named), named)


@pytest.fixture
def job(tmp_path: Path) -> Transactions:
    return Transactions(tmp_path / "job")


# -- what the directory says ------------------------------------------------------------------------
def test_each_transaction_has_one_standing(job: Transactions) -> None:
    job.commit(1, job.staged(0, 10), receipt=True)
    job.commit(2, job.staged(1, 11), job.staged(2, 12))
    job.job_dir.write_staged(job.staged(2, 12))
    job.job_dir.write_staged(job.staged(3, 13))
    assert job.standing(10) == "CONFIRMED"
    assert job.standing(11) == job.standing(12) == "DECIDED"
    assert job.standing(13) == "STAGED"
    assert job.standing(14) == "OF_NEWEST_OWNER" and job.standing(14, owner=1) == "LEFTOVER"
    # Behind a receipt an id belongs to whoever has it next, and before it to what waits.
    assert job.standing(10, producer_epoch=4) == "OF_NEWEST_OWNER"
    assert job.standing(11, producer_epoch=4) == "DECIDED" and job.standing(13, producer_epoch=4) == "STAGED"
    assert [int(one.checkpoint) for one in NamedTransactions.read(job.job_dir).named if one.checkpoint] == [
        1,
        2,
        2,
    ]


def test_a_decision_that_nobody_finishes_has_its_own_standing(job: Transactions) -> None:
    """A zombie's COMMIT below another one (D47), and one that a rewind left behind."""
    job.commit(1, job.staged(0, 10))
    job.commit(2, job.staged(1, 11), receipt=True)
    job.commit(3, job.staged(2, 12))
    intent = RewindIntent(
        BatchId(2), Lineage(1), "ordered", {}, RewindKind.TO_CHECKPOINT, CheckpointId(2), order_id="o"
    )
    job.job_dir.create_rewind(intent)
    job.job_dir.close_rewind(intent)
    assert [job.standing(block) for block in (10, 11, 12)] == ["LEFT_BEHIND", "CONFIRMED", "LEFT_BEHIND"]
    for block in (10, 12):
        assert plan_commits([job.found(block)], frozenset({str(job.name(block))}))[0].refusal
        assert plan_aborts([job.found(block)], frozenset({str(job.name(block))}))[0].refusal


def test_what_an_older_lineage_staged_is_not_taken_for_a_leftover(job: Transactions) -> None:
    job.job_dir.write_staged(job.staged(3, 13, lineage=4))
    assert job.standing(13) == "STAGED"


def test_a_committable_that_is_none_is_damage(job: Transactions) -> None:
    strange = StagedBatch(
        Lineage(0), BatchId(0), OwnerEpoch(2), 1, (), (Committable("out", {"transactional_id": 7}),)
    )
    job.job_dir.write_staged(strange)
    with pytest.raises(CorruptObjectError, match="damaged"):
        NamedTransactions.read(job.job_dir)


# -- what may be ended ------------------------------------------------------------------------------
def test_only_what_is_decided_is_committed(job: Transactions) -> None:
    job.commit(1, job.staged(0, 10), receipt=True)
    job.commit(2, job.staged(1, 11, 12))
    job.job_dir.write_staged(job.staged(3, 13))
    found = [job.found(block) for block in (10, 11, 12, 13, 14)]
    assert [one.found.name.block for one in plan_commits(found, EVERYTHING)] == [11, 12]
    asked = frozenset(str(one.name) for one in found)
    refusals = {one.found.name.block: one.refusal for one in plan_commits(found, asked)}
    assert refusals[11] == refusals[12] == "" and refusals.keys() == {10, 11, 12, 13, 14}
    assert "checkpoint 1 is confirmed" in refusals[10] and "staged and not decided" in refusals[13]
    assert "not named yet" in refusals[14]


def test_what_a_sink_has_in_a_checkpoint_is_committed_as_a_whole(job: Transactions) -> None:
    """What is lost must be the end of what a sink staged, and micro-batches are whole."""
    job.commit(2, job.staged(1, 11), job.staged(2, 12), job.staged(2, 13, sink="other"))
    found = [job.found(11), job.found(12), job.found(13)]
    refused = plan_commits(found, frozenset({str(job.name(12)), str(job.name(13))}))
    assert str(job.name(11)) in refused[0].refusal and "together with" in refused[0].refusal
    assert not refused[1].refusal
    assert not any(one.refusal for one in plan_commits(found, EVERYTHING))
    expired = plan_commits([job.found(11, UNKNOWN_STATE), *found[1:]], EVERYTHING)
    assert ["another cluster" in one.refusal for one in expired] == [True, True, False]


def test_only_what_nobody_names_is_aborted(job: Transactions) -> None:
    job.commit(1, job.staged(0, 10), receipt=True)
    job.commit(2, job.staged(1, 11))
    job.job_dir.write_staged(job.staged(3, 13))
    found = [job.found(block) for block in (10, 11, 13, 14)]
    found += [job.found(15, owner=1), job.found(16, "CompleteAbort"), job.found(10, epoch=4)]
    chosen = [(one.found.name.block, one.found.producer_epoch) for one in plan_aborts(found, EVERYTHING)]
    assert chosen == [(14, 3), (15, 3), (10, 4)]
    asked = frozenset(str(one.name) for one in found)
    refusals = [one.refusal for one in plan_aborts(found, asked)]
    assert "a decision names it" in refusals[0] and "a decision names it" in refusals[1]
    assert "the next start keeps it or aborts it" in refusals[2] and "nothing is open" in refusals[5]


# -- the command ------------------------------------------------------------------------------------
def test_a_job_that_runs_ends_its_transactions_itself(job: Transactions) -> None:
    lock = JobLock(job.on_disk.root / "owner.lock")
    lock.acquire()
    for verb in ("commit", "abort"):
        result = flinkish("transactions", verb, job.on_disk.root, "--yes", *NOWHERE)
        assert result.exit_code == 1 and "the job 'orders' runs: process" in result.stderr
    lock.release()


def test_brokers_have_to_be_named_and_to_answer(job: Transactions, monkeypatch: pytest.MonkeyPatch) -> None:
    assert flinkish("transactions", "list", job.on_disk.root).exit_code == 2
    result = flinkish("transactions", "list", job.on_disk.root, "--bootstrap-servers", "no port")
    assert result.exit_code == 2 and "no port" in result.stderr


def test_a_properties_file_is_read_as_java_reads_it(tmp_path: Path) -> None:
    text = r"""
# a comment
! another
security.protocol=SASL_PLAINTEXT
sasl.mechanism : PLAIN
sasl.jaas.config = org.apache.kafka.common.security.plain.PlainLoginModule required \
    username="app" \
    password="a\\b\u0021=c";
empty
client.id\ x=1
""".replace("\n", "\r\n")
    found = parse_properties(text, "a file")
    assert found["security.protocol"] == "SASL_PLAINTEXT" and found["sasl.mechanism"] == "PLAIN"
    assert found["sasl.jaas.config"].endswith('required username="app" password="a\\b!=c";')
    assert found["empty"] == "" and found["client.id x"] == "1" and len(found) == 5
    assert parse_properties("last=1\\", "a file") == {"last": "1"}


def test_settings_that_say_nothing_about_the_connection_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "client.properties"
    file.write_text("bootstrap.servers=other:1\nsecurity.protocol=PLAINTEXT\nacks=all\n")
    with file.open() as config:
        connection = connection_of("b:9092", config)
    assert connection.to_java_options() == {"bootstrap.servers": "b:9092", "security.protocol": "PLAINTEXT"}
    assert "acks" in capsys.readouterr().err


def test_what_names_a_transaction_is_said_in_words(job: Transactions) -> None:
    job.commit(2, job.staged(1, 11))
    assert "checkpoint 2 is decided and not confirmed: micro-batch 0/1 of sink 'out'" in job.found(11).text
    assert "by another producer epoch" in job.found(11, epoch=9).text
    assert job.found(15, owner=1).text == "a leftover: the job directory does not name it"
    assert isinstance(job.found(11).named, NamedTransaction)
    assert job.found(11).to_json()["checkpoint"] == 2 and job.found(14).to_json()["sink"] is None
    assert Standing.STAGED.value in {one.value for one in Standing}
