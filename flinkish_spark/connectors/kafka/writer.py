"""Both halves of the Kafka sink behind its settings: columns, the writer, barriers, the committer."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from flinkish_spark.bridge.plans import Selection
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.barriers import BarrierRecords, BarrierWriter
from flinkish_spark.connectors.kafka.client.marks import KafkaMarks
from flinkish_spark.connectors.kafka.client.producer import StagedTransaction, abandon_all
from flinkish_spark.connectors.kafka.client.settings import (
    DEFAULT_MAX_REQUEST_BYTES,
    DeliveryGuarantee,
    OnRefusal,
    ProducerSettings,
    RecordHeaders,
    SharedProducer,
    StagingSettings,
    TaskAttempt,
)
from flinkish_spark.connectors.kafka.client.transactions import KafkaCommittable, Liveness, TransactionClient
from flinkish_spark.connectors.kafka.record_encoder import (
    HEADERS,
    KEY,
    MISFIT,
    PARTITION,
    TIMESTAMP,
    TOPIC,
    VALUE,
    EncodeRows,
    RecordEncoder,
)
from flinkish_spark.connectors.kafka.sink_settings import KafkaSinkSettings
from flinkish_spark.connectors.row_count import RowCount, begin_staging, collect_reports
from flinkish_spark.contracts.sink import Committer, JoiningWriter, SinkContext, StageRequest, StageResult
from flinkish_spark.core.errors import BrokerUnavailableError, CorruptObjectError
from flinkish_spark.core.formats import BadRecordPolicy, DeadLetter
from flinkish_spark.protocol.ids import CheckpointId, TransactionalId
from flinkish_spark.protocol.records import CommitAnswer, Committable, Outcome, TaskAck
from flinkish_spark.protocol.timeline import Mark
from flinkish_spark.transport import columns as C
from flinkish_spark.types.record_time import TimeLimits

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class SinkInPython:
    """What a task is told of a sink."""

    #: Of its transaction; the transactional id is the prefix that task and attempt are added to.
    settings: StagingSettings
    #: What every record gets of ours.
    headers: tuple[tuple[str, bytes], ...]
    #: The parts of its records.
    columns: tuple[str, ...]

    def transaction(self, task: TaskContext, transactions_of_task: int) -> StagedTransaction:
        partition = task.partitionId()
        settings = replace(self.settings, transactions_of_task=transactions_of_task)
        if settings.shared is not None:
            shared = replace(settings.shared, ticket=ticket_of(settings.shared.ticket, partition))
            settings = replace(settings, shared=shared)
        elif settings.transactional_id is not None:
            settings = replace(settings, attempt=TaskAttempt(partition, task.attemptNumber()))
        return StagedTransaction(settings, common_headers=self.headers)

    def write(self, transaction: StagedTransaction, records: pa.RecordBatch) -> None:
        columns = {name: records.column(name) for name in self.columns}
        times = columns.get(TIMESTAMP)
        if times is not None:
            times = (times.fill_null(transaction.now_ms()) if times.null_count else times).to_numpy()
        transaction.write(
            columns[KEY],
            columns[VALUE],
            columns.get(HEADERS),
            topics=columns[TOPIC],
            partitions=columns.get(PARTITION),
            timestamps_ms=times,
            misfits=columns.get(MISFIT),
        )

    def report(self, ack: RowCount, transaction: StagedTransaction) -> dict[str, Any]:
        """Return what the task tells of it, once all is written and acknowledged."""
        prepared = transaction.prepare()
        counts = transaction.counts
        done = replace(ack.finish(), dropped=counts.dropped, dead_lettered=counts.dead_lettered)
        report = {**done.to_json(), "committable": None if prepared is None else prepared.to_json()}
        if self.settings.shared is not None:
            written, ticket = transaction.acknowledged_by_place(), transaction.ticket
            report["written"] = [[topic, partition, count] for (topic, partition), count in written.items()]
            report["ticket"] = None if ticket is None else [ticket.producer_id, ticket.producer_epoch]
        return report


@dataclass(frozen=True)
class StageInPython:
    """Callable for mapInArrow: stages the rows of one task, yields a row per sink, its report as JSON."""

    #: Of several the column `C.SINK` says whose a row is, by place.
    sinks: tuple[SinkInPython, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = begin_staging()
        transactions: list[StagedTransaction] = []
        try:
            for sink in self.sinks:
                transactions.append(sink.transaction(task, len(self.sinks)))
            counts = [RowCount(task.partitionId()) for _ in self.sinks]
            own = list(zip(self.sinks, counts, transactions, strict=True))
            for batch in batches:
                for place, (sink, ack, transaction) in enumerate(own):
                    rows = batch if len(own) == 1 else batch.filter(pc.equal(batch.column(C.SINK), place))
                    records = ack.admit(rows)
                    if records.num_rows:
                        sink.write(transaction, records)
            found = [json.dumps(sink.report(ack, transaction)) for sink, ack, transaction in own]
        except BaseException:
            abandon_all(transactions)
            raise
        yield pa.record_batch([pa.array(found)], names=["report"])


#: The task number in the transactional id of barrier records; Spark numbers no partition so high.
BARRIER_TASK = 999_999_999
_BARRIER, _SEQUENCES = "barrier_of", "next_sequences"


@dataclass(frozen=True, slots=True)
class KafkaStaged:
    """A committable of a Kafka sink: records of a task or micro-batch, or a checkpoint's barrier records."""

    handle: KafkaCommittable
    #: The checkpoint; None for data. When a checkpoint is aborted its committables pass to the next one: data
    #: becomes visible with that, barrier records must never.
    barrier_of: CheckpointId | None = None
    #: Of a transaction that all tasks of a checkpoint write into, what it holds once the micro-batch is
    #: staged: by topic, the next sequence number of each partition. None for a transaction of one task.
    next_sequences: Mapping[str, tuple[int, ...]] | None = None

    def belongs_to(self, checkpoint: CheckpointId) -> bool:
        return self.barrier_of in (None, checkpoint)

    def to_payload(self) -> dict[str, Any]:
        """Return the stored form; a task's records are stored as their handle alone."""
        more: dict[str, Any] = {} if self.barrier_of is None else {_BARRIER: int(self.barrier_of)}
        if self.next_sequences is not None:
            more[_SEQUENCES] = {topic: list(known) for topic, known in self.next_sequences.items()}
        return {**self.handle.to_json(), **more}

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> KafkaStaged:
        fields = dict(payload)
        barrier_of, sequences = fields.pop(_BARRIER, None), fields.pop(_SEQUENCES, None)
        try:
            checkpoint = None if barrier_of is None else CheckpointId(barrier_of)
            known = None if sequences is None else _sequences(sequences)
        except ValueError as wrong:
            raise CorruptObjectError("a stored Kafka committable cannot be read", why=str(wrong)) from wrong
        return cls(KafkaCommittable.from_json(fields), checkpoint, known)

    @property
    def transaction(self) -> tuple[str, int, int]:
        return (self.handle.transactional_id, self.handle.producer_id, self.handle.producer_epoch)


