"""`flinkish topics` on a real broker: checkpoints, open transactions, and what readers wait for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer

from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.client import KafkaWire
from flinkish_spark.connectors.kafka.client.transactions import Evidence
from flinkish_spark.connectors.kafka.writer import KafkaSinkCommittable
from flinkish_spark.core.errors import AuthorizationError
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
    left.decide(7, left.staged(3, KafkaSinkCommittable(first, next_sequences={out: (3, 0)})))
    left.job_dir.write_staged(left.staged(4, KafkaSinkCommittable(staged)))
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


def test_what_has_ended_since_it_was_seen_holds_nothing_back(
    left: Left, topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = topic()
    left.open(out, 11)
    behind = left.open(out, 12)
    asked = KafkaAdmin.end_offsets

    def after_the_commit(self: KafkaAdmin, places: Any, *isolation: Any) -> Any:
        monkeypatch.undo()
        left.producers[0].commit_transaction()
        end = time.monotonic() + 10
        while asked(self, places)[out, 0] == 0:
            assert time.monotonic() < end
            time.sleep(0.05)
        return asked(self, places, *isolation)

    monkeypatch.setattr(KafkaAdmin, "end_offsets", after_the_commit)
    found = rows(left, out)
    assert found[-1][1:4] == (3, "last stable offset", "4 offsets wait")
    assert found[-1][-1].startswith(f"held back by {behind.transactional_id}: ")
    left.producers[1].abort_transaction()


def test_a_checkpoint_is_found_far_from_its_end_in_each_of_its_topics_and_not_where_none_is(
    left: Left, topic: Any
) -> None:
    """Readers wait for a stranger, so only the marker tells; another topic has no record that is known."""
    out, other = topic(), topic(partitions=2)
    stranger = left.open(out, 13, job=JobUuid("f" * 32))
    staged, moved = left.open(out, 11), left.open(out, 12)
    for _ in range(6):
        left.producers[1].send(out, b"x" * 1_000_000)
    left.producers[1].send(other, b"x", partition=1)
    left.producers[1].commit_transaction()
    left.producers[2].commit_transaction()
    left.decide(7, left.staged(3, KafkaSinkCommittable(staged, next_sequences={out: (9,), other: (0, 1)})))
    gone = replace(moved, evidence=Evidence(out, 4, 0))
    left.decide(8, left.staged(4, KafkaSinkCommittable(gone)))
    found = rows(left, out)
    assert [row[:4] for row in found if row[2].startswith("checkpoint")] == [
        (0, 5, "checkpoint 7", "COMMITTED"),
        (4, 0, "checkpoint 8", "GONE"),
    ]
    (row,) = [row for row in rows(left, other) if row[2].startswith("checkpoint")]
    assert row[:4] == (1, None, "checkpoint 7", "COMMITTED")
    assert row[-1].endswith(f"one transaction over 2 partitions, among them {out}-0 offset 5")
    assert stranger.producer_id
    left.producers[0].abort_transaction()


def test_without_a_right_on_the_ids_the_job_directory_tells_whose_a_transaction_is(
    left: Left, topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka then lists none of them, and refuses to describe one."""
    out = topic()
    staged = left.open(out, 12)
    unnamed = left.open(out, 13)
    left.job_dir.write_staged(left.staged(4, KafkaSinkCommittable(staged)))

    def refused(*_: Any) -> Any:
        raise AuthorizationError("Kafka refuses this principal the request to describe transactions")

    monkeypatch.setattr(KafkaWire, "list_transactions", lambda *_: [])
    monkeypatch.setattr(KafkaWire, "describe_transactions", lambda _, ids: refused() if ids else {})
    first, last, second = rows(left, out)
    text = f"{staged.transactional_id}: staged and not decided: micro-batch 0/4 of sink 'out'"
    assert (first[3], first[-1]) == ("HANGING", f"{text}; no coordinator shows it")
    assert last[-1] == f"held back by {first[-1]}"
    assert (
        second[-1] == f"nobody's: no coordinator shows an open transaction of producer {unnamed.producer_id}"
    )
    monkeypatch.undo()
    for producer in left.producers:
        producer.abort_transaction()


def test_a_topic_that_there_is_not(left: Left) -> None:
    result = flinkish("topics", left.on_disk.root, "nowhere", "--bootstrap-servers", left.servers)
    assert result.exit_code == 1
    assert "nowhere" in result.output
