"""Bases as files: read where they lie, checked once, deleted when nobody can ask for them again."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from flinkish_spark import KeyedProcessFunction, ValueStateDescriptor
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.state.base_files import BaseFiles, BaseObjects, MappedBases, bases_of
from flinkish_spark.state.codec import (
    OWNER,
    BaseRef,
    FrameError,
    pack_frame,
    read_trusted_table,
    table_bytes,
    unpack_frame,
)
from flinkish_spark.state.group_values import describe_group, inline_base, read_tables
from flinkish_spark.state.key_group import BasePolicy
from tests.support.operator_harness import MemoryBases, OperatorHarness

TINY = BasePolicy(smallest_bytes=1, delta_share=0.25, smallest_delta_rows=2)


class Count(KeyedProcessFunction):
    def open(self, context):
        self.n = context.get_state(ValueStateDescriptor("n", "LONG", default=0))

    def process_element(self, value, ctx):
        self.n.update(self.n.value() + 1)
        yield value, self.n.value()


def harness(bases, restore=None):
    return OperatorHarness(
        Count(),
        key=lambda n: n,
        key_type="LONG",
        max_parallelism=2,
        policy=TINY,
        bases=bases,
        restore=restore,
    )


def bases(folder, batch=0, retained=None):
    return BaseFiles(MappedBases(StoreSpec(str(folder))), batch, retained)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_state_comes_back_from_files(tmp_path) -> None:
    first = harness(bases(tmp_path))
    for n in range(50):
        first.push(n)
    assert len(names(tmp_path)) > 2, "key groups grew and moved into bases"
    second = harness(bases(tmp_path), first.snapshot())
    second.push_all([(n, None) for n in range(60)])
    assert sorted(second.take().rows) == [(n, 2 if n < 50 else 1) for n in range(60)]


def test_former_bases_stay_until_no_retained_checkpoint_can_name_them(tmp_path) -> None:
    """Whoever goes back to a retained micro-batch finds all that its state names."""
    state, kept = None, {}
    for batch in range(40):
        retained = batch - 10 if batch >= 10 else None
        run = harness(bases(tmp_path, batch, retained), state)
        run.push_all([(n, None) for n in range(batch * 3)])
        state = kept[batch] = run.snapshot()
        for back in range(max(0, batch - 10), batch + 1):
            again = harness(bases(tmp_path, batch, retained), kept[back])
            assert again.entries("n") == {n: sum(n < 3 * b for b in range(back + 1)) for n in range(3 * back)}
    # A base per key group, and the former ones of the last ten micro-batches.
    assert len(names(tmp_path)) <= 2 * 12


def test_a_lost_attempt_changes_nothing(tmp_path) -> None:
    first = harness(bases(tmp_path, 0))
    first.push_all([(n, None) for n in range(30)])
    before = first.snapshot()
    lost = harness(bases(tmp_path, 1, retained=0), before)
    lost.push_all([(n, None) for n in range(60)])
    again = harness(bases(tmp_path, 1, retained=0), before)
    again.push_all([(n, None) for n in range(60)])
    assert again.entries("n") == {n: 2 if n < 30 else 1 for n in range(60)}


def test_missing_torn_and_altered_files_are_found(tmp_path) -> None:
    run = harness(bases(tmp_path))
    run.push_all([(n, None) for n in range(30)])
    snapshot = run.snapshot()
    for path in tmp_path.iterdir():
        whole = path.read_bytes()
        for damaged in (whole[:-1], whole[:100] + b"\xff" + whole[101:], b""):
            path.write_bytes(damaged)
            with pytest.raises(FrameError):
                harness(bases(tmp_path), snapshot).entries("n")
        path.unlink()
        with pytest.raises(FrameError, match="cannot be read"):
            harness(bases(tmp_path), snapshot).entries("n")
        path.write_bytes(whole)
    assert len(harness(bases(tmp_path), snapshot).entries("n")) == 30


def test_a_savepoint_holds_all_entries_itself(tmp_path) -> None:
    first = harness(bases(tmp_path))
    for n in range(50):
        first.push(n)
    first.push(3)
    values = {group: inline_base(v, bases(tmp_path)) for group, v in first.snapshot().values.items()}
    alone = replace(first.snapshot(), values=values)
    again = harness(MemoryBases(), alone)
    assert again.entries("n") == {n: 2 if n == 3 else 1 for n in range(50)}
    assert {describe_group(value).owner for value in values.values()} == {"operator"}
    assert all(inline_base(value, bases(tmp_path)) == value for value in values.values())
    rows = [read_tables(value).get("state/n") for value in values.values()]
    assert sum(table.num_rows for table in rows) == 50


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "1-2-zz", "", "1-2-0123456789abcdef/../../x"])
def test_a_name_that_is_none_becomes_no_path(tmp_path, name) -> None:
    with pytest.raises(FrameError, match="is not the name of a base"):
        MappedBases(StoreSpec(str(tmp_path))).frame(BaseRef(name, 0, 1))


def test_columns_of_a_mapped_file_are_aligned(tmp_path) -> None:
    files = bases(tmp_path)
    table = pa.record_batch({"hash": np.arange(9), "alive": [True] * 9})
    ref = files.write(1, pack_frame({"": b"{}", "state/a": table_bytes(table), "bb": table_bytes(table)}))
    frame = files.read(ref)
    for name in ("state/a", "bb"):
        view = np.frombuffer(frame[name], dtype=np.uint8)
        assert view.__array_interface__["data"][0] % 64 == 0
        assert read_trusted_table(name, frame[name]).equals(table)


# -- in a bucket ------------------------------------------------------------------------------------------


def test_state_comes_back_from_a_bucket_and_each_base_is_told(tmp_path) -> None:
    pytest.importorskip("obstore")
    place = bases_of(StoreSpec.parse(f"memory://bases-{tmp_path.name}/jobs/bases"), "sums", "chain")
    store, told, state = place.open_bucket(), [], None
    for batch in range(40):
        files = BaseObjects(MappedBases(place), batch, told.append)
        run = harness(files, state)
        run.push_all([(n, None) for n in range(batch * 3)])
        state = run.snapshot()
    assert sorted(told) == sorted(store.sizes_below("")), "no task deletes one, and none is kept quiet"
    assert {int(name.split("-")[1]) for name in told} > {10, 30}
    again = harness(BaseObjects(MappedBases(place), 40, told.append), state)
    assert again.entries("n") == {n: sum(n < 3 * batch for batch in range(40)) for n in range(3 * 39)}
    former = [json.loads(bytes(unpack_frame(value)[OWNER]))["former"] for value in state.values.values()]
    assert all(len(files) <= 1 for files in former), "a value names few files that nobody needs"


def test_a_base_is_fetched_once_and_what_is_gone_or_altered_is_found(tmp_path) -> None:
    pytest.importorskip("obstore")
    place = StoreSpec.parse(f"memory://bases-{tmp_path.name}/jobs/bases")
    store, told = place.open_bucket(), []
    run = harness(BaseObjects(MappedBases(place), 0, told.append))
    run.push_all([(n, None) for n in range(30)])
    snapshot, mapped = run.snapshot(), MappedBases(place)
    assert len(harness(BaseObjects(mapped, 1, told.append), snapshot).entries("n")) == 30
    whole = {name: store.read(name) for name in store.sizes_below("")}
    for name, content in whole.items():
        store.put(name, content[:100] + b"\xff" + content[101:])
    with pytest.raises(FrameError):
        harness(BaseObjects(MappedBases(place), 1, told.append), snapshot).entries("n")
    store.delete_all(whole)
    with pytest.raises(FrameError, match="is gone"):
        harness(BaseObjects(MappedBases(place), 1, told.append), snapshot).entries("n")
    assert len(harness(BaseObjects(mapped, 1, told.append), snapshot).entries("n")) == 30, "it has them"


class Keep(KeyedProcessFunction):
    def open(self, context):
        self.kept = context.get_state(ValueStateDescriptor("kept", "BINARY"))

    def process_element(self, size, ctx):
        self.kept.update(bytes(size))
        yield size, len(self.kept.value())


def test_a_large_value_is_not_written_again_with_the_keys_beside_it(tmp_path) -> None:
    """It goes into a base when it changes, however few rows that is; else it stays where it is."""

    def run(batch, pairs, state):
        made = OperatorHarness(
            Keep(),
            key=lambda size: size % 10,
            key_type="LONG",
            max_parallelism=1,
            policy=BasePolicy(),
            bases=bases(tmp_path, batch),
            restore=state,
        )
        made.push_all([(size, None) for size in pairs])
        return made.snapshot()

    large, small = 3_000_001, 22
    state = run(0, [large, small], None)
    for batch in range(1, 4):
        state = run(batch, [small], state)
        assert sum(map(len, state.values.values())) < 10_000
    written = set(names(tmp_path))
    assert len(written) == 1
    state = run(4, [large + 10], state)
    assert sum(map(len, state.values.values())) < 10_000, "it went through Spark as a change"
    assert len(set(names(tmp_path)) - written) == 1
