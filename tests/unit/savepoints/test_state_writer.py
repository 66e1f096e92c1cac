"""Writing savepoints without Spark: the tasks' half, which columns go into which state, chains, timers."""

from __future__ import annotations

import datetime
import json
import threading
from collections import namedtuple

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from flinkish_spark import (
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateTtl,
    ValueStateDescriptor,
)
from flinkish_spark.core.elements import MIN_WATERMARK_MS, TimeDomain
from flinkish_spark.core.errors import ConfigError, SchemaError, UserFunctionError
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.event_time import Valve
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage
from flinkish_spark.protocol.plan_layout import Chain
from flinkish_spark.protocol.restore import (
    JobShape,
    OperatorShape,
    RestoreRules,
    SourceShape,
    begin_chain,
    check_restore,
)
from flinkish_spark.protocol.savepoints import OperatorState, SavedChain, SavepointMetadata, StateFile
from flinkish_spark.protocol.timer_index import Agenda, NextTimers
from flinkish_spark.protocol.watermarks import EventTime, OperatorTime
from flinkish_spark.savepoints.bootstrap import KeyedStateBootstrapFunction, bootstrap_function
from flinkish_spark.savepoints.entries import SavepointValues, file_values
from flinkish_spark.savepoints.files import BootstrapError, SavepointDamagedError
from flinkish_spark.savepoints.group_edits import (
    EditedState,
    EditedTimers,
    EditGroup,
    FillGroup,
    PackRows,
    PackValues,
    WriteGroups,
    WriterError,
)
from flinkish_spark.savepoints.writer_plan import (
    add_operator,
    drop_operator,
    drop_times,
    rename_operator,
    rename_times,
    replace_due_timers,
    state_columns,
    timer_fields,
)
from flinkish_spark.state.codec import timer_layout
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.rows import arrow_schema
from tests.support.operator_harness import OperatorHarness, Snapshot

NOW_MS = 1_000_000
GROUPS = 16
ROWS = "user STRING, amount LONG, at LONG"


class Fills(KeyedStateBootstrapFunction):
    """A total, the amounts in their order, and a timer of each clock."""

    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", "LONG", default=0))
        self.seen = context.get_list_state(ListStateDescriptor("seen", "LONG"))
        self.recent = context.get_state(ValueStateDescriptor("recent", "LONG", ttl=StateTtl(10_000)))

    def process_element(self, value, ctx):
        self.total.update(self.total.value() + value.amount)
        self.seen.add(value.amount)
        self.recent.update(value.amount)
        ctx.timer_service().register_event_time_timer(ctx.timestamp())
        assert ctx.timer_service().current_watermark() == MIN_WATERMARK_MS
        ctx.timer_service().register_processing_time_timer(ctx.timer_service().current_processing_time())


class Goes(KeyedProcessFunction):
    """The job that goes on with it."""

    def open(self, context):
        Fills.open(self, context)

    def process_element(self, order, ctx):
        yield "order", order.user, self.total.value(), list(self.seen), self.recent.value()

    def on_timer(self, time_ms, ctx):
        yield "timer", ctx.get_current_key(), time_ms, ctx.time_domain().value


Order = namedtuple("Order", "user amount at")


def packed(schema: T.StructType, rows, hash_of, timestamp=None):
    """Rows as blocks behind their key group, and the schema of the blocks."""
    columns = {"hash": [hash_of(row[0]) for row in rows]}
    fields = [T.StructField("hash", T.LongType())]
    if timestamp is not None:
        columns["time"] = [row[schema.names.index(timestamp)] for row in rows]
        fields.append(T.StructField("time", T.LongType()))
    for number, field in enumerate(schema):
        columns[f"c{number}"] = [row[number] for row in rows]
        fields.append(T.StructField(f"c{number}", field.dataType))
    columns["k0"] = [row[0] for row in rows]
    fields.append(T.StructField("k0", schema[0].dataType))
    stored = arrow_schema(fields)
    groups = pa.array([hash_of(row[0]) % GROUPS for row in rows], pa.int32())
    arrays = [groups, *(pa.array(columns[f.name], f.type) for f in stored)]
    batch = pa.RecordBatch.from_arrays(arrays, names=["key_group", *stored.names])
    return sorted_blocks(PackRows(1, stored)([batch])), stored


def sorted_blocks(*batches):
    table = pa.Table.from_batches([batch for several in batches for batch in several])
    return table.sort_by([("key_group", "ascending"), ("part", "ascending")]).to_batches(max_chunksize=3)


