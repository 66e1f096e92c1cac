"""A job directory that is behind what sinks and sources hold is not started, unless somebody accepts it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flinkish_spark.checkpoint.commit import JobInterruptedError, refuse_another_timeline
from flinkish_spark.checkpoint.failures import QueryError
from flinkish_spark.checkpoint.ownership import Ownership, seal_open_ids, take_over
from flinkish_spark.checkpoint.staging import StagingContext
from flinkish_spark.connectors.delta.manifest import _DeltaManifestWriter
from flinkish_spark.connectors.files.committer import FileMarks
from flinkish_spark.connectors.files.disk import SinkFiles
from flinkish_spark.connectors.kafka.client.marks import KafkaMarks
from flinkish_spark.connectors.kafka.manifest import _KafkaManifestWriter
from flinkish_spark.connectors.kafka.writer import KafkaCommitter
from flinkish_spark.contracts.manifest import ManifestContext
from flinkish_spark.contracts.sink import SinkContext
from flinkish_spark.core.clock import SystemThreads
from flinkish_spark.core.errors import AnotherTimelineError, BrokerUnavailableError, EnvironmentFault
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore
from flinkish_spark.job.timeline import settle_timeline
from flinkish_spark.protocol.decisions import Decision, Receipt, TriggerRecord, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId, CheckpointPurpose, JobUuid, Lineage, OwnerEpoch
from flinkish_spark.protocol.lineage import LineageHistory
from flinkish_spark.protocol.records import Barrier, SinkAck, StagedBatch, TaskAck
from flinkish_spark.protocol.retention import CheckpointFact, RetentionFacts, find_deletions
from flinkish_spark.protocol.timeline import Mark
from flinkish_spark.sources import EndAtLatest, HybridSource, KafkaRecordsSource
from tests.support.clocks import ManualClock
from tests.support.coordinator_rig import context_of
from tests.support.jvm_errors import Throwables

JOB = JobUuid("1" * 32)
A, B, C = "a" * 16, "b" * 16, "c" * 16
#: Of a checkpoint, in the order in which they are deleted.
FILES = ("trigger.json", "decision.json", "receipt.json")


class Sink:
    """A committer of which only the mark counts."""

    def __init__(self, *marks: Mark) -> None:
        self.marks, self.silent = marks, 0
        self.error: Exception = BrokerUnavailableError("nobody answers")

    def newest_marks(self) -> Sequence[Mark]:
        if self.silent:
            self.silent -= 1
            raise self.error
        return self.marks


def settle(
    ownership: Ownership,
    sink: Sink | None = None,
    source: Sink | None = None,
    stops: Callable[[], bool] = lambda: False,
    cancelled: Callable[[], bool] = lambda: False,
    clock: ManualClock | None = None,
):
    found = [] if source is None else [SimpleNamespace(uid="in", source=source)]
    if source is not None:
        source.newest_marks = lambda job, read=source.newest_marks: read()  # type: ignore[method-assign]
    committers = {} if sink is None else {"out": sink}
    return settle_timeline(
        context_of(
            job=JOB,
            job_dir=ownership.job_dir,
            ownership=ownership,
            committers=committers,
            sources=found,
            clock=clock or ManualClock(),
            threads=SystemThreads(),
            must_give_up=stops,
            is_cancelled=cancelled,
        )
    )


def owner(root: Path, token: str) -> Ownership:
    return take_over(JobDir(LocalStore(root)), ManualClock(), lambda: token)


def of_the_jvm(name: str, says: str) -> Exception:
    """Return what Py4J raises of an exception of Java's inside another."""
    return Throwables([("org.apache.spark.SparkException", "Job aborted"), (name, says)]).raised()


STAGED = StagedBatch(Lineage(0), BatchId(3), OwnerEpoch(1), 2, (), (), ())


def decide(ownership: Ownership, checkpoint: int) -> Mark:
    """Decide a checkpoint; return what its commit leaves."""
    ownership.job_dir.create_decision(
        Decision(CheckpointId(checkpoint), Verdict.COMMIT, ownership.epoch, 0, batches=(STAGED,))
    )
    return ownership.timeline.mark_of(CheckpointId(checkpoint))


