"""Commit and abort of transactions prepared by another process, and their outcome by the log.

Only code 0 is conclusive. A coordinator's "fenced" or "unknown id" says nothing about the data, since the
transaction may have been committed before. So a committable names one of its records, and the log is read at
its offset before anything is concluded:

- The batch there must have the committable's producer id and epoch. If the topic was created again or the log
  was truncated, it has another producer's record.
- If the last stable offset is beyond it, the broker's list of aborted transactions decides.
- If not, or if compaction removed the record, the first later marker of that producer id decides.
- Without an answer or a marker the outcome is undecided, which is RETRY: the broker may have acted.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import kafka.errors as kafka_errors
from kafka import TopicPartition
from kafka.admin import OffsetSpec

from flinkish_spark.connectors.kafka.client.batches import sequence_after
from flinkish_spark.connectors.kafka.client.client import (
    END_TXN_VERSION,
    UNAUTHORIZED,
    UNSETTLED,
    ConfirmationCounter,
    EndAction,
    Handle,
    Isolation,
    KafkaWire,
    TransactionView,
    WireClient,
    ask_until_settled,
    describe_code,
)
from flinkish_spark.connectors.kafka.client.fetch import Batch, LogSlice, Marker, fetch_headers
from flinkish_spark.core.clock import tries
from flinkish_spark.core.errors import AuthorizationError, BrokerUnavailableError, CorruptObjectError
from flinkish_spark.protocol.codec import StoredObject, read
from flinkish_spark.protocol.ids import JobUuid, TransactionalId
from flinkish_spark.protocol.records import CommitAnswer, Outcome

#: Enough for one batch; Kafka sends a whole batch even if it is larger.
_PEEK_BYTES = 64 * 1024
_SCAN_BYTES = 4 * 1024 * 1024
#: Least duration of a scan for a marker: about 100 MB.
_LEAST_SCAN_MS = 1_000


class Fate(enum.Enum):
    """Outcome of a transaction by the log."""

    COMMITTED = "COMMITTED"
    ABORTED = "ABORTED"
    #: Still open, its markers are not written yet, or the log could not be read.
    UNDECIDED = "UNDECIDED"
    #: The record is no longer there, and no marker tells why.
    GONE = "GONE"


@dataclass(frozen=True, slots=True)
class Finding:
    fate: Fate
    detail: str


@dataclass(frozen=True, slots=True)
class Evidence(StoredObject):
    IS_CLOSED: ClassVar = True

    topic: str
    partition: int
    offset: int

    def __post_init__(self) -> None:
        if not self.topic or self.partition < 0 or self.offset < 0:
            raise ValueError(f"there is no place {self}")

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition} offset {self.offset}"


def judge_stable(seen: LogSlice, place: Evidence, producer_id: int, producer_epoch: int) -> Finding | None:
    """Find the outcome in a read_committed slice that starts at `place`; None if it needs a marker."""
    if seen.last_stable_offset <= place.offset:
        return None
    batch = _find_batch_at(seen, place.offset)
    if batch is not None and (batch.producer_id, batch.producer_epoch) != (producer_id, producer_epoch):
        return Finding(
            Fate.GONE,
            f"{place} holds a record of producer {batch.producer_id} epoch {batch.producer_epoch}: "
            "the topic was created again or its log was truncated",
        )
    if any(pid == producer_id and first <= place.offset for pid, first in seen.aborted):
        return Finding(Fate.ABORTED, f"{place} lies in an aborted transaction")
    if batch is None or batch.records == 0:
        return None
    return Finding(Fate.COMMITTED, f"{place} is visible to read_committed readers")


def judge_markers(
    seen: LogSlice, place: Evidence, producer_id: int, producer_epoch: int, is_record_there: bool
) -> Finding | None:
    # A marker of another epoch counts only while the record is still there. Otherwise it may end the
    # producer's next transaction, if compaction removed our own marker.
    for batch in seen.batches:
        if batch.marker is None or batch.producer_id != producer_id or batch.last_offset <= place.offset:
            continue
        if batch.producer_epoch == producer_epoch or is_record_there:
            fate = Fate.COMMITTED if batch.marker is Marker.COMMIT else Fate.ABORTED
            return Finding(
                fate, f"{place} was ended by the {batch.marker.name} marker at {batch.last_offset}"
            )
        return Finding(Fate.GONE, f"{place} and the end of its transaction were compacted away")
    return None


def _find_batch_at(seen: LogSlice, offset: int) -> Batch | None:
    return next((b for b in seen.batches if b.base_offset <= offset <= b.last_offset), None)


class EvidenceReader:
    """Finds the outcome of transactions in the log, over a shared connection."""

    def __init__(self, wire: KafkaWire, *, patience_ms: int = 2_000) -> None:
        self._wire = wire
        self._patience_ms = patience_ms
        #: Progress of scans that took too long: the next offset, and whether the record is there.
        self._scanned: dict[tuple[Evidence, int, int], tuple[int, bool]] = {}

    def read(self, place: Evidence, producer_id: int, producer_epoch: int) -> Finding:
        """Return the outcome of the transaction with a record at `place`; wait a little for its markers."""
        finding, doubt = Finding(Fate.UNDECIDED, f"{place} was not read"), ConfirmationCounter()
        for _left_ms in tries(self._patience_ms, self._wire.clock):
            seen = self._fetch(place, place.offset, Isolation.READ_COMMITTED, _PEEK_BYTES)
            is_absent = seen.code == kafka_errors.UnknownTopicOrPartitionError.errno
            is_believed = doubt.is_confirmed(is_absent)
            if is_absent:
                finding = Finding(Fate.UNDECIDED, f"{place}: the broker does not know the partition")
                if is_believed:
                    gone = f"topic {place.topic} (partition {place.partition}) was deleted"
                    return Finding(Fate.GONE, gone)
                continue
            if seen.code == kafka_errors.OffsetOutOfRangeError.errno:
                return self._judge_out_of_range(place)
            if seen.code:
                detail = f"{place} cannot be read now (error {describe_code(seen.code)})"
                finding = Finding(Fate.UNDECIDED, detail)
                continue
            stable = judge_stable(seen, place, producer_id, producer_epoch)
            finding = stable or self._scan(place, producer_id, producer_epoch)
            if finding.fate is not Fate.UNDECIDED:
                return finding
        return finding

    def _fetch(self, place: Evidence, offset: int, isolation: Isolation, max_bytes: int) -> LogSlice:
        seen = fetch_headers(self._wire, (place.topic, place.partition), offset, isolation, max_bytes)
        if seen.code in UNAUTHORIZED:
            raise AuthorizationError(
                f"Kafka refuses this principal READ on topic {place.topic!r}, which is needed to tell "
                f"whether a transaction was committed ({describe_code(seen.code)})",
                code=seen.code,
            )
        return seen

    def _judge_out_of_range(self, place: Evidence) -> Finding:
        partition = TopicPartition(place.topic, place.partition)
        found = self._wire.call(
            f"find the start of {place.topic}-{place.partition}",
            lambda admin: admin.list_partition_offsets({partition: OffsetSpec.EARLIEST}),
        )
        start = found[partition].offset
        if place.offset < start:
            return Finding(Fate.GONE, f"{place} was deleted, the log starts at {start}: the evidence is gone")
        return Finding(
            Fate.GONE,
            f"{place} is beyond the end of the log: the topic was created again or its log was truncated",
        )

    def _scan(self, place: Evidence, producer_id: int, producer_epoch: int) -> Finding:
        """Scan for the end of the transaction from `place` on, within a time limit."""
        clock = self._wire.clock
        end_ms = clock.monotonic_ms() + max(self._patience_ms, _LEAST_SCAN_MS)
        asked = (place, producer_id, producer_epoch)
        next_offset, is_record_there = self._scanned.pop(asked, (place.offset, False))
        while True:
            seen = self._fetch(place, next_offset, Isolation.READ_UNCOMMITTED, _SCAN_BYTES)
            if seen.code:
                return Finding(
                    Fate.UNDECIDED, f"{place} cannot be read now (error {describe_code(seen.code)})"
                )
            if next_offset == place.offset and (batch := _find_batch_at(seen, place.offset)) is not None:
                is_record_there = True
                if (batch.producer_id, batch.producer_epoch) != (producer_id, producer_epoch):
                    return Finding(Fate.GONE, f"{place} holds a record of another producer")
            found = judge_markers(seen, place, producer_id, producer_epoch, is_record_there)
            if found is not None:
                return found
            if seen.batches:
                next_offset = seen.batches[-1].last_offset + 1
            if not seen.batches or next_offset >= seen.high_watermark:
                break
            if clock.monotonic_ms() > end_ms:
                # The next call continues from here; starting over it would never get further.
                self._scanned[asked] = next_offset, is_record_there
                return Finding(
                    Fate.UNDECIDED, f"{place}: no end of the transaction up to offset {next_offset}"
                )
        if is_record_there or seen.high_watermark <= place.offset:
            return Finding(Fate.UNDECIDED, f"{place} is still open")
        return Finding(Fate.GONE, f"{place} was compacted away and no marker is left: the evidence is gone")


_ONGOING = "Ongoing"
OPEN_STATES = (_ONGOING, "PrepareCommit", "PrepareAbort", "PrepareEpochFence")
#: Transaction timeout for fencing, small enough for any broker's maximum; this client never begins a
#: transaction.
_FENCING_TIMEOUT_MS = 10_000


@dataclass(frozen=True, slots=True)
class KafkaCommittable(StoredObject):
    """Handle of a prepared transaction, by which any process can commit or abort it."""

    IS_CLOSED: ClassVar = True

    transactional_id: str
    producer_id: int
    producer_epoch: int
    evidence: Evidence
    #: Number of records, at least one; an empty transaction is no committable.
    records: int
    protocol_version: int = END_TXN_VERSION

    def __post_init__(self) -> None:
        if not self.transactional_id or min(self.producer_id, self.producer_epoch, self.records - 1) < 0:
            raise ValueError(f"there is no transaction {self}")
        if self.protocol_version != END_TXN_VERSION:
            raise ValueError(
                f"EndTxn version {self.protocol_version!r} is not supported, only {END_TXN_VERSION}"
            )

    @classmethod
    def from_json(cls, value: Any) -> Self:
        try:
            found: Self = read(cls, value)
        except ValueError as wrong:
            raise CorruptObjectError("A stored Kafka committable cannot be read", why=str(wrong)) from wrong
        return found


@dataclass(frozen=True, slots=True)
class Liveness:
    alive: bool
    reason: str


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """An open transaction, which holds back read_committed readers."""

    transactional_id: TransactionalId
    producer_id: int
    state: str


def parse_own_ids(job: JobUuid, texts: Iterable[str]) -> Iterator[TransactionalId]:
    for text in texts:
        parsed = TransactionalId.parse(text)
        # Ids with leading zeros parse, too, but are not written by this package.
        if parsed is not None and parsed.job == job and str(parsed) == text:
            yield parsed


def why_not_counted(
    wire: KafkaWire, next_sequences: Mapping[str, Sequence[int]], producer_id: int, producer_epoch: int
) -> str:
    """Compare a transaction's expected contents with the leaders'; return the first difference, or ""."""
    places = [(topic, p) for topic, known in next_sequences.items() for p in range(len(known))]
    seen = wire.last_sequences(places, producer_id, producer_epoch)
    for topic, partition in places:
        last, wanted = seen.get((topic, partition)), next_sequences[topic][partition]
        found = 0 if last is None else sequence_after(last, 1)
        if found != wanted:
            return (
                f"partition {partition} of topic {topic} has {found} records of producer {producer_id} "
                f"epoch {producer_epoch}, and {wanted} were acknowledged"
            )
    return ""


def abort_own(wire: KafkaWire, handle: Handle, within_ms: int) -> str:
    """Abort this process's open transaction; return why it may still be open, or ""."""
    # Once the coordinator is settled, nothing of this epoch is open, whatever it answered.
    code, lost = ask_until_settled(
        wire,
        within_ms,
        lambda left_ms: wire.end_transaction(handle, EndAction.ABORT, connect_within_ms=left_ms),
    )
    return str(lost) if lost else describe_code(code) if code in UNSETTLED else ""