def _sequences(stored: Any) -> dict[str, tuple[int, ...]]:
    for known in stored.values() if isinstance(stored, Mapping) else [None]:
        if not isinstance(known, list) or any(type(one) is not int or one < 0 for one in known):
            raise ValueError(f"{_SEQUENCES} is {stored!r}")
    return {str(topic): tuple(known) for topic, known in stored.items()}


def checkpoint_in(tasks: Iterable[TaskAck]) -> CheckpointId | None:
    return max((barrier.checkpoint for task in tasks for barrier in task.barriers), default=None)


def staged_in(committables: Sequence[Committable]) -> list[KafkaStaged]:
    return [KafkaStaged.of(committable.payload) for committable in committables]


#: Which job and which of its sinks wrote a record.
JOB_HEADER, UID_HEADER = "flinkish-job", "flinkish-uid"
#: The checkpoint that a record was expected to become visible with.
CHECKPOINT_HEADER = "flinkish-checkpoint"
#: Which micro-batch wrote a record, as ``<lineage>/<batch>``.
BATCH_HEADER = "flinkish-batch"


class KafkaWriter(JoiningWriter):
    """Writes the records of a micro-batch into one output per task."""

    def __init__(self, sink: KafkaSinkSettings, context: SinkContext) -> None:
        self._sink, self._context = sink, context
        with KafkaAdmin(sink.connection) as admin:
            known = admin.topics(sink.topics)
        limits = {name: info.max_message_bytes for name, info in known.items()}
        own = int(sink.producer_option("max.request.size") or DEFAULT_MAX_REQUEST_BYTES)
        self._max_record_bytes = min([own, *(limits[name] for name in sink.data_topics if name in limits)])
        letters = [limits[name] for name in sink.dead_letter_topics if name in limits]
        self._max_dead_letter_bytes = min([own, *letters])
        self._compacted = [name for name in sink.data_topics if name in known and known[name].is_compacted]
        self._times = TimeLimits.merge(known[name].times for name in sink.data_topics if name in known)
        self._encoder = RecordEncoder.of(sink, context.schema)
        self._columns = self._encoder.spark_columns()
        named = [column.alias(name) for name, column in self._columns.items()]
        self._given = Selection([*map(F.col, C.SINK_CONTROL), *named])
        self._barriers: BarrierWriter | None = None
        if sink.barriers is BarrierRecords.EACH_CHECKPOINT:
            self._barriers = BarrierWriter(
                sink.connection, sink.topic, context.job, context.uid, sink.transaction_timeout_ms
            )

    @property
    def columns(self) -> Mapping[str, Column]:
        return self._columns

    def stage(self, request: StageRequest) -> StageResult:
        (found,) = _written(self._encoded(request), [self._own(request)])
        return self._staged(found, request)

    @classmethod
    def stage_all(cls, staging: Sequence[tuple[Self, StageRequest]]) -> Sequence[StageResult]:
        encode = EncodeRows(tuple((writer._encoder, request.columns) for writer, request in staging))
        rows = C.map_in_arrow(staging[0][1].rows, encode, encode.columns())
        found = _written(rows, [writer._own(request) for writer, request in staging])
        return [writer._staged(own, request) for own, (writer, request) in zip(found, staging, strict=True)]

    def _encoded(self, request: StageRequest) -> DataFrame:
        encode = EncodeRows(((self._encoder, {name: name for name in self._columns}),))
        rows = request.rows
        if not (self._encoder.reads_fields_alone and C.is_made_by_workers(rows)):
            rows = self._given.of(rows)
        return C.map_in_arrow(rows, encode, encode.columns())

    def _staged(self, found: Sequence[Mapping[str, Any]], request: StageRequest) -> StageResult:
        staged = [
            KafkaStaged(KafkaCommittable.from_json(r["committable"])) for r in found if r["committable"]
        ]
        tasks = tuple(TaskAck.from_json(r) for r in found)
        checkpoint = checkpoint_in(tasks)
        if self._barriers is not None and checkpoint is not None:
            # Last, so that its offsets and its commit come behind those of the data.
            # The block is this micro-batch's alone, so no other transaction can have this id.
            owner = self._context.owner_epoch
            name = TransactionalId(self._context.job, owner, request.block, BARRIER_TASK, 0)
            handle = self._barriers.stage(checkpoint, request.lineage, str(name))
            staged.append(KafkaStaged(handle, checkpoint))
        return StageResult(tasks, tuple(one.to_payload() for one in staged))

    def shared_reports(
        self,
        request: StageRequest,
        owned: Callable[[DataFrame], DataFrame],
        partitions: Mapping[str, int],
        transactional_id: str,
        producer: SharedProducer,
    ) -> Sequence[Mapping[str, Any]]:
        """Write into a transaction that is not the tasks' own; return each task's report."""
        told = self._told(request, transactional_id, partitions)
        columns = tuple(dict.fromkeys((*told.columns, PARTITION)))
        told = replace(told, settings=replace(told.settings, shared=producer), columns=columns)
        (found,) = _written(owned(self._encoded(request)), [told])
        return found

    def _own(self, request: StageRequest) -> SinkInPython:
        prefix = TransactionalId.prefix(self._context.job, self._context.owner_epoch, request.block)
        if not self._sink.partition:
            return self._told(request, prefix, None)
        # Now: partitions may have been added, and a record may name one of them.
        with KafkaAdmin(self._sink.connection) as admin:
            partitions = admin.partition_counts(self._sink.data_topics)
        return self._told(request, prefix, partitions)

    def _told(
        self, request: StageRequest, transactional_id: str, partitions: Mapping[str, int] | None
    ) -> SinkInPython:
        sink = self._sink
        is_exact = sink.delivery is DeliveryGuarantee.EXACTLY_ONCE
        oversize, letters = _policy(sink.oversize_policy)
        bad_record, bad_letters = _policy(sink.on_bad_record)
        settings = StagingSettings(
            connection=sink.connection,
            transactional_id=transactional_id if is_exact else None,
            transaction_timeout_ms=sink.transaction_timeout_ms,
            guarantee=sink.delivery,
            uid=self._context.uid,
            max_record_bytes=self._max_record_bytes,
            max_dead_letter_bytes=self._max_dead_letter_bytes,
            times=self._times,
            compacted=frozenset(self._compacted),
            default_topic=sink.topic,
            topics=frozenset(sink.data_topics) if sink.topic_column else None,
            partitions=partitions,
            oversize=oversize,
            dead_letter_topic=letters,
            bad_record=bad_record,
            bad_record_topic=bad_letters,
            producer=ProducerSettings.of(sink.producer, sink.delivery),
        )
        headers = tuple((name, text.encode()) for name, text in self._headers(request).items())
        return SinkInPython(settings, headers, tuple(self._encoder.schema().names))

    def _headers(self, request: StageRequest) -> dict[str, str]:
        batch = {BATCH_HEADER: f"{request.lineage}/{request.batch}"}
        match self._sink.record_headers:
            case RecordHeaders.NONE:
                return {}
            case RecordHeaders.BATCH:
                return batch
            case RecordHeaders.FULL:
                job, uid = str(self._context.job), self._context.uid
                checkpoint = str(request.checkpoint)
                return {JOB_HEADER: job, UID_HEADER: uid, CHECKPOINT_HEADER: checkpoint, **batch}


