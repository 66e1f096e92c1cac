"""`flinkish replay-dead-letters` on a real broker: each letter once, whatever is cut off, by any filters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from kafka import KafkaProducer

from flinkish_spark.connectors.kafka import letter_replay
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.admission import OutgoingRecords
from flinkish_spark.connectors.kafka.client.batches import HEADERS_TYPE
from flinkish_spark.connectors.kafka.client.client import KafkaWire
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.produce import ProduceClient
from flinkish_spark.connectors.kafka.client.session import TransactionSession
from tests.support.cli_rig import flinkish, said
from tests.support.jobs import await_markers, read_committed


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
        (
            b"three",
            letter(orders, "unreadable", ("flinkish-partition", b"7"), ("flinkish-timestamp", b"1234")),
        ),
        (b'{"a": 1}', letter(orders, "does-not-fit")),
    )
    wanted = {"put_back": {orders: 2}, "not_chosen": 3, "not_whole": 0}
    assert replay(servers, letters, "--where", "flinkish-error=unreadable", "--dry-run") == wanted
    assert replay(servers, letters, "--where", "flinkish-error=unreadable") == wanted
    # Nothing a second time, and what was left behind is still to be had.
    assert replay(servers, letters, "--where", "flinkish-error=unreadable")["put_back"] == {}
    assert replay(servers, letters) == {"put_back": {other: 1}, "not_chosen": 0, "not_whole": 2}
    assert replay(servers, letters, "--to", other) == {
        "put_back": {other: 1},
        "not_chosen": 0,
        "not_whole": 1,
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
    # The letter was written later than its record.
    assert next(record.timestamp for record in found if record.value == b"three") == 1_234
    assert sorted(record.value for record in read_committed(servers, other)) == [b"two", b'{"a": 1}']


@pytest.mark.parametrize(
    "moment", ["add_partitions", "add_group", "commit_in_transaction", "commit", "behind"]
)
def test_a_run_that_is_cut_off_leaves_nothing_twice_and_nothing_out(
    broker: Any, topic: Any, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    servers, letters, orders = broker.bootstrap_servers, topic(), topic()
    write(servers, letters, *((f"{n}".encode(), letter(orders, "unreadable")) for n in range(7)))
    monkeypatch.setattr(letter_replay, "_PORTION", 2)
    left = [2]

    def dying(real: Any) -> Any:
        def call(self: Any, *args: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 and moment == "behind":
                real(self, *args, **named)
            if left[0] == 0:
                raise KeyboardInterrupt
            return real(self, *args, **named)

        return call

    name = "commit" if moment == "behind" else moment
    of = TransactionSession if name == "commit" else ProduceClient
    with monkeypatch.context() as dying_once:
        dying_once.setattr(of, name, dying(getattr(of, name)))
        # Nor does it end what it has begun, as a run that was killed.
        dying_once.setattr(letter_replay, "abort_own", lambda *_: "")
        flinkish("replay-dead-letters", letters, "--bootstrap-servers", servers)
    assert left == [0]
    replay(servers, letters)
    found = [record.value for record in read_committed(servers, orders)]
    assert sorted(found) == [f"{n}".encode() for n in range(7)]


def test_what_cannot_be_is_refused(broker: Any, topic: Any) -> None:
    servers, letters = broker.bootstrap_servers, topic()
    for words, status, said_ in (
        (("nowhere",), 1, "nowhere"),
        ((letters, "--where", "nonsense"), 2, "NAME=VALUE"),
        ((letters, "--where", "=unreadable"), 2, "NAME=VALUE"),
    ):
        result = flinkish("replay-dead-letters", *words, "--bootstrap-servers", servers)
        assert result.exit_code == status and said_ in result.output
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


def test_whatever_a_record_may_be_goes_back(broker: Any, topic: Any) -> None:
    """Without key and value, with a header that is null, and larger than Python's producer sends."""
    servers, large = broker.bootstrap_servers, {"max.message.bytes": "4000000"}
    letters, orders = topic(configs=large), topic(configs=large)
    named = [[("trace", None), *letter(orders, "unreadable")], letter(orders, "unreadable")]
    headers = [[{"key": name, "value": value} for name, value in one] for one in named]
    values = pa.array([None, b"x" * 3_000_000], pa.binary())
    nothing = pa.array([None, None], pa.binary())
    made = letter_replay._Transactions(KafkaConnection(servers), f"writer-{letters}")
    made.session.begin()
    made.send(letters, OutgoingRecords.of(nothing, values, pa.array(headers, HEADERS_TYPE), letters, None, 7))
    made.commit("nobody", {(letters, 0): 0}, "")
    made.close()
    assert replay(servers, letters)["put_back"] == {orders: 2}
    found = read_committed(servers, orders)
    assert [len(one.value or b"") for one in found] == [0, 3_000_000]
    assert (found[0].key, found[0].value, found[0].timestamp) == (None, None, 7)
    assert [list(one.headers) for one in found] == [[("trace", None), ("trace", b"t1")], [("trace", b"t1")]]


