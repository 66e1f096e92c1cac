"""Generated records are pure functions of seed and number."""

from __future__ import annotations

import datetime
import tracemalloc
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import types as T

from flinkish_spark.connectors.generator import (
    Counting,
    DataGeneratorSource,
    Field,
    RandomChoice,
    RandomDouble,
    RandomLong,
    RandomText,
    Times,
    random_bits,
)
from flinkish_spark.connectors.rates import RateLimit
from flinkish_spark.connectors.split_positions import SplitPosition
from flinkish_spark.connectors.splits import SplitStreamReader, read_piece
from flinkish_spark.core.errors import ConfigError, SchemaError

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
FIELDS = {
    "id": Counting(start=10, step=2),
    "turn": Counting(cycle=3),
    "amount": RandomLong(-5, 5),
    "price": RandomDouble(1.0, 2.0),
    "name": RandomText(8),
    "color": RandomChoice(["red", "green", "blue"]),
    "at": Times(START, step_ms=100, jitter_ms=1_000),
}


def rows(source, split="0", start=0, end=None):
    end = source.end(split) if end is None else end
    return [row for batch in source.read(split, start, end) for row in batch.to_pylist()]


def test_any_piece_is_a_part_of_the_whole() -> None:
    source = DataGeneratorSource(FIELDS, records=25_000, seed=3)
    whole = rows(source)
    assert len(whole) == 25_000 and rows(source, start=9_990, end=10_020) == whole[9_990:10_020]
    assert whole[4]["id"] == 18 and [row["turn"] for row in whole[:5]] == [0, 1, 2, 0, 1]


def test_parts_deal_the_same_records_out() -> None:
    one, three = (DataGeneratorSource(FIELDS, records=100, seed=1, splits=n) for n in (1, 3))
    parts = [rows(three, split) for split in three.splits()]
    assert [len(part) for part in parts] == [34, 33, 33]
    dealt = sorted((row for part in parts for row in part), key=lambda row: row["id"])
    assert dealt == rows(one)


def test_values_lie_where_they_should_and_are_spread() -> None:
    found = rows(DataGeneratorSource(FIELDS, records=20_000, seed=7))
    amounts = [row["amount"] for row in found]
    assert set(amounts) == set(range(-5, 6)) and 1_600 < amounts.count(0) < 2_040
    prices = [row["price"] for row in found]
    assert 1.0 <= min(prices) < 1.001 and 1.999 < max(prices) < 2.0
    assert {len(row["name"]) for row in found} == {8} and len({row["name"] for row in found}) == 20_000
    assert {row["color"] for row in found} == {"red", "green", "blue"}
    late = [START + datetime.timedelta(milliseconds=100 * n) - row["at"] for n, row in enumerate(found)]
    assert min(late) >= datetime.timedelta(0) and max(late) <= datetime.timedelta(seconds=1)


def test_seed_and_field_tell_records_apart() -> None:
    fields = {"a": RandomLong(0, 1 << 40), "b": RandomLong(0, 1 << 40)}
    found = rows(DataGeneratorSource(fields, records=50, seed=1))
    assert all(row["a"] != row["b"] for row in found)
    assert not set(map(str, found)) & set(map(str, rows(DataGeneratorSource(fields, records=50, seed=2))))


def test_the_bits_are_what_they_were_in_the_first_version() -> None:
    """Else a job that goes on would generate other records."""
    assert random_bits(42, 1, np.arange(3)).tolist() == BITS


BITS = [3289781915849628290, 1832404210048606420, 17997158799002671013]


def test_types_are_those_of_the_schema(tmp_path) -> None:
    source = DataGeneratorSource(FIELDS, records=10).bind("made")
    reader = SplitStreamReader(source, str(tmp_path))
    start = reader.initialOffset()
    end = reader.latestOffset(start, None)
    (piece,) = reader.partitions(start, end)
    (batch,) = read_piece(reader.source, piece)
    assert isinstance(batch, pa.RecordBatch) and batch.num_rows == 10
    assert SplitPosition.from_json(end).is_ended


