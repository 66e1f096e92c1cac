"""Sources of splits without Spark: what the reader logs, reads and refuses."""

from __future__ import annotations

import datetime
import errno
import json
import socket
import ssl
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql import types as T

from flinkish_spark.checkpoint.failures import Outage, QueryError, RepeatableUserError, classify
from flinkish_spark.connectors.collection import CollectionSource
from flinkish_spark.connectors.rates import RateLimit, TokenBucket, divide_allowance
from flinkish_spark.connectors.split_positions import SplitPosition, lowest_offsets
from flinkish_spark.connectors.splits import SourceUnavailable, SplitSource, SplitStreamReader, read_piece
from flinkish_spark.contracts.source import SourceStart
from flinkish_spark.core.errors import ConfigError, InputLostError, RetriableError, SchemaError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.store import LocalStore
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage, OwnerEpoch
from flinkish_spark.protocol.limits import UNLIMITED
from flinkish_spark.protocol.plan_layout import lowest
from flinkish_spark.protocol.records import StagedBatch


class Counters(SplitSource):
    """Splits that grow when the test says so."""

    schema = "n LONG"

    def __init__(self, ends: dict[str, int]) -> None:
        self.ends = ends
        self.told: list[object] = []

    def splits(self):
        return list(self.ends)

    def latest(self, split, start, limit):
        return self.ends[split] if limit is None else min(self.ends[split], start + limit)

    def read(self, split, start, end):
        return ((n,) for n in range(start, end))

    def on_commit(self, offsets):
        self.told.append(dict(offsets))


def reader_of(source: SplitSource, folder: Path, uid: str = "in") -> SplitStreamReader:
    return SplitStreamReader(source.bind(uid), str(folder))


def step(reader: SplitStreamReader, start):
    """Plan and read one micro-batch; return where it ends and its rows in order."""
    end = json.loads(json.dumps(reader.latestOffset(json.loads(json.dumps(start)), None)))
    return end, rows_of(reader, start, end)


def rows_of(reader: SplitStreamReader, start, end):
    found = []
    for piece in reader.partitions(start, end):
        for batch in read_piece(reader.source, piece):
            found += [tuple(row.values()) for row in batch.to_pylist()]
    return found


def offsets(position):
    return SplitPosition.from_json(position).offsets


def test_records_have_the_split_s_number_and_their_place(tmp_path) -> None:
    source = Counters({"b": 2, "a": 1})
    reader = reader_of(source, tmp_path)
    end, rows = step(reader, reader.initialOffset())
    assert rows == [(0, 0, 0), (1, 0, 1), (0, 1, 0)]
    source.ends.update(a=3, c=1)
    again, rows = step(reader, end)
    assert rows == [(1, 1, 1), (2, 1, 2), (0, 2, 0)] and offsets(again) == {"b": 2, "a": 3, "c": 1}
    assert step(reader, again) == (again, [])


def test_a_piece_that_is_read_again_is_the_same_in_another_process(tmp_path) -> None:
    source = Counters({"a": 3})
    first = reader_of(source, tmp_path)
    start = first.initialOffset()
    end, rows = step(first, start)
    source.ends = {"a": 9, "later": 4}
    assert rows_of(reader_of(source, tmp_path), start, end) == rows


def test_a_split_that_is_found_later_begins_where_the_source_said_then(tmp_path) -> None:
    """Behaviours 165 and 166: what is found between two micro-batches belongs to exactly one of them."""

    class FromTheEnd(Counters):
        def first(self, split):
            return self.ends[split]

    source = FromTheEnd({"a": 5})
    reader = reader_of(source, tmp_path)
    start = reader.initialOffset()
    lost, rows = step(reader, start)
    assert rows == [] and offsets(lost) == {"a": 5}
    # Spark did not come to log it. Meanwhile the source has grown: nothing between is left out.
    source.ends = {"a": 7}
    end, rows = step(reader_of(source, tmp_path), start)
    assert rows == [(5, 0, 5), (6, 0, 6)] and offsets(end) == {"a": 7}
    assert rows_of(reader_of(source, tmp_path), start, end) == rows


def test_a_split_that_vanishes_is_lost_input(tmp_path) -> None:
    source = Counters({"a": 1, "b": 1})
    reader = reader_of(source, tmp_path)
    end, _ = step(reader, reader.initialOffset())
    del source.ends["a"]
    with pytest.raises(InputLostError, match="the split 'a' of source 'in' is gone: it was read up to 1"):
        reader.latestOffset(end, None)


def test_a_split_that_goes_back_is_lost_input(tmp_path) -> None:
    source = Counters({"a": 4})
    reader = reader_of(source, tmp_path)
    end, _ = step(reader, reader.initialOffset())
    source.ends["a"] = 2
    with pytest.raises(InputLostError, match="ends at 2, and was read up to 4"):
        reader.latestOffset(end, None)