def report_of(task, batches):
    (row,) = [row for batch in task(batches) for row in batch.to_pylist()]
    return json.loads(row["report"])


def file_of(report, operator="totals"):
    one = report["file"]
    return StateFile(operator, operator, one["name"], one["rows"], one["bytes"], one["sha256"])


def filled(folder, function, rows, timestamp=None, ddl=ROWS, name="t0"):
    schema = parse_ddl(ddl)
    blocks, stored = packed(schema, rows, OperatorHarness._hash, timestamp)
    made = bootstrap_function(function, schema, "totals")
    fill = FillGroup("totals", GROUPS, made, stored, schema.names, [schema[0].dataType], NOW_MS)
    return report_of(WriteGroups(StoreSpec(str(folder)), name, EditGroup("totals", {}, fill)), blocks)


def restored(folder, report, function, operator="totals"):
    """A harness of a job that begins with the file."""
    values = {
        group: bytes(value) for group, value in file_values(StoreSpec(str(folder)), file_of(report, operator))
    }
    snapshot = Snapshot(values, MIN_WATERMARK_MS, NOW_MS)
    key = {"key": lambda order: order.user, "key_type": "STRING", "uid": operator}
    return OperatorHarness(function, **key, max_parallelism=GROUPS, restore=snapshot)


ORDERS = [Order("ann", 3, 30), Order("ben", 7, 20), Order("ann", 5, 10), Order(None, 1, 5)]


def test_a_job_finds_what_a_function_has_filled(tmp_path) -> None:
    report = filled(tmp_path, Fills(), ORDERS, timestamp="at")
    due = {group: (event_ms, processing_ms) for group, event_ms, processing_ms in report["due"]}
    assert due[OperatorHarness._hash("ann") % GROUPS] == (10, NOW_MS)
    assert set(report["states"]) == {"total", "seen", "recent"}
    job = restored(tmp_path, report, Goes())
    job.push_all([(Order(user, 0, 0), None) for user in ("ann", "ben", None)])
    rows = sorted(job.take().rows, key=str)
    assert [row for row in rows if row[0] == "order"] == [
        # The rows of a key came by their times.
        ("order", "ann", 8, [5, 3], 3),
        ("order", "ben", 7, [7], 7),
        ("order", None, 1, [1], 1),
    ]
    assert {row[1:] for row in rows if row[0] == "timer"} == {
        (user, NOW_MS, "PROCESSING_TIME") for user in ("ann", "ben", None)
    }
    job.watermark(20)
    assert sorted(job.take().rows, key=str) == [
        ("timer", "ann", 10, "EVENT_TIME"),
        ("timer", "ben", 20, "EVENT_TIME"),
        ("timer", None, 5, "EVENT_TIME"),
    ]
    job.processing_time(NOW_MS + 10_000)
    job.push(Order("ann", 0, 0))
    assert job.take().rows == [("order", "ann", 8, [5, 3], None)]


class Emits(Fills):
    def process_element(self, value, ctx):
        return [value]


class Breaks(Fills):
    def process_element(self, value, ctx):
        raise KeyError(value.amount)


class WrongType(Fills):
    def process_element(self, value, ctx):
        self.total.update("seven")


class Never(Fills):
    def process_element(self, value, ctx):
        yield value


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (Emits(), "it emits rows, and a bootstrap has no output"),
        (Breaks(), "KeyError: 3 .*key 'ann'"),
        (WrongType(), "cannot hold 'seven'"),
    ],
)
def test_a_function_that_fails_is_named_with_its_reason(tmp_path, function, says) -> None:
    with pytest.raises(WriterError, match=says) as caught:
        filled(tmp_path, function, ORDERS[:1])
    assert json.loads(str(caught.value).split(" ", 1)[1])["uid"] == "totals"


def test_a_function_of_which_a_call_runs_nothing_or_that_cannot_travel_is_refused() -> None:
    with pytest.raises(ConfigError, match="generator"):
        bootstrap_function(Never(), parse_ddl(ROWS), "totals")
    stuck = Fills()
    stuck.lock = threading.Lock()
    with pytest.raises(UserFunctionError, match="that fills the state of 'totals'"):
        bootstrap_function(stuck, parse_ddl(ROWS), "totals")
    with pytest.raises(ConfigError, match="pairs of descriptor and columns"):
        bootstrap_function("total", parse_ddl(ROWS), "totals")  # type: ignore[arg-type]


