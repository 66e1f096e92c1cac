"""Writer and committer of the Kafka sink."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Annotated, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame

from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.barriers import BarrierRecords, BarrierWriter
from flinkish_spark.connectors.kafka.client.marks import KafkaMarks
from flinkish_spark.connectors.kafka.client.producer import StagedTransaction
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
    EncodeRecords,
    RecordEncoder,
)
from flinkish_spark.connectors.kafka.sink_settings import KafkaSinkSettings
from flinkish_spark.connectors.row_count import collect_reports
from flinkish_spark.connectors.task_staging import JoiningWriter, StageInTasks, StagePlan, TaskStage
from flinkish_spark.contracts.sink import Committer, SinkContext, StageRequest, StageResult
from flinkish_spark.core.arrow_pass import map_in_pass
from flinkish_spark.core.errors import BrokerUnavailableError, CorruptObjectError
from flinkish_spark.core.formats import BadRecordPolicy, DeadLetter
from flinkish_spark.protocol.codec import read, whole
from flinkish_spark.protocol.ids import CheckpointId, TransactionalId
from flinkish_spark.protocol.records import CommitAnswer, Committable, Outcome, TaskAck
from flinkish_spark.protocol.timeline import Mark
from flinkish_spark.types.record_time import TimeLimits

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class KafkaWork:
    #: Settings of the transaction; to the transactional id the task appends its number and attempt.
    settings: StagingSettings
    headers: tuple[tuple[str, bytes], ...]
    columns: tuple[str, ...]
    #: Encodes the rows; None if they are encoded.
    encode: EncodeRecords | None = None

    def begin(self, task: TaskContext, sinks: int) -> TaskStage:
        partition = task.partitionId()
        settings = replace(self.settings, transactions_of_task=sinks)
        if settings.shared is not None:
            shared = replace(settings.shared, ticket=make_ticket_name(settings.shared.ticket, partition))
            settings = replace(settings, shared=shared)
        elif settings.transactional_id is not None:
            settings = replace(settings, attempt=TaskAttempt(partition, task.attemptNumber()))
        return _KafkaStage(self, StagedTransaction(settings, common_headers=self.headers))


class _KafkaStage(TaskStage):
    holds_readers = True

    def __init__(self, work: KafkaWork, transaction: StagedTransaction) -> None:
        self._work, self._transaction = work, transaction

    def write(self, records: pa.RecordBatch) -> None:
        transaction, encode = self._transaction, self._work.encode
        if encode is not None:
            records = encode.encode(records)
        columns = {name: records.column(name) for name in self._work.columns}
        times = columns.get(TIMESTAMP)
        if times is not None:
            times = (times.fill_null(transaction.now_ms()) if times.null_count else times).to_numpy()
        transaction.write(
            columns.get(KEY),
            columns[VALUE],
            columns.get(HEADERS),
            topics=columns.get(TOPIC),
            partitions=columns.get(PARTITION),
            timestamps_ms=times,
            misfits=columns.get(MISFIT),
        )

    def finish(self, ack: TaskAck) -> Mapping[str, Any]:
        transaction = self._transaction
        prepared, counts = transaction.prepare(), transaction.counts
        done = replace(ack, dropped=counts.dropped, dead_lettered=counts.dead_lettered)
        report = {**done.to_json(), "committable": None if prepared is None else prepared.to_json()}
        if self._work.settings.shared is not None:
            written, ticket = transaction.count_acknowledged(), transaction.ticket
            report["written"] = [[topic, partition, count] for (topic, partition), count in written.items()]
            report["ticket"] = None if ticket is None else [ticket.producer_id, ticket.producer_epoch]
        return report

    def abandon(self, within_ms: int) -> None:
        self._transaction.abandon(within_ms)


#: Task number in the transactional id of barrier records; no Spark partition has a number this high.
BARRIER_TASK = 999_999_999
_BARRIER, _SEQUENCES = "barrier_of", "next_sequences"
_Sequences: Any = Mapping[str, tuple[Annotated[int, whole(0)], ...]] | None


@dataclass(frozen=True, slots=True)
class KafkaSinkCommittable:
    """A Kafka sink's committable: records of a task or micro-batch, or barrier records of a checkpoint."""

    handle: KafkaCommittable
    #: The checkpoint of barrier records; None for data. The committables of an aborted checkpoint pass to the
    #: next one: it commits the data, but must never commit the barrier records.
    barrier_of: CheckpointId | None = None
    #: For a transaction shared by all tasks of a checkpoint: topic -> the next sequence number of each
    #: partition after the micro-batch was staged. None for a transaction of one task.
    next_sequences: Mapping[str, tuple[int, ...]] | None = None

    def belongs_to(self, checkpoint: CheckpointId) -> bool:
        return self.barrier_of in (None, checkpoint)

    def to_payload(self) -> dict[str, Any]:
        """Return the stored form; for a task's records it is the handle alone."""
        more: dict[str, Any] = {} if self.barrier_of is None else {_BARRIER: int(self.barrier_of)}
        if self.next_sequences is not None:
            more[_SEQUENCES] = {topic: list(known) for topic, known in self.next_sequences.items()}
        return {**self.handle.to_json(), **more}

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> KafkaSinkCommittable:
        fields = dict(payload)
        barrier_of, sequences = fields.pop(_BARRIER, None), fields.pop(_SEQUENCES, None)
        try:
            checkpoint = None if barrier_of is None else CheckpointId(barrier_of)
            known = read(_Sequences, sequences)
        except ValueError as wrong:
            raise CorruptObjectError("a stored Kafka committable cannot be read", why=str(wrong)) from wrong
        return cls(KafkaCommittable.from_json(fields), checkpoint, known)

    @property
    def transaction(self) -> tuple[str, int, int]:
        return (self.handle.transactional_id, self.handle.producer_id, self.handle.producer_epoch)


