"""Keyed state of a savepoint as rows: the tasks' half, without Spark."""

from __future__ import annotations

import datetime
import json

import pyarrow as pa
import pytest

from flinkish_spark import KeyedProcessFunction, ListStateDescriptor, StateTtl, ValueStateDescriptor
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage
from flinkish_spark.protocol.savepoints import OperatorState, SavepointMetadata, StateFile, state_path
from flinkish_spark.savepoints.errors import SavepointDamaged, SavepointMisfit
from flinkish_spark.savepoints.reading import _columns, _files, _ReadTable, _schema
from flinkish_spark.savepoints.state_files import StateFileWriter
from flinkish_spark.testing.operator_harness import OperatorHarness


class Keeps(KeyedProcessFunction):
    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", "total LONG, orders LONG"))
        self.seen = context.get_list_state(ListStateDescriptor("seen", "STRING", ttl=StateTtl(60_000)))
        self.rare = context.get_state(ValueStateDescriptor("rare", "DATE"))

    def process_element(self, value, ctx):
        user, amount = value
        self.total.update((amount, 1))
        self.seen.add(f"{user}{amount}")


@pytest.fixture
def saved(tmp_path):
    """A file with the state of four keys in some key groups."""
    harness = OperatorHarness(Keeps(), key=lambda value: value[0], key_type="STRING", uid="totals")
    harness.processing_time(5_000)
    for user in ("a", "b", "c", None):
        harness.push((user, 7))
    values = harness.snapshot().values
    writer = StateFileWriter(tmp_path / state_path("totals", "f"))
    writer.write(list(values), [bytes(value) for value in values.values()])
    size, digest = writer.close()
    return tmp_path, StateFile("totals", "totals", "f", len(values), size, digest)


def read(saved, name):
    folder, file = saved
    columns = _columns(_schema(folder, [file], name))
    given = pa.RecordBatch.from_pydict({"file": [json.dumps(file.to_json())]})
    batches = list(_ReadTable(str(folder), name, columns)(iter([given])))
    return columns, sorted((row for one in batches for row in one.to_pylist()), key=str)


def test_entries_have_their_key_and_their_fields(saved) -> None:
    columns, rows = read(saved, "total")
    assert columns.simpleString() == "struct<key:string,total:bigint,orders:bigint>"
    assert {row["key"] for row in rows} == {"a", "b", "c", None}
    assert {(row["total"], row["orders"]) for row in rows} == {(7, 1)}


def test_a_state_that_expires_says_when_it_was_touched(saved) -> None:
    columns, rows = read(saved, "seen")
    assert columns.simpleString() == "struct<key:string,touched_at:timestamp,value:array<string>>"
    touched = datetime.datetime(1970, 1, 1, 0, 0, 5, tzinfo=datetime.UTC)
    assert [row for row in rows if row["key"] == "a"] == [
        {"key": "a", "touched_at": touched, "value": ["a7"]}
    ]


def test_damage_is_found(saved) -> None:
    folder, file = saved
    with open(folder / file.path, "r+b") as opened:
        opened.truncate(file.size_bytes - 1)
    with pytest.raises(SavepointDamaged, match="cannot be used"):
        read(saved, "total")


def metadata(*files: StateFile) -> SavepointMetadata:
    states = {"total": "value_0 int64"}
    return SavepointMetadata(
        "a" * 32, "orders", JobUuid("0" * 32), CheckpointId(7), Lineage(0), BatchId(3), 5, 2,
        {"totals": OperatorState(128, ("string",), states)}, {}, (), files=files,
    )  # fmt: skip


def test_what_is_not_there_is_named_with_what_is() -> None:
    one = StateFile("totals", "first", "f", 1, 1, "0" * 64)
    other = StateFile("totals", "second", "g", 1, 1, "0" * 64)
    given = metadata(one, other)
    for uid, name, chain, says in [
        ("sums", "total", None, "no operator 'sums'.* choose from: totals"),
        ("totals", "sum", None, "no state of 'totals' 'sum'.* choose from: total"),
        ("totals", "total", "third", "no chain of 'totals' 'third'.* choose from: first, second"),
        ("totals", "total", None, "several chains.* chain='first' or 'second'"),
    ]:
        with pytest.raises(SavepointMisfit, match=f"(?s){says}"):
            _files(given, uid, name, chain)
    assert _files(given, "totals", "total", "second") == [other]
    assert _files(metadata(one), "totals", "total", None) == [one]


def test_a_state_of_windows_shows_them() -> None:
    kinds = {"key_0": pa.string(), "alive": pa.bool_()}
    names = ["hash", "key_0", "key_1", "from", "to", "value_0", "alive"]
    stored = pa.schema([(name, kinds.get(name, pa.int64())) for name in names])
    assert _columns(stored).simpleString() == (
        "struct<key_0:string,key_1:bigint,window_start:timestamp,window_end:timestamp,value:bigint>"
    )