@pytest.mark.parametrize(("start", "end"), [(2.5, 2.25), (2.5, 2), (3, 2.5), (0.5, -1e9)])
def test_a_number_that_falls_is_lost_input_whole_or_not(tmp_path, start, end) -> None:
    source = Counters({"a": start})
    reader = reader_of(source, tmp_path)
    position = reader.latestOffset(reader.initialOffset(), None)
    assert offsets(position) == {"a": start}
    source.ends["a"] = end
    with pytest.raises(InputLostError, match=f"ends at {end}, and was read up to {start}"):
        reader.latestOffset(position, None)


@pytest.mark.parametrize(
    ("end", "is_ended"), [(2, True), (2.0, True), (2.5, True), (2.75, False), (3, False)]
)
def test_a_split_is_at_its_end_if_its_number_is_not_below(tmp_path, end, is_ended) -> None:
    class Ending(Counters):
        is_bounded = True

        def end(self, split):
            return end

    reader = reader_of(Ending({"a": 2.5}), tmp_path)
    position = SplitPosition.from_json(reader.latestOffset(reader.initialOffset(), None))
    assert position.is_ended is is_ended and position.done == ({"a"} if is_ended else set())


@pytest.mark.parametrize("end", [float("nan"), float("inf")])
def test_an_end_to_which_nothing_comes_is_refused(tmp_path, end) -> None:
    class Endless(Counters):
        is_bounded = True

        def end(self, split):
            return end

    reader = reader_of(Endless({"a": 1}), tmp_path)
    with pytest.raises(ConfigError, match=r"end\(\) of source 'in' returned (nan|inf) for the split 'a'"):
        reader.latestOffset(reader.initialOffset(), None)


@pytest.mark.parametrize(
    "offset", [float("inf"), [float("nan")], (1, 2), {1: 2}, float("nan"), None, object(), b"x"]
)
def test_an_offset_that_json_cannot_hold_is_refused(tmp_path, offset) -> None:
    class Odd(Counters):
        def latest(self, split, start, limit):
            return offset

    reader = reader_of(Odd({"a": 1}), tmp_path)
    with pytest.raises(ConfigError, match=r"returned .* for the split 'a'"):
        reader.latestOffset(reader.initialOffset(), None)


@pytest.mark.parametrize("count", ["5", b"5", -1, True, float("nan"), float("inf"), [5]])
def test_a_number_of_records_that_is_none_is_refused(tmp_path, count) -> None:
    class Odd(Counters):
        def records_between(self, split, start, end):
            return count

    reader = reader_of(Odd({"a": 9}).limit_rate(RateLimit(records_per_batch=5)), tmp_path)
    with pytest.raises(ConfigError, match=r"records_between\(\) of source 'in' returned .* split 'a'"):
        reader.latestOffset(reader.initialOffset(), None)


def test_a_number_of_records_may_be_one_of_numpy_or_not_known(tmp_path) -> None:
    class Counted(Counters):
        def records_between(self, split, start, end):
            return np.int64(end - start) if split == "a" else None

    reader = reader_of(Counted({"a": 9, "b": 9}).limit_rate(RateLimit(records_per_batch=6)), tmp_path)
    assert offsets(reader.latestOffset(reader.initialOffset(), None)) == {"a": 3, "b": 3}


@pytest.mark.parametrize("splits", ["all", b"a", ["a", "a"], [1], [""], None, 5])
def test_splits_that_are_no_names_are_refused(tmp_path, splits) -> None:
    class Odd(Counters):
        def splits(self):
            return splits

    reader = reader_of(Odd({}), tmp_path)
    with pytest.raises(ConfigError, match=r"splits\(\) of source 'in'"):
        reader.latestOffset(reader.initialOffset(), None)


def test_offsets_need_not_be_numbers(tmp_path) -> None:
    class Files(Counters):
        def first(self, split):
            return ""

        def latest(self, split, start, limit):
            return "b.csv"

        def read(self, split, start, end):
            yield from ((f"{start}-{end}-{n}",) for n in range(2))

        schema = "name STRING"

    reader = reader_of(Files({"a": 1}), tmp_path)
    end, rows = step(reader, reader.initialOffset())
    assert rows == [("-b.csv-0", 0, 0), ("-b.csv-1", 0, 1)] and step(reader, end) == (end, [])


