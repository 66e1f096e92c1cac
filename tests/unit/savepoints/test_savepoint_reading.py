"""Keyed state of a savepoint as rows: the tasks' half, without Spark."""

from __future__ import annotations

import datetime
import json
from dataclasses import replace

import pyarrow as pa
import pytest

from flinkish_spark import (
    KeyedBroadcastProcessFunction,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    StateTtl,
    ValueStateDescriptor,
)
from flinkish_spark.core.errors import UserError
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage
from flinkish_spark.protocol.savepoints import OperatorState, SavepointMetadata, StateFile, state_path
from flinkish_spark.savepoints.entries import (
    FIRST_MICROS,
    LAST_MICROS,
    CopyValues,
    FindSections,
    FirstCopy,
    ReadEntries,
    ReadSection,
    ReadTimers,
    SavepointValues,
    common_columns,
    common_schema,
    file_values,
    reader_columns,
    sections_of,
    timer_columns,
    to_micros,
    to_ms,
)
from flinkish_spark.savepoints.files import SavepointDamagedError
from flinkish_spark.savepoints.group_edits import (
    EditedPartition,
    EditGroup,
    PackValues,
    WriteGroups,
    WriterError,
)
from flinkish_spark.savepoints.reader import files_of
from flinkish_spark.savepoints.writer_plan import fields_by_column, state_columns
from flinkish_spark.state.group_values import change_group, read_tables
from flinkish_spark.state.operator_state import (
    BROADCAST_KIND,
    LIST_KIND,
    BroadcastTables,
    OperatorListDescriptor,
    OperatorLists,
)
from flinkish_spark.state.savepoint_files import StateFileWriter
from flinkish_spark.transport.blocks import to_block
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.rows import arrow_schema
from tests.support.operator_harness import BroadcastHarness, OperatorHarness


class Keeps(KeyedProcessFunction):
    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", "total LONG, orders LONG"))
        self.seen = context.get_list_state(ListStateDescriptor("seen", "STRING", ttl=StateTtl(60_000)))
        self.rare = context.get_state(ValueStateDescriptor("rare", "DATE"))

    def process_element(self, value, ctx):
        user, amount = value
        self.total.update((amount, 1))
        self.seen.add(f"{user}{amount}")


def written(folder, harness):
    """The state of a harness as a file of a savepoint."""
    values = harness.snapshot().values
    writer = StateFileWriter(folder / state_path("totals", "f"))
    writer.write(list(values), [bytes(value) for value in values.values()])
    size, digest = writer.close()
    return folder, StateFile("totals", "totals", "f", len(values), size, digest)


@pytest.fixture
def saved(tmp_path):
    """A file with the state of four keys in some key groups."""
    harness = OperatorHarness(Keeps(), key=lambda value: value[0], key_type="STRING", uid="totals")
    harness.processing_time(5_000)
    for user in ("a", "b", "c", None):
        harness.push((user, 7))
    return written(tmp_path, harness)


def given_to(file):
    """What a task is given to read a file."""
    return [pa.RecordBatch.from_pydict({"file": [json.dumps(file.to_json())]})]


def sections(saved):
    folder, file = saved
    found = FindSections(SavepointValues(StoreSpec(str(folder))))(given_to(file))
    return sections_of((row["section"], row["schema"]) for batch in found for row in batch.to_pylist())


def rows_of(batches):
    return sorted((row for one in batches for row in one.to_pylist()), key=str)


def read(saved, name):
    folder, file = saved
    schema = common_schema(name, sections(saved)[f"state/{name}"])
    values = SavepointValues(StoreSpec(str(folder)))
    return reader_columns(schema), rows_of(ReadEntries(values, f"state/{name}", schema)(given_to(file)))


def test_entries_have_their_key_and_their_fields(saved) -> None:
    columns, rows = read(saved, "total")
    assert columns.simpleString() == "struct<key:string,total:bigint,orders:bigint>"
    assert {row["key"] for row in rows} == {"a", "b", "c", None}
    assert {(row["total"], row["orders"]) for row in rows} == {(7, 1)}


def test_a_state_that_expires_says_when_it_was_touched(saved) -> None:
    columns, rows = read(saved, "seen")
    assert columns.simpleString() == SEEN
    assert [row for row in rows if row["key"] == "a"] == [
        {"key": "a", "touched_at": at(5), "each_touched_at": [at(5)], "value": ["a7"]}
    ]


