"""Seeds: what a lineage begins with, read and installed without Spark."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from pyspark.sql.types import StructType

from flinkish_spark.checkpoint.spark_log import SparkLog
from flinkish_spark.contracts.source import Source, SourceNode, SourceStart
from flinkish_spark.core.errors import CorruptObjectError, InputLostError, JobDirError, StoreError, UserError
from flinkish_spark.core.job_dir import JobDir, seed_folder
from flinkish_spark.core.store import LocalStore
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.planning.beginning import Beginning
from flinkish_spark.planning.seed_source import SeedReader
from flinkish_spark.planning.sink_rows import PlannedJob, PlannedSink, SinkPart
from flinkish_spark.planning.stream_graph import StreamGraph
from flinkish_spark.protocol.decisions import Decision, RewindIntent, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage, OwnerEpoch
from flinkish_spark.protocol.lineage import RewindKind
from flinkish_spark.protocol.plan_layout import (
    Chain,
    NativeOperator,
    OperatorInstance,
    PlanLayout,
    Scan,
    ScanRole,
)
from flinkish_spark.protocol.records import StagedBatch
from flinkish_spark.protocol.restore import NonRestoredState, OperatorShape
from flinkish_spark.protocol.savepoints import (
    ClaimMode,
    OperatorState,
    SavedChain,
    SavepointMetadata,
    Seed,
    SeededChain,
    SeedOrigin,
    SourceFacts,
)
from flinkish_spark.savepoints.files import (
    RestoreSettings,
    SavepointDamagedError,
    SavepointDir,
    SavepointNotFoundError,
)
from flinkish_spark.savepoints.job import JobSavepoints
from flinkish_spark.savepoints.restore import Rescaling, Restore, check_rescale
from flinkish_spark.savepoints.seeds import (
    RESTORED_FROM,
    SeedKeeper,
    check_layout,
    find_beginning,
    find_claimant,
    find_lost_seed,
    read_layout,
    read_seed,
    shuffle_partitions_of,
    write_seed,
)
from flinkish_spark.worker.keyed_operator import OperatorError
from tests.unit.savepoints.test_savepoint_files import write_file

TOTALS = Chain(("orders",), ("totals",), ("totals",))
AT_5 = {"t": {"0": 5}}


class Topic(Source):
    """A source that can begin anywhere."""

    topics = ("t",)
    kind = "kafka"

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self.start: SourceStart | None = None

    @property
    def is_positionable(self) -> bool:
        return True

    def load(self, spark, control_path):
        raise NotImplementedError

    def starting_at(self, start):
        moved = Topic(self.first)
        moved.start = start
        return moved

    def check_start(self, uid, position):
        if position["t"]["0"] < self.first:
            raise InputLostError("gone", uid=uid)


def job(source: Source | None = None, operators=("totals",), chain=TOTALS):
    graph = StreamGraph(sources=[SourceNode("orders", source or Topic())])
    planned = PlannedJob(None, (), (chain,), {uid: OperatorShape(128, ("string",)) for uid in operators})
    return graph, planned


@pytest.fixture
def root(tmp_path):
    return tmp_path / "job"


@pytest.fixture
def savepoint(tmp_path):
    path = tmp_path / "savepoint"
    place = SavepointDir(path)
    place.prepare()
    place.finish(
        SavepointMetadata(
            "a" * 32,
            "orders",
            JobUuid("0" * 32),
            CheckpointId(7),
            Lineage(0),
            BatchId(3),
            5,
            2,
            {"totals": OperatorState(128, ("string",))},
            {"orders": SourceFacts("kafka", {"topic-orders-t": {"topic_id": "x"}})},
            (SavedChain(TOTALS, {"orders": AT_5}),),
            hooks={"catalog": {"version": 3}},
            files=(write_file(path),),
        )
    )
    return path


def rewritten(savepoint, **changes) -> None:
    metadata = SavepointDir(savepoint).metadata()
    (savepoint / "savepoint.json").unlink()
    SavepointDir(savepoint).finish(replace(metadata, **changes))


def restore(root, path, source=None, hooks=("catalog",), operators=("totals",), chain=TOTALS, **settings):
    graph, planned = job(source, operators, chain)
    wanted = None if path is None else RestoreSettings(str(path), **settings)
    return Restore(wanted, graph, planned, JobDir(LocalStore(root)), StoreSpec(str(root)), hooks)


# -- preparing a job directory ----------------------------------------------------------------------


def test_a_check_creates_nothing(root, savepoint) -> None:
    assert restore(root, savepoint).check() == "a" * 32
    assert not root.exists()


def test_a_prepared_job_needs_the_savepoint_no_more(root, savepoint) -> None:
    # behaviours 22, 42, 65
    rewritten(savepoint, finished=("orders", "gone"))
    assert restore(root, savepoint).prepare(5) == "a" * 32
    job_dir = JobDir(LocalStore(root))
    seed = read_seed(job_dir, Lineage(0))
    assert seed is not None
    assert seed.chains == (SeededChain(TOTALS, {"orders": AT_5}, {"totals": "totals"}),)
    assert (seed.shuffle_partitions, seed.hooks, seed.finished) == (
        5,
        {"catalog": {"version": 3}},
        ("orders",),
    )
    assert (root / "seeds/0" / seed.files[0].path).is_file()
    assert job_dir.find_fact("topic-orders-t") == {"topic_id": "x"}
    before = sorted(path.name for path in savepoint.rglob("*"))
    restore(root, savepoint).prepare(5)
    assert sorted(path.name for path in savepoint.rglob("*")) == before


def test_a_restore_that_was_cut_off_is_done_again(root, savepoint) -> None:
    leftover = root / "seeds/0/state/totals/old.parquet"
    leftover.parent.mkdir(parents=True)
    leftover.write_text("x")
    restore(root, savepoint).prepare(2)
    assert not leftover.exists()


def test_an_unknown_path_is_refused(root, tmp_path) -> None:
    # behaviour 63
    with pytest.raises(SavepointNotFoundError):
        restore(root, tmp_path / "nowhere").check()
    assert not root.exists()


def test_a_misfit_names_every_reason(root, savepoint) -> None:
    chain = Chain(("orders",), ("other",), ("other",))
    with pytest.raises(UserError, match=r"totals: .*; catalog: ") as caught:
        restore(root, savepoint, operators=("other",), chain=chain, hooks=()).check()
    assert len(caught.value.problems) == 2
    assert "NonRestoredState.ALLOW" in caught.value.what_to_do
    allowed = restore(
        root, savepoint, operators=("other",), chain=chain, hooks=(), non_restored=NonRestoredState.ALLOW
    )
    allowed.prepare(2)
    seed = read_seed(JobDir(LocalStore(root)), Lineage(0))
    assert (seed.files, seed.hooks) == ((), {})
    assert seed.chains == (SeededChain(chain, {"orders": AT_5}, {}),)


def test_input_that_is_gone_is_named_before_anything_is_created(root, savepoint) -> None:
    with pytest.raises(InputLostError):
        restore(root, savepoint, source=Topic(first=6)).check()
    assert not root.exists()


def test_a_job_has_one_beginning(root, savepoint, tmp_path) -> None:
    restore(root, savepoint).prepare(2)
    with pytest.raises(JobDirError, match="prepared for a restore and not started"):
        restore(root, None).check()
    JobDir(LocalStore(root)).read_or_create_job({}, {RESTORED_FROM: "a" * 32, "shuffle_partitions": 2})
    assert restore(root, None).check() == "a" * 32
    assert restore(root, savepoint).prepare(2) == "a" * 32
    moved = tmp_path / "moved"
    savepoint.rename(moved)
    assert restore(root, moved).check() == "a" * 32
    # A user may delete what the job does not need.
    assert restore(root, savepoint).check() == "a" * 32
    with pytest.raises(JobDirError, match="began with another savepoint"):
        restore(root, tmp_path / "other").check()


def test_a_job_that_began_without_a_savepoint_stays_without(root, savepoint) -> None:
    JobDir(LocalStore(root)).read_or_create_job({}, {})
    with pytest.raises(JobDirError, match="did not begin with a savepoint"):
        restore(root, savepoint).check()
    assert restore(root, None).check() == ""


def test_a_plan_says_which_sinks_read_each_chain_behind_an_operator_too() -> None:
    nothing = StructType([])

    def sink(uid: str, stream: int) -> PlannedSink:
        return PlannedSink(uid, None, nothing, (SinkPart(stream, (), (), frozenset()),))

    copy = Chain(("orders",), (), ("copy",))
    sinks = (sink("out", 0), sink("copy", 1), sink("more", 0))
    planned = PlannedJob(None, sinks, (TOTALS, copy))
    assert planned.read_by == {TOTALS: ("out", "more"), copy: ("copy",)}


# -- what the live lineage begins with --------------------------------------------------------------


def test_a_plain_rewind_keeps_the_seed_and_a_reseed_brings_another(root, savepoint) -> None:
    job_dir = JobDir(LocalStore(root))
    assert find_beginning(job_dir, StoreSpec(str(root))) == Beginning()
    assert shuffle_partitions_of(job_dir, Beginning()) is None
    restore(root, savepoint).prepare(2)
    job_dir.read_or_create_job({}, {RESTORED_FROM: "a" * 32, "shuffle_partitions": 2})
    first = find_beginning(job_dir, StoreSpec(str(root)))
    assert first.folder == StoreSpec(str(root / "seeds/0"))
    job_dir.close_rewind(RewindIntent(BatchId(4), Lineage(1), "", {}, RewindKind.PLAIN))
    assert find_beginning(job_dir, StoreSpec(str(root))) == first
    # Prepared, and kept by a crash from being begun with.
    seed = Seed(Lineage(2), SeedOrigin.RESCALE, "", CheckpointId(9), 5, ())
    write_seed(job_dir, seed)
    assert shuffle_partitions_of(job_dir, find_beginning(job_dir, StoreSpec(str(root)))) == 2
    job_dir.close_rewind(RewindIntent(BatchId(0), Lineage(2), "", {}, RewindKind.RESEED))
    assert find_beginning(job_dir, StoreSpec(str(root))) == Beginning(seed, StoreSpec(str(root / "seeds/2")))
    assert shuffle_partitions_of(job_dir, find_beginning(job_dir, StoreSpec(str(root)))) == 5


def test_a_seed_that_is_gone_is_an_error_and_no_empty_start(root, savepoint) -> None:
    restore(root, savepoint).prepare(2)
    job_dir = JobDir(LocalStore(root))
    job_dir.read_or_create_job({}, {RESTORED_FROM: "a" * 32, "shuffle_partitions": 2})
    (root / seed_folder(Lineage(0)) / "seed.json").unlink()
    with pytest.raises(CorruptObjectError, match="seed of lineage 0 is gone"):
        find_beginning(job_dir, StoreSpec(str(root)))


def test_the_layout_of_the_plan_is_recorded_once_and_compared(root) -> None:
    class Plan:
        def __init__(self, *scans):
            self.scans = scans

        @property
        def layout(self):
            return PlanLayout(self.scans, (OperatorInstance("totals", "totals"),))

    job_dir = JobDir(LocalStore(root))
    with pytest.raises(JobDirError, match="in which order"):
        read_layout(job_dir)
    one, other = Scan(ScanRole.RECORDS, "orders", "totals"), Scan(ScanRole.RECORDS, "other", "totals")
    check_layout(job_dir, Plan(one, other))
    assert check_layout(job_dir, Plan(one, other)) == read_layout(job_dir)
    with pytest.raises(JobDirError, match="another way"):
        check_layout(job_dir, Plan(other, one))


def test_a_chain_begins_where_its_seed_says(root, savepoint) -> None:
    restore(root, savepoint).prepare(2)
    beginning = find_beginning(JobDir(LocalStore(root)), StoreSpec(str(root)))
    node = SourceNode("orders", Topic())
    moved = beginning.position_source(node, TOTALS, "orders")
    assert isinstance(moved, Topic) and moved.start is not None
    assert moved.start.position == AT_5
    assert moved.start.folder.startswith(str(root / "seeds/0/begin/orders-"))
    other = Chain(("orders",), ("new",), ("new",))
    assert beginning.position_source(node, other, "orders") is node.source
    assert beginning.state_of(None, "new", other) is None
    assert beginning.label(other) == "" != beginning.label(TOTALS)
    assert Beginning().position_source(node, TOTALS, "orders") is node.source


# -- letting go -------------------------------------------------------------------------------------


def decision(lineage: int) -> Decision:
    batch = StagedBatch(Lineage(lineage), BatchId(0), OwnerEpoch(1), 1, (), ())
    return Decision(
        CheckpointId(1), Verdict.COMMIT, OwnerEpoch(1), 5, lineage=Lineage(lineage), batches=(batch,)
    )


def keep(root) -> None:
    """Confirm a checkpoint, as every start of the query does with the newest one."""
    job_dir = JobDir(LocalStore(root))
    SeedKeeper(
        StoreSpec(str(root)), find_beginning(job_dir, StoreSpec(str(root))), find_claimant(job_dir)
    ).on_confirmed(decision(0))


@pytest.mark.parametrize("claim", list(ClaimMode))
def test_behind_the_first_checkpoint_the_seeds_files_go_and_a_claimed_savepoint_too(
    root, savepoint, claim
) -> None:
    # behaviour 65
    restore(root, savepoint, claim=claim).prepare(2)
    job_dir = JobDir(LocalStore(root))
    keeper = SeedKeeper(
        StoreSpec(str(root)), find_beginning(job_dir, StoreSpec(str(root))), find_claimant(job_dir)
    )
    keeper.on_confirmed(decision(0))
    keeper.on_confirmed(decision(0))
    assert read_seed(job_dir, Lineage(0)) is not None
    assert not list((root / "seeds/0").glob("state/*/*"))
    assert savepoint.exists() is (claim is ClaimMode.NO_CLAIM)


def test_checkpoints_of_an_older_lineage_do_not_free_the_seed(root, savepoint) -> None:
    restore(root, savepoint).prepare(2)
    job_dir = JobDir(LocalStore(root))
    beginning = find_beginning(job_dir, StoreSpec(str(root)))
    later = replace(beginning, seed=replace(beginning.seed, lineage=Lineage(3)))
    SeedKeeper(StoreSpec(str(root)), later, None).on_confirmed(decision(2))
    assert list((root / "seeds/0").glob("state/*/*"))


def test_a_later_savepoint_in_the_same_place_survives_every_start_of_the_job(root, savepoint) -> None:
    """Behaviour 65: the job owns the one that it claimed, not the place."""
    restore(root, savepoint, claim=ClaimMode.CLAIM).prepare(2)
    whole = SavepointDir(savepoint).metadata()
    keep(root)
    SavepointDir(savepoint).prepare()
    later = SavepointDir(savepoint).finish(
        replace(whole, savepoint="c" * 32, checkpoint=CheckpointId(99), files=(write_file(savepoint),))
    )
    keep(root)
    SavepointDir(savepoint).check_files(later.files)
    assert SavepointDir(savepoint).metadata() == later


def test_a_claimed_savepoint_that_cannot_be_deleted_is_left_for_the_next_start(
    root, savepoint, monkeypatch
) -> None:
    def refuse(self, job, savepoint):
        raise StoreError("no")

    restore(root, savepoint, claim=ClaimMode.CLAIM).prepare(2)
    with monkeypatch.context() as patch:
        patch.setattr(SavepointDir, "delete", refuse)
        keep(root)
    assert SavepointDir(savepoint).metadata()
    keep(root)
    assert not savepoint.exists()


def test_a_job_directory_that_was_moved_still_owns_what_it_claimed(root, savepoint) -> None:
    restore(root, savepoint, claim=ClaimMode.CLAIM).prepare(2)
    with pytest.raises(UserError, match="belongs to another job"):
        restore(root.parent / "another", savepoint).check()
    moved = root.parent / "moved"
    root.rename(moved)
    keep(moved)
    assert not savepoint.exists()


def test_a_restore_that_was_cut_off_behind_its_claim_is_done_again(root, savepoint, monkeypatch) -> None:
    def crash(self, files, folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SavepointDir, "copy_to_folder", crash)
        with pytest.raises(KeyboardInterrupt):
            restore(root, savepoint, claim=ClaimMode.CLAIM).prepare(2)
    assert (savepoint / "claimed.json").exists()
    assert restore(root, savepoint, claim=ClaimMode.CLAIM).prepare(2) == "a" * 32


# -- beginning anew ---------------------------------------------------------------------------------


def cancelled(root, savepoint, **settings) -> JobDir:
    """A restored job behind its first checkpoint that was cancelled with DELETE_ON_CANCELLATION."""
    restore(root, savepoint, **settings).prepare(2)
    job_dir = JobDir(LocalStore(root))
    job_dir.read_or_create_job({}, {RESTORED_FROM: "a" * 32, "shuffle_partitions": 2})
    job_dir.create_decision(decision(0))
    assert find_lost_seed(job_dir, StoreSpec(str(root))) is None
    keep(root)
    assert find_lost_seed(job_dir, StoreSpec(str(root))) is None
    job_dir.store.delete("checkpoints/1/decision.json")
    job_dir.create_decision(Decision(CheckpointId(2), Verdict.ABORT, OwnerEpoch(1), 5))
    return job_dir


def test_a_job_without_checkpoints_begins_anew_with_the_savepoint_that_is_given_again(
    root, savepoint
) -> None:
    job_dir = cancelled(root, savepoint)
    seed = find_lost_seed(job_dir, StoreSpec(str(root)))
    assert seed is not None and seed == read_seed(job_dir, Lineage(0))
    assert restore(root, savepoint).check() == "a" * 32
    # The check wrote nothing.
    assert find_lost_seed(job_dir, StoreSpec(str(root))) == seed
    assert restore(root, savepoint).prepare(2) == "a" * 32
    assert find_lost_seed(job_dir, StoreSpec(str(root))) is None
    (part,) = (reader := SeedReader(str(root / "seeds/0"), "totals", "totals")).partitions(
        {"flinkish:seed": 0}, {"flinkish:seed": 1}
    )
    assert sum(batch.num_rows for batch in reader.read(part)) == 40


@pytest.mark.parametrize("claim", list(ClaimMode))
def test_a_job_without_checkpoints_and_without_its_savepoint_is_refused(root, savepoint, claim) -> None:
    cancelled(root, savepoint, claim=claim)
    if savepoint.exists():
        with pytest.raises(JobDirError, match="neither a checkpoint nor the state") as caught:
            restore(root, None).check()
        assert "the savepoint that it was restored from" in caught.value.what_to_do
        shutil.rmtree(savepoint)
    with pytest.raises(JobDirError, match="DELETE_ON_CANCELLATION"):
        restore(root, savepoint).check()


def test_a_savepoint_that_is_needed_again_has_to_be_whole(root, savepoint) -> None:
    cancelled(root, savepoint)
    next(savepoint.glob("state/*/*")).unlink()
    with pytest.raises(SavepointDamagedError, match="no such file"):
        restore(root, savepoint).check()


def test_a_rescaled_job_without_checkpoints_is_refused(root) -> None:
    job_dir = begun(root)
    file = write_file(root / "seeds/1")
    chains = (SeededChain(TOTALS, {"orders": AT_5}, {"totals": "totals"}),)
    write_seed(job_dir, Seed(Lineage(1), SeedOrigin.RESCALE, "", CheckpointId(9), 3, chains, files=(file,)))
    job_dir.close_rewind(RewindIntent(BatchId(0), Lineage(1), "", {}, RewindKind.RESEED))
    # A checkpoint of before the rescale is not what the live lineage goes on from.
    job_dir.create_decision(decision(0))
    assert restore(root, None).check() == ""
    (root / "seeds/1" / file.path).unlink()
    with pytest.raises(JobDirError, match="neither a checkpoint nor the state") as caught:
        restore(root, None).check()
    assert caught.value.what_to_do.startswith("begin with a new job_dir")


def test_until_its_log_begins_anew_a_job_runs_with_the_partitions_that_it_had(root) -> None:
    """What is replayed before a rescale is replayed from state in the old partitions."""
    job_dir = JobDir(LocalStore(root))
    savepoints = JobSavepoints(None, "job", StoreSpec(str(root)), 5, job_dir, None, ())
    assert savepoints.shuffle_partitions() == 5
    begun(root)
    assert savepoints.shuffle_partitions() == 2
    write_seed(job_dir, Seed(Lineage(1), SeedOrigin.RESCALE, "", CheckpointId(9), 5, ()))
    assert savepoints.shuffle_partitions() == 2
    job_dir.close_rewind(RewindIntent(BatchId(0), Lineage(1), "", {}, RewindKind.RESEED))
    assert savepoints.shuffle_partitions() == 5


# -- the source -------------------------------------------------------------------------------------


def test_the_seed_is_read_whole_in_the_first_micro_batch_and_never_again(root, savepoint) -> None:
    restore(root, savepoint).prepare(2)
    reader = SeedReader(str(root / "seeds/0"), "totals", "totals")
    start = reader.initialOffset()
    end = reader.latestOffset(start, None)
    assert (start, end) == ({"flinkish:seed": 0}, {"flinkish:seed": 1})
    assert reader.latestOffset(end, None) == end
    rows = [
        row for p in reader.partitions(start, end) for batch in reader.read(p) for row in batch.to_pylist()
    ]
    assert [row["key_group"] for row in rows] == list(range(40))
    assert rows[3]["value"] == b"value 3" * 50
    assert list(reader.partitions(end, end)) == []


def test_a_seed_file_that_is_gone_fails_for_good(root, savepoint) -> None:
    restore(root, savepoint).prepare(2)
    reader = SeedReader(str(root / "seeds/0"), "totals", "totals")
    (part,) = reader.partitions({"flinkish:seed": 0}, {"flinkish:seed": 1})
    next((root / "seeds/0").glob("state/*/*")).unlink()
    with pytest.raises(OperatorError, match=r"\[FLINKISH_STATE\] operator 'totals'"):
        list(reader.read(part))


def test_a_big_batch_is_handed_out_row_by_row(root, savepoint, monkeypatch) -> None:
    from flinkish_spark.planning import seed_source

    monkeypatch.setattr(seed_source, "_MOST_BYTES", 10)
    restore(root, savepoint).prepare(2)
    reader = SeedReader(str(root / "seeds/0"), "totals", "totals")
    (part,) = reader.partitions({"flinkish:seed": 0}, {"flinkish:seed": 1})
    assert [batch.num_rows for batch in reader.read(part)] == [1] * 40


# -- another number of shuffle partitions -----------------------------------------------------------


class Frame(Topic):
    """A source that begins where it is."""

    kind = "dataframe"

    @property
    def is_positionable(self) -> bool:
        return False


def rescaling(root, partitions, source=None) -> Rescaling:
    graph, planned = job(source)
    log = SparkLog(LocalStore(root), "spark/1", root / "spark/1")
    return Rescaling(
        None, planned, graph.sources, JobDir(LocalStore(root)), StoreSpec(str(root)), log, partitions
    )


def begun(root, partitions=2) -> JobDir:
    job_dir = JobDir(LocalStore(root))
    job_dir.read_or_create_job({}, {RESTORED_FROM: "", "shuffle_partitions": partitions})
    return job_dir


def test_a_rescale_is_wanted_until_a_log_of_that_number_has_begun(root) -> None:
    assert not rescaling(root, 3).is_wanted(Lineage(0))
    job_dir = begun(root)
    assert not rescaling(root, 2).is_wanted(Lineage(0))
    assert rescaling(root, 3).is_wanted(Lineage(0))
    rescaling(root, 3).export(None, Lineage(1))
    assert rescaling(root, 3).is_wanted(Lineage(0))
    job_dir.close_rewind(RewindIntent(BatchId(0), Lineage(1), "", {}, RewindKind.RESEED))
    assert not rescaling(root, 3).is_wanted(Lineage(1))
    assert rescaling(root, 2).is_wanted(Lineage(1))


def test_a_rescale_before_the_first_checkpoint_begins_where_the_job_began(root) -> None:
    """Spark's own Kafka source keeps its beginning in its checkpoint, which is set aside."""
    job_dir = begun(root)
    layout = PlanLayout(
        (Scan(ScanRole.RECORDS, "orders", "totals"), Scan(ScanRole.BARRIERS, "", "totals")), ()
    )
    check_layout(job_dir, type("Plan", (), {"layout": layout})())
    first = root / "spark/1/sources/0/0"
    first.parent.mkdir(parents=True)
    first.write_text('\0v1\n{"t":{"0":5}}')
    (root / "seeds/1/state").mkdir(parents=True)
    rescaling(root, 3).export(None, Lineage(1))
    seed = read_seed(job_dir, Lineage(1))
    assert (seed.chains, seed.shuffle_partitions) == ((SeededChain(TOTALS, {"orders": AT_5}, {}),), 3)
    assert not (root / "seeds/1/state").exists()