# -- columns ----------------------------------------------------------------------------------------
class Shows(KeyedProcessFunction):
    """Everything that the columns filled."""

    def __init__(self, descriptors) -> None:
        self.descriptors = descriptors

    def open(self, context):
        make = {
            ValueStateDescriptor: context.get_state,
            ListStateDescriptor: context.get_list_state,
            MapStateDescriptor: context.get_map_state,
        }
        self.states = [make[type(one)](one) for one in self.descriptors]

    def process_element(self, order, ctx):
        yield tuple(
            one.value()
            if hasattr(one, "value")
            else dict(one.items())
            if hasattr(one, "items")
            else list(one)
            for one in self.states
        )


def shown(folder, ddl, rows, pairs, users=("ann",)):
    report = filled(folder, pairs, rows, ddl=ddl)
    job = restored(folder, report, Shows([descriptor for descriptor, _ in pairs]))
    job.push_all([(Order(user, 0, 0), None) for user in users])
    return job.take().rows


def test_columns_go_into_value_states(tmp_path) -> None:
    one, two = (
        ValueStateDescriptor("one", "LONG", default=9),
        ValueStateDescriptor("two", "n LONG, name STRING"),
    )
    alone = ValueStateDescriptor("alone", "n LONG")
    pairs = [(one, "n"), (two, ["n", "name"]), (alone, "n")]
    rows = [("ann", 1, "x"), ("ben", None, None)]
    found = shown(tmp_path, "user STRING, n LONG, name STRING", rows, pairs, users=("ann", "ben"))
    assert sorted(found, key=str) == [(1, (1, "x"), (1,)), (9, None, None)]


def test_columns_go_into_lists_and_maps_by_element_or_whole(tmp_path) -> None:
    seen, pairs_seen = (
        ListStateDescriptor("seen", "LONG"),
        ListStateDescriptor("pairs", "n LONG, name STRING"),
    )
    counts = MapStateDescriptor("counts", "STRING", "LONG")
    named = MapStateDescriptor("named", "STRING", "n LONG, name STRING")
    pairs = [
        (seen, "n"),
        (pairs_seen, ("n", "name")),
        (counts, ("name", "n")),
        (named, ("name", "n", "name")),
    ]
    rows = [("ann", 1, "x"), ("ann", 2, "y")]
    assert shown(tmp_path, "user STRING, n LONG, name STRING", rows, pairs) == [
        ([1, 2], [(1, "x"), (2, "y")], {"x": 1, "y": 2}, {"x": (1, "x"), "y": (2, "y")})
    ]
    ddl = (
        "user STRING, ns ARRAY<LONG>, ps ARRAY<STRUCT<n: LONG, name: STRING>>, m MAP<STRING, LONG>, "
        "mp MAP<STRING, STRUCT<n: LONG, name: STRING>>"
    )
    row = ("ann", [1, 2], [{"n": 1, "name": "x"}], {"x": 1}, {"x": {"n": 1, "name": "y"}})
    whole = [(seen, "ns"), (pairs_seen, "ps"), (counts, "m"), (named, "mp")]
    assert shown(tmp_path / "whole", ddl, [row], whole) == [([1, 2], [(1, "x")], {"x": 1}, {"x": (1, "y")})]


def test_a_value_of_a_whole_map_may_be_null_and_an_element_of_a_whole_list_may_not(tmp_path) -> None:
    named = MapStateDescriptor("named", "STRING", "n LONG, name STRING")
    kind = "STRUCT<n: LONG, name: STRING>"
    row = ("ann", {"x": None})
    found = shown(tmp_path, f"user STRING, m MAP<STRING, {kind}>", [row], [(named, "m")])
    assert found == [({"x": None},)]
    listed = ListStateDescriptor("listed", "n LONG, name STRING")
    with pytest.raises(WriterError, match=r"a list state takes no None.*'ann'"):
        filled(tmp_path / "list", [(listed, "l")], [("ann", [None])], ddl=f"user STRING, l ARRAY<{kind}>")


@pytest.mark.parametrize(
    "pair",
    [(ValueStateDescriptor("one", "LONG"), "n"), (MapStateDescriptor("m", "STRING", "LONG"), ("name", "n"))],
)
def test_several_rows_for_one_place_are_refused(tmp_path, pair) -> None:
    with pytest.raises(WriterError, match="several rows for the key 'ann'"):
        filled(tmp_path, [pair], [("ann", 1, "x"), ("ann", 2, "x")], ddl="user STRING, n LONG, name STRING")