SEEN = "struct<key:string,touched_at:timestamp,each_touched_at:array<timestamp>,value:array<string>>"


def at(seconds):
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def test_each_element_says_when_it_was_touched(tmp_path) -> None:
    harness = OperatorHarness(Keeps(), key=lambda value: value[0], key_type="STRING", uid="totals")
    for second, user in enumerate("aabaac"):
        harness.processing_time(1_000 * second)
        harness.push((user, second))
    _, rows = read(written(tmp_path, harness), "seen")
    assert {row["key"]: (row["touched_at"], row["each_touched_at"]) for row in rows} == {
        "a": (at(4), [at(0), at(1), at(3), at(4)]),
        "b": (at(2), [at(2)]),
        "c": (at(5), [at(5)]),
    }


def test_lists_without_times_of_elements_are_read_beside_others(tmp_path) -> None:
    """A key group of a writer's savepoint, which was told no times of elements, and is not touched since."""
    harness = OperatorHarness(Keeps(), key=lambda value: value[0], key_type="STRING", uid="totals")
    for user in "abcdefgh":
        harness.push((user, 1))
        harness.push((user, 2))
    before = harness.snapshot()
    values = {
        group: change_group(
            value, "totals", {"state/seen": read_tables(value)["state/seen"].drop_columns(["touches"])}
        )
        for group, value in before.values.items()
    }
    after = OperatorHarness(
        Keeps(),
        key=lambda value: value[0],
        key_type="STRING",
        uid="totals",
        restore=replace(before, values=values),
    )
    after.processing_time(3_000)
    after.push(("a", 3))
    saved = written(tmp_path, after)
    assert len(set(map(len, sections(saved)["state/seen"]))) == 2
    columns, rows = read(saved, "seen")
    assert columns.simpleString() == SEEN
    assert {row["key"]: row["each_touched_at"] for row in rows} == {
        **{user: [at(0)] * 2 for user in "bcdefgh"},
        "a": [at(0), at(0), at(3)],
    }


class Wider(KeyedProcessFunction):
    """As Keeps, with another declaration."""

    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", "total LONG, last STRING"))
        self.seen = context.get_list_state(ListStateDescriptor("seen", "STRING", ttl=StateTtl(60_000)))

    def process_element(self, value, ctx):
        self.total.update((value[1], "x"))
        ctx.timer_service().register_event_time_timer(90_000 + value[1])
        ctx.timer_service().register_processing_time_timer(1 << 62)


def test_key_groups_of_several_declarations_are_read_together(tmp_path) -> None:
    """A key group that was not touched since is stored as it was declared then."""
    before = OperatorHarness(Keeps(), key=lambda value: value[0], key_type="STRING", uid="totals")
    for user in "abcdefgh":
        before.push((user, 7))
    after = OperatorHarness(
        Wider(), key=lambda value: value[0], key_type="STRING", uid="totals", restore=before.snapshot()
    )
    after.push(("a", 9))
    columns, rows = read(written(tmp_path, after), "total")
    assert set(columns.names) == {"key", "total", "orders", "last"}
    by_key = {row["key"]: row for row in rows}
    assert by_key["a"] == {"key": "a", "total": 9, "orders": None, "last": "x"}
    assert {"key": "b", "total": 7, "orders": 1, "last": None} in rows and len(rows) == 8


def test_fields_by_the_names_of_keys_and_times_are_told_apart_from_these_and_written_back(tmp_path) -> None:
    class Named(KeyedProcessFunction):
        def open(self, context):
            kind = "key STRING, touched_at TIMESTAMP, window_start LONG"
            self.state = context.get_state(ValueStateDescriptor("state", kind, ttl=StateTtl(60_000)))

        def process_element(self, value, ctx):
            self.state.update(("own", at(9), value[1]))

    harness = OperatorHarness(Named(), key=lambda value: value[0], key_type="STRING", uid="totals")
    harness.push(("a", 5))
    saved = written(tmp_path, harness)
    columns, rows = read(saved, "state")
    assert columns.names == ["key", "touched_at", "value_key", "value_touched_at", "window_start"]
    assert rows == [
        {"key": "a", "touched_at": at(0), "value_key": "own", "value_touched_at": at(9), "window_start": 5}
    ]
    (stored,) = sections(saved)["state/state"]
    layout, given = state_columns(columns, "totals", "state", ["string"], fields_by_column(stored))
    assert layout.schema == stored
    assert [one.name for one in given] == columns.names