def test_a_rescale_before_the_first_checkpoint_of_a_restored_job_keeps_its_seed(root, savepoint) -> None:
    restore(root, savepoint, claim=ClaimMode.CLAIM).prepare(2)
    job_dir = begun(root)
    rescaling(root, 3).export(None, Lineage(1))
    before, after = read_seed(job_dir, Lineage(0)), read_seed(job_dir, Lineage(1))
    assert after == replace(before, lineage=Lineage(1), shuffle_partitions=3)
    SeedKeeper(StoreSpec(str(root)), Beginning(after), find_claimant(job_dir)).on_confirmed(decision(0))
    reader = SeedReader(str(root / "seeds/1"), "totals", "totals")
    parts = reader.partitions({"flinkish:seed": 0}, {"flinkish:seed": 1})
    assert sum(batch.num_rows for part in parts for batch in reader.read(part)) == 40
    SeedKeeper(StoreSpec(str(root)), Beginning(after), find_claimant(job_dir)).on_confirmed(decision(1))
    assert not list((root / "seeds").rglob("*.parquet"))


def test_a_rescale_with_a_dataframe_is_refused_and_leaves_no_seed(root) -> None:
    job_dir = begun(root)
    with pytest.raises(UserError, match="runs with 2 shuffle partitions and cannot change to 3"):
        rescaling(root, 3, Frame()).export(None, Lineage(1))
    assert read_seed(job_dir, Lineage(1)) is None


def test_a_rescale_is_looked_at_before_anything_is_written(root) -> None:
    """A preflight asks the same question as the recovery."""

    def check(wanted: int, source: Source) -> None:
        check_rescale(JobDir(LocalStore(root)), StoreSpec(str(root)), [SourceNode("ticks", source)], wanted)

    check(3, Frame())
    begun(root)
    natives = [NativeOperator(0, "orders", "totals", "limit()")]
    with pytest.raises(UserError, match=r"'orders' contains limit\(\), and Spark does not move"):
        check_rescale(JobDir(LocalStore(root)), StoreSpec(str(root)), [], 3, natives)
    before = sorted(root.rglob("*"))
    check(2, Frame())
    check(3, Topic())
    with pytest.raises(UserError, match="2 shuffle partitions and cannot change to 3") as caught:
        check(3, Frame())
    assert "its source 'ticks' is a DataFrame" in caught.value.why
    assert sorted(root.rglob("*")) == before
