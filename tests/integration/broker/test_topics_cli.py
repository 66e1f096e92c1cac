"""`flinkish topics` on a real broker: checkpoints, open transactions, and what readers wait for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer

from flinkish_spark.connectors.kafka.client.client import KafkaWire
from flinkish_spark.connectors.kafka.writer import KafkaStaged
from flinkish_spark.protocol.ids import JobUuid
from tests.integration.broker.test_transactions_cli import Left
from tests.support.cli_rig import flinkish, said


@pytest.fixture
def left(broker: Any, tmp_path: Path) -> Iterator[Left]:
    made = Left(tmp_path / "job", broker.bootstrap_servers)
    yield made
    for producer in made.producers:
        producer.close(timeout=1)


def rows(left: Left, topic: str) -> list[tuple[Any, ...]]:
    words = ("topics", left.on_disk.root, topic, "--bootstrap-servers", left.servers)
    result = flinkish(*words, "--json")
    assert result.exit_code == 0, result.output
    assert topic not in flinkish(*words).stderr
    return [tuple(row.values()) for row in said(result)["rows"]]


def test_what_holds_readers_back_and_whose_it_is(left: Left, topic: Any) -> None:
    """A confirmed checkpoint, what is staged behind it, a stranger's transaction, a program without ids."""
    out = topic(partitions=2)
    first, staged = left.open(out, 11), left.open(out, 12)
    stranger = left.open(out, 13, job=JobUuid("f" * 32))
    left.producers[0].commit_transaction()
    left.decide(7, left.staged(3, KafkaStaged(first, next_sequences={out: (3, 0)})))
    left.job_dir.write_staged(left.staged(4, KafkaStaged(staged)))
    with_id = KafkaProducer(bootstrap_servers=left.servers, transactional_id=f"theirs-{out}")
    left.producers.append(with_id)
    with_id.init_transactions()
    with_id.begin_transaction()
    with_id.send(out, b"x", partition=1).get(timeout=10)

    found = rows(left, out)

    kinds = [(partition, offset, what) for partition, offset, what, *_ in found]
    assert kinds == [
        (0, 2, "checkpoint 7"),
        (0, 3, "open transaction"),
        (0, 3, "last stable offset"),
        (0, 6, "open transaction"),
        (1, 0, "open transaction"),
        (1, 0, "last stable offset"),
    ]
    states = [state for _, _, _, state, *_ in found]
    # Behind the checkpoint: three records of each of two transactions, and the marker of the first.
    assert states == ["COMMITTED", "Ongoing", "7 offsets wait", "Ongoing", "Ongoing", "1 offsets wait"]
    whose = [row[-1] for row in found]
    assert whose[0] == "sink 'out', decided and not confirmed, one transaction over 1 partitions"
    assert whose[1] == f"{staged.transactional_id}: staged and not decided: micro-batch 0/4 of sink 'out'"
    assert whose[2] == f"held back by {whose[1]}"
    assert whose[3] == f"{stranger.transactional_id}: of the job {'f' * 32}"
    assert whose[5] == f"held back by theirs-{out}: of another program"
    assert 0 <= found[1][4] < 60_000 and found[2][4] == found[1][4]
    for producer in left.producers[1:]:
        producer.abort_transaction()


def test_a_topic_in_which_nothing_is_open(left: Left, topic: Any) -> None:
    out = topic()
    assert rows(left, out) == [(0, 0, "last stable offset", "at the end", None, "")]


def test_a_transaction_that_ends_between_two_requests_does_not_hang(
    left: Left, topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = topic()
    left.open(out, 11)
    listed = KafkaWire.list_transactions

    def after_the_commit(self: KafkaWire, *states: Any) -> Any:
        monkeypatch.undo()
        left.producers[0].commit_transaction()
        end = time.monotonic() + 10
        while any(one.open_since is not None for one in self.producers([(out, 0)])[out, 0]):
            assert time.monotonic() < end
            time.sleep(0.05)
        return listed(self, *states)

    monkeypatch.setattr(KafkaWire, "list_transactions", after_the_commit)
    (row,) = rows(left, out)
    assert row[2:4] == ("last stable offset", "at the end")


def test_a_topic_that_there_is_not(left: Left) -> None:
    result = flinkish("topics", left.on_disk.root, "nowhere", "--bootstrap-servers", left.servers)
    assert result.exit_code == 1
    assert "nowhere" in result.output