def test_a_directory_that_is_put_back_from_a_backup_is_not_started(tmp_path: Path) -> None:
    first = owner(tmp_path / "job", A)
    assert decide(first, 1) == Mark(CheckpointId(1), A)
    shutil.copytree(tmp_path / "job", tmp_path / "backup")
    second = owner(tmp_path / "job", B)
    newest = [decide(second, n) for n in range(2, 14)][-1]
    assert newest == Mark(CheckpointId(13), B)
    assert settle(owner(tmp_path / "job", C), Sink(newest)) is False
    with pytest.raises(AnotherTimelineError) as refused:
        settle(owner(tmp_path / "backup", C), Sink(newest))
    assert (refused.value.found, refused.value.newest) == (CheckpointId(13), CheckpointId(1))  # type: ignore[attr-defined]
    assert "sink 'out' holds checkpoint 13" in str(refused.value)
    assert "its newest is 1" in str(refused.value)
    assert "flinkish timeline accept" in str(refused.value)
    with pytest.raises(AnotherTimelineError, match="source 'in' holds checkpoint 13"):
        settle(owner(tmp_path / "backup", C), source=Sink(newest))


def test_a_snapshot_of_a_job_that_ran_is_told_by_the_id_that_it_had_given_up(tmp_path: Path) -> None:
    """The copy knows id 2 as pending; its takeover seals it, while the true job has committed it."""
    first = owner(tmp_path / "job", A)
    decide(first, 1)
    shutil.copytree(tmp_path / "job", tmp_path / "snapshot")
    pending = TriggerRecord(CheckpointId(2), first.epoch, CheckpointPurpose.PERIODIC, 0)
    JobDir(LocalStore(tmp_path / "snapshot")).create_trigger(pending)
    committed = decide(first, 2)
    restored = owner(tmp_path / "snapshot", B)
    assert restored.job_dir.decision(CheckpointId(2)).verdict is Verdict.ABORT  # type: ignore[union-attr]
    with pytest.raises(AnotherTimelineError, match="given up here, and committed elsewhere"):
        settle(restored, Sink(committed))