class Declared(KeyedProcessFunction):
    """Puts what it is given into a state of some type."""

    def __init__(self, kind):
        self.kind = kind

    def open(self, context):
        self.state = context.get_state(ValueStateDescriptor("state", self.kind))

    def process_element(self, value, ctx):
        self.state.update(value[1])


@pytest.mark.parametrize(
    ("before", "old", "after", "new", "found"),
    [
        ("n INT", (1,), "n LONG, m INT", (2, 3), [{"n": 1, "m": None}, {"n": 2, "m": 3}]),
        ("n INT, m INT", (1, 4), "n LONG", (2,), [{"n": 1, "m": 4}, {"n": 2, "m": None}]),
        ("value INT", (1,), "value LONG, m INT", (2, 3), [{"value": 1, "m": None}, {"value": 2, "m": 3}]),
        ("n INT", (1,), "n LONG", (2,), [{"value": {"n": 1}}, {"value": {"n": 2}}]),
        (
            "ARRAY<STRUCT<n: INT, m: INT>>",
            [(1, 4)],
            "ARRAY<STRUCT<n: LONG, o: STRING>>",
            [(2, "x")],
            [{"value": [{"n": 1, "m": 4, "o": None}]}, {"value": [{"n": 2, "m": None, "o": "x"}]}],
        ),
    ],
)
def test_fields_that_any_key_group_still_has_are_read(tmp_path, before, old, after, new, found) -> None:
    """Also where one field became several, several one, or where they are those of elements."""
    key = {"key": lambda value: value[0], "key_type": "STRING", "uid": "totals"}
    first = OperatorHarness(Declared(before), **key)
    first.push(("a", old))
    second = OperatorHarness(Declared(after), **key, restore=first.snapshot())
    second.push(("b", new))
    columns, rows = read(written(tmp_path, second), "state")
    assert set(columns.names) == {"key", *found[0]}
    by_key = {row["key"]: row for row in rows}
    assert [by_key["a"], by_key["b"]] == [{"key": user, **row} for user, row in zip("ab", found, strict=True)]


def test_timers_are_read(tmp_path) -> None:
    harness = OperatorHarness(Wider(), key=lambda value: value[0], key_type="STRING", uid="totals")
    harness.push(("a", 1))
    saved = written(tmp_path, harness)
    folder, file = saved
    columns = timer_columns(next(iter(sections(saved).values()))[0])
    names = "key:string,clock:string,time_ms:bigint,window_start:timestamp,window_end:timestamp"
    assert columns.simpleString() == f"struct<{names}>"
    assert rows_of(ReadTimers(SavepointValues(StoreSpec(str(folder))), columns)(given_to(file))) == [
        {"key": "a", "clock": clock, "time_ms": ms, "window_start": None, "window_end": None}
        for clock, ms in [("EVENT_TIME", 90_001), ("PROCESSING_TIME", 1 << 62)]
    ]


def test_times_beyond_the_calendar_are_its_ends_and_come_back_as_they_were() -> None:
    ms = pa.array([-(1 << 63), 0, 61_000, None, (1 << 63) - 1])
    micros = to_micros(ms)
    assert micros.cast(pa.int64()).to_pylist() == [FIRST_MICROS, 0, 61_000_000, None, LAST_MICROS]
    assert [str(value)[:10] for value in micros.to_pylist()][::4] == ["0001-01-02", "9999-12-30"]
    assert to_ms(micros).to_pylist() == ms.to_pylist()
    with pytest.raises(ValueError, match="whole milliseconds"):
        to_ms(pa.array([1], pa.timestamp("us", "UTC")))


def test_damage_is_found(saved) -> None:
    folder, file = saved
    with open(folder / file.path, "r+b") as opened:
        opened.truncate(file.size_bytes - 1)
    with pytest.raises(SavepointDamagedError, match="cannot be used"):
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
    for uid, chain, says in [
        ("sums", None, "no operator 'sums'.* choose from: totals"),
        ("totals", "third", "no chain of 'totals' 'third'.* choose from: first, second"),
        ("totals", None, "several chains.* chain='first' or 'second'"),
    ]:
        with pytest.raises(UserError, match=f"(?s){says}"):
            files_of(given, uid, chain)
    assert files_of(given, "totals", "second") == [other]
    assert files_of(metadata(one), "totals", None) == [one]