def test_batches_are_brought_to_the_schema(tmp_path) -> None:
    class Columns(Counters):
        schema = "n LONG, text STRING"

        def read(self, split, start, end):
            # Another order and narrower types; an empty batch in between.
            yield pa.record_batch({"text": ["x"], "n": pa.array([1], pa.int32())})
            yield pa.record_batch({"text": pa.array([], pa.string()), "n": pa.array([], pa.int32())})
            yield pa.record_batch({"text": ["y", None], "n": pa.array([2, 3], pa.int32())})

    reader = reader_of(Columns({"a": 3}), tmp_path)
    _, rows = step(reader, reader.initialOffset())
    assert rows == [(1, "x", 0, 0), (2, "y", 0, 1), (3, None, 0, 2)]


def test_rows_with_names_go_by_their_names(tmp_path) -> None:
    class Named(Counters):
        schema = "n LONG, text STRING"

        def read(self, split, start, end):
            yield Row(text="x", n=1)

    reader = reader_of(Named({"a": 1}), tmp_path)
    assert step(reader, reader.initialOffset())[1] == [(1, "x", 0, 0)]


class Pair(NamedTuple):
    text: str
    n: int


@dataclass
class PairOfFields:
    text: str
    n: int


class Yields(Counters):
    schema = "n LONG, text STRING"

    def __init__(self, *records: object) -> None:
        super().__init__({"a": len(records)})
        self.records = records

    def read(self, split, start, end):
        yield from self.records[start:end]


@pytest.mark.parametrize("record", [Pair("x", 1), PairOfFields("x", 1), {"text": "x", "n": 1}, [1, "x"]])
def test_a_record_of_any_form_goes_as_what_a_function_emits(tmp_path, record) -> None:
    reader = reader_of(Yields(record, (2, "y")), tmp_path)
    assert step(reader, reader.initialOffset())[1] == [(1, "x", 0, 0), (2, "y", 0, 1)]


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (None, "it yielded a NoneType; a row is a tuple"),
        (7, "it yielded a int; a row is a tuple"),
        # Spark would cut it, or make a text of it.
        ((1.5, "x"), "it yielded a wrong value: field 'n' of type int64 cannot hold 1.5"),
        ((1, 2), "it yielded a wrong value: field 'text' of type string cannot hold 2"),
        (("one", "x"), "it yielded a wrong value: field 'n' of type int64 cannot hold 'one'"),
        ((1 << 63, "x"), "it yielded a wrong value: field 'n' of type int64 cannot hold 9223372036854775808"),
        ((1,), "it yielded 1 fields, but 2 are declared: n, text"),
        ({"n": 1, "m": 2}, "it yielded the field 'm', but the declared fields are n, text"),
        (pa.record_batch({"n": [1]}), "text"),
        (pa.record_batch({"n": ["one"], "text": ["x"]}), "one"),
    ],
)
def test_what_is_no_record_is_an_error_and_never_the_end(tmp_path, record, says) -> None:
    reader = reader_of(Yields((1, "x"), record, (2, "y")), tmp_path)
    with pytest.raises(RuntimeError) as caught:
        step(reader, reader.initialOffset())
    error = classify(caught.value)
    assert "read() of source 'in' failed" in str(error) and says in str(error)


@pytest.mark.parametrize(
    ("kind", "nullable", "column", "says"),
    [
        (T.LongType(), False, pa.array([1, None]), "field 'n' is None and must not be null, in row 1 of a"),
        (
            T.ArrayType(T.LongType(), containsNull=False),
            True,
            pa.array([[1], [2, None]]),
            "field 'n.element' is None and must not be null, in row 1 of a|has nulls",
        ),
        (
            T.StructType([T.StructField("x", T.LongType(), nullable=False)]),
            True,
            pa.array([{"x": 1}, {"x": None}]),
            "field 'n.x' is None and must not be null, in row 1 of a batch",
        ),
    ],
)
def test_a_null_that_must_not_be_is_refused_in_a_batch_as_in_a_row(
    tmp_path, kind, nullable, column, says
) -> None:
    class Nulls(Yields):
        schema = T.StructType([T.StructField("n", kind, nullable)])

    batch = pa.RecordBatch.from_arrays([column], ["n"])
    reader = reader_of(Nulls(batch), tmp_path)
    with pytest.raises(RuntimeError, match=says):
        step(reader, reader.initialOffset())
    reader = reader_of(Nulls(batch.slice(0, 1)), tmp_path)
    assert len(step(reader, reader.initialOffset())[1]) == 1


TEXTS = pa.map_(pa.string(), pa.string())
POINT = pa.struct([("x", pa.int32()), ("y", pa.string()), ("more", pa.int64())])