def test_a_micro_batch_of_an_earlier_owner_becomes_visible_with_a_checkpoint_of_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its barrier is of a checkpoint that the takeover gave up; a sink is told the next one."""
    first = owner(tmp_path, A)
    decide(first, 1)
    first.job_dir.create_trigger(TriggerRecord(CheckpointId(2), first.epoch, CheckpointPurpose.PERIODIC, 0))
    drawn = [1, 1, 2, 2, 3]
    monkeypatch.setattr(StagingContext, "_find_drawn", lambda self, batch: CheckpointId(drawn[batch.value]))

    def told(ownership: Ownership) -> list[int]:
        unused: Any = None
        context = StagingContext(JOB, ownership, Lineage(0), unused, ManualClock(), unused)
        return [int(context.checkpoint_of(BatchId(batch))) for batch in range(1, 5)]

    assert told(first) == [2, 2, 3, 3]
    assert told(owner(tmp_path, B)) == [3, 3, 3, 3]


def triggered(ownership: Ownership, checkpoint: int) -> None:
    record = TriggerRecord(CheckpointId(checkpoint), ownership.epoch, CheckpointPurpose.PERIODIC, 0)
    ownership.job_dir.create_trigger(record)


def passed_on(ownership: Ownership, checkpoint: int, barrier: int) -> None:
    """Decide a checkpoint whose micro-batch has the barrier of one that was given up."""
    staged = replace(
        STAGED, acks=(SinkAck("out", (TaskAck(0, 1, 7, (Barrier(CheckpointId(barrier), 0),)),)),)
    )
    shown = Decision(CheckpointId(checkpoint), Verdict.COMMIT, ownership.epoch, 0, batches=(staged,))
    ownership.job_dir.create_decision(shown)


def retained(ownership: Ownership, retained: int) -> list[int]:
    """Delete old checkpoints as a job does whose checkpoints are all complete; return which."""
    job_dir = ownership.job_dir
    facts = [
        CheckpointFact(one.checkpoint, one.verdict, has_receipt=one.verdict is Verdict.COMMIT)
        for one in map(job_dir.decision, job_dir.list_checkpoint_ids())
        if one is not None
    ]
    gone = find_deletions(RetentionFacts(tuple(facts), LineageHistory(), retained))
    job_dir.delete_all(f"checkpoints/{one.checkpoint}/{part}" for one in gone for part in FILES)
    return [int(one.checkpoint) for one in gone]


def of_its_own_restart(ownership: Ownership) -> None:
    assert seal_open_ids(ownership, ManualClock()) == (CheckpointId(2),)


def of_a_timeout(ownership: Ownership) -> None:
    ownership.job_dir.create_decision(
        Decision(CheckpointId(2), Verdict.ABORT, ownership.epoch, 0, reason="EXPIRED")
    )


@pytest.mark.parametrize("gives_up", [of_its_own_restart, of_a_timeout])
@pytest.mark.parametrize("takes_over_between", [True, False])
def test_the_mark_of_a_barrier_that_its_owner_gave_up_is_ours_for_as_long_as_the_input_is_idle(
    tmp_path: Path, gives_up: Callable[[Ownership], None], takes_over_between: bool
) -> None:
    """An atomic sink has written the mark by then; the next checkpoint of that owner shows it."""
    first = owner(tmp_path / "job", A)
    decide(first, 1)
    triggered(first, 2)
    left = first.timeline.mark_of(CheckpointId(2))
    gives_up(first)
    passed_on(first, 3, barrier=2)
    # A crash in each place, and a copy that goes on: decided, and nothing more is done.
    shutil.copytree(tmp_path / "job", tmp_path / "copy")
    assert settle(owner(tmp_path / "copy", C), source=Sink(left)) is False
    last = owner(tmp_path / "job", B) if takes_over_between else first
    for checkpoint in range(4, 56):
        decide(last, checkpoint)
    # One that was cut off: of 2 the decision is there, and what has shown its barrier is not.
    shutil.copytree(tmp_path / "job", tmp_path / "cut")
    cut = JobDir(LocalStore(tmp_path / "cut"))
    cut.create_receipt(Receipt(CheckpointId(3), first.epoch, 0))
    cut.delete_all(["checkpoints/3/decision.json"])
    assert retained(last, 50) == [1, 2, 3, 4, 5]
    for root in ("job", "cut", "copy"):
        for token in (C, "d" * 16):
            again = owner(tmp_path / root, token)
            assert [one.given_up for one in again.timeline.stretches if one.given_up] == []
            assert settle(again, source=Sink(left)) is False


@pytest.mark.parametrize("barrier", [2, 3])
def test_no_later_owner_leaves_the_mark_of_what_a_takeover_gave_up(tmp_path: Path, barrier: int) -> None:
    """Its micro-batch may run again and keep its barrier; whoever bears that mark has a copy."""
    _, second = copied_while_open(tmp_path)
    left = second.timeline.mark_of(CheckpointId(2))
    passed_on(second, 3, barrier)
    for checkpoint in range(4, 56):
        decide(second, checkpoint)
    for _ in range(2):
        third = owner(tmp_path / "copy", C)
        for found in ({"source": Sink(left)}, {"sink": Sink(left)}):
            with pytest.raises(AnotherTimelineError, match="given up here, and committed elsewhere"):
                settle(third, **found)
        assert settle(third, source=Sink(third.timeline.mark_of(CheckpointId(3)))) is False
        retained(third, 50)
    assert third.job_dir.decision(CheckpointId(3)) is None


def test_each_stretch_lists_what_was_given_up_for_others_and_nothing_else(tmp_path: Path) -> None:
    first = owner(tmp_path, A)
    triggered(first, 1)
    assert seal_open_ids(first, ManualClock()) == (CheckpointId(1),)
    triggered(first, 2)
    # Two takeovers that were cut off, one before its seals and one behind them.
    first.job_dir.create_owner(OwnerEpoch(2), {})
    third = owner(tmp_path, B)
    (tmp_path / "timeline" / "3.json").unlink()
    fourth = owner(tmp_path, B)
    triggered(fourth, 3)
    # A zombie that is late seals an id that is a newer owner's; it is no copy of that one.
    late = Decision(CheckpointId(3), Verdict.ABORT, third.epoch, 0, reason="sealed")
    fourth.job_dir.create_decision(late)
    triggered(fourth, 4)
    fifth = owner(tmp_path, C)
    listed = [[int(one) for one in stretch.given_up] for stretch in fifth.timeline.stretches]
    assert listed == [[], [2], [4]]


def test_a_newer_owner_outside_is_told_although_it_committed_nothing(tmp_path: Path) -> None:
    mine = owner(tmp_path, A)
    decide(mine, 1)
    with pytest.raises(AnotherTimelineError, match="Its owner 9 is newer"):
        settle(owner(tmp_path, B), Sink(Mark(CheckpointId(1), A, OwnerEpoch(9))))


def test_what_a_user_accepts_lies_below_everything_that_comes(tmp_path: Path) -> None:
    decide(owner(tmp_path, A), 1)
    foreign = Sink(Mark(CheckpointId(13), B, OwnerEpoch(7)))
    job_dir = JobDir(LocalStore(tmp_path))
    job_dir.order_timeline(0)
    assert settle(owner(tmp_path, C), foreign) is True
    again = owner(tmp_path, A)
    assert (again.epoch, again.timeline.newest) == (OwnerEpoch(8), CheckpointId(13))
    assert settle(again, foreign) is False
    assert not job_dir.timeline_is_ordered()
    # The order is used up: what comes from elsewhere later is refused.
    decide(again, 14)
    with pytest.raises(AnotherTimelineError, match="holds checkpoint 14"):
        settle(owner(tmp_path, C), Sink(Mark(CheckpointId(14), B)))


def test_an_order_that_nothing_needs_is_forgotten(tmp_path: Path) -> None:
    mine = owner(tmp_path, A)
    mine.job_dir.order_timeline(0)
    assert settle(mine, Sink()) is False
    assert not mine.job_dir.timeline_is_ordered()


def test_a_system_that_does_not_answer_is_waited_for(tmp_path: Path) -> None:
    sink = Sink()
    sink.silent = 3
    assert settle(owner(tmp_path, A), sink) is False
    assert sink.silent == 0
    sink.silent = 3
    # Nothing is recovered over what nobody has looked at.
    with pytest.raises(JobInterruptedError):
        settle(owner(tmp_path, A), sink, stops=lambda: True)
    assert sink.silent == 2


def test_an_outage_that_the_jvm_tells_of_is_waited_for_like_any_other(tmp_path: Path) -> None:
    sink = Sink()
    sink.silent, sink.error = 5, of_the_jvm("java.net.ConnectException", "Connection refused")
    assert settle(owner(tmp_path, A), sink) is False and sink.silent == 0


def test_what_the_jvm_says_three_times_ends_the_start_with_its_innermost_cause(tmp_path: Path) -> None:
    sink = Sink()
    sink.silent, sink.error = 9, of_the_jvm("java.lang.IllegalStateException", "no such protocol")
    with pytest.raises(QueryError, match=r"^IllegalStateException: no such protocol"):
        settle(owner(tmp_path, A), sink)
    # 9 - 3 tries.
    assert sink.silent == 6
    sink.error = of_the_jvm("java.lang.ClassNotFoundException", "io.delta.Gone")
    with pytest.raises(EnvironmentFault, match=r"^ClassNotFoundException: io.delta.Gone"):
        settle(owner(tmp_path, A), sink)
    assert sink.silent == 5


def test_a_question_that_hangs_is_left_alone_by_a_cancel(tmp_path: Path) -> None:
    sink, answer, asked = Sink(), threading.Event(), []
    sink.newest_marks = lambda: asked.append(answer.wait(30)) or ()  # type: ignore[method-assign,func-returns-value]
    looks = iter([False, False, True])
    try:
        with pytest.raises(JobInterruptedError, match="reading the newest checkpoints of sinks and sources"):
            settle(owner(tmp_path, A), sink, cancelled=lambda: next(looks))
        assert asked == []
    finally:
        answer.set()


def copied_while_open(root: Path) -> tuple[Ownership, Ownership]:
    """Return the owners of a directory and of its copy; checkpoint 2 was open when it was made."""
    original = owner(root / "job", A)
    decide(original, 1)
    triggered(original, 2)
    shutil.copytree(root / "job", root / "copy")
    return original, owner(root / "copy", B)


def test_what_a_takeover_gave_up_is_known_for_ever_and_listed_once(tmp_path: Path) -> None:
    _, copy = copied_while_open(tmp_path)
    mark = Mark(CheckpointId(2), A)
    assert [one.given_up for one in copy.timeline.stretches] == [(), (CheckpointId(2),)]
    decide(copy, 3)
    # As old checkpoints go, while a sink that gets no rows keeps its mark.
    copy.job_dir.delete_all(
        f"checkpoints/{n}/{part}.json" for n in (1, 2) for part in ("trigger", "decision")
    )
    again = owner(tmp_path / "copy", C)
    assert [one.given_up for one in again.timeline.stretches] == [(), (CheckpointId(2),), ()]
    for ownership in (copy, again):
        assert "was given up here" in ownership.timeline.why_not_ours(mark, CheckpointId(9))
    with pytest.raises(AnotherTimelineError, match="given up here, and committed elsewhere"):
        settle(again, Sink(mark))


def test_a_takeover_that_was_cut_off_behind_its_seals_leaves_them_to_the_next_one(tmp_path: Path) -> None:
    original, copy = copied_while_open(tmp_path)
    (tmp_path / "copy" / "timeline" / f"{copy.epoch}.json").unlink()
    assert owner(tmp_path / "copy", C).timeline.has_given_up(CheckpointId(2))
    assert not original.timeline.has_given_up(CheckpointId(2))


@pytest.mark.parametrize("is_original_first", [True, False])
def test_of_a_copy_and_its_original_one_commits_what_was_open_to_files(
    tmp_path: Path, is_original_first: bool
) -> None:
    original, copy = copied_while_open(tmp_path)
    mine, others = (FileMarks(files_of(tmp_path), one.timeline) for one in (original, copy))
    if is_original_first:
        mine.leave(2)
        for checkpoint in (3, 4):
            with pytest.raises(AnotherTimelineError, match="2 was given up here, and committed elsewhere"):
                others.leave(checkpoint)
        mine.leave(3)
        return
    others.leave(3)
    with pytest.raises(AnotherTimelineError, match="sink 'out' holds checkpoint 3"):
        mine.leave(2)
    others.leave(4)


def test_a_copy_goes_on_alone_when_its_original_has_ended_or_nothing_was_open(tmp_path: Path) -> None:
    original, copy = copied_while_open(tmp_path)
    FileMarks(files_of(tmp_path), original.timeline).leave(1)
    marks = FileMarks(files_of(tmp_path), copy.timeline)
    assert [settle(copy, Sink(one)) for one in (marks.newest(),) if one is not None] == [False]
    marks.leave(3)
    decide(copy, 3)
    shutil.copytree(tmp_path / "copy", tmp_path / "fork")
    fork = owner(tmp_path / "fork", C)
    marks = FileMarks(files_of(tmp_path), fork.timeline)
    assert [settle(fork, Sink(one)) for one in (marks.newest(),) if one is not None] == [False]
    marks.leave(4)
    with pytest.raises(AnotherTimelineError, match="sink 'out' holds checkpoint 4"):
        FileMarks(files_of(tmp_path), copy.timeline).leave(4)


@pytest.mark.parametrize("is_original_first", [True, False])
def test_of_a_copy_and_its_original_one_commits_what_was_open_to_kafka(
    tmp_path: Path, is_original_first: bool
) -> None:
    group = Group()
    original, copy = copied_while_open(tmp_path)

    def commit(ownership: Ownership, checkpoint: int) -> None:
        """Ask and leave the mark as a commit does; its transactions are asked about behind that."""
        marks = KafkaMarks(group, JOB, "out", "orders")  # type: ignore[arg-type]
        unused: Any = None
        context = SinkContext(
            JOB, ownership.epoch, "out", unused, unused, "", unused, unused, ownership.timeline
        )
        KafkaCommitter(unused, context, marks)._mark(CheckpointId(checkpoint))

    first, then = ((original, 2), (copy, 3)) if is_original_first else ((copy, 3), (original, 2))
    commit(*first)
    left = dict(group.notes)
    with pytest.raises(AnotherTimelineError, match=f"sink 'out' holds checkpoint {first[1]}"):
        commit(*then)
    assert group.notes == left


def test_a_manifest_does_not_go_on_behind_what_was_given_up(tmp_path: Path) -> None:
    original, copy = copied_while_open(tmp_path)
    group, left = Group(), original.timeline.mark_of(CheckpointId(2))
    marks = KafkaMarks(group, JOB, "out", "orders")  # type: ignore[arg-type]
    marks.leave(left)
    store = LocalStore(tmp_path / "copy")
    context = ManifestContext(JOB, copy.epoch, "orders", store, copy.timeline)
    kafka, delta = object.__new__(_KafkaManifestWriter), object.__new__(_DeltaManifestWriter)
    kafka._marks, kafka._context, delta._context = marks, context, context  # type: ignore[attr-defined]
    delta._path, delta._app_id = "", ""
    delta._tables = SimpleNamespace(newest_mark=lambda *_: left)
    record: Any = SimpleNamespace(checkpoint=CheckpointId(3))
    refused = "the manifest holds checkpoint 2"
    with pytest.raises(AnotherTimelineError, match=refused):
        kafka._write(record)
    with pytest.raises(AnotherTimelineError, match=refused):
        delta._require_ours(CheckpointId(3))
    assert marks.newest() == left


def test_who_is_refused_by_a_sink_as_an_older_owner_hears_of_the_copy(tmp_path: Path) -> None:
    """A database turns older owner epochs away before it is asked whose its checkpoint is."""
    original, copy = copied_while_open(tmp_path)
    database: Any = Sink(Mark(CheckpointId(3), B, copy.epoch))
    with pytest.raises(AnotherTimelineError, match="sink 'out' holds checkpoint 3"):
        refuse_another_timeline(database, "out", original, CheckpointId(2))
    database.marks = (Mark(CheckpointId(1), A, copy.epoch),)
    with pytest.raises(AnotherTimelineError, match="Its owner 2 is newer"):
        refuse_another_timeline(database, "out", original, CheckpointId(2))
    database.marks = (Mark(CheckpointId(1), A, original.epoch),)
    refuse_another_timeline(database, "out", original, CheckpointId(2))


def files_of(root: Path) -> SinkFiles:
    return SinkFiles(root / "lake", JOB, "out")


def test_two_copies_that_run_at_once_do_not_commit_the_same_id_to_files(tmp_path: Path) -> None:
    first = owner(tmp_path / "job", A)
    decide(first, 1)
    FileMarks(files_of(tmp_path), first.timeline).leave(1)
    shutil.copytree(tmp_path / "job", tmp_path / "copy")
    here, there = owner(tmp_path / "job", B), owner(tmp_path / "copy", C)
    mine, others = FileMarks(files_of(tmp_path), here.timeline), FileMarks(files_of(tmp_path), there.timeline)
    mine.leave(2)
    mine.leave(2)
    assert mine.newest() == Mark(CheckpointId(2), B)
    for checkpoint in (2, 3):
        with pytest.raises(AnotherTimelineError, match="sink 'out' holds checkpoint 2"):
            others.leave(checkpoint)
    mine.leave(3)
    assert sorted(p.name for p in (files_of(tmp_path).hidden / "timeline").iterdir()) == ["3.json"]


class Group:
    """In the place of KafkaAdmin: one group's notes."""

    def __init__(self) -> None:
        self.notes: dict[Any, str] = {}

    def find_committed_notes(self, group: str) -> dict[Any, str]:
        return dict(self.notes)

    def commit_offsets(self, group: str, offsets: Any, direction: Any = None, note: str = "") -> None:
        assert group in (f"flinkish-{JOB}-out", "readers")
        self.notes.update(dict.fromkeys(offsets, note))