@pytest.mark.parametrize(
    ("descriptor", "columns", "says"),
    [
        (ValueStateDescriptor("one", "LONG"), "nothing", "no such column.*choose from: user, n, name"),
        (ValueStateDescriptor("one", "DOUBLE"), "n", "They are bigint, and it takes double.*cast"),
        (ValueStateDescriptor("one", "a LONG, b STRING"), "n", "takes bigint, string"),
        (ListStateDescriptor("seen", "LONG"), "name", "takes array<bigint> or bigint"),
        (MapStateDescriptor("m", "STRING", "LONG"), "n", "takes map<string,bigint> or string, bigint"),
    ],
)
def test_columns_that_do_not_fit_a_state_are_refused(descriptor, columns, says) -> None:
    with pytest.raises(SchemaError, match=says):
        bootstrap_function([(descriptor, columns)], parse_ddl("user STRING, n LONG, name STRING"), "totals")


def test_a_state_with_a_function_of_its_own_takes_no_columns() -> None:
    descriptor = ReducingStateDescriptor("sum", lambda first, second: first + second, "LONG")
    with pytest.raises(ConfigError, match="cannot be filled from columns"):
        bootstrap_function([(descriptor, "n")], parse_ddl("n LONG"), "totals")


# -- edits ------------------------------------------------------------------------------------------
def edited(folder, report, uid, ddl, rows, name):
    """The file with one state replaced, under a uid; an edit of nothing without rows."""
    layout, columns = state_columns(parse_ddl(ddl), uid, name, ["string"])
    fields = [T.StructField("hash", T.LongType())]
    fields += [T.StructField(f"c{at}", field.dataType) for at, field in enumerate(columns)]
    edit = EditedState(f"state/{name}", arrow_schema(fields), layout.schema)
    hashes = [OperatorHarness._hash(row[0]) for row in rows]
    arrays = [pa.array([one % GROUPS for one in hashes], pa.int32()), pa.array(hashes, pa.int64())]
    arrays += [pa.array([row[at] for row in rows], edit.rows.types[at + 1]) for at in range(len(columns))]
    batch = pa.RecordBatch.from_arrays(arrays, names=["key_group", *edit.rows.names])
    given = pa.RecordBatch.from_pydict({"file": [json.dumps(file_of(report).to_json())]})
    blocks = sorted_blocks(PackValues(StoreSpec(str(folder)))([given]), PackRows(1, edit.rows)([batch]))
    return report_of(WriteGroups(StoreSpec(str(folder)), "edited", EditGroup(uid, {1: edit})), blocks)


def test_one_state_is_replaced_and_everything_else_stays(tmp_path) -> None:
    before = filled(tmp_path, Fills(), ORDERS, timestamp="at")
    rows = [("ann", 100), ("cem", 200)]
    report = edited(tmp_path, before, "sums", "key STRING, value LONG", rows, "total")
    job = restored(tmp_path, report, Goes(), "sums")
    job.push_all([(Order(user, 0, 0), None) for user in ("ann", "ben", "cem")])
    assert sorted(orders(job)) == [
        ("order", "ann", 100, [5, 3], 3),
        ("order", "ben", 0, [7], 7),
        ("order", "cem", 200, [], None),
    ]
    job.watermark(5)
    assert ("timer", None, 5, "EVENT_TIME") in job.take().rows


def orders(job):
    return [row for row in job.take().rows if row[0] == "order"]


def test_times_of_entries_are_written_as_they_are_read(tmp_path) -> None:
    before = filled(tmp_path, Fills(), ORDERS, timestamp="at")
    touched = datetime.datetime.fromtimestamp((NOW_MS + 5_000) / 1000, datetime.UTC)
    ddl = "value LONG, key STRING, touched_at TIMESTAMP"
    report = edited(tmp_path, before, "totals", ddl, [("ann", touched, 1)], "recent")
    job = restored(tmp_path, report, Goes())
    job.processing_time(NOW_MS + 14_999)
    job.push(Order("ann", 0, 0))
    job.processing_time(NOW_MS + 15_000)
    job.push(Order("ann", 0, 0))
    assert [row[-1] for row in orders(job)] == [1, None]


class Elements(KeyedProcessFunction):
    """Elements that expire one by one."""

    def open(self, context):
        self.seen = context.get_list_state(ListStateDescriptor("seen", "LONG", StateTtl(10_000)))
        self.n = context.get_map_state(MapStateDescriptor("n", "STRING", "LONG", StateTtl(10_000)))

    def process_element(self, order, ctx):
        if order.amount:
            self.seen.add(order.amount)
            self.n[str(order.amount)] = order.amount
        yield list(self.seen), dict(self.n)


