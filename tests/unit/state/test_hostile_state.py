"""Stored state whose checksums are right and whose content is not: an error of its own, never a crash."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

import pyarrow as pa
import pytest

from flinkish_spark import KeyedProcessFunction, ListStateDescriptor, MapStateDescriptor, ValueStateDescriptor
from flinkish_spark.state.codec import OWNER, FrameError, pack_frame, read_entries, table_bytes, unpack_frame
from flinkish_spark.state.evolution import StateMismatch
from flinkish_spark.state.group_values import describe_group, inline_base, read_tables
from flinkish_spark.state.key_group import GroupLayout, GroupState, NoBases
from flinkish_spark.state.operator_state import unpack_tables
from tests.support.operator_harness import OperatorHarness, Snapshot

_DAMAGE = (FrameError, StateMismatch)


class Keeps(KeyedProcessFunction):
    def open(self, context: Any) -> None:
        self.last = context.get_state(ValueStateDescriptor("last", "STRING"))
        self.all = context.get_list_state(ListStateDescriptor("all", "a STRING, b LONG"))
        self.counts = context.get_map_state(MapStateDescriptor("counts", "STRING", "LONG"))

    def process_element(self, value: Any, ctx: Any) -> Any:
        yield self.last.value(), list(self.all), dict(self.counts)
        self.last.update(value)
        self.all.append((value, len(self.all)))
        self.counts[value] = len(self.counts)
        ctx.timer_service().register_event_time_timer(len(value))

    def on_timer(self, timestamp: int, ctx: Any) -> Any:
        yield self.last.value()


def harness(restore: Snapshot | None = None) -> OperatorHarness:
    return OperatorHarness(Keeps(), key=lambda _: 1, key_type="INT", max_parallelism=1, restore=restore)


@pytest.fixture(scope="module")
def stored() -> bytes:
    run = harness()
    for value in ("ann", "benjamin", "a text that is longer than the others"):
        run.push(value)
    return run.snapshot().values[0]


def _go_on(value: bytes) -> None:
    run = harness(Snapshot({0: value}, 0, 0))
    run.push("next")
    run.watermark(1000)


def _with(value: bytes, **sections: bytes) -> bytes:
    return pack_frame({**unpack_frame(value), **sections})


def test_mutations_with_right_checksums_are_found_or_harmless(stored: bytes) -> None:
    chance = random.Random(11)
    sections = {name: bytes(payload) for name, payload in unpack_frame(stored).items()}
    outcomes = []
    for _ in range(400):
        name = chance.choice([one for one in sections if one != OWNER])
        payload = bytearray(sections[name])
        for _ in range(chance.choice((1, 1, 4))):
            at = chance.randrange(len(payload))
            payload[at] = chance.choice((0, 1, 127, 128, 255, payload[at] ^ (1 << chance.randrange(8))))
        try:
            _go_on(pack_frame({**sections, name: bytes(payload)}))
            outcomes.append("harmless")
        except _DAMAGE:
            outcomes.append("found")
    assert outcomes.count("found") > 50


@pytest.mark.parametrize(
    "owner",
    [
        b"[]", b"5", b"null", b'"a"', b"{", b"\xff", b"[" * 100_000, b'{"uid": 5}', b'{"base": 5}',
        b'{"base": {}}', b'{"base": {"file": "a", "offset": 0}}', b'{"former": 5}', b'{"former": [5]}',
        b'{"base": {"file": "a", "offset": -1, "length": 0}}', b'{"former": [["a", "b"]]}',
        b'{"base": {"file": 5, "offset": 0, "length": 0}}', b'{"registered": []}',
        b'{"registered": {"a": "b"}}',
    ],
)  # fmt: skip
def test_an_owner_that_is_none_is_damage_for_every_reader(stored: bytes, owner: bytes) -> None:
    value = _with(stored, **{OWNER: owner})
    for read in (
        _go_on,
        describe_group,
        read_tables,
        lambda given: inline_base(given, NoBases()),
        lambda given: unpack_tables("operator", "broadcast state", {}, given),
    ):
        with pytest.raises(FrameError, match="with the owner of the state"):
            read(value)


@pytest.mark.parametrize("payload", [b"", b"text", bytes(64), b"\xff" * 64])
def test_what_is_no_table_is_damage_for_every_reader(stored: bytes, payload: bytes) -> None:
    value = _with(stored, **{"state/last": payload})
    for read in (_go_on, describe_group, read_tables):
        with pytest.raises(FrameError, match="'state/last' is damaged"):
            read(value)


def test_offsets_that_point_nowhere_are_found_before_they_are_followed() -> None:
    offsets = pa.py_buffer(struct.pack("<3i", 0, 1 << 30, 5))
    texts = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"hello")])
    table = pa.record_batch({"hash": [1, 2], "value_0": texts, "alive": [True, True]})
    with pytest.raises(FrameError, match="damaged"):
        read_entries("state/last", table_bytes(table))
    # Also behind a text that is no UTF-8.
    wrong = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(struct.pack("<3i", 0, 1, 2)), pa.py_buffer(b"\xff\xff")]
    )
    table = pa.record_batch({"hash": [1, 2], "a": wrong, "b": texts, "alive": [True, True]})
    with pytest.raises(FrameError, match="damaged"):
        read_entries("state/last", table_bytes(table))


def test_a_text_that_is_no_utf8_is_no_damage_of_columns() -> None:
    offsets = pa.py_buffer(struct.pack("<2i", 0, 1))
    text = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(b"\xff")])
    table = pa.record_batch({"hash": [1], "value_0": text, "alive": [True]})
    assert read_entries("state/last", table_bytes(table)).num_rows == 1


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"hash": [2, 1], "alive": [True, True]}, "not in the order of its hashes"),
        ({"hash": [1, None], "alive": [True, True]}, "hash is null"),
        ({"hash": [1, 2], "alive": [True, None]}, "alive is null"),
        ({"hash": [1, 2], "touched": [None, 1], "alive": [True, True]}, "touched is null"),
        ({"hash": ["a", "b"], "alive": [True, True]}, "no hashes"),
        ({"hash": [1]}, "no hashes"),
    ],
)
def test_columns_that_every_table_has_are_whole(columns: dict[str, Any], says: str) -> None:
    with pytest.raises(FrameError, match=says):
        read_entries("state/a", table_bytes(pa.record_batch(columns)))


def test_a_map_with_a_key_twice_is_named() -> None:
    run = OperatorHarness(Keeps(), key=lambda _: 1, key_type="INT", max_parallelism=1)
    run.push("a")
    value = run.snapshot().values[0]
    table = read_tables(value)["state/counts"]
    at = table.schema.get_field_index("value_0")
    twice = pa.array([[("a", 1), ("a", 2)]], table.schema.field(at).type)
    columns = [twice if n == at else column for n, column in enumerate(table.columns)]
    wrong = table_bytes(pa.RecordBatch.from_arrays(columns, schema=table.schema))
    with pytest.raises(FrameError, match="of state 'counts' cannot be read"):
        _go_on(_with(value, **{"state/counts": bytes(wrong)}))


def test_an_altered_name_is_damage_and_no_state_to_be_given_up(stored: bytes) -> None:
    at = stored.index(b"state/last") + len("state/")
    with pytest.raises(FrameError, match="torn or altered"):
        _go_on(stored[:at] + b"m" + stored[at + 1 :])


def test_a_layout_reads_what_it_has_written(stored: bytes) -> None:
    run = harness()
    layout: GroupLayout = run._layout
    assert GroupState(layout, stored, NoBases()).timer_count() == 3
    assert json.loads(bytes(unpack_frame(stored)[OWNER]))["uid"] == "operator"