def parse_committables(committables: Sequence[Committable]) -> list[KafkaSinkCommittable]:
    return [KafkaSinkCommittable.of(committable.payload) for committable in committables]


#: Headers with the job and the sink that wrote a record.
JOB_HEADER, UID_HEADER = "flinkish-job", "flinkish-uid"
#: Header with the checkpoint that was expected to commit a record.
CHECKPOINT_HEADER = "flinkish-checkpoint"
#: Header with the micro-batch that wrote a record, as ``<lineage>/<batch>``.
BATCH_HEADER = "flinkish-batch"


class KafkaWriter(JoiningWriter):
    """Stages the records of a micro-batch, in one transaction per task."""

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
        self._encode = EncodeRecords(self._encoder, self._encoder.column_names())
        self._barriers: BarrierWriter | None = None
        if sink.barriers is BarrierRecords.EACH_CHECKPOINT:
            self._barriers = BarrierWriter(
                sink.connection, sink.topic, context.job, context.uid, sink.transaction_timeout_ms
            )

    @cached_property
    def columns(self) -> Mapping[str, Column]:
        return self._encoder.spark_columns()

    @property
    def reads_fields_alone(self) -> bool:
        return self._encoder.reads_fields_alone

    def plan(self, request: StageRequest) -> StagePlan:
        work = replace(self._make_transaction_work(request), encode=self._encode)
        return StagePlan(work, partial(self._to_result, request))

    def _to_result(self, request: StageRequest, found: Sequence[Mapping[str, Any]]) -> StageResult:
        staged = [
            KafkaSinkCommittable(KafkaCommittable.from_json(r["committable"]))
            for r in found
            if r["committable"]
        ]
        tasks = tuple(TaskAck.from_json(r) for r in found)
        checkpoint = request.find_checkpoint(tasks)
        if self._barriers is not None and checkpoint is not None:
            # Last, so that barrier records have later offsets, and are committed later, than the data.
            # The block belongs to this micro-batch, so no other transaction can have this id.
            owner = self._context.owner_epoch
            name = TransactionalId(self._context.job, owner, request.block, BARRIER_TASK, 0)
            handle = self._barriers.stage(checkpoint, request.lineage, str(name))
            staged.append(KafkaSinkCommittable(handle, checkpoint))
        return StageResult(tasks, tuple(one.to_payload() for one in staged))

    def write_shared(
        self,
        request: StageRequest,
        assign: Callable[[DataFrame], DataFrame],
        partitions: Mapping[str, int],
        transactional_id: str,
        producer: SharedProducer,
    ) -> Sequence[Mapping[str, Any]]:
        """Let all tasks write into one shared transaction; return each task's report."""
        work = self._make_work(request, transactional_id, partitions)
        columns = tuple(dict.fromkeys((*work.columns, PARTITION)))
        work = replace(work, settings=replace(work.settings, shared=producer), columns=columns)
        encoded = map_in_pass(self.select_rows(request), self._encode, self._encode.columns())
        return collect_reports(assign(encoded.frame), StageInTasks((work,)))

    def _make_transaction_work(self, request: StageRequest) -> KafkaWork:
        prefix = TransactionalId.prefix(self._context.job, self._context.owner_epoch, request.block)
        if not self._sink.partition:
            return self._make_work(request, prefix, None)
        # Ask now: a record may name a partition that was just added.
        with KafkaAdmin(self._sink.connection) as admin:
            partitions = admin.partition_counts(self._sink.data_topics)
        return self._make_work(request, prefix, partitions)

    def _make_work(
        self, request: StageRequest, transactional_id: str, partitions: Mapping[str, int] | None
    ) -> KafkaWork:
        sink = self._sink
        is_exact = sink.delivery is DeliveryGuarantee.EXACTLY_ONCE
        oversize, letters = _to_refusal_policy(sink.oversize_policy)
        bad_record, bad_letters = _to_refusal_policy(sink.on_bad_record)
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
        return KafkaWork(settings, headers, tuple(self._encoder.schema().names))

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