EACH = "touched_at TIMESTAMP, each_touched_at ARRAY<TIMESTAMP>"


def later(seconds):
    return datetime.datetime.fromtimestamp(NOW_MS / 1000 + seconds, datetime.UTC)


def test_times_of_elements_are_written_as_they_are_read(tmp_path) -> None:
    before = filled(tmp_path, Bootstraps(), ORDERS)
    ddl = f"key STRING, value ARRAY<LONG>, {EACH}"
    rows = [
        ("ann", later(5), [later(2), later(5)], [1, 2]),
        ("ben", later(5), None, [3, 4]),
        ("cem", later(5), [], []),
    ]
    report = edited(tmp_path, before, "totals", ddl, rows, "seen")
    ddl = f"key STRING, value MAP<STRING, LONG>, {EACH}"
    report = edited(tmp_path, report, "totals", ddl, [("ann", later(4), [later(4)], [("x", 7)])], "n")
    job = restored(tmp_path, report, Elements())

    def at(seconds, user):
        job.processing_time(NOW_MS + seconds * 1_000)
        job.push(Order(user, 0, 0))
        return job.take().rows[0]

    assert at(11, "ann") == ([1, 2], {"x": 7})
    assert at(12, "ann") == ([2], {"x": 7})
    assert at(14, "ann") == ([2], {})
    assert [at(14, user)[0] for user in ("ben", "cem")] == [[3, 4], []]
    assert at(15, "ben") == ([], {})


def test_times_may_be_left_out_then_all_elements_have_that_of_the_entry(tmp_path) -> None:
    before = filled(tmp_path, Bootstraps(), ORDERS)
    ddl = "key STRING, value ARRAY<LONG>, touched_at TIMESTAMP"
    report = edited(tmp_path, before, "totals", ddl, [("ann", later(5), [1, 2])], "seen")
    job = restored(tmp_path, report, Elements())
    job.processing_time(NOW_MS + 14_999)
    job.push(Order("ann", 9, 0))
    job.processing_time(NOW_MS + 15_000)
    job.push(Order("ann", 0, 0))
    assert [row[0] for row in job.take().rows] == [[1, 2, 9], [9]]


class Bootstraps(KeyedStateBootstrapFunction):
    """A list and a map with a time to live."""

    open = Elements.open

    def process_element(self, value, ctx):
        self.seen.add(value.amount)
        self.n[str(value.amount)] = value.amount


@pytest.mark.parametrize(
    ("touched", "each", "says"),
    [
        (5, [5], "as many times as elements"),
        (5, [5, None], "one is null"),
        (5, [2, 4], "the latest one must be the entry's touched_at; leave each_touched_at out"),
        (5, [5, 0.0005], "whole milliseconds"),
    ],
)
def test_times_of_elements_that_do_not_fit_are_refused(tmp_path, touched, each, says) -> None:
    before = filled(tmp_path, Bootstraps(), ORDERS)
    ddl = f"key STRING, value ARRAY<LONG>, {EACH}"
    times = [None if one is None else later(one) for one in each]
    with pytest.raises(WriterError, match=f"each_touched_at of the state 'seen': .*{says}"):
        edited(tmp_path, before, "totals", ddl, [("ann", later(touched), times, [1, 2])], "seen")


@pytest.mark.parametrize(
    "ddl",
    [
        "key STRING, value ARRAY<LONG>, each_touched_at ARRAY<TIMESTAMP>",
        f"key STRING, value LONG, {EACH}",
        "key STRING, value ARRAY<LONG>, touched_at TIMESTAMP, each_touched_at ARRAY<LONG>",
    ],
)
def test_times_of_elements_without_elements_or_touch_are_refused(ddl) -> None:
    with pytest.raises(SchemaError, match="each_touched_at"):
        state_columns(parse_ddl(ddl), "totals", "seen", ["string"])


def test_two_rows_for_one_key_and_null_times_are_refused(tmp_path) -> None:
    before = filled(tmp_path, Fills(), ORDERS, timestamp="at")
    rows = [("ann", 1), ("ann", 2)]
    with pytest.raises(WriterError, match=r"state 'total' has several rows for \['ann'\]"):
        edited(tmp_path, before, "totals", "key STRING, value LONG", rows, "total")
    with pytest.raises(WriterError, match="touched_at of the state 'recent': it is null"):
        ddl = "key STRING, touched_at TIMESTAMP, value LONG"
        edited(tmp_path, before, "totals", ddl, [("ann", None, 1)], "recent")