def test_a_source_of_kafkas_records_leaves_its_mark_alone_and_within_a_hybrid_one() -> None:
    records = KafkaRecordsSource("nowhere:1", ["orders"], group_id="readers").bind("in")
    group = records.__dict__["_admin"] = Group()
    past = KafkaRecordsSource("nowhere:1", ["history"], ending=EndAtLatest())
    live = HybridSource(past, records)
    for source, splits in ((records, {"orders:0": 7}), (live, {"1:orders:0": 9})):
        group.notes.clear()
        source._tell(splits, f"flinkish {JOB} 4 {A}")
        assert list(source.newest_marks(JOB)) == [Mark(CheckpointId(4), A)]
    assert list(KafkaRecordsSource("nowhere:1", ["orders"]).bind("in").newest_marks(JOB)) == []


def test_a_mark_in_kafka_is_the_note_of_a_group() -> None:
    group = Group()
    marks = KafkaMarks(group, JOB, "out", "orders")  # type: ignore[arg-type]
    assert marks.newest() is None
    marks.leave(Mark(CheckpointId(4), A))
    assert group.notes == {("orders", 0): f"flinkish {JOB} 4 {A}"}
    assert marks.newest() == Mark(CheckpointId(4), A)
    group.notes["orders", 1] = "somebody's own note"
    assert marks.newest() == Mark(CheckpointId(4), A)