def ticket_of(prefix: str, task: int) -> str:
    return f"{prefix}-{task}-0"


def _written(rows: DataFrame, sinks: Sequence[SinkInPython]) -> Sequence[Sequence[Mapping[str, Any]]]:
    """Write; return by sink each task's ack with its committable."""
    found = collect_reports(rows, StageInPython(tuple(sinks)))
    return [found[place :: len(sinks)] for place in range(len(sinks))]


def _policy(policy: BadRecordPolicy) -> tuple[OnRefusal, str | None]:
    if isinstance(policy, DeadLetter):
        return OnRefusal.DEAD_LETTER, policy.topic
    return OnRefusal(policy.value), None


MicroBatch = Sequence[KafkaStaged]


class KafkaCommitter(Committer):
    """Ends what tasks staged: in order, whole micro-batches at a time."""

    # What `commit` answers, and what a replay may rely on:
    #
    # - Answers come in the order of the committables and end at the first that is not done: nothing behind
    #   the last answer has ever been committed, in this call and in all earlier ones.
    # - Before the first transaction of a micro-batch is committed the coordinators are asked about all of
    #   them. If one is lost and none was committed before, none is: LOST stands at the first committable of
    #   the micro-batch, which can be staged again as a whole.
    # - If some were committed before, LOST stands at the first lost one, and everything before it is done.
    #   Then only the tasks from there on can be staged again, by `task_of`.
    # - `is_proven_aborted` of LOST is about every lost transaction of the micro-batch, and false if somebody
    #   committed one behind the last answer, which no process of this package does.
    # - RETRY says that nothing is known, or that a time limit struck between the look and the commit.

    def __init__(
        self,
        client: TransactionClient,
        context: SinkContext,
        marks: KafkaMarks | None = None,
        *,
        shows_whole: bool = False,
    ) -> None:
        self._client, self._context, self._marks = client, context, marks
        self.shows_whole = shows_whole

    def commit(self, checkpoint: CheckpointId, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Commit whole micro-batches in the given order, stopping at what is not done."""
        micro_batches = [list(some) for _, some in groupby(staged_in(committables), _block_of)]
        try:
            if micro_batches:
                self._mark(checkpoint)
            alive = self._looked_at(micro_batches)
        except BrokerUnavailableError as unanswered:
            return [CommitAnswer(Outcome.RETRY, str(unanswered))]
        answers: list[CommitAnswer] = []
        for micro_batch in micro_batches:
            answers += self._committed(checkpoint, micro_batch, alive)
            if not answers[-1].outcome.is_done:
                break
        return answers

    def newest_marks(self) -> Sequence[Mark]:
        mark = None if self._marks is None else self._marks.newest()
        return () if mark is None else (mark,)

    def _mark(self, checkpoint: CheckpointId) -> None:
        """Leave the mark of a checkpoint; raise AnotherTimelineError if that of another timeline is there."""
        if self._marks is None:
            return
        # This order matters: before the first transaction ends, since readers may see its records from then
        # on, and a directory of before must not write them again.
        found, ours = self._marks.newest(), self._context.timeline.mark_of(checkpoint)
        if found is not None:
            self._context.require_ours(found, checkpoint)
        if found != ours:
            self._marks.leave(ours)

    def _looked_at(self, micro_batches: Sequence[MicroBatch]) -> Mapping[KafkaCommittable, Liveness]:
        data = [[one.handle for one in batch if one.barrier_of is None] for batch in micro_batches]
        handles = [handle for of_one in data if len(of_one) > 1 for handle in of_one]
        return self._client.is_alive(handles) if handles else {}

    def _committed(
        self, checkpoint: CheckpointId, micro_batch: MicroBatch, alive: Mapping[KafkaCommittable, Liveness]
    ) -> list[CommitAnswer]:
        """Commit one micro-batch; all answers are done but the last one."""
        # A transaction that is not open under its own epoch never is again, so that asking for its commit
        # changes nothing and tells what became of it: committed before, or lost.
        settled = {
            position: self._client.commit(one.handle)
            for position, one in enumerate(micro_batch)
            if one.handle in alive and not alive[one.handle].alive
        }
        lost = {position: answer for position, answer in settled.items() if answer.outcome is Outcome.LOST}
        is_touched = any(answer.outcome.is_done for answer in settled.values())
        unknown = next((answer for answer in settled.values() if answer.outcome is Outcome.RETRY), None)
        if lost and not is_touched and unknown is None:
            return [_lost(lost, micro_batch, settled)]
        answers: list[CommitAnswer] = []
        # By transaction: one that all tasks of a checkpoint share is ended once for all that tell of it.
        ended: dict[tuple[str, int, int], CommitAnswer] = {}
        for position, one in enumerate(micro_batch):
            known = settled.get(position) or ended.get(one.transaction)
            if unknown is not None and (known is None or not known.outcome.is_done):
                # What became of the rest of the micro-batch is to be known first.
                answers.append(unknown)
            elif position in lost:
                answers.append(_lost(lost, micro_batch, settled))
            else:
                answers.append(known or self._ended(checkpoint, one, alive))
                ended[one.transaction] = answers[-1]
            if not answers[-1].outcome.is_done:
                break
        return answers

    def _ended(
        self, checkpoint: CheckpointId, one: KafkaStaged, alive: Mapping[KafkaCommittable, Liveness]
    ) -> CommitAnswer:
        """Commit what belongs to a decided checkpoint, abort the barrier records of another one."""
        if not one.belongs_to(checkpoint):
            return self._client.abort(one.handle)
        answer = self._client.commit(one.handle)
        if answer.outcome is not Outcome.LOST:
            return answer
        if one.barrier_of is not None:
            # No record of anybody is missing: readers that follow this job's checkpoints wait for the next.
            why = answer.detail
            LOG.warning("the barrier records of checkpoint %s are lost, no data is: %s", checkpoint, why)
            return CommitAnswer(Outcome.ALREADY_COMMITTED, f"barrier records only, given up: {why}")
        if one.handle in alive:
            # It was open at the look. The next call looks again and sees the micro-batch as a whole.
            return CommitAnswer(Outcome.RETRY, f"lost since it was looked at: {answer.detail}")
        return answer

    def abort(self, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        return [self._client.abort(staged.handle) for staged in staged_in(committables)]

    def why_dead(self, committables: Sequence[Committable]) -> Mapping[int, str]:
        staged = staged_in(committables)
        # A decision needs the data, and the newest barrier records.
        newest = max((one.barrier_of for one in staged if one.barrier_of is not None), default=None)
        handles = {i: one.handle for i, one in enumerate(staged) if one.barrier_of in (None, newest)}
        alive = self._client.is_alive(handles.values())
        who = f"sink '{self._context.uid}', transaction"
        dead = {
            index: f"{who} {handle.transactional_id}: {alive[handle].reason}"
            for index, handle in handles.items()
            if not alive[handle].alive
        }
        return dead or self._why_not_whole(staged, who)

    def _why_not_whole(self, staged: Sequence[KafkaStaged], who: str) -> Mapping[int, str]:
        """Return why a checkpoint cannot be shown as one, by position; asked right before its decision."""
        shared = [(index, one) for index, one in enumerate(staged) if one.next_sequences is not None]
        if not shared:
            return {}
        index, newest = shared[-1]
        others = [at for at, one in shared if one.transaction != newest.transaction]
        if others:
            why = "holds a part of the checkpoint only: a checkpoint that was aborted had begun before"
            return {others[0]: f"{who} {staged[others[0]].handle.transactional_id} {why}"}
        assert newest.next_sequences is not None
        # What is compared here cannot change any more but by a task that has outlived its micro-batch, which
        # would have been noticed by its ticket.
        why = self._client.why_not_counted(newest.handle, newest.next_sequences)
        return {index: f"{who} {newest.handle.transactional_id}: {why}"} if why else {}

    def task_of(self, committable: Committable) -> int | None:
        """Return the Spark partition that a transaction's id names; None if it is not a task's."""
        staged = KafkaStaged.of(committable.payload)
        name = TransactionalId.parse(staged.handle.transactional_id)
        is_of_a_task = staged.barrier_of is None and staged.next_sequences is None
        return name.task if name is not None and is_of_a_task else None

    def sweep(self, kept: Sequence[Committable], running_blocks: Callable[[], frozenset[int]]) -> int:
        names = {str(c.payload.get("transactional_id", "")) for c in kept}
        aborted = 0
        listed = self._client.list_of_job(self._context.job)
        # This order matters: a block that is leased after the listing has nothing in it.
        leased = running_blocks()
        for found in listed:
            name = found.transactional_id
            if str(name) not in names and self._context.is_left_over(name.owner_epoch, name.block, leased):
                self._client.abort_open(name)
                aborted += 1
        return aborted

    def close(self) -> None:
        self._client.close()


def _block_of(one: KafkaStaged) -> tuple[object, ...]:
    """Return what tells a micro-batch from others: it has a block of its own until the receipt."""
    name = TransactionalId.parse(one.handle.transactional_id)
    # A name that is not ours stands for itself.
    return (one.handle,) if name is None else (name.owner_epoch, name.block)


def _lost(
    lost: Mapping[int, CommitAnswer], micro_batch: MicroBatch, settled: Mapping[int, CommitAnswer]
) -> CommitAnswer:
    first = min(lost)
    is_proven = all(answer.is_proven_aborted for answer in lost.values())
    detail = lost[first].detail
    if len(micro_batch) > 1:
        detail += f" ({len(lost)} of the {len(micro_batch)} transactions of its micro-batch are lost)"
    behind = [p for p, answer in settled.items() if p > first and answer.outcome.is_done]
    if behind:
        name = micro_batch[behind[0]].handle.transactional_id
        detail += f"; {name} behind it was committed, by nobody of this package"
    return replace(lost[first], detail=detail, is_proven_aborted=is_proven and not behind)