class TransactionClient(WireClient):
    """Commits, aborts and looks up transactions that other processes prepared."""

    def _use(self, wire: KafkaWire) -> None:
        super()._use(wire)
        self._reader = EvidenceReader(wire)

    def commit(self, committable: KafkaCommittable) -> CommitAnswer:
        return self._end(committable, EndAction.COMMIT)

    def abort(self, committable: KafkaCommittable) -> CommitAnswer:
        return self._end(committable, EndAction.ABORT)

    def is_alive(self, committables: Iterable[KafkaCommittable]) -> dict[KafkaCommittable, Liveness]:
        """Check for each committable whether its transaction is still open, right before a decision."""
        wanted = list(committables)
        views = self.describe(sorted({one.transactional_id for one in wanted}))
        return {one: _liveness(one, views[one.transactional_id]) for one in wanted}

    def why_not_counted(self, one: KafkaCommittable, next_sequences: Mapping[str, Sequence[int]]) -> str:
        return why_not_counted(self._wire, next_sequences, one.producer_id, one.producer_epoch)

    def list_open_transactions(self, job: JobUuid) -> list[OpenTransaction]:
        """Return the open transactions of `job`, found by parsing transactional ids."""
        rows = {row.transactional_id: row for row in self._wire.list_transactions(OPEN_STATES)}
        return [
            OpenTransaction(name, rows[str(name)].producer_id, rows[str(name)].state.value)
            for name in sorted(parse_own_ids(job, rows))
        ]

    def abort_open(self, transactional_id: TransactionalId) -> CommitAnswer:
        """Abort the open transaction of a leftover id, and fence its producers."""
        # A new epoch does both: after a plain abort a task that still writes could open the next transaction.
        name = str(transactional_id)
        try:
            view = self.describe([name])[name]
        except BrokerUnavailableError as lost:
            return CommitAnswer(Outcome.RETRY, str(lost))
        if view.code == kafka_errors.TransactionalIdNotFoundError.errno:
            return CommitAnswer(Outcome.ALREADY_COMMITTED, f"{name} is unknown to Kafka")
        code, lost_detail = self._ask_until_settled(
            name,
            lambda left_ms: (
                self._wire.init_producer_id(name, _FENCING_TIMEOUT_MS, connect_within_ms=left_ms).code
            ),
        )
        if code:
            return CommitAnswer(Outcome.RETRY, f"{name} was not fenced: {lost_detail or describe_code(code)}")
        if view.state == "PrepareCommit":
            return CommitAnswer(Outcome.FENCED, f"{name} was committed by another owner")
        if view.state in OPEN_STATES:
            return CommitAnswer(Outcome.COMMITTED, f"{name} was open and is aborted")
        return CommitAnswer(Outcome.ALREADY_COMMITTED, f"nothing was open under {name} ({view.state})")

    def _end(self, one: KafkaCommittable, action: EndAction) -> CommitAnswer:
        code, lost_detail = self._ask_until_settled(
            one.transactional_id,
            lambda left_ms: self._wire.end_transaction(
                Handle(one.transactional_id, one.producer_id, one.producer_epoch),
                action,
                version=one.protocol_version,
                connect_within_ms=left_ms,
            ),
        )
        name = one.transactional_id
        if not code:
            return CommitAnswer(Outcome.COMMITTED, f"{name}: {action.value.lower()} accepted")
        if lost_detail or code in UNSETTLED:
            return CommitAnswer(Outcome.RETRY, f"{name}: {lost_detail or describe_code(code)}")
        try:
            finding = self._reader.read(one.evidence, one.producer_id, one.producer_epoch)
        except BrokerUnavailableError as lost:
            return CommitAnswer(Outcome.RETRY, f"{name}: {describe_code(code)}; {lost}")
        detail = f"{name}: Kafka answered {describe_code(code)}; {finding.detail}"
        if action is EndAction.COMMIT:
            return CommitAnswer(_COMMIT_OUTCOMES[finding.fate], detail, finding.fate is Fate.ABORTED)
        outcome = _ABORT_OUTCOMES[finding.fate]
        if outcome is Outcome.FENCED:
            detail = f"was committed by another owner ({detail})"
        return CommitAnswer(outcome, detail)

    def _ask_until_settled(self, transactional_id: str, ask: Callable[[int], int]) -> tuple[int, str]:
        """Ask until the coordinator is settled; return the last code, and the error if nobody answered."""
        code, lost = ask_until_settled(self._wire, self._wire.timeout_ms, ask)
        if code in UNAUTHORIZED:
            raise AuthorizationError(
                f"Kafka refuses this principal WRITE on transactional id {transactional_id!r} "
                f"or on a topic of its transaction ({describe_code(code)})",
                code=code,
            )
        return code, str(lost or "")

    def describe(self, transactional_ids: Iterable[str]) -> dict[str, TransactionView]:
        views: dict[str, TransactionView] = {}
        waiting = list(transactional_ids)
        for _left_ms in tries(self._wire.timeout_ms, self._wire.clock):
            views.update(self._wire.describe_transactions(waiting))
            waiting = [one for one in waiting if one not in views or views[one].code in UNSETTLED]
            if not waiting:
                break
        else:
            raise BrokerUnavailableError(
                f"The coordinator of {len(waiting)} Kafka transactions, among them {waiting[0]}, could not "
                f"describe them within {self._wire.timeout_ms} ms",
                what_to_do="wait for the cluster to settle",
                transactional_ids=waiting,
            )
        for transactional_id, view in views.items():
            if view.code in UNAUTHORIZED:
                raise AuthorizationError(
                    f"Kafka refuses this principal DESCRIBE on transactional id {transactional_id!r} "
                    f"({describe_code(view.code)})",
                    code=view.code,
                )
        return views


def _liveness(one: KafkaCommittable, view: TransactionView) -> Liveness:
    if view.code:
        return Liveness(False, f"Kafka answered {describe_code(view.code)}")
    if (view.producer_id, view.producer_epoch) != (one.producer_id, one.producer_epoch):
        return Liveness(
            False,
            f"producer {one.producer_id} epoch {one.producer_epoch} was replaced by producer "
            f"{view.producer_id} epoch {view.producer_epoch} (state {view.state})",
        )
    return Liveness(view.state == _ONGOING, f"state {view.state}")


_COMMIT_OUTCOMES = {
    Fate.COMMITTED: Outcome.ALREADY_COMMITTED,
    Fate.ABORTED: Outcome.LOST,
    Fate.GONE: Outcome.LOST,
    Fate.UNDECIDED: Outcome.RETRY,
}
_ABORT_OUTCOMES = {
    Fate.COMMITTED: Outcome.FENCED,
    Fate.ABORTED: Outcome.ALREADY_COMMITTED,
    Fate.GONE: Outcome.ALREADY_COMMITTED,
    Fate.UNDECIDED: Outcome.RETRY,
}