@pytest.mark.parametrize(
    ("declared", "column", "says"),
    [
        ("LONG", pa.array(["12"]), "is string, but the declared type is int64"),
        ("STRING", pa.array([12]), "is int64, but the declared type is string"),
        # It would be microseconds, and is most often milliseconds.
        ("TIMESTAMP", pa.array([1_767_225_600_000]), "is int64, but the declared type is timestamp"),
        ("DATE", pa.array([12], pa.int32()), "is int32, but the declared type is date32"),
        ("BOOLEAN", pa.array([2]), "is int64, but the declared type is bool"),
        ("LONG", pa.array([True]), "is bool, but the declared type is int64"),
        (
            "DATE",
            pa.array([datetime.datetime(2026, 1, 1, 12)]),
            "is timestamp.*, but the declared type is date32",
        ),
        ("ARRAY<LONG>", pa.array([["12"]]), "is list<.*string>, but the declared type is list<.*int64>"),
        (
            "MAP<STRING, LONG>",
            pa.array([[("a", "1")]], pa.map_(pa.string(), pa.string())),
            "is map.*, but the declared type is map",
        ),
        (
            "STRUCT<x: LONG, y: LONG>",
            pa.array([(1, "2", 3)], POINT),
            "is struct.*, but the declared type is struct",
        ),
        ("FLOAT", pa.array([1e300]), "does not fit float: it is beyond what a FLOAT can be"),
        ("INT", pa.array([1 << 40]), "does not fit int32: Integer value"),
    ],
)
def test_a_column_of_another_type_is_refused_by_name(tmp_path, declared, column, says) -> None:
    class Other(Yields):
        schema = f"found {declared}"

    reader = reader_of(Other(pa.RecordBatch.from_arrays([column], ["found"])), tmp_path)
    with pytest.raises(RuntimeError, match=rf"read\(\) of source 'in'.*the column 'found' {says}"):
        step(reader, reader.initialOffset())


@pytest.mark.parametrize(
    ("declared", "column", "found"),
    [
        ("DOUBLE", pa.array([1, None]), [1.0, None]),
        ("FLOAT", pa.array([float("inf"), 0.5]), [float("inf"), 0.5]),
        ("STRING", pa.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"]),
        ("STRING", pa.array([b"a"]), ["a"]),
        ("STRING", pa.array(["a"], pa.string_view()), ["a"]),
        ("BINARY", pa.array([b"ab"], pa.binary(2)), [b"ab"]),
        ("ARRAY<LONG>", pa.array([[1, 2]], pa.list_(pa.int64(), 2)), [[1, 2]]),
        ("ARRAY<LONG>", pa.nulls(1), [None]),
        ("LONG", pa.nulls(2), [None, None]),
        ("ARRAY<LONG>", pa.array([[1], None], pa.large_list(pa.int8())), [[1], None]),
        # Of a struct the declared fields are taken, in whatever order.
        ("STRUCT<y: STRING, x: LONG>", pa.array([(1, "a", 3)], POINT), [{"y": "a", "x": 1}]),
    ],
)
def test_a_column_of_another_width_is_brought_to_the_schema(tmp_path, declared, column, found) -> None:
    class Narrow(Yields):
        schema = f"found {declared}"

    reader = reader_of(Narrow(pa.RecordBatch.from_arrays([column], ["found"])), tmp_path)
    assert [row[0] for row in step(reader, reader.initialOffset())[1]] == found


def test_records_and_batches_may_alternate_and_keep_their_places(tmp_path) -> None:
    batch = pa.record_batch({"n": [7, 8], "text": ["b", "b"]})
    rows = [(n, "r") for n in range(1_500)]
    reader = reader_of(Yields(*rows[:3], batch, *rows, batch.slice(0, 0), batch), tmp_path)
    found = step(reader, reader.initialOffset())[1]
    own = [*rows[:3], (7, "b"), (8, "b"), *rows, (7, "b"), (8, "b")]
    assert found == [(*row, 0, place) for place, row in enumerate(own)]


def test_times_without_a_zone_are_in_utc_as_those_of_functions(tmp_path) -> None:
    class Timed(Yields):
        schema = "at TIMESTAMP"

    reader = reader_of(Timed((datetime.datetime(2026, 1, 1, 12),)), tmp_path)
    ((at, _, _),) = step(reader, reader.initialOffset())[1]
    assert at == datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)


def test_an_error_of_the_source_names_method_and_source(tmp_path) -> None:
    class Broken(Counters):
        def latest(self, split, start, limit):
            raise KeyError("nothing")

        def read(self, split, start, end):
            raise ConnectionRefusedError("not today")
            yield ()

    reader = reader_of(Broken({"a": 1}), tmp_path)
    with pytest.raises(RuntimeError) as caught:
        reader.latestOffset(reader.initialOffset(), None)
    error = classify(caught.value)
    assert isinstance(error, RepeatableUserError) and "latest() of source 'in' failed" in str(error)
    (piece,) = reader.partitions(reader.initialOffset(), SplitPosition("in", {"a": 1}).to_json())
    with pytest.raises(SourceUnavailable, match=r"read\(\) of source 'in' failed.*not today"):
        list(read_piece(reader.source, piece))