def edited_timers(folder, report, rows):
    """The file with other timers."""
    ddl = "key STRING, clock STRING, time_ms LONG, window_start TIMESTAMP, window_end TIMESTAMP"
    columns = timer_fields(parse_ddl(ddl), "totals", ["string"])
    fields = [T.StructField("hash", T.LongType())]
    fields += [T.StructField(f"c{at}", field.dataType) for at, field in enumerate(columns)]
    layouts = {domain: timer_layout(domain, [T.StringType()]) for domain in TimeDomain}
    edit = EditedTimers(arrow_schema(fields), layouts)
    hashes = [OperatorHarness._hash(row[0]) for row in rows]
    arrays = [pa.array([one % GROUPS for one in hashes], pa.int32()), pa.array(hashes, pa.int64())]
    arrays += [pa.array([row[at] for row in rows], edit.rows.types[at + 1]) for at in range(len(columns))]
    batch = pa.RecordBatch.from_arrays(arrays, names=["key_group", *edit.rows.names])
    given = pa.RecordBatch.from_pydict({"file": [json.dumps(file_of(report).to_json())]})
    blocks = sorted_blocks(PackValues(StoreSpec(str(folder)))([given]), PackRows(1, edit.rows)([batch]))
    return report_of(WriteGroups(StoreSpec(str(folder)), "timed", EditGroup("totals", {1: edit})), blocks)


def test_timers_are_replaced_and_states_stay(tmp_path) -> None:
    before = filled(tmp_path, Fills(), ORDERS, timestamp="at")
    event, processing = (domain.value for domain in TimeDomain)
    rows = [
        ("ben", event, 90, None, None),
        ("ann", event, 80, None, None),
        ("ann", event, 70, None, None),
        ("cem", processing, NOW_MS + 5, None, None),
    ]
    report = edited_timers(tmp_path, before, rows)
    due = {group: tuple(times) for group, *times in report["due"]}
    assert due[OperatorHarness._hash("ann") % GROUPS][0] == 70
    job = restored(tmp_path, report, Goes())
    job.watermark(80)
    assert job.take().rows == [("timer", "ann", 70, event), ("timer", "ann", 80, event)]
    job.processing_time(NOW_MS + 5)
    assert job.take().rows == [("timer", "cem", NOW_MS + 5, processing)]
    job.push(Order("ann", 0, 0))
    assert job.take().rows == [("order", "ann", 8, [5, 3], 3)]
    assert job.timer_count() == 1


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (("ann", "WALL", 1, None, None), "one of EVENT_TIME, PROCESSING_TIME"),
        (("ann", "EVENT_TIME", None, None, None), "no time"),
        (("ann", "EVENT_TIME", 1, datetime.datetime(2026, 1, 1), None), "without beginning or end"),
    ],
)
def test_timers_that_cannot_be_are_refused(tmp_path, row, says) -> None:
    before = filled(tmp_path, Fills(), ORDERS, timestamp="at")
    with pytest.raises(WriterError, match=says):
        edited_timers(tmp_path, before, [row])
    twice = ("ann", "EVENT_TIME", 1, None, None)
    with pytest.raises(WriterError, match="the timers of EVENT_TIME has several rows"):
        edited_timers(tmp_path, before, [twice, twice])


WINDOW = "window_start TIMESTAMP, window_end TIMESTAMP"


@pytest.mark.parametrize(
    ("ddl", "says"),
    [
        (f"key STRING, clock STRING, time_ms INT, {WINDOW}", "'time_ms' .* is a bigint, and here int"),
        (f"key STRING, time_ms LONG, {WINDOW}", "'clock' .* here missing"),
        (f"key STRING, clock STRING, time_ms LONG, {WINDOW}, n INT", "no column 'n'"),
    ],
)
def test_columns_that_are_not_those_of_read_timers_are_refused(ddl, says) -> None:
    with pytest.raises(SchemaError, match=says):
        timer_fields(parse_ddl(ddl), "totals", ["string"])


@pytest.mark.parametrize(
    ("ddl", "says"),
    [
        ("key LONG, value LONG", "'key' of .* is a string, and here bigint"),
        ("value LONG", "here missing"),
        ("key STRING", "has no value"),
        ("key STRING, total LONG", "the only value 'total'"),
        ("key STRING, window_start TIMESTAMP, value LONG", "has one of window_start and window_end"),
        (
            "key STRING, touched_at LONG, value LONG",
            "'touched_at' of .* is a timestamp, and here bigint",
        ),
    ],
)
def test_columns_that_are_not_those_of_read_state_are_refused(ddl, says) -> None:
    with pytest.raises(SchemaError, match=says):
        state_columns(parse_ddl(ddl), "totals", "total", ["string"])