def test_it_keeps_to_its_limit_and_may_have_no_end() -> None:
    endless = DataGeneratorSource({"id": Counting()}, rate=RateLimit(records_per_batch=7))
    assert not endless.is_bounded and endless.end("0") is None
    assert endless.latest("0", 5, 7) == 12 and endless.latest("0", 5, None) == 100_005
    bounded = DataGeneratorSource({"id": Counting()}, records=3)
    assert bounded.is_bounded and bounded.latest("0", 1, 7) == 3
    assert bounded.fingerprint() == endless.fingerprint()


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataGeneratorSource({}),
        lambda: DataGeneratorSource({"id": 5}),
        lambda: DataGeneratorSource({5: Counting()}),
        lambda: DataGeneratorSource({"id": Counting}),
        lambda: DataGeneratorSource({"id": Counting()}, records=-1),
        lambda: DataGeneratorSource({"id": Counting()}, splits=0),
        lambda: DataGeneratorSource({"id": Counting()}, seed=1.5),
        lambda: RandomLong(3, 2),
        lambda: RandomLong(-(1 << 62), 1 << 62),
        lambda: RandomDouble(1, 0),
        lambda: RandomDouble(float("nan"), 0),
        lambda: RandomText(0),
        lambda: RandomChoice([]),
        lambda: RandomChoice([1, "a"]),
        lambda: RandomChoice("abc"),
        lambda: RandomChoice(5),
        lambda: DataGeneratorSource({"id": Counting()}, records=1 << 70),
        lambda: DataGeneratorSource({"id": Counting((1 << 63) - 2)}, records=3),
        lambda: DataGeneratorSource({"id": Counting(0, -(1 << 40))}, records=1 << 40),
        lambda: DataGeneratorSource({"at": Times(START, step_ms=1_000)}, records=1 << 62),
        lambda: RandomChoice(None),
        lambda: RandomChoice({"a", "b"}),
        lambda: RandomChoice({"a": 1, "b": 2}),
        lambda: RandomChoice({"a": 1}.keys()),
        lambda: RandomChoice([1 << 70]),
        lambda: RandomChoice(["\ud800"]),
        lambda: Times(START, jitter_ms=1 << 62),
        lambda: Times(START, step_ms=1 << 62),
        lambda: Counting(cycle=0),
        lambda: Times(datetime.datetime(2026, 1, 1)),
        lambda: Times(START, step_ms=-1),
    ],
)
def test_what_cannot_be_is_refused(make) -> None:
    with pytest.raises(ConfigError):
        make()


def test_a_field_that_goes_beyond_its_type_is_an_error_and_does_not_begin_again(tmp_path) -> None:
    most = (1 << 63) - 1
    assert [row["id"] for row in rows(DataGeneratorSource({"id": Counting(most - 1)}, records=2))][1] == most
    DataGeneratorSource({"id": Counting(most - 1, cycle=2)}, records=1_000)
    endless = DataGeneratorSource({"id": Counting(most - 1)}, rate=RateLimit(records_per_batch=3))
    reader = SplitStreamReader(endless.bind("made"), str(tmp_path))
    start = reader.initialOffset()
    (piece,) = reader.partitions(start, reader.latestOffset(start, None))
    with pytest.raises(RuntimeError, match=r"read\(\) of source 'made'.*goes beyond .* at record 2"):
        list(read_piece(reader.source, piece))


def test_long_texts_are_made_a_part_at_a_time_and_are_what_they_were() -> None:
    numbers = np.arange(10_000)
    whole = RandomText(2_000).values(numbers, 5, 1)
    whole.validate(full=True)
    tracemalloc.start()
    again = RandomText(2_000).values(numbers, 5, 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert again == whole and peak < 2 * whole.nbytes
    assert whole[7_777].as_py() == RandomText(2_000).values(np.array([7_777]), 5, 1)[0].as_py()
    assert RandomText(12).values(np.arange(2), 42, 1).to_pylist() == TEXTS
    longest = DataGeneratorSource({"a": RandomText(100_000), "b": RandomText(100_000)}, records=100)
    batches = list(longest.read("0", 0, 100))
    assert (
        sum(batch.num_rows for batch in batches) == 100 and max(batch.nbytes for batch in batches) < 1 << 23
    )


TEXTS = ["khza01yvg3a0", "ekxdyl9io9dh"]


class Bare(Field):
    """A field as somebody may write it first."""

    type = T.LongType()

    def values(self, numbers, seed, stream):
        return pa.array(numbers)


class Named(Bare):
    def __repr__(self) -> str:
        return "Named()"


@dataclass(frozen=True)
class Halved(Bare):
    by: object = 2


def test_a_field_of_one_s_own_says_what_it_is_the_same_at_every_start() -> None:
    """An address would be another one then, and the input taken for another one."""
    for field in (Bare(), Halved(by=lambda n: n), Halved(by=Bare())):
        with pytest.raises(ConfigError, match=r"fields\['id'\] is .*To do: define __repr__ in"):
            DataGeneratorSource({"id": field})
    for field, text in ((Named(), "Named()"), (Halved(), "Halved(by=2)")):
        source = DataGeneratorSource({"id": field}, records=3)
        assert source.fingerprint()["fields"] == [["id", text]]
        assert [row["id"] for row in rows(source)] == [0, 1, 2]
    DataGeneratorSource({"id": RandomChoice(["<x at 0x7f>"])})


def test_names_of_fields_are_looked_at() -> None:
    for names in (("id", "ID"), ("_fs_seq",)):
        with pytest.raises(SchemaError, match="a data generator has"):
            DataGeneratorSource({name: Counting() for name in names})