@pytest.mark.parametrize(
    ("raised", "is_counted"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/in/a"), True),
        (PermissionError(errno.EACCES, "Permission denied"), True),
        (IsADirectoryError(errno.EISDIR, "Is a directory"), True),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory"), True),
        (OSError(errno.EINVAL, "Invalid argument"), True),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), False),
        (ConnectionRefusedError("not today"), False),
        (TimeoutError("timed out"), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (OSError(errno.ESTALE, "Stale file handle"), False),
        (OSError(errno.EIO, "Input/output error"), False),
        (OSError("away"), False),
        # Their numbers are their own: 1 and 2 are EPERM and ENOENT of the system.
        (ssl.SSLError(1, "record layer failure"), False),
        (socket.herror(2, "Host name lookup failure"), False),
    ],
)
def test_what_a_source_is_refused_is_counted_and_an_outage_is_waited_for(
    tmp_path, raised, is_counted
) -> None:
    class Refused(Counters):
        def read(self, split, start, end):
            raise raised
            yield ()

    reader = reader_of(Refused({"a": 1}), tmp_path)
    (piece,) = reader.partitions(reader.initialOffset(), SplitPosition("in", {"a": 1}).to_json())
    wanted = RetriableError if is_counted else SourceUnavailable
    with pytest.raises(wanted, match=r"read\(\) of source 'in' failed") as caught:
        list(read_piece(reader.source, piece))
    assert caught.value.restartable and caught.value.ends_when_repeated is is_counted
    # As text, which is how Spark hands it on.
    kind = type(caught.value)
    error = classify(RuntimeError(f"failed:\n{kind.__module__}.{kind.__qualname__}: {caught.value}"))
    assert type(error) is (QueryError if is_counted else Outage), repr(error)


def test_names_of_splits_that_are_made_while_they_are_gone_through_are_work_of_the_source(tmp_path) -> None:
    class Lazy(Counters):
        def splits(self):
            return map(self.look, self.ends)

        def look(self, name):
            if self.ends[name] is None:
                raise ConnectionResetError("not today")
            return name if self.ends[name] else {}["nothing"]

    reader = reader_of(Lazy({"a": 1, "b": None}), tmp_path)
    with pytest.raises(SourceUnavailable, match=r"splits\(\) of source 'in' failed.*not today"):
        reader.latestOffset(reader.initialOffset(), None)
    with pytest.raises(RuntimeError) as caught:
        reader_of(Lazy({"a": 0}), tmp_path).latestOffset(reader.initialOffset(), None)
    assert "splits() of source 'in' failed" in str(classify(caught.value))
    assert step(reader_of(Lazy({"a": 1}), tmp_path), reader.initialOffset())[1] == [(0, 0, 0)]


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("schema", "n NUMBER", "cannot be read"),
        ("schema", "_fs_seq LONG", "control columns"),
        ("rate", 5, "rate is 5"),
        ("topics", ["orders"], "has an attribute 'topics'"),
        ("handle", open, ""),
        ("socket", lambda: (_ for _ in ()), ""),
        ("folder", "/data", ""),
        ("_folder", "/data", ""),
    ],
)
def test_what_cannot_work_is_refused_where_the_source_is_added(attribute, value, message) -> None:
    source = Counters({"a": 1})
    setattr(source, attribute, value)
    if not message:
        assert source.bind("in")
        return
    with pytest.raises((ConfigError, SchemaError), match=message):
        source.bind("in")


def test_an_attribute_of_the_class_is_refused_as_one_of_the_object_is() -> None:
    class OfTopics(Counters):
        topics = ("orders",)

    with pytest.raises(ConfigError, match="has an attribute 'topics'"):
        OfTopics({"a": 1}).bind("in")


def test_a_source_that_cannot_travel_or_would_never_run_is_refused(tmp_path) -> None:
    source = Counters({})
    source.handle = (tmp_path / "x").open("w")
    with pytest.raises(ConfigError, match="cannot be sent to Spark's processes"):
        source.bind("in")

    class Waiting(Counters):
        async def on_commit(self, offsets):
            pass

    with pytest.raises(ConfigError, match=r"Waiting.on_commit\(\) would never run"):
        Waiting({}).bind("in")

    class Bare(Counters):
        pass

    Bare.schema = ""
    with pytest.raises(SchemaError):
        Bare({}).bind("in")


# -- committing, fingerprints, savepoints -------------------------------------------------------------
def logged(*positions) -> LoggedOffsets:
    return LoggedOffsets((*positions, {"flinkish:checkpoint": 3}, None))


