"""`flinkish replay-dead-letters` on a real broker: each letter once, whatever is cut off, by any filters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from kafka import KafkaProducer

from flinkish_spark import DeliveryGuarantee
from flinkish_spark.connectors.kafka import letter_replay
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.producer import StagedTransaction
from flinkish_spark.connectors.kafka.client.settings import StagingSettings
from tests.support.cli_rig import flinkish, said
from tests.support.jobs import read_committed


def write(servers: str, letters: str, *of: tuple[bytes, Sequence[tuple[str, bytes]]]) -> None:
    producer = KafkaProducer(bootstrap_servers=servers)
    for value, headers in of:
        producer.send(letters, key=b"key", value=value, headers=list(headers), timestamp_ms=1_000).get(
            timeout=10
        )
    producer.close()


def letter(topic: str, error: str, *more: tuple[str, bytes]) -> list[tuple[str, bytes]]:
    ours = [("flinkish-error", error.encode()), ("flinkish-topic", topic.encode())]
    return [("trace", b"t1"), *ours, *more]


def replay(servers: str, letters: str, *words: str) -> dict[str, Any]:
    result = flinkish("replay-dead-letters", letters, "--bootstrap-servers", servers, *words, "--json")
    assert result.exit_code == 0, result.output
    found = said(result)
    return {name: found[name] for name in ("put_back", "not_chosen", "not_whole")}


def test_letters_go_back_once_by_one_filter_and_the_rest_by_another(broker: Any, topic: Any) -> None:
    """With their key, headers, partition and time, and without what was said of them."""
    servers, letters, orders, other = broker.bootstrap_servers, topic(), topic(partitions=3), topic()
    write(
        servers,
        letters,
        (b"one", letter(orders, "unreadable", ("flinkish-partition", b"2"))),
        (b"two", letter(other, "bad-timestamp")),
        (b"cut", letter(orders, "oversize", ("flinkish-size", b"99"))),
        # Its key was too large for the topic of the letters; and, of an earlier version, its headers.
        (b"keyless", letter(orders, "bad-timestamp", ("flinkish-size", b"9999"))),
        (b"bare", letter(orders, "bad-timestamp", ("flinkish-headers-left-out", b"3"))),
        (b"three", letter(orders, "unreadable", ("flinkish-partition", b"7"))),
        (b'{"a": 1}', letter(orders, "does-not-fit")),
    )
    wanted = {"put_back": {orders: 2}, "not_chosen": 5, "not_whole": 0}
    assert replay(servers, letters, "--where", "flinkish-error=unreadable", "--dry-run") == wanted
    assert replay(servers, letters, "--where", "flinkish-error=unreadable") == wanted
    # Nothing a second time, and what was left behind is still to be had.
    assert replay(servers, letters, "--where", "flinkish-error=unreadable")["put_back"] == {}
    assert replay(servers, letters) == {"put_back": {other: 1}, "not_chosen": 0, "not_whole": 4}
    assert replay(servers, letters, "--to", other) == {
        "put_back": {other: 1},
        "not_chosen": 0,
        "not_whole": 3,
    }

    found = read_committed(servers, orders)
    assert {record.value for record in found} == {b"one", b"three"}
    one = next(record for record in found if record.value == b"one")
    assert (one.key, one.partition, one.timestamp, list(one.headers)) == (
        b"key",
        2,
        1_000,
        [("trace", b"t1")],
    )
    assert sorted(record.value for record in read_committed(servers, other)) == [b"two", b'{"a": 1}']


def test_letters_without_key_and_value_and_with_empty_headers_go_back(broker: Any, topic: Any) -> None:
    """What Kafka has and its Python client does not send: a record of nothing, a header without a value."""
    servers, letters, orders = broker.bootstrap_servers, topic(), topic()
    own = [("empty", None), ("trace", b"1"), ("empty", b""), ("trace", b"1")]
    given = [(None, None, own), (b"k", None, []), (None, b"", own[:1])]
    settings = StagingSettings(
        connection=KafkaConnection(servers),
        transactional_id=None,
        transaction_timeout_ms=1,
        guarantee=DeliveryGuarantee.AT_LEAST_ONCE,
    )
    for key, value, headers in given:
        with StagedTransaction(settings) as out:
            ours = [("flinkish-error", b"unreadable"), ("flinkish-topic", orders.encode())]
            binary = [pa.array([one], pa.binary()) for one in (key, value)]
            out.write(*binary, [*headers, *ours], topics=letters, timestamps_ms=7)
            out.prepare()
    assert replay(servers, letters)["put_back"] == {orders: 3}
    found = [
        (one.key, one.value, list(one.headers), one.timestamp) for one in read_committed(servers, orders)
    ]
    assert found == [(*one, 7) for one in given]


@pytest.mark.parametrize("moment", ["send_offsets_to_transaction", "commit_transaction", "behind"])
def test_a_run_that_is_cut_off_leaves_nothing_twice_and_nothing_out(
    broker: Any, topic: Any, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    servers, letters, orders = broker.bootstrap_servers, topic(), topic()
    write(servers, letters, *((f"{n}".encode(), letter(orders, "unreadable")) for n in range(7)))
    monkeypatch.setattr(letter_replay, "_PORTION", 2)
    left = [2]

    def dying(real: Any) -> Any:
        def call(self: Any, *args: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 and moment == "behind":
                real(self, *args)
            if left[0] == 0:
                raise KeyboardInterrupt
            return real(self, *args)

        return call

    name = "commit_transaction" if moment == "behind" else moment
    monkeypatch.setattr(KafkaProducer, name, dying(getattr(KafkaProducer, name)))
    flinkish("replay-dead-letters", letters, "--bootstrap-servers", servers)
    assert left == [0]
    replay(servers, letters)
    found = [record.value for record in read_committed(servers, orders)]
    assert sorted(found) == [f"{n}".encode() for n in range(7)]


def test_what_cannot_be_is_refused(broker: Any, topic: Any) -> None:
    servers, letters = broker.bootstrap_servers, topic()
    for words, said_ in (
        (("nowhere",), "nowhere"),
        ((letters, "--where", "nonsense"), "NAME=VALUE"),
    ):
        result = flinkish("replay-dead-letters", *words, "--bootstrap-servers", servers)
        assert result.exit_code == 1 and said_ in result.output
    write(servers, letters, (b"one", letter("gone", "unreadable")))
    assert "gone" in flinkish("replay-dead-letters", letters, "--bootstrap-servers", servers).output


def test_too_many_pieces_to_remember_end_the_run(
    broker: Any, topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, letters, orders = broker.bootstrap_servers, topic(), topic()
    errors = ["unreadable", "bad-timestamp"] * 4
    write(servers, letters, *((f"{n}".encode(), letter(orders, e)) for n, e in enumerate(errors)))
    monkeypatch.setattr(letter_replay, "_NOTE_BYTES", 8)
    words = ("--bootstrap-servers", servers, "--where", "flinkish-error=unreadable")
    result = flinkish("replay-dead-letters", letters, *words)
    assert result.exit_code == 1 and "too many pieces" in result.output
    assert read_committed(servers, orders) == []
