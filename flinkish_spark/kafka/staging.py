"""Writing the Kafka records of a task in Python: in a transaction that another process ends, or without one.

Equal in meaning to the JVM writer. Whole Arrow columns become record batches; no record is ever a
Python object. Rules:

- The transaction begins when the first records are sent, so a task without records leaves nothing
  behind at the broker.
- InitProducerId comes before every transaction (`_producer_session`).
- Prepared means: every record was acknowledged by all in-sync replicas (under
  ``DeliveryGuarantee.NONE`` by whom the settings say). Nothing is dropped but what the policies for
  refused records say, and that is counted.
- Without a transaction records are visible at once, and an abandoned attempt leaves what it has sent.
- After any error the only way on is to abandon the attempt; its transaction is aborted, here or by
  whoever leased its transactional id.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from flinkish_spark.errors import InternalError
from flinkish_spark.kafka import staging_faults as faults
from flinkish_spark.kafka._admission import Admission
from flinkish_spark.kafka._columns import Addressed
from flinkish_spark.kafka._outbox import Outbox
from flinkish_spark.kafka._pace import pauses_ms
from flinkish_spark.kafka._producer_session import session_for
from flinkish_spark.kafka._routing import Spreader, by_partition, by_topic
from flinkish_spark.kafka._wire import KafkaWire
from flinkish_spark.kafka.answers import UNSETTLED, EndAction
from flinkish_spark.kafka.record_batch import Column, CommonHeaders, Int64s
from flinkish_spark.kafka.staging_settings import StagingSettings
from flinkish_spark.kafka.transactions import KafkaCommittable
from flinkish_spark.kafka.wire_pool import WIRES, WirePool

_LOG = logging.getLogger(__name__)
#: Records are collected until there are about this many bytes, then encoded while the ones before
#: travel. Less means more and smaller batches, more means that the broker waits for the first ones.
_PORTION_BYTES = 4 * 1024 * 1024
#: How long an abort may take that nobody's data depends on: whoever leased the id aborts it again.
_ABORT_BOUND_MS = 3_000


@dataclass(frozen=True, slots=True)
class StagedCounts:
    """What became of the records that were written.

    Attributes
    ----------
    sent
        Records that went out, dead letters included.
    bytes
        Of their keys and values.
    dropped
        Left out by ``OnRefusal.DROP``.
    dead_lettered
        Made a dead letter by ``OnRefusal.DEAD_LETTER``.
    """

    sent: int = 0
    bytes: int = 0
    dropped: int = 0
    dead_lettered: int = 0


class _Phase(enum.Enum):
    WRITING = "is being written"
    PREPARED = "is prepared"
    FAILED = "failed"
    ABANDONED = "was abandoned"


class StagedTransaction:
    """The output of one task attempt, a transaction if there is one; a context manager, not thread safe.

    Life cycle: :meth:`write` any number of times, then exactly one of :meth:`prepare` and
    :meth:`abandon`. Leaving the `with` block without having prepared abandons it. A crash at any
    point leaves at most an open transaction under `settings.transactional_id`, which read_committed
    readers do not see and which whoever leased the id, or its timeout, aborts.

    Parameters
    ----------
    settings
        Of this attempt alone: two attempts with one transactional id fence each other.
    pool
        Where the connection is borrowed from, and given back to once the transaction is prepared
        or abandoned.
    common_headers
        What every record gets before its own headers, and every dead letter behind its reason.

    Examples
    --------
    >>> with StagedTransaction(settings) as transaction:  # doctest: +SKIP
    ...     for batch in batches:
    ...         transaction.write(batch["key"], batch["value"], topics="orders")
    ...     committable = transaction.prepare()
    """

    def __init__(
        self, settings: StagingSettings, *, pool: WirePool = WIRES, common_headers: CommonHeaders = ()
    ) -> None:
        self._settings, self._pool = settings, pool
        self._wire: KafkaWire | None = pool.borrow(settings.connection)
        self._clock = self._wire.clock
        self._session = session_for(self._wire, settings)
        self._admission = Admission(settings, common_headers, self._clock)
        self._outbox = Outbox(self._session)
        self._spreader = Spreader(settings.producer.batch_bytes)
        self._collected: list[Addressed] = []
        self._collected_bytes = 0
        self._phase = _Phase.WRITING
        self.counts = StagedCounts()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._phase is not _Phase.PREPARED:
            self.abandon()

    def now_ms(self) -> int:
        """Return the time that a record without a timestamp gets."""
        return self._clock.wall_ms()

    def write(
        self,
        keys: Column | None,
        values: Column,
        headers: Column | CommonHeaders | None = None,
        topics: Column | str | None = None,
        partitions: Column | None = None,
        timestamps_ms: Int64s | int | None = None,
        misfits: Column | None = None,
    ) -> None:
        """Add records. They are sent once there are enough of them, at the latest by :meth:`prepare`.

        Parameters
        ----------
        keys, values
            Binary or string columns of one length; null is no key and a tombstone. None stands for
            keys that are all null.
        headers
            None, pairs of name and value for every record, or a column of Spark's type
            ``array<struct<key:string,value:binary>>``.
        topics
            One topic, or a string column. None and null stand for the default topic.
        partitions
            Integer column, null where the key decides; records without key are spread.
        timestamps_ms
            Milliseconds since 1970, for all records or for each; None is now.
        misfits
            String column: why a record does not fit its format; null if it does.

        Raises
        ------
        BadRecordError
            If one of these or of the earlier records cannot be written as it is.
        AuthorizationError, StagingFailed
            If Kafka refuses, or cannot be reached within ``delivery.timeout.ms``.
        SchemaError
            If a column is of a wrong type or length.
        """
        self._require(_Phase.WRITING)
        if not len(values):
            return
        at_ms = self._clock.wall_ms() if timestamps_ms is None else timestamps_ms
        with self._failing():
            headers = self._admission.with_common(headers, len(values))
            records = Addressed.of(keys, values, headers, topics, partitions, at_ms, misfits)
            if self._collected and not records.continues(self._collected[-1]):
                self._send_collected()
            self._collected.append(records)
            self._collected_bytes += records.rows.about_bytes
            if self._collected_bytes >= _PORTION_BYTES:
                self._send_collected()

    def prepare(self) -> KafkaCommittable | None:
        """Make everything durable and invisible, and return the handle that commits or aborts it.

        From here on the transaction belongs to whoever holds the handle. Returns None if there is
        no transaction, because no record was sent or because the guarantee needs none.

        Raises
        ------
        BadRecordError, AuthorizationError, StagingFailed
            If a record could not be written; the transaction is to be abandoned.
        """
        self._require(_Phase.WRITING)
        with self._failing():
            self._send_collected()
            self._outbox.drain()
            committable = self._committable()
        self._phase = _Phase.PREPARED
        self._release()
        return committable

    def abandon(self) -> None:
        """Abort what was begun, within about three seconds; never raises, may be repeated.

        What could not be aborted in time stays open and invisible until its lease or its timeout
        ends it. Does nothing to a prepared transaction.
        """
        if self._phase in (_Phase.PREPARED, _Phase.ABANDONED):
            return
        failed_before, self._phase = self._phase is _Phase.FAILED, _Phase.ABANDONED
        self._collected.clear()
        try:
            # What is under way should arrive before the abort; a broker would refuse it later, but
            # only since Kafka 3.6 (KIP-890).
            quiet = self._outbox.hush(_ABORT_BOUND_MS // 3)
            if (failed_before or not quiet) and self._wire is not None:
                # The next task gets this wire, and it may be what failed.
                self._wire.close()
            if self._session.is_begun and self._session.is_transactional:
                self._abort()
        except Exception as failed:
            _LOG.warning(
                "could not abort the Kafka transaction of %s (%s); its lease or its timeout ends it",
                self._settings.transactional_id,
                failed,
            )
        finally:
            self._release()

    # -- inside -------------------------------------------------------------------------------

    def _send_collected(self) -> None:
        collected, self._collected, self._collected_bytes = self._collected, [], 0
        if not collected:
            return
        whole = Addressed.joined(collected)
        portions = max(1, whole.rows.about_bytes // _PORTION_BYTES)
        step = -(-len(whole.rows) // portions)
        for start in range(0, len(whole.rows), step):
            for topic, records in by_topic(whole.slice(start, step), self._settings.default_topic):
                self._send(topic, self._admitted(topic, records))

    def _send(self, topic: str, records: Addressed) -> None:
        if not len(records.rows):
            return
        layout = self._session.layout_with(topic, records.highest_partition)
        parts = by_partition(topic, records, layout, self._spreader)
        places = {(topic, partition): rows for partition, rows in parts.items()}
        # This order matters: a broker refuses records of a partition that is not in the transaction.
        if not self._session.is_begun:
            self._session.begin()
        self._session.join(places)
        self._outbox.post(places)
        sent, size = self.counts.sent + len(records.rows), self.counts.bytes + records.rows.payload_bytes
        self.counts = replace(self.counts, sent=sent, bytes=size)

    def _admitted(self, topic: str, records: Addressed) -> Addressed:
        """Return the records that can be written, after the others met their policy."""
        judged = self._admission.judged(topic, records)
        self.counts = replace(self.counts, dropped=self.counts.dropped + judged.dropped)
        for name, letters in judged.letters:
            self._send(name, letters)
            count = self.counts.dead_lettered + len(letters.rows)
            self.counts = replace(self.counts, dead_lettered=count)
        return judged.admitted

    def _committable(self) -> KafkaCommittable | None:
        outbox, session = self._outbox, self._session
        if outbox.acknowledged != self.counts.sent:
            raise InternalError(
                f"{self.counts.sent} records were sent, but {outbox.acknowledged} acknowledged after a flush"
            )
        name = self._settings.transactional_id
        if not session.is_begun or name is None:
            return None
        if outbox.evidence is None:
            raise faults.StagingFailed(
                "the broker acknowledged no record with its offset",
                why="each was a repeat whose first answer was lost; the transaction's fate could not be "
                "proved later",
            )
        return KafkaCommittable(
            name,
            session.producer_id,
            session.producer_epoch,
            outbox.evidence,
            outbox.acknowledged,
        )

    def _abort(self) -> None:
        name = self._settings.transactional_id
        assert name is not None
        # Its own connection with short time limits: the borrowed one may be what fails.
        wire = KafkaWire(self._settings.connection, timeout_ms=_ABORT_BOUND_MS // 2, clock=self._clock)
        try:
            for left_ms in pauses_ms(_ABORT_BOUND_MS // 2, self._clock):
                code = wire.end_transaction(
                    name,
                    self._session.producer_id,
                    self._session.producer_epoch,
                    EndAction.ABORT,
                    connect_within_ms=left_ms,
                )
                if code not in UNSETTLED:
                    break
        finally:
            wire.close()

    def _release(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            self._pool.give_back(wire)

    def _require(self, phase: _Phase) -> None:
        if self._phase is not phase:
            name = self._settings.transactional_id or "a task"
            raise InternalError(f"nothing can be added, the output of {name} {self._phase.value}")

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._phase = _Phase.FAILED
            raise