def test_a_state_of_windows_shows_them() -> None:
    kinds = {"key_0": pa.string(), "alive": pa.bool_()}
    names = ["hash", "key_0", "key_1", "from", "to", "value_0", "alive"]
    stored = pa.schema([(name, kinds.get(name, pa.int64())) for name in names])
    assert reader_columns(stored).simpleString() == (
        "struct<key_0:string,key_1:bigint,window_start:timestamp,window_end:timestamp,value:bigint>"
    )


class Limited(KeyedBroadcastProcessFunction):
    """Keyed and broadcast state of one name."""

    def open(self, context):
        self.n = context.get_state(ValueStateDescriptor("limits", "LONG", default=0))

    def process_element(self, value, ctx):
        self.n.update(self.n.value() + 1)

    def process_broadcast_element(self, limit, ctx):
        ctx.get_broadcast_state(LIMITS)[limit] = (limit, 1)


LIMITS = MapStateDescriptor("limits", "STRING", "name STRING, most LONG")


def limited_file(folder):
    """A file as an export writes it: the copies of broadcast state are those of key groups -1 and -2."""
    harness = BroadcastHarness(Limited(), [LIMITS], key=lambda value: value, key_type="STRING", uid="totals")
    harness.micro_batch([("all", None), ("some", None)], [("a", None), ("b", None)])
    snapshot = harness.snapshot()
    rows = [*((-1 - n, copy) for n, copy in enumerate(snapshot.broadcast)), *snapshot.values.items()]
    writer = StateFileWriter(folder / state_path("totals", "f"))
    writer.write([group for group, _ in rows], [bytes(value) for _, value in rows])
    size, digest = writer.close()
    return folder, StateFile("totals", "totals", "f", len(rows), size, digest)


def test_keyed_and_broadcast_state_of_one_name_are_told_apart(tmp_path) -> None:
    saved = limited_file(tmp_path)
    folder, file = saved
    found = sections(saved)
    assert set(found) == {"state/limits", "broadcast/limits"}
    assert read(saved, "limits")[1] == [{"key": "a", "value": 1}, {"key": "b", "value": 1}]
    assert len(found["broadcast/limits"]) == 1
    copies = FirstCopy(SavepointValues(StoreSpec(str(folder))), "broadcast/limits")(given_to(file))
    assert rows_of(ReadSection(CopyValues(), "broadcast/limits")(copies)) == [
        {"key": name, "value": {"name": name, "most": 1}} for name in ("all", "some")
    ]


def test_broadcast_state_goes_through_edits_and_can_be_edited_itself(tmp_path) -> None:
    folder, file = limited_file(tmp_path)
    given = given_to(file)
    kind = arrow_schema(parse_ddl("key STRING, value STRUCT<name: STRING, most: LONG>"))
    edit = EditedPartition("broadcast/limits", kind, BROADCAST_KIND)

    def written_by(rows, edits):
        blocks = [to_block(pa.RecordBatch.from_pylist(rows, schema=kind))] if rows else []
        packed = [
            row
            for one in PackValues(StoreSpec(str(folder)), frozenset({BROADCAST_KIND}))(given)
            for row in one.to_pylist()
        ]
        packed += [{"key_group": -1, "part": 1, "block": block} for block in blocks]
        packed.sort(key=lambda row: (row["key_group"], row["part"]))
        task = WriteGroups(StoreSpec(str(folder)), f"g{len(rows)}", EditGroup("sums", edits))
        (report,) = [row for one in task([pa.RecordBatch.from_pylist(packed)]) for row in one.to_pylist()]
        one = json.loads(report["report"])["file"]
        return StateFile("sums", "sums", one["name"], one["rows"], one["bytes"], one["sha256"])

    def copies(file):
        values = [bytes(value) for group, value in file_values(StoreSpec(str(folder)), file) if group < 0]
        return [dict(BroadcastTables("sums", [LIMITS], value).readable(LIMITS)) for value in values]

    # Under another uid, and one copy is enough.
    assert copies(written_by([], {})) == [{"all": ("all", 1), "some": ("some", 1)}]
    new = [{"key": "all", "value": {"name": "x", "most": 9}}]
    assert copies(written_by(new, {1: edit})) == [{"all": ("x", 9)}]
    with pytest.raises(WriterError, match="several rows for one key"):
        written_by(new * 2, {1: edit})
    with pytest.raises(WriterError, match="has a null"):
        written_by([{"key": "all", "value": None}] * 3, {1: edit})


ITEMS = OperatorListDescriptor("open", "file STRING, at LONG")