def test_columns_are_stored_as_a_job_stores_them() -> None:
    layout, columns = state_columns(
        parse_ddl("n LONG, key_1 INT, window_end TIMESTAMP, key_0 STRING, window_start TIMESTAMP, m STRING"),
        "totals",
        "total",
        ["string", "int"],
    )
    assert layout.schema.names == ["hash", "key_0", "key_1", "from", "to", "value_0", "value_1", "alive"]
    assert [one.name for one in columns] == ["key_0", "key_1", "window_start", "window_end", "n", "m"]


def test_fields_of_a_state_may_have_the_names_of_times() -> None:
    """As in a function that keeps windows of its own; nothing but what is stored tells them apart."""
    ddl = "key STRING, window_start TIMESTAMP, window_end TIMESTAMP, touched_at LONG, clicks LONG"
    fields = {name: name for name in ("clicks", "window_start", "window_end", "touched_at")}
    layout, columns = state_columns(parse_ddl(ddl), "totals", "session", ["string"], fields)
    assert layout.schema.names == ["hash", "key_0", *(f"value_{at}" for at in range(4)), "alive"]
    assert layout.value_names == ("window_start", "window_end", "touched_at", "clicks")
    assert [one.name for one in columns] == ["key", *layout.value_names]


# -- chains and times -------------------------------------------------------------------------------
ORDERS_AT = {"orders": {"orders": {"0": 7}}}


def savepoint(chains, *uids) -> SavepointMetadata:
    operators = {uid: OperatorState(128, ("string",)) for uid in uids}
    ids = JobUuid("0" * 32), CheckpointId(0), Lineage(0), BatchId(0)
    return SavepointMetadata("a" * 32, "orders", *ids, 0, 2, operators, {}, chains)


def shape(*chains: Chain) -> JobShape:
    uids = {uid for chain in chains for uid in chain.operators}
    sources = {
        uid: SourceShape("kafka", True, frozenset({"orders"})) for chain in chains for uid in chain.sources
    }
    operators = {uid: OperatorShape(128, ("string",)) for uid in uids}
    return JobShape(operators, sources, {chain: ("table",) for chain in chains})


@pytest.mark.parametrize(
    "chains",
    [
        [Chain(("orders",), ("totals", "counts"), ("counts",))],
        [Chain(("orders",), ("totals",), ("totals",)), Chain(("orders",), ("totals", "counts"), ("counts",))],
        [Chain(("orders",), ("totals",), ("totals",)), Chain(("clicks",), ("counts",), ("counts",))],
        [Chain(("orders",), ("other", "totals"), ("totals",)), Chain(("clicks",), ("counts",), ("counts",))],
    ],
)
def test_a_savepoint_from_nothing_fits_every_plan_and_sources_begin_where_they_say(chains) -> None:
    saved, name = add_operator(*add_operator((), "totals", None)[:1], "counts", None)
    job = shape(*chains)
    assert check_restore(savepoint(saved, "totals", "counts"), job, RestoreRules()).problems == ()
    for chain in chains:
        begun = begin_chain(chain, ("table",), saved, job.positionable)
        assert begun.positions == {}
        known = [uid for uid in chain.operators if uid != "other"]
        assert begun.states == dict.fromkeys(known, name)


def test_a_new_operator_stands_where_the_chain_beside_it_stood() -> None:
    known = (SavedChain(Chain(("orders",), ("totals",), ("totals",)), ORDERS_AT, ("table",)),)
    saved, name = add_operator(known, "counts", None)
    job = shape(Chain(("orders",), ("totals", "counts"), ("counts",)))
    (chain,) = job.chains
    begun = begin_chain(chain, ("table",), saved, job.positionable)
    assert (name, begun.positions) == ("totals", ORDERS_AT)
    assert begun.states == {"totals": "totals", "counts": "totals"}
    other = SavedChain(
        Chain(("clicks",), ("clicked",), ("clicked",)), {"clicks": {"clicks": {"0": 1}}}, ("other",)
    )
    with pytest.raises(BootstrapError, match=r"not clear which.*beside='totals' or 'clicked'"):
        add_operator((*known, other), "counts", None)
    with pytest.raises(BootstrapError, match="no chain 'x'"):
        add_operator((*known, other), "counts", "x")
    assert add_operator((*known, other), "counts", "clicked")[1] == "clicked"