def test_a_confirmed_checkpoint_tells_the_source_what_every_scan_has_read() -> None:
    source = Counters({"a": 5, "b": 5}).bind("in")
    one = SplitPosition("in", {"a": 5, "b": 2}).to_json()
    two = SplitPosition("in", {"b": 4, "a": 3}).to_json()
    other = SplitPosition("other", {"a": 1}).to_json()
    assert source.commit_offsets(logged(one, other, two)) == {}
    assert source.told == [{"a": 3, "b": 2}]
    source.commit_offsets(logged(other))
    assert source.told == [{"a": 3, "b": 2}]


def test_a_source_that_cannot_take_note_now_is_asked_again() -> None:
    class Away(Counters):
        def on_commit(self, offsets):
            raise TimeoutError("away")

    with pytest.raises(SourceUnavailable, match="Away") as caught:
        Away({}).bind("in").commit_offsets(logged(SplitPosition("in", {"a": 1}).to_json()))
    assert caught.value.restartable


def test_an_error_in_taking_note_is_one_of_the_source_s_code() -> None:
    class Wrong(Counters):
        def on_commit(self, offsets):
            raise KeyError("nothing")

    with pytest.raises(RepeatableUserError, match="the source 'in' failed when it was told") as caught:
        Wrong({}).bind("in").commit_offsets(logged(SplitPosition("in", {"a": 1}).to_json()))
    assert "nothing" in str(caught.value)


@pytest.mark.parametrize(
    ("error", "waits"),
    [(ConnectionRefusedError(111, "Connection refused"), True), (FileNotFoundError("no such table"), False)],
)
def test_a_source_that_cannot_say_what_it_reads_is_no_dead_jvm(tmp_path, error, waits) -> None:
    class Away(Counters):
        def fingerprint(self):
            raise error

    job_dir = JobDir(LocalStore(tmp_path))
    with pytest.raises(SourceUnavailable, match="the source 'in' failed when it was asked which") as caught:
        Away({}).bind("in").check_input(job_dir, "in", None)
    assert caught.value.restartable and caught.value.ends_when_repeated is not waits
    assert classify(caught.value) is caught.value


def test_an_error_in_a_fingerprint_is_one_of_the_source_s_code(tmp_path) -> None:
    class Wrong(Counters):
        def fingerprint(self):
            raise KeyError("nothing")

    with pytest.raises(RepeatableUserError, match="'in' failed when it was asked which input") as caught:
        Wrong({}).bind("in").check_input(JobDir(LocalStore(tmp_path)), "in", None)
    assert "KeyError: 'nothing'. To do: correct fingerprint()" in str(caught.value)
    assert caught.value.uid == "in"


def test_what_no_checkpoint_needs_is_released(tmp_path) -> None:
    """Not before there are two: the newest may have to be replayed, from where the one before it ends."""

    class Keeping(Counters):
        def on_release(self, offsets):
            self.told.append(("released", dict(offsets)))

        on_commit = SplitSource.on_commit

    job_dir = JobDir(LocalStore(tmp_path))
    source = Keeping({}).bind("in")
    source.preflight(None, job_dir, "in")
    for checkpoint in (1, 2, 3):
        position = SplitPosition("in", {"a": 10 * checkpoint}).to_json()
        text = "\n".join(["v1", "{}", json.dumps(position)])
        staged = StagedBatch(Lineage(0), BatchId(checkpoint), OwnerEpoch(1), 1, (), ())
        who = (CheckpointId(checkpoint), Verdict.COMMIT, OwnerEpoch(1), 0)
        decision = Decision(*who, batches=(staged,), offsets_text=text)
        job_dir.create_decision(decision)
        source.commit_offsets(logged(position))
        if checkpoint == 2:
            (tmp_path / "checkpoints" / "1" / "decision.json").unlink()
    assert source.told == [("released", {"a": 10}), ("released", {"a": 20})]


def test_offsets_without_order_are_told_only_where_scans_agree() -> None:
    one, two = SplitPosition("in", {"a": "x", "b": "y"}), SplitPosition("in", {"a": "x", "b": "z"})
    assert lowest_offsets([SplitPosition("in", {"a": 1.5}), SplitPosition("in", {"a": 1})]) == {"a": 1}
    assert lowest_offsets([one, two]) == {"a": "x"} and lowest_offsets([]) == {}
    assert lowest([one.to_json(), two.to_json()]) == SplitPosition("in", {"a": "x"}).to_json()


def test_the_position_is_no_kafka_position() -> None:
    position = logged(SplitPosition("in", {"a": {"x": 1}, "7": 3}).to_json())
    assert position.partitions() == {} and position.checkpoint.value == 3