def make_ticket_name(prefix: str, task: int) -> str:
    return f"{prefix}-{task}-0"


def _to_refusal_policy(policy: BadRecordPolicy) -> tuple[OnRefusal, str | None]:
    if isinstance(policy, DeadLetter):
        return OnRefusal.DEAD_LETTER, policy.topic
    return OnRefusal(policy.value), None


MicroBatch = Sequence[KafkaSinkCommittable]


class KafkaCommitter(Committer):
    """Commits or aborts staged transactions in order, one whole micro-batch at a time."""

    # The answers of `commit`, on which a replay relies:
    #
    # - They have the order of the committables and end at the first one that is not done: no committable
    #   after the last answer has ever been committed, neither in this call nor in an earlier one.
    # - Before `commit` ends the first transaction of a micro-batch it asks the coordinators about all.
    #   If one is lost and none was committed earlier, it commits none: it answers LOST for the first
    #   committable of the micro-batch, which can then be staged again as a whole.
    # - If some were committed earlier, LOST is the answer for the first lost one, and all before it are done.
    #   Then only the tasks from there on can be staged again, by `task_of`.
    # - `is_proven_aborted` of LOST covers every lost transaction of the micro-batch. It is false if a
    #   transaction after the last answer was committed, which no process of this package does.
    # - RETRY: the outcome is unknown, or a transaction timed out between the check and the commit.

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
        """Commit whole micro-batches in the given order; stop at the first committable that is not done."""
        micro_batches = [list(some) for _, some in groupby(parse_committables(committables), _to_block_key)]
        try:
            if micro_batches:
                self._mark(checkpoint)
            data = [[one.handle for one in batch if one.barrier_of is None] for batch in micro_batches]
            handles = [handle for of_one in data if len(of_one) > 1 for handle in of_one]
            alive = self._client.is_alive(handles) if handles else {}
        except BrokerUnavailableError as unanswered:
            return [CommitAnswer(Outcome.RETRY, str(unanswered))]
        answers: list[CommitAnswer] = []
        for micro_batch in micro_batches:
            answers += self._commit_micro_batch(checkpoint, micro_batch, alive)
            if not answers[-1].outcome.is_done:
                break
        return answers

    def newest_marks(self) -> Sequence[Mark]:
        mark = None if self._marks is None else self._marks.newest()
        return () if mark is None else (mark,)

    def _mark(self, checkpoint: CheckpointId) -> None:
        """Write the mark of a checkpoint; raise AnotherTimelineError if there is one of another timeline."""
        if self._marks is None:
            return
        # This order matters: the mark precedes the first commit. From then on readers may see records, and an
        # older copy of the job directory must not write them again.
        found, ours = self._marks.newest(), self._context.timeline.mark_of(checkpoint)
        if found is not None:
            self._context.require_ours(found, checkpoint)
        if found != ours:
            self._marks.leave(ours)

    def _commit_micro_batch(
        self, checkpoint: CheckpointId, micro_batch: MicroBatch, alive: Mapping[KafkaCommittable, Liveness]
    ) -> list[CommitAnswer]:
        """Commit one micro-batch; every answer but the last one is done."""
        # A transaction that is no longer open under its epoch stays so. Asking for its commit changes nothing
        # and tells its outcome: committed earlier, or lost.
        settled = {
            position: self._client.commit(one.handle)
            for position, one in enumerate(micro_batch)
            if one.handle in alive and not alive[one.handle].alive
        }
        lost = {position: answer for position, answer in settled.items() if answer.outcome is Outcome.LOST}
        is_touched = any(answer.outcome.is_done for answer in settled.values())
        unknown = next((answer for answer in settled.values() if answer.outcome is Outcome.RETRY), None)
        if lost and not is_touched and unknown is None:
            return [_make_lost_answer(lost, micro_batch, settled)]
        answers: list[CommitAnswer] = []
        # By transaction: end a shared transaction once for all of its committables.
        ended: dict[tuple[str, int, int], CommitAnswer] = {}
        for position, one in enumerate(micro_batch):
            known = settled.get(position) or ended.get(one.transaction)
            if unknown is not None and (known is None or not known.outcome.is_done):
                # First the outcome of the rest of the micro-batch must be known.
                answers.append(unknown)
            elif position in lost:
                answers.append(_make_lost_answer(lost, micro_batch, settled))
            else:
                answers.append(known or self._end(checkpoint, one, alive))
                ended[one.transaction] = answers[-1]
            if not answers[-1].outcome.is_done:
                break
        return answers

    def _end(
        self, checkpoint: CheckpointId, one: KafkaSinkCommittable, alive: Mapping[KafkaCommittable, Liveness]
    ) -> CommitAnswer:
        """Commit a committable of the decided checkpoint; abort barrier records of another checkpoint."""
        if not one.belongs_to(checkpoint):
            return self._client.abort(one.handle)
        answer = self._client.commit(one.handle)
        if answer.outcome is not Outcome.LOST:
            return answer
        if one.barrier_of is not None:
            # No data is missing: chained jobs align at the next checkpoint instead.
            why = answer.detail
            LOG.warning("the barrier records of checkpoint %s are lost, no data is: %s", checkpoint, why)
            return CommitAnswer(Outcome.ALREADY_COMMITTED, f"barrier records only, given up: {why}")
        if one.handle in alive:
            # It was open when checked. The next call checks the whole micro-batch again.
            return CommitAnswer(Outcome.RETRY, f"lost since it was looked at: {answer.detail}")
        return answer

    def abort(self, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        return [self._client.abort(staged.handle) for staged in parse_committables(committables)]

    def why_dead(self, committables: Sequence[Committable]) -> Mapping[int, str]:
        staged = parse_committables(committables)
        # The decision needs the data and the newest barrier records.
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

    def _why_not_whole(self, staged: Sequence[KafkaSinkCommittable], who: str) -> Mapping[int, str]:
        """Return why a shared transaction is not the whole checkpoint, by position; before the decision."""
        shared = [(index, one) for index, one in enumerate(staged) if one.next_sequences is not None]
        if not shared:
            return {}
        index, newest = shared[-1]
        others = [at for at, one in shared if one.transaction != newest.transaction]
        if others:
            why = "holds a part of the checkpoint only: a checkpoint that was aborted had begun before"
            return {others[0]: f"{who} {staged[others[0]].handle.transactional_id} {why}"}
        assert newest.next_sequences is not None
        # After this comparison only a task that outlived its micro-batch could write, and its ticket would
        # have revealed it.
        why = self._client.why_not_counted(newest.handle, newest.next_sequences)
        return {index: f"{who} {newest.handle.transactional_id}: {why}"} if why else {}

    def task_of(self, committable: Committable) -> int | None:
        """Return the Spark partition in a transactional id; None if the transaction is not a task's."""
        staged = KafkaSinkCommittable.of(committable.payload)
        name = TransactionalId.parse(staged.handle.transactional_id)
        is_of_a_task = staged.barrier_of is None and staged.next_sequences is None
        return name.task if name is not None and is_of_a_task else None

    def sweep(self, kept: Sequence[Committable], running_blocks: Callable[[], frozenset[int]]) -> int:
        names = {str(c.payload.get("transactional_id", "")) for c in kept}
        aborted = 0
        listed = self._client.list_open_transactions(self._context.job)
        # This order matters: a block leased after the listing has no transaction in the list.
        leased = running_blocks()
        for found in listed:
            name = found.transactional_id
            if str(name) not in names and self._context.is_left_over(name.owner_epoch, name.block, leased):
                self._client.abort_open(name)
                aborted += 1
        return aborted

    def close(self) -> None:
        self._client.close()


def _to_block_key(one: KafkaSinkCommittable) -> tuple[object, ...]:
    """Return a key of the micro-batch: until the receipt no other has its block."""
    name = TransactionalId.parse(one.handle.transactional_id)
    # An id of another form is a key of its own.
    return (one.handle,) if name is None else (name.owner_epoch, name.block)


def _make_lost_answer(
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