def test_without_its_operator_a_chain_still_says_where_its_sinks_stood() -> None:
    known = (SavedChain(Chain(("orders",), ("totals",), ("totals",)), ORDERS_AT, ("table",)),)
    (left,) = drop_operator(known, "totals")
    assert (left.chain, left.positions) == (Chain(("orders",), (), ("table",)), ORDERS_AT)
    chain = Chain(("orders",), ("new",), ("new",))
    assert begin_chain(chain, ("table",), (left,), ("orders",)).positions == ORDERS_AT
    assert drop_operator(add_operator((), "totals", None)[0], "totals") == ()
    both = (SavedChain(Chain(("orders",), ("a", "b"), ("b",)), ORDERS_AT),)
    assert drop_operator(both, "b")[0].chain == Chain(("orders",), ("a",), ("b",))


def timers(*names):
    return Agenda({(name, 3): NextTimers(60_000, None) for name in names})


def test_timers_follow_their_operator() -> None:
    times = EventTime(agenda=timers("totals", "totals.counts", "totals.x", "counts"))
    uids = ["totals", "totals.x", "counts"]
    left = drop_times(times, "totals", uids)
    assert left is not None and set(left.agenda.groups) == {("totals.x", 3), ("counts", 3)}
    chains, names = rename_operator(
        (SavedChain(Chain(("orders",), ("totals", "counts"), ("counts",)), ORDERS_AT),), "counts", "numbers"
    )
    assert chains[0].chain == Chain(("orders",), ("totals", "numbers"), ("numbers",)) and names == {
        "counts": "numbers"
    }
    renamed = rename_times(times, "counts", "numbers", uids, names)
    assert renamed is not None and {name for name, _ in renamed.agenda.groups} == {
        "totals",
        "totals.numbers",
        "totals.x",
        "numbers",
    }
    assert drop_times(None, "totals", uids) is None


def test_where_an_operator_stood_follows_it_too() -> None:
    """Else the operator under its new uid would be a new one, for which no record is late."""
    valve = Valve[str](watermark_ms=50).add_channels(["orders.counts"])
    operators = {
        "totals": OperatorTime(frozenset({"orders.x"}), frozenset({"totals"}), carried_ms=7),
        "counts": OperatorTime(frozenset({"orders.counts", "raw"}), frozenset({"counts"}), valve),
    }
    times = EventTime(operators=operators)
    left = drop_times(times, "totals", list(operators))
    assert left is not None and left.operators == {"counts": operators["counts"]}
    renamed = rename_times(times, "counts", "numbers", list(operators), {"counts": "numbers"})
    assert renamed is not None and renamed.operators.keys() == {"totals", "numbers"}
    numbers = renamed.operators["numbers"]
    assert (numbers.inputs, numbers.instances) == ({"orders.numbers", "raw"}, {"numbers"})
    assert numbers.valve.channels.keys() == {"orders.numbers"} and numbers.watermark_ms == 50
    assert renamed.operators["totals"] == operators["totals"]


def test_timers_of_a_new_operator_are_known_to_the_job() -> None:
    assert replace_due_timers(None, "totals", "a", ["a"], [(3, None, None)]) is None
    times = replace_due_timers(None, "totals", "a", ["a"], [(3, None, None), (4, 60_000, None)])
    assert times is not None and times.agenda.groups == {("totals", 4): NextTimers(60_000, None)}
    assert EventTime.from_json(times.to_json()) == times
    # Of one that is in several chains only those in this one are replaced.
    both = EventTime(agenda=timers("totals.a", "totals.b"))
    times = replace_due_timers(both, "totals", "a", ["a", "b"], [(4, None, 7)])
    assert times is not None and times.agenda.groups == {
        ("totals.a", 4): NextTimers(None, 7),
        ("totals.b", 3): NextTimers(60_000, None),
    }


def test_an_altered_file_is_not_rewritten(tmp_path) -> None:
    file = file_of(filled(tmp_path, Fills(), ORDERS, timestamp="at"))
    other = {**file.to_json(), "sha256": "0" * 64}
    given = pa.RecordBatch.from_pydict({"file": [json.dumps(other)]})
    with pytest.raises(SavepointDamagedError, match="checksum"):
        list(PackValues(StoreSpec(str(tmp_path)))([given]))


def test_values_of_a_savepoint_pass_through_as_they_are(tmp_path) -> None:
    report = filled(tmp_path, Fills(), ORDERS, timestamp="at")
    given = pa.RecordBatch.from_pydict({"file": [json.dumps(file_of(report).to_json())]})
    assert len(list(SavepointValues(StoreSpec(str(tmp_path)))([given]))) == len(report["groups"])