def lists_file(folder):
    """Two partitions with operator list state; the one between them has kept nothing."""
    rows = []
    for group, items in ((-1, [("a", 1), ("b", 2)]), (-3, [("c", 3)])):
        lists = OperatorLists("merged", [ITEMS], None)
        lists.state(ITEMS).add_all(items)
        rows.append((group, lists.dump()))
    writer = StateFileWriter(folder / state_path("merged", "f"))
    writer.write([group for group, _ in rows], [value for _, value in rows])
    size, digest = writer.close()
    return folder, StateFile("merged", "merged", "f", len(rows), size, digest)


def test_items_of_all_partitions_are_read(tmp_path) -> None:
    saved = lists_file(tmp_path)
    folder, file = saved
    assert set(sections(saved)) == {"lists/open"}
    read_all = ReadSection(SavepointValues(StoreSpec(str(folder))), "lists/open")(given_to(file))
    items = [row["item"] for one in read_all for row in one.to_pylist()]
    assert items == [{"file": "a", "at": 1}, {"file": "b", "at": 2}, {"file": "c", "at": 3}]


def test_items_that_partitions_keep_by_several_declarations_are_read_together() -> None:
    """A partition that has stored nothing since has its items as they were declared then."""
    found = {}
    for kind, item in (("file STRING, at INT", ("a", 1)), ("at LONG, size LONG", (2, 3))):
        own = OperatorListDescriptor("open", kind)
        lists = OperatorLists("merged", [own], None)
        lists.state(own).add(item)
        found[read_tables(lists.dump())["lists/open"].schema] = lists.dump()
    schema = common_columns("open", list(found))
    rows = rows_of(ReadSection(lambda _: iter(found.values()), "lists/open", schema)(()))
    assert rows == [
        {"item": {"file": "a", "at": 1, "size": None}},
        {"item": {"file": None, "at": 2, "size": 3}},
    ]


def test_items_of_partitions_go_through_edits_and_stay_apart(tmp_path) -> None:
    folder, file = lists_file(tmp_path)
    packed = list(PackValues(StoreSpec(str(folder)), frozenset({BROADCAST_KIND}))(given_to(file)))
    task = WriteGroups(StoreSpec(str(folder)), "g", EditGroup("other", {}))
    (report,) = [row for one in task(packed) for row in one.to_pylist()]
    one = json.loads(report["report"])["file"]
    new = StateFile("other", "other", one["name"], one["rows"], one["bytes"], one["sha256"])
    kept = {
        group: OperatorLists("other", [ITEMS], value)
        for group, value in file_values(StoreSpec(str(folder)), new)
    }
    assert {group: lists.state(ITEMS).get() for group, lists in kept.items()} == {
        -1: [("a", 1), ("b", 2)],
        -3: [("c", 3)],
    }
    kind = arrow_schema(parse_ddl("key STRING, value LONG"))
    edit = EditedPartition("broadcast/limits", kind, BROADCAST_KIND)
    with pytest.raises(WriterError, match="keeps operator list state where broadcast state was to be"):
        list(WriteGroups(StoreSpec(str(folder)), "h", EditGroup("other", {1: edit}))(packed))


def test_items_are_replaced_and_all_of_them_are_the_first_partitions(tmp_path) -> None:
    folder, file = lists_file(tmp_path)
    kind = arrow_schema(parse_ddl("item STRUCT<file: STRING, at: LONG>"))
    new = pa.RecordBatch.from_pylist([{"item": {"file": "d", "at": 4}}] * 2, schema=kind)
    packed = [row for one in PackValues(StoreSpec(str(folder)))(given_to(file)) for row in one.to_pylist()]
    packed.insert(1, {"key_group": -1, "part": 1, "block": to_block(new)})
    change = EditGroup("merged", {1: EditedPartition("lists/open", kind, LIST_KIND)})
    task = WriteGroups(StoreSpec(str(folder)), "g", change)
    (report,) = [row for one in task([pa.RecordBatch.from_pylist(packed)]) for row in one.to_pylist()]
    one = json.loads(report["report"])["file"]
    written = StateFile("merged", "merged", one["name"], one["rows"], one["bytes"], one["sha256"])
    kept = {
        group: OperatorLists("merged", [ITEMS], value)
        for group, value in file_values(StoreSpec(str(folder)), written)
    }
    assert {group: lists.state(ITEMS).get() for group, lists in kept.items()} == {-1: [("d", 4), ("d", 4)]}