def test_what_is_cut_is_no_whole_record(broker: Any, topic: Any) -> None:
    """It says so itself; how long its value is means nothing."""
    servers, letters, orders = broker.bootstrap_servers, topic(), topic()
    of_source = letter(orders, "unreadable", ("flinkish-source", b"in"))
    write(
        servers,
        letters,
        (b"v" * 1_024, of_source),
        (b"v" * 1_024, letter(orders, "bad-timestamp")),
        (b"v", letter(orders, "bad-timestamp", ("flinkish-size", b"9000"))),
        (b"v", [*of_source, ("flinkish-size", b"2000000")]),
        (b"v", [*of_source, ("flinkish-headers-left-out", b"3")]),
    )
    assert replay(servers, letters) == {"put_back": {orders: 2}, "not_chosen": 0, "not_whole": 3}
    assert [len(record.value) for record in read_committed(servers, orders)] == [1_024, 1_024]


def test_a_letter_that_its_topic_does_not_take_ends_the_run_and_leaves_nothing_open(
    broker: Any, topic: Any
) -> None:
    servers, letters, small = broker.bootstrap_servers, topic(), topic(configs={"max.message.bytes": "900"})
    write(servers, letters, (b"v" * 2_000, letter(small, "unreadable")))
    result = flinkish("replay-dead-letters", letters, "--bootstrap-servers", servers)
    assert result.exit_code == 1 and "max.message.bytes" in result.output and "bug" not in result.output
    wire = KafkaWire(KafkaConnection(servers))
    mine = f"flinkish-letters-flinkish-letters-{letters}"
    assert mine not in {one.transactional_id for one in wire.list_transactions(["Ongoing"])}
    wire.close()
    itself = flinkish("replay-dead-letters", letters, "--bootstrap-servers", servers, "--to", letters)
    assert itself.exit_code == 1 and "another topic" in itself.output


def test_letters_of_many_transactions_are_one_piece_to_remember(
    broker: Any, topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two of them lies a marker, and what was aborted."""
    servers, letters, orders = broker.bootstrap_servers, topic(), topic()
    producer = KafkaProducer(bootstrap_servers=servers, transactional_id=f"writer-{letters}")
    producer.init_transactions()
    for number in range(6):
        producer.begin_transaction()
        producer.send(letters, b"%d" % number, headers=letter(orders, "unreadable")).get(timeout=10)
        if number % 3 == 2:
            producer.abort_transaction()
        else:
            producer.commit_transaction()
    producer.close()
    await_markers({"bootstrap_servers": servers})
    monkeypatch.setattr(letter_replay, "_NOTE_BYTES", 9)
    assert replay(servers, letters, "--where", "trace=none")["not_chosen"] == 4
    await_markers({"bootstrap_servers": servers})
    notes = KafkaAdmin(KafkaConnection(servers)).find_committed_notes(f"flinkish-letters-{letters}")
    assert notes == {(letters, 0): "left:0-8"}
    assert replay(servers, letters)["put_back"] == {orders: 4}
    assert [record.value for record in read_committed(servers, orders)] == [b"0", b"1", b"3", b"4"]


def test_a_second_run_ends_the_first(broker: Any, topic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    servers, letters, orders = broker.bootstrap_servers, topic(), topic()
    write(servers, letters, *((f"{n}".encode(), letter(orders, "unreadable")) for n in range(4)))
    monkeypatch.setattr(letter_replay, "_PORTION", 2)
    real = TransactionSession.commit

    def beside_another(self: TransactionSession) -> None:
        monkeypatch.setattr(TransactionSession, "commit", real)
        assert replay(servers, letters)["put_back"] == {orders: 4}
        real(self)

    monkeypatch.setattr(TransactionSession, "commit", beside_another)
    first = flinkish("replay-dead-letters", letters, "--bootstrap-servers", servers)
    assert first.exit_code == 1 and "is no longer ours" in first.output
    assert sorted(record.value for record in read_committed(servers, orders)) == [b"0", b"1", b"2", b"3"]
