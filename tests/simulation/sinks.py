"""The outside ends of the product's own committers, and writers that stage into the simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from flinkish_spark.connectors.delta.committing import CommitResult
from flinkish_spark.connectors.delta.table import Append, DeltaConflict, TableCommit, checkpoint_note, mark_in
from flinkish_spark.connectors.kafka.client.barriers import BarrierRecords
from flinkish_spark.connectors.kafka.client.transactions import (
    Evidence,
    KafkaCommittable,
    Liveness,
    OpenTransaction,
)
from flinkish_spark.connectors.kafka.writer import BARRIER_TASK, KafkaSinkCommittable
from flinkish_spark.contracts.sink import SinkContext, SinkWriter, StageRequest, StageResult
from flinkish_spark.core.errors import BrokerUnavailableError
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, TransactionalId
from flinkish_spark.protocol.records import Barrier, CommitAnswer, Outcome, TaskAck
from flinkish_spark.protocol.timeline import Mark
from tests.simulation.faults import FaultKind as K
from tests.simulation.frames import SimFrame
from tests.simulation.input_topic import SOURCE, Row
from tests.simulation.outputs import MicroBatch, Table, Transaction, TransactionState
from tests.simulation.scheduler import US_PER_MS, Process
from tests.simulation.world import World

_PRODUCER_ID = 7
_ALL_BITS = (1 << 64) - 1
#: Longer than any process stands still between its look at a committable and the decision.
_DECIDED_WITHIN_US = 10_000 * US_PER_MS
#: Why a broker aborts a transaction by itself.
TIMEOUT = "timeout"


class SinkCall:
    """One call of a committer, which a suspended machine may be in the middle of.

    What has left a process cannot be checked any more. A call that began before its process lost the
    job and has not arrived by then is taken to fail, as a connection does that was silent for long:
    nothing short of the broker could keep it from arriving. A call that begins later does arrive.
    """

    def __init__(self, process: Process, is_lost: Callable[[Process], bool]) -> None:
        self.process, self._is_lost = process, is_lost
        self._had_job = True
        #: Whether it only asks whether committables are alive.
        self.is_question = False

    def begins(self, *, is_question: bool = False) -> None:
        """Note that the committer was called."""
        self._had_job, self.is_question = not self._is_lost(self.process), is_question

    @property
    def is_cut_off(self) -> bool:
        """Whether the job was lost since."""
        return self._had_job and self._is_lost(self.process)


class SimTransactionClient:
    """In the place of :class:`~flinkish_spark.connectors.kafka.client.transactions.TransactionClient`."""

    def __init__(self, world: World, call: SinkCall) -> None:
        self._world, self._call = world, call

    def commit(self, one: KafkaCommittable) -> CommitAnswer:
        """End a transaction with COMMIT."""
        return self._end(one, TransactionState.COMMITTED, TransactionState.ABORTED, Outcome.LOST)

    def abort(self, one: KafkaCommittable) -> CommitAnswer:
        """End a transaction with ABORT."""
        return self._end(one, TransactionState.ABORTED, TransactionState.COMMITTED, Outcome.FENCED)

    def _end(
        self, one: KafkaCommittable, wanted: TransactionState, other: TransactionState, contrary: Outcome
    ) -> CommitAnswer:
        world, name = self._world, one.transactional_id
        world.step(f"sink {'commit' if contrary is Outcome.LOST else 'abort'}", name)
        trouble = world.struck(K.SINK_UNAVAILABLE, K.LOST_SINK_REPLY)
        if trouble is K.SINK_UNAVAILABLE or self._call.is_cut_off:
            return CommitAnswer(Outcome.RETRY, "the simulated broker does not answer")
        found = world.broker.transactions[one.evidence.offset]
        if contrary is Outcome.LOST:
            world.destroyer.about_to_commit(found)
        if not found.has_evidence:
            outcome = Outcome.LOST if contrary is Outcome.LOST else Outcome.ALREADY_COMMITTED
            return CommitAnswer(outcome, f"the records of {name} are gone")
        was_open = found.is_open
        # A handle ends whatever is open under its id and epoch, whether that is what it means or not.
        newest = world.broker.newest[name]
        if newest.epoch == one.producer_epoch:
            world.broker.end(newest, wanted, self._call.process.name)
            if newest.state is TransactionState.COMMITTED and newest.beside is not None:
                world.note_beside(SOURCE, *newest.beside)
        if trouble is K.LOST_SINK_REPLY:
            return CommitAnswer(Outcome.RETRY, "the simulated broker's answer was lost")
        if found.state is other:
            return CommitAnswer(contrary, f"{name} is {other.value}", is_proven_aborted=True)
        return CommitAnswer(Outcome.COMMITTED if was_open else Outcome.ALREADY_COMMITTED, name)

    def is_alive(self, ones: Iterable[KafkaCommittable]) -> Mapping[KafkaCommittable, Liveness]:
        """Tell which transactions can still be ended."""
        world = self._world
        world.step("sink alive?")
        if world.struck(K.SINK_UNAVAILABLE):
            raise _unavailable()
        self._expire()
        answers = {}
        for one in ones:
            found = world.broker.transactions[one.evidence.offset]
            if not self._call.is_question:
                world.destroyer.about_to_commit(found)
            if self._may_die(found) and world.struck(K.TRANSACTION_EXPIRED):
                world.broker.end(found, TransactionState.ABORTED, TIMEOUT)
            found.safe_until_us = world.scheduler.now_us + _DECIDED_WITHIN_US
            answers[one] = Liveness(found.is_open, found.state.value)
        return answers

    def _expire(self) -> None:
        """Abort what is older than its timeout."""
        world = self._world
        oldest_us = world.scheduler.now_us - world.scenario.transaction_timeout_ms * US_PER_MS
        for one in world.broker.open_ones():
            if one.began_us < oldest_us and self._may_die(one):
                world.broker.end(one, TransactionState.ABORTED, TIMEOUT)

    def _may_die(self, transaction: Transaction) -> bool:
        """Whether a timeout may strike: not between a look at it and the end of its decision.

        A job's transaction timeout is minutes longer than that may take.
        """
        world = self._world
        return world.scheduler.now_us > transaction.safe_until_us and not world.is_decided(transaction)

    def list_open_transactions(self, job: JobUuid) -> list[OpenTransaction]:
        """List open transactions."""
        world = self._world
        world.step("sink list")
        if world.struck(K.SINK_UNAVAILABLE):
            raise _unavailable()
        self._expire()
        found = [one for one in world.broker.open_ones() if one.id.job == job]
        return [OpenTransaction(one.id, _PRODUCER_ID, "Ongoing") for one in found]

    def abort_open(self, transactional_id: TransactionalId) -> CommitAnswer:
        """Abort what is open under an id, and fence whoever writes."""
        world = self._world
        world.step("sink abort open", transactional_id)
        if world.struck(K.SINK_UNAVAILABLE) or self._call.is_cut_off:
            return CommitAnswer(Outcome.RETRY, "the simulated broker does not answer")
        newest = world.broker.newest[str(transactional_id)]
        world.broker.end(newest, TransactionState.ABORTED, f"{self._call.process.name} sweeps")
        return CommitAnswer(Outcome.COMMITTED)

    def close(self) -> None:
        """Do nothing."""


class SimMarks:
    """In the place of :class:`~flinkish_spark.connectors.kafka.client.marks.KafkaMarks`."""

    def __init__(self, world: World, call: SinkCall, uid: str) -> None:
        self._world, self._call, self._uid = world, call, uid

    def newest(self) -> Mark | None:
        """Return the mark."""
        self._ask("mark?")
        return self._world.marks.get(self._uid)

    def leave(self, mark: Mark) -> None:
        """Write it."""
        self._ask("mark")
        if self._call.is_cut_off:
            raise _unavailable()
        self._world.marks[self._uid] = mark
        if self._world.struck(K.LOST_SINK_REPLY):
            raise _unavailable()

    def _ask(self, what: str) -> None:
        self._world.step(f"sink {what}", self._uid)
        if self._world.struck(K.SINK_UNAVAILABLE):
            raise _unavailable()


class SimDeltaCommits:
    """In the place of :class:`~flinkish_spark.connectors.delta.committing.DeltaCommits`."""

    def __init__(self, world: World, call: SinkCall, table: Table) -> None:
        self._world, self._call, self._table = world, call, table

    def find_committed_version(self, path: str, app_id: str) -> int:
        """Return the last version that `app_id` committed."""
        self._world.step("table version", path)
        return self._table.committed_epoch(app_id)

    def missing_files(self, staged: Mapping[str, Any]) -> list[str]:
        """Return staged files that are gone."""
        files = [self._table.files[str(action["add"]["path"])] for action in staged["actions"]]
        for file in files:
            if (
                self._call.is_question
                and not self._world.is_decided(file)
                and self._world.struck(K.STAGED_FILE_GONE)
            ):
                file.is_there = False
            if not self._call.is_question:
                self._world.destroyer.about_to_add(file)
        return [file.name for file in files if not file.is_there]

    def info(self, path: str) -> None:
        """Return that nothing special is known."""

    def why_unfit(self, path: str, staged: Sequence[Mapping[str, Any]]) -> Mapping[int, str]:
        """Return no reason: the schema stays."""
        self._world.step("table alive?", path)
        return {}

    def version_of(self, path: str, app_id: str, version: int) -> None:
        """Return that it is not cheap to find out."""

    def make_durable(self, path: str, whose: str, version: int | None = None) -> None:
        """Do nothing: a simulated table loses no version."""

    def files(self, path: str) -> Any:
        """Return a folder without folders of merges: what is staged are data files."""
        return SimpleNamespace(folders=lambda below: [])

    def newest_mark(self, path: str, app_id: str) -> Mark | None:
        """Return which checkpoint `app_id` committed last."""
        version = self.find_committed_version(path, app_id)
        for one in reversed(self._table.versions):
            mark = mark_in(one.described().note, app_id)
            if mark is not None and int(mark.checkpoint) == version:
                return mark
        return None

    def commit(
        self,
        path: str,
        staged: Sequence[Mapping[str, Any]],
        app_id: str,
        mark: Mark,
        require_ours: Callable[[Mark], None],
    ) -> CommitResult:
        """Commit staged sets as one version."""
        world, version = self._world, int(mark.checkpoint)
        world.step("table commit", f"{path} {version}")
        trouble = world.struck(K.SINK_UNAVAILABLE, K.LOST_SINK_REPLY)
        if trouble is K.SINK_UNAVAILABLE or self._call.is_cut_off:
            raise DeltaConflict("the simulated table conflicts")
        found = self.newest_mark(path, app_id)
        if found is not None:
            require_ours(found)
        if self._table.committed_epoch(app_id) >= version:
            return CommitResult(False, None)
        added = [a["add"]["path"] for s in staged for a in s["actions"]]
        self._table.commit(added, app_id, version, checkpoint_note(app_id, mark))
        if trouble is K.LOST_SINK_REPLY:
            raise DeltaConflict("the simulated table's answer was lost")
        return CommitResult(True, len(self._table.versions))

    def open(self, path: str) -> int:
        """Return how many versions there are: an open table is as it was."""
        return len(self._table.versions)

    def commits(self, path: str, table: int) -> Iterator[TableCommit]:
        """Yield the versions of an open table, newest first."""
        self._world.step("table history", path)
        return (version.described() for version in reversed(self._table.versions[:table]))

    def missing_at(self, path: str, version: int) -> list[str]:
        """Return no file: what was committed stays."""
        return []

    def set_back(self, path: str, table: int, version: int | None, note: str) -> None:
        """Commit the content of an older version, or no rows, behind the version that is open."""
        self._world.step("table restore", f"{path} {'empty' if version is None else version}")
        if self._call.is_cut_off or self._world.struck(K.SINK_UNAVAILABLE):
            raise DeltaConflict("the simulated table conflicts")
        if table != len(self._table.versions):
            raise DeltaConflict("the simulated table has another version by now")
        self._table.restore(-1 if version is None else version, note)


class _SimWriter(SinkWriter):
    """Runs the tasks of a sink, in the JVM; tasks fail, race and straggle."""

    def __init__(
        self, world: World, context: SinkContext, in_jvm: Callable[[Callable[[], StageResult]], StageResult]
    ) -> None:
        self._world, self._context, self._in_jvm = world, context, in_jvm

    def stage(self, request: StageRequest) -> StageResult:
        """Stage a micro-batch; everything is flushed when this returns."""
        return self._in_jvm(lambda: self._run_tasks(request))

    def _run_tasks(self, request: StageRequest) -> StageResult:
        world, frame = self._world, cast(SimFrame, request.rows)
        scenario = world.scenario
        if frame.is_replay:
            world.on_staged_again(int(self._context.owner_epoch), self._context.uid, int(request.batch))
        acks, payloads = [], []
        barriers = _barriers(world, frame)
        for task in range(scenario.tasks):
            rows = [row for row in frame.rows if row.key % scenario.tasks == task]
            digest = sum(_mixed(hash(row)) for row in rows)
            is_compared = len(scenario.sinks) > scenario.scans and not frame.is_replay
            if is_compared and world.struck(K.ROWS_DIFFER):
                digest += 1
            frame.job_step("task", f"{self._context.uid} {request.lineage}/{request.batch} task {task}")
            payloads += self._write(request, frame, task, rows)
            acks.append(TaskAck(task, len(rows), digest % (1 << 64), tuple(barriers[task])))
        payloads += self._close(request, frame, request.find_checkpoint(acks))
        return StageResult(tuple(acks), tuple(payloads))

    def _close(
        self, request: StageRequest, frame: SimFrame, checkpoint: CheckpointId | None
    ) -> list[Mapping[str, Any]]:
        """Stage what goes behind the data of a micro-batch that carries a barrier."""
        return []

    def _write(
        self, request: StageRequest, frame: SimFrame, task: int, rows: list[Row]
    ) -> list[Mapping[str, Any]]:
        raise NotImplementedError


class SimKafkaWriter(_SimWriter):
    """One transaction per task attempt."""

    def _write(
        self, request: StageRequest, frame: SimFrame, task: int, rows: list[Row]
    ) -> list[Mapping[str, Any]]:
        if not rows:
            return []
        attempt = 0
        while self._world.struck(K.TASK_RETRY):
            self._attempt(request, frame, task, attempt, rows[: len(rows) // 2])
            attempt += 1
        if self._world.struck(K.STRAGGLER):
            attempt += 1
            self._straggle(request, task, attempt - 1, rows)
        staged = self._attempt(request, frame, task, attempt, rows)
        barrier = CheckpointId(max(frame.barriers, default=0))
        if barrier >= request.checkpoint:
            # As an atomic sink does; if the checkpoint is given up, it shows with the next one.
            staged.beside = self._context.timeline.mark_of(barrier), frame.ends
        self._world.in_flight.add(id(staged))
        if self._world.struck(K.SPECULATIVE_LOSER):
            self._attempt(request, frame, task, attempt + 1, rows)
        return [KafkaSinkCommittable(_handle(staged)).to_payload()]

    def _close(
        self, request: StageRequest, frame: SimFrame, checkpoint: CheckpointId | None
    ) -> list[Mapping[str, Any]]:
        if checkpoint is None or self._world.scenario.barrier_records is BarrierRecords.NONE:
            return []
        frame.job_step("barrier record", f"{self._context.uid} {checkpoint}")
        staged = self._begin(request, BARRIER_TASK, 0)
        staged.barrier_of = int(checkpoint)
        self._world.in_flight.add(id(staged))
        return [KafkaSinkCommittable(_handle(staged), checkpoint).to_payload()]

    def _attempt(
        self, request: StageRequest, frame: SimFrame, task: int, attempt: int, rows: list[Row]
    ) -> Transaction:
        frame.job_step("transaction", f"{self._context.uid} block {request.block} task {task}.{attempt}")
        begun = self._begin(request, task, attempt)
        frame.job_step("flush", begun.name)
        begun.rows.extend(rows)
        return begun

    def _begin(self, request: StageRequest, task: int, attempt: int) -> Transaction:
        context, world = self._context, self._world
        name = TransactionalId(context.job, context.owner_epoch, request.block, task, attempt)
        origin = MicroBatch(int(request.lineage), int(request.batch))
        return world.broker.begin(name, context.uid, origin, world.scheduler.now_us)

    def _straggle(self, request: StageRequest, task: int, attempt: int, rows: list[Row]) -> None:
        """Begin a task attempt that writes when it was given up long ago, whatever became of its job."""
        world, executor = self._world, Process("executor")
        begun = self._begin(request, task, attempt)

        def write() -> None:
            world.step("straggling task", begun.name)
            if begun.is_open:
                begun.rows.extend(rows)

        delay_ms = world.chance.choice((20, 200, 1_000))
        world.scheduler.spawn(executor, "executor/task", write, delay_us=delay_ms * 1_000)


class SimDeltaWriter(_SimWriter):
    """One file per task."""

    def _write(
        self, request: StageRequest, frame: SimFrame, task: int, rows: list[Row]
    ) -> list[Mapping[str, Any]]:
        table, uid = self._world.tables[self._context.uid], self._context.uid
        origin = MicroBatch(int(request.lineage), int(request.batch))
        if not rows:
            return []
        if self._world.struck(K.TASK_RETRY, K.SPECULATIVE_LOSER, K.STRAGGLER):
            table.stage(origin, rows)
        frame.job_step("file", uid)
        staged = table.stage(origin, rows)
        payload = {"path": f"/{uid}", "mode": Append().to_json(), "rows": len(rows)}
        return [{**payload, "actions": [{"add": {"path": staged.name}}]}]


def _mixed(number: int) -> int:
    """Return 64 bits that depend on all of `number`: sums of a tuple's own hashes often meet."""
    number &= _ALL_BITS
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        number = (number ^ number >> shift) * factor & _ALL_BITS
    return number ^ number >> 31


def _handle(staged: Transaction) -> KafkaCommittable:
    evidence = Evidence(staged.sink, 0, staged.serial)
    return KafkaCommittable(staged.name, _PRODUCER_ID, staged.epoch, evidence, max(1, len(staged.rows)))


def _barriers(world: World, frame: SimFrame) -> list[list[Barrier]]:
    """Return what each task sees: every barrier of the branch, once per channel unless a fault strikes."""
    tasks = world.scenario.tasks
    seen: list[list[Barrier]] = [[] for _ in range(tasks)]
    for checkpoint in frame.barriers:
        for task in range(tasks):
            barrier = Barrier(CheckpointId(checkpoint), task)
            if world.struck(K.LOST_BARRIER):
                continue
            seen[task].append(barrier)
            if world.struck(K.DOUBLED_BARRIER):
                # Twice on its channel, or in the place of another channel's.
                number = world.chance.randrange(tasks)
                seen[task].append(Barrier(CheckpointId(checkpoint), task))
                if number != task:
                    seen[number] = [one for one in seen[number] if one.checkpoint != barrier.checkpoint]
                    return seen
    return seen


def _unavailable() -> BrokerUnavailableError:
    return BrokerUnavailableError("no simulated broker answers")