def test_another_input_under_the_same_uid_is_refused(tmp_path) -> None:
    job_dir = JobDir(LocalStore(tmp_path))
    first, other = (CollectionSource([(n,)], "n LONG").bind("in") for n in (1, 2))
    assert first.identity(job_dir, "in") == {}
    first.check_input(job_dir, "in", None)
    first.limit_rate(RateLimit(records_per_batch=1)).check_input(job_dir, "in", None)
    assert set(first.identity(job_dir, "in")) == {"source-in"}
    with pytest.raises(InputLostError, match="the input of source 'in' is another one"):
        other.check_input(job_dir, "in", None)


def test_a_restored_source_goes_on_where_the_savepoint_stood(tmp_path) -> None:
    position = SplitPosition("in", {"b": 3}).to_json()
    source = Counters({"a": 1, "b": 4}).bind("in")
    moved = source.starting_at(SourceStart(position, str(tmp_path / "begin"), "label"))
    reader = SplitStreamReader(moved, str(tmp_path / "begin"))
    assert reader.initialOffset() == position and moved._fs_format != source._fs_format
    assert step(reader, position)[1] == [(3, 0, 3), (0, 1, 0)]


# -- bounded --------------------------------------------------------------------------------------------
def test_a_collection_is_read_whole_and_says_that_it_has_ended(tmp_path) -> None:
    source = CollectionSource([{"n": 1}, (2,), Row(n=3), 4, None], "n LONG", splits=2)
    reader = reader_of(source, tmp_path)
    end, rows = step(reader, reader.initialOffset())
    assert sorted(rows, key=lambda r: r[1:]) == [(1, 0, 0), (3, 0, 1), (None, 0, 2), (2, 1, 0), (4, 1, 1)]
    bound = source.bind("in")
    assert bound.has_ended(logged(end)) and not bound.has_ended(logged(end, reader.initialOffset()))
    assert not bound.has_ended(logged()) and step(reader, end) == (end, [])


@dataclass(slots=True)
class Place:
    city: str
    number: int | None = None


@dataclass
class Trip:
    at: Place
    via: list[Place]
    named: dict[str, Place]


def test_a_collection_takes_dataclasses_with_slots_within_fields(tmp_path) -> None:
    trip = Trip(Place("Ulm", 7), [Place("Bonn")], {"home": Place("Kiel", 1)})
    reader = reader_of(CollectionSource([trip], Trip), tmp_path)
    ((at, via, named, _, _),) = step(reader, reader.initialOffset())[1]
    assert (at, via) == ({"city": "Ulm", "number": 7}, [{"city": "Bonn", "number": None}])
    assert dict(named) == {"home": {"city": "Kiel", "number": 1}}
    with pytest.raises(SchemaError, match="record 0 of the collection"):
        CollectionSource([Trip(Place(5), [], {})], Trip)


def test_a_split_at_its_end_is_no_channel_any_more(tmp_path) -> None:
    """Else event time would wait for it."""
    source = (
        CollectionSource([1, 2, 3], "n LONG", splits=2).limit_rate(RateLimit(records_per_batch=2)).bind("in")
    )
    reader = SplitStreamReader(source, str(tmp_path))
    one, _ = step(reader, reader.initialOffset())
    two, _ = step(reader, one)
    assert source.channels_in(logged(one)) == {0} and source.channels_in(logged(two)) == frozenset()
    assert SplitPosition.from_json(two) == SplitPosition(
        "in", {"part-0": 2, "part-1": 1}, is_ended=True, done=frozenset({"part-0", "part-1"})
    )
    endless = Counters({}).bind("in")
    assert endless.channels_in(logged(SplitPosition("in", {"a": 1, "b": 0}).to_json())) == {0, 1}


def test_an_empty_collection_ends_at_once(tmp_path) -> None:
    source = CollectionSource([], "n LONG").bind("in")
    reader = SplitStreamReader(source, str(tmp_path))
    end, rows = step(reader, reader.initialOffset())
    assert rows == [] and end != reader.initialOffset() and source.has_ended(logged(end))


@pytest.mark.parametrize("value", [("x",), (1, 2), {"m": 1}, 1.5, True, [None, None]])
def test_a_value_that_does_not_fit_is_named(value) -> None:
    with pytest.raises(SchemaError, match="record 1 of the collection"):
        CollectionSource([1, value], "n LONG")


