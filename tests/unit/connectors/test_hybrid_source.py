"""One source after the other: exactly at the end, whatever happens around it."""

from __future__ import annotations

import json

import pytest

from flinkish_spark.connectors.split_positions import SplitPosition
from flinkish_spark.connectors.splits import SplitStreamReader
from flinkish_spark.core.errors import ConfigError, InputLostError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.store import LocalStore
from flinkish_spark.sources import CollectionSource, HybridSource, RateLimit, SocketTextSource
from tests.unit.connectors.test_split_source import Counters, logged, rows_of, step


def hybrid(live, **settings) -> HybridSource:
    history = CollectionSource(range(-7, 0), "n LONG", splits=2)
    return HybridSource(history, live).bind("in")


def test_the_live_part_begins_behind_the_last_record_of_history(tmp_path) -> None:
    live = Counters({"a": 3})
    source = hybrid(live).limit_rate(RateLimit(records_per_batch=3))
    reader = SplitStreamReader(source, str(tmp_path))
    position, found = reader.initialOffset(), []
    for _ in range(8):
        # Every micro-batch is run again by another process, and comes out the same.
        end, rows = step(reader, position)
        again = SplitStreamReader(source, str(tmp_path))
        assert rows_of(again, position, end) == rows
        found.append([row[0] for row in rows])
        position = end
    numbers = [n for batch in found for n in batch]
    assert sorted(numbers) == list(range(-7, 3)) and numbers[7:] == [0, 1, 2]
    assert not any(min(batch) < 0 <= max(batch) for batch in found if batch)
    assert SplitPosition.from_json(position).offsets == {"0:part-0": 4, "0:part-1": 3, "1:a": 3}
    # Live goes on.
    source._parts[1].ends["b"] = 1
    assert step(reader, position)[1] == [(0, 3, 0)]


def test_three_parts_and_the_end_of_all(tmp_path) -> None:
    empty, more = CollectionSource([], "n LONG"), CollectionSource([1, 2], "n LONG")
    source = HybridSource(empty, more, empty).bind("in")
    reader = SplitStreamReader(source, str(tmp_path))
    position, found = reader.initialOffset(), []
    for _ in range(6):
        position, rows = step(reader, json.loads(json.dumps(position)))
        found += [row[0] for row in rows]
    assert found == [1, 2] and source.is_bounded and source.has_ended(logged(position))
    assert not hybrid(Counters({})).is_bounded


@pytest.mark.parametrize("splits", ["ab", None, ["a", ""], [1], ["a", "a"]])
def test_a_part_whose_splits_are_no_names_is_refused(tmp_path, splits) -> None:
    class Odd(Counters):
        def splits(self):
            return splits

    source = HybridSource(CollectionSource([], "n LONG"), Odd({"a": 1})).bind("in")
    reader = SplitStreamReader(source, str(tmp_path))
    with pytest.raises(ConfigError, match=r"splits\(\) of source 'in.1'"):
        step(reader, step(reader, reader.initialOffset())[0])


def test_parts_are_told_what_concerns_them() -> None:
    live = Counters({"a": 3})
    source = hybrid(live)
    told = source._parts[1].told
    source.commit_offsets(logged(SplitPosition("in", {"0:part-0": 1}).to_json()))
    assert told == []
    source.commit_offsets(logged(SplitPosition("in", {"0:part-0": 4, "1:a": 2}).to_json()))
    assert told == [{"a": 2}]


def test_parts_look_after_their_own_input(tmp_path) -> None:
    job_dir = JobDir(LocalStore(tmp_path))
    lines = SocketTextSource("h", 1)
    source = HybridSource(CollectionSource(["a"], "value STRING"), lines).bind("in")
    source.preflight(None, job_dir, "in")
    assert source._parts[1].job_folder == tmp_path / "sources" / "in" / "1"

    def check(offsets):
        position = SplitPosition("in", offsets).to_json()
        source.check_input(job_dir, "in", LoggedOffsets((position,)))

    source.check_input(job_dir, "in", None)
    check({"0:all": 1})
    with pytest.raises(InputLostError, match=r"lines of source 'in\.1' are gone"):
        check({"0:all": 1, "1:lines": 17})
    assert set(source.identity(job_dir, "in")) == {"source-in", "source-in.0"}
    source.check_start("in", SplitPosition("in", {"0:all": 1}).to_json())
    with pytest.raises(InputLostError):
        source.check_start("in", SplitPosition("in", {"0:all": 1, "1:lines": 0}).to_json())
    other = HybridSource(CollectionSource(["b"], "value STRING"), lines).bind("in")
    with pytest.raises(InputLostError, match=r"the input of source 'in\.0' is another one"):
        other.check_input(job_dir, "in", None)


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [CollectionSource([1], "n LONG")],
        [CollectionSource([1], "n LONG"), "live"],
        [Counters({}), CollectionSource([1], "n LONG")],
        [CollectionSource([1], "m LONG"), Counters({})],
        [CollectionSource([1], "n INT"), Counters({})],
        [CollectionSource([1], "n LONG"), Counters({}).limit_rate(RateLimit(records_per_batch=1))],
    ],
)
def test_parts_that_do_not_fit_are_refused(parts) -> None:
    with pytest.raises(ConfigError):
        HybridSource(*parts)
