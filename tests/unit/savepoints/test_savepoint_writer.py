"""A savepoint made of another one, without Spark: what is refused, what is taken, when it exists."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flinkish_spark import KeyedProcessFunction, ValueStateDescriptor
from flinkish_spark.core.errors import ConfigError, EnvironmentFault
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage
from flinkish_spark.protocol.plan_layout import Chain
from flinkish_spark.protocol.savepoints import (
    OperatorState,
    SavedChain,
    SavepointMetadata,
    SourceFacts,
    StateFile,
    state_path,
)
from flinkish_spark.protocol.timer_index import Agenda, NextTimers
from flinkish_spark.protocol.watermarks import EventTime
from flinkish_spark.savepoints.files import (
    BootstrapError,
    SavepointDamagedError,
    SavepointDir,
    SavepointNotFoundError,
)
from flinkish_spark.savepoints.writer import SavepointWriter
from flinkish_spark.state.savepoint_files import StateFileWriter
from tests.support.operator_harness import OperatorHarness

AT = {"orders": {"orders": {"0": 7}}}


class Count(KeyedProcessFunction):
    def open(self, context):
        self.n = context.get_state(ValueStateDescriptor("n", "LONG", default=0))

    def process_element(self, value, ctx):
        self.n.update(self.n.value() + 1)


def state_file(folder, uid, chain) -> StateFile:
    harness = OperatorHarness(Count(), key=lambda value: value, key_type="STRING", uid=uid)
    for user in "abc":
        harness.push(user)
    writer = StateFileWriter(folder / state_path(uid, "f"))
    values = harness.snapshot().values
    writer.write(list(values), [bytes(value) for value in values.values()])
    size, digest = writer.close()
    return StateFile(uid, chain, "f", len(values), size, digest)


@pytest.fixture
def old(tmp_path):
    """A savepoint of a job with two operators behind each other."""
    folder = tmp_path / "old"
    files = tuple(state_file(folder, uid, "counts") for uid in ("totals", "counts"))
    states = {"n": "key_0 string, value int64"}
    agenda = Agenda({(uid, 1): NextTimers(60_000, None) for uid in ("totals", "counts")})
    metadata = SavepointMetadata(
        savepoint="a" * 32,
        job="orders",
        job_uuid=JobUuid("0" * 32),
        checkpoint=CheckpointId(7),
        lineage=Lineage(1),
        batch=BatchId(3),
        decided_at_ms=5,
        shuffle_partitions=2,
        operators={uid: OperatorState(16, ("string",), states) for uid in ("totals", "counts")},
        sources={"orders": SourceFacts("kafka", {"topic-orders": {"id": "x"}})},
        chains=(SavedChain(Chain(("orders",), ("totals", "counts"), ("counts",)), AT, ("table",)),),
        sinks=("table",),
        hooks={"catalog": {"version": 3}},
        finished=("counts",),
        files=files,
        times=EventTime(agenda=agenda),
    )
    SavepointDir(folder).finish(metadata)
    return folder, metadata


def writer_of(folder) -> SavepointWriter:
    return SavepointWriter.from_existing(None, folder)  # type: ignore[arg-type]


def test_what_is_not_changed_is_taken_over_with_places_hooks_and_times(old, tmp_path) -> None:
    folder, metadata = old
    new = writer_of(folder).remove_operator("totals").write(tmp_path / "new")
    assert new == SavepointDir(tmp_path / "new").metadata()
    assert new.savepoint != metadata.savepoint
    assert new.operators == {"counts": metadata.operators["counts"]}
    assert new.files == (metadata.files[1],) and (tmp_path / "new" / new.files[0].path).is_file()
    assert new.chains == (SavedChain(Chain(("orders",), ("counts",), ("counts",)), AT, ("table",)),)
    assert new.times == EventTime(agenda=Agenda({("counts", 1): NextTimers(60_000, None)}))
    kept = ("job", "job_uuid", "checkpoint", "sources", "sinks", "hooks", "finished")
    assert all(getattr(new, name) == getattr(metadata, name) for name in kept)
    # The old one is as it was, and can go.
    assert SavepointDir(folder).metadata() == metadata
    (folder / metadata.files[1].path).unlink()
    SavepointDir(tmp_path / "new").check_files(new.files)


def test_a_writer_is_a_value(old) -> None:
    writer = writer_of(old[0])
    assert writer.remove_operator("totals").operators == ("counts",)
    renamed = writer.change_uid("counts", "numbers")
    assert set(renamed.operators) == {"totals", "numbers"} and set(writer.operators) == {"totals", "counts"}
    assert renamed._plan.metadata.finished == ("numbers",)
    # The chain has another name, and the state of both operators goes with it.
    assert [set(one.origin) for one in renamed._plan.operators.values()] == [{"numbers"}] * 2


def test_nothing_that_exists_is_overwritten(old, tmp_path) -> None:
    folder, metadata = old
    writer = writer_of(folder)
    for target in (folder, folder / "inside", tmp_path):
        with pytest.raises(EnvironmentFault):
            writer.write(target)
    writer.write(tmp_path / "new")
    with pytest.raises(EnvironmentFault, match="Another savepoint is there"):
        writer.write(tmp_path / "new")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    with pytest.raises(EnvironmentFault, match="not empty"):
        writer.write(tmp_path / "mine")
    with pytest.raises(EnvironmentFault, match="absolute"):
        writer.write("new")
    assert SavepointDir(folder).metadata() == metadata


def test_a_write_that_was_cut_off_is_no_savepoint_and_can_be_repeated(old, tmp_path, monkeypatch) -> None:
    target = tmp_path / "new"
    with monkeypatch.context() as patched:
        patched.setattr(SavepointDir, "finish", lambda self, metadata: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            writer_of(old[0]).write(target)
    with pytest.raises(SavepointNotFoundError):
        SavepointDir(target).metadata()
    stray = target / state_path("totals", "of-the-first-call")
    stray.write_bytes(b"torn")
    writer_of(old[0]).write(target)
    assert not stray.exists()


def test_a_damaged_savepoint_is_not_taken_over(old, tmp_path) -> None:
    folder, metadata = old
    path = folder / metadata.files[0].path
    whole = path.read_bytes()
    path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(SavepointDamagedError, match="checksum does not match"):
        writer_of(folder).write(tmp_path / "new")
    path.write_bytes(whole[:-1])
    with pytest.raises(SavepointDamagedError, match="bytes instead of"):
        writer_of(folder)
    assert not (tmp_path / "new" / "savepoint.json").exists()


def test_what_is_not_there_or_is_taken_is_refused(old) -> None:
    writer = writer_of(old[0])
    for change in (
        lambda: writer.remove_operator("sums"),
        lambda: writer.change_uid("sums", "numbers"),
        lambda: writer.replace_state("sums", "n", None),  # type: ignore[arg-type]
    ):
        with pytest.raises(BootstrapError, match=r"no operator 'sums'.*choose from: counts, totals"):
            change()
    for taken in ("totals", "orders", "table"):
        with pytest.raises(BootstrapError, match="already"):
            writer.change_uid("counts", taken)
    with pytest.raises(ConfigError, match="not usable"):
        writer.change_uid("counts", "../counts")
    with pytest.raises(ConfigError, match="max_parallelism"):
        SavepointWriter.new(None, max_parallelism=0)  # type: ignore[arg-type]


def test_of_several_chains_it_has_to_be_said_which(old, tmp_path) -> None:
    _, metadata = old
    both = tmp_path / "both"
    files = (
        state_file(both, "totals", "totals"),
        replace(state_file(both, "totals", "counts"), chain="counts"),
    )
    chains = (SavedChain(Chain(("orders",), ("totals",), ("totals",)), AT), *metadata.chains)
    SavepointDir(both).finish(replace(metadata, files=files, chains=chains))
    with pytest.raises(BootstrapError, match=r"in 2 chains.*chain='counts' or 'totals'"):
        writer_of(both).replace_state("totals", "n", None)  # type: ignore[arg-type]
    with pytest.raises(BootstrapError, match="no chain 'other'"):
        writer_of(both).replace_state("totals", "n", None, chain="other")  # type: ignore[arg-type]