@pytest.mark.parametrize(
    ("value", "schema", "says"),
    [
        (5, "a STRING", "field 'a' of type string cannot hold 5"),
        ((1, 2.5), "a LONG, b STRING", "field 'b' of type string cannot hold 2.5"),
        (Decimal("12345.67"), "a DECIMAL(5, 2)", "12345.67"),
        (Decimal("1.234"), "a DECIMAL(5, 2)", "1.234"),
        ("\ud800", "a STRING", "surrogates"),
        (Row(a=1, b=2, c=3), "a LONG, b LONG", "The field 'c', but the declared fields are a, b"),
        ({"a": 1, "b": 2, "c": 3}, "a LONG, b LONG", "there is no field 'c'"),
        (({"x": 1, "z": 2},), "a STRUCT<x: LONG>", "z"),
    ],
)
def test_a_collection_refuses_what_its_reader_would(value, schema, says) -> None:
    with pytest.raises(SchemaError, match=r"record 0 of the collection") as caught:
        CollectionSource([value], schema)
    assert says in str(caught.value)


def test_a_collection_takes_records_with_names() -> None:
    records = [Pair("x", 1), PairOfFields("y", 2), {"n": 3}, Row(text="z", n=4), (5, "v")]
    source = CollectionSource(records, "n LONG, text STRING")
    assert source.values == ((1, "x"), (2, "y"), (3, None), (4, "z"), (5, "v"))
    assert CollectionSource([PairOfFields("x", 1)], PairOfFields).values == (("x", 1),)
    with pytest.raises(SchemaError, match=r"record 0 .* The field 'text', but the declared fields are n"):
        CollectionSource([Pair("x", 1)], "n LONG")


def test_a_collection_of_rows_is_the_input_that_it_is_as_tuples() -> None:
    """A job goes on with the fingerprint of its first start."""
    forms = [(1, "x")], [Row(n=1, text="x")], [Row(text="x", n=1)], [{"n": 1, "text": "x"}], [Row(1, "x")]
    found = [CollectionSource(form, "n LONG, text STRING").fingerprint() for form in forms]
    assert all(one == found[0] for one in found)


def test_a_collection_is_given_as_a_list() -> None:
    with pytest.raises(ConfigError, match="the same at every start"):
        CollectionSource({"b", "a"}, "n STRING")
    with pytest.raises(ConfigError, match="values is 'abc'"):
        CollectionSource("abc", "n STRING")
    with pytest.raises(ConfigError, match="splits"):
        CollectionSource([1], "n LONG", splits=0)


# -- limits ---------------------------------------------------------------------------------------------
def test_a_micro_batch_keeps_to_its_limit_over_all_splits(tmp_path) -> None:
    source = Counters({"a": 100, "b": 100, "c": 1}).limit_rate(RateLimit(records_per_batch=4))
    reader = reader_of(source, tmp_path)
    position, sizes = reader.initialOffset(), []
    for _ in range(6):
        position, rows = step(reader, position)
        sizes.append(len(rows))
    assert max(sizes) == 4 and offsets(position)["c"] == 1 and sum(sizes) > 16


def test_the_pace_is_kept_over_time_and_saves_up_a_second_at_most() -> None:
    pace = TokenBucket(RateLimit(records_per_second=10, records_per_batch=6), 0.0)
    assert pace.allowance(0.05) == 0
    assert pace.allowance(0.35) == 3
    pace.spend(3)
    assert pace.allowance(0.40) == 1
    assert pace.allowance(60.0) == 6
    pace.spend(6)
    assert pace.allowance(60.0) == 4
    slow = TokenBucket(RateLimit(records_per_second=0.1), 0.0)
    assert slow.allowance(9.0) == 0 and slow.allowance(10.5) == 1
    assert TokenBucket(RateLimit(), 0.0).allowance(1.0) is None
    assert divide_allowance(None, ["a"], 0) == {"a": None} and divide_allowance(3, [], 0) == {}


@pytest.mark.parametrize(
    "limits",
    [
        {"records_per_second": 0},
        {"records_per_second": float("nan")},
        {"records_per_second": float("inf")},
        {"records_per_second": True},
        {"records_per_second": "5"},
        {"records_per_batch": 0},
        {"records_per_batch": 1.5},
        {"records_per_batch": None},
    ],
)
def test_a_limit_that_cannot_be_is_refused(limits) -> None:
    with pytest.raises(ConfigError):
        RateLimit(**limits)
    assert RateLimit().records_per_batch is UNLIMITED


@pytest.mark.parametrize("facts", [{1: "a"}, (1, 2), {"at": float("nan")}, b"x"])
def test_facts_of_a_piece_that_json_cannot_hold_are_refused_before_a_task(tmp_path, facts) -> None:
    class WithFacts(Counters):
        def piece_facts(self, split, start, end):
            return facts

    reader = reader_of(WithFacts({"a": 3}), tmp_path)
    start = reader.initialOffset()
    with pytest.raises(ConfigError, match=r"piece_facts\(\) of source 'in' returned"):
        reader.partitions(start, reader.latestOffset(start, None))
