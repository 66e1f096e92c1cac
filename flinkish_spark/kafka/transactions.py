"""Ending prepared transactions from another process than the one that wrote them.

Rules:

- A handle is (transactional id, producer id, epoch). It names *one* transaction only because the
  writer asks for a new epoch before every transaction; otherwise committing an old handle would
  commit whatever is open under it now.
- Code 0 is the only answer that is believed as it stands. On every other answer the record named
  in the committable is read in the log first.
- "Nobody answered" is never an answer: the broker may have acted. It becomes RETRY.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from flinkish_spark.clock import Clock, SystemClock
from flinkish_spark.errors import AuthorizationError, BrokerUnavailableError, CorruptObjectError
from flinkish_spark.kafka._pace import pauses_ms
from flinkish_spark.kafka._wire import KafkaWire
from flinkish_spark.kafka.answers import (
    END_TXN_VERSION,
    UNAUTHORIZED,
    UNSETTLED,
    Code,
    EndAction,
    TransactionView,
    name_of,
)
from flinkish_spark.kafka.evidence import Evidence, EvidenceReader, Fate, Finding
from flinkish_spark.kafka.options import KafkaConnection
from flinkish_spark.protocol.codec import ADDED, Stored, read
from flinkish_spark.protocol.ids import JobUuid, TransactionalId
from flinkish_spark.protocol.outcomes import CommitAnswer, Outcome

_CLOCK = SystemClock()
_ONGOING = "Ongoing"
_OPEN_STATES = (_ONGOING, "PrepareCommit", "PrepareAbort", "PrepareEpochFence")
#: The time limit is that of the next transaction, and this client never begins one; small
#: enough for any broker's maximum.
_FENCING_TIMEOUT_MS = 10_000
_EVIDENCE_PATIENCE_MS = 2_000


@dataclass(frozen=True, slots=True)
class KafkaCommittable(Stored):
    """A prepared transaction: what any process needs to commit or abort it.

    Written by the task that staged the records, after every record was acknowledged; stored in
    the staged file and in the decision; used by :class:`TransactionClient`.

    Parameters
    ----------
    transactional_id, producer_id, producer_epoch
        The handle.
    evidence
        The place of any one record of this transaction.
    records
        How many records it holds, at least one; an empty transaction is no committable.
    protocol_version
        The EndTxn version the handle was prepared for.
    """

    IS_CLOSED: ClassVar = True

    transactional_id: str
    producer_id: int
    producer_epoch: int
    evidence: Evidence
    records: int
    protocol_version: int = field(default=END_TXN_VERSION, metadata=ADDED)

    def __post_init__(self) -> None:
        if not isinstance(self.transactional_id, str) or not self.transactional_id:
            raise ValueError(f"a committable needs a transactional id, got {self.transactional_id!r}")
        lowest = {"producer_id": 0, "producer_epoch": 0, "records": 1}
        for name, least in lowest.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
        if self.protocol_version != END_TXN_VERSION:
            raise ValueError(
                f"EndTxn version {self.protocol_version!r} is not supported, only {END_TXN_VERSION}"
            )

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Return the committable that `value` holds.

        Raises
        ------
        CorruptObjectError
            If a field is missing, unknown or out of range.
        """
        try:
            found: Self = read(cls, value)
        except ValueError as wrong:
            raise CorruptObjectError("A stored Kafka committable cannot be read", why=str(wrong)) from wrong
        return found


@dataclass(frozen=True, slots=True)
class Liveness:
    """Whether a committable can still be committed, with the observation."""

    alive: bool
    reason: str


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that still holds back read_committed readers."""

    transactional_id: TransactionalId
    producer_id: int
    state: str


class TransactionClient:
    """Commits, aborts and looks up transactions that other processes prepared.

    Used by the coordinator, again and again over hours; it reconnects by itself after a broker
    restart. All calls are idempotent, keep nothing between them and may be repeated after a
    crash by a new process. One instance belongs to one thread.

    Parameters
    ----------
    connection
        Where Kafka is.
    retry_budget_ms
        How long one call keeps asking a coordinator that cannot answer yet.
    evidence_patience_ms
        How long an undecided place in the log is read again before the answer is RETRY.
    clock
        Time, replaceable in tests.
    """

    def __init__(
        self,
        connection: KafkaConnection,
        *,
        retry_budget_ms: int = 15_000,
        evidence_patience_ms: int = _EVIDENCE_PATIENCE_MS,
        clock: Clock = _CLOCK,
    ) -> None:
        self._use(KafkaWire(connection, timeout_ms=retry_budget_ms, clock=clock), evidence_patience_ms)

    @classmethod
    def over(cls, wire: KafkaWire) -> TransactionClient:
        """Return a client that asks over `wire`; the two are used, and closed, as one."""
        client = cls.__new__(cls)
        client._use(wire, _EVIDENCE_PATIENCE_MS)
        return client

    def _use(self, wire: KafkaWire, evidence_patience_ms: int) -> None:
        self._wire, self._budget_ms = wire, wire.timeout_ms
        self._reader = EvidenceReader(wire, patience_ms=evidence_patience_ms)

    def close(self) -> None:
        """Close the connection; a later call opens it again."""
        self._wire.close()

    def __enter__(self) -> TransactionClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def commit(self, committable: KafkaCommittable) -> CommitAnswer:
        """Make the records of a decided committable visible.

        Returns
        -------
        CommitAnswer
            COMMITTED (also when repeated while the coordinator still remembers),
            ALREADY_COMMITTED (the log shows it), RETRY (nothing is known), or LOST (the log shows
            that it was aborted, or the record is gone; the detail says which).

        Raises
        ------
        AuthorizationError
            If Kafka refuses the principal.
        """
        return self._ended(committable, EndAction.COMMIT)

    def abort(self, committable: KafkaCommittable) -> CommitAnswer:
        """Drop the records of a committable that was never decided.

        Returns
        -------
        CommitAnswer
            COMMITTED (it is aborted), ALREADY_COMMITTED (it was gone before), RETRY, or FENCED
            (somebody else committed it: another owner decided).

        Raises
        ------
        AuthorizationError
            If Kafka refuses the principal.
        """
        return self._ended(committable, EndAction.ABORT)

    def is_alive(self, committables: Iterable[KafkaCommittable]) -> dict[KafkaCommittable, Liveness]:
        """Tell for each committable whether its transaction is still open under its own epoch.

        One request to each coordinator. To be called right before a decision; a transaction may
        still reach its time limit between this and the commit.

        Raises
        ------
        BrokerUnavailableError
            If a coordinator could not tell within the retry budget; nothing is concluded then.
        AuthorizationError
            If Kafka refuses the principal.
        """
        wanted = list(committables)
        views = self._described(sorted({one.transactional_id for one in wanted}))
        return {one: _liveness(one, views[one.transactional_id]) for one in wanted}

    def list_of_job(self, job: JobUuid) -> list[OpenTransaction]:
        """Return the open transactions of `job`, by exact parsing of their ids.

        Foreign ids never match, whatever they begin with.

        Raises
        ------
        BrokerUnavailableError
            If not all brokers answered.
        """
        found: list[OpenTransaction] = []
        for row in self._wire.list_transactions(_OPEN_STATES):
            parsed = TransactionalId.parse(row.transactional_id)
            # Leading zeros parse to the same numbers; only the spelling we write is ours.
            if parsed is not None and parsed.job == job and str(parsed) == row.transactional_id:
                found.append(OpenTransaction(parsed, row.producer_id, row.state))
        return sorted(found, key=lambda one: one.transactional_id)

    def abort_open(self, transactional_id: TransactionalId) -> CommitAnswer:
        """Abort whatever is open under a leftover id, and fence its producers.

        A new epoch is taken and not just the transaction ended: a task that is still writing
        would otherwise open the next one under the same id.

        Returns
        -------
        CommitAnswer
            COMMITTED (something was open and is aborted), ALREADY_COMMITTED (nothing was open),
            FENCED (its commit was under way; it has been left to finish), or RETRY.

        Raises
        ------
        AuthorizationError
            If Kafka refuses the principal.
        """
        name = str(transactional_id)
        try:
            view = self._described([name])[name]
        except BrokerUnavailableError as lost:
            return CommitAnswer(Outcome.RETRY, str(lost))
        if view.code == Code.TRANSACTIONAL_ID_NOT_FOUND:
            return CommitAnswer(Outcome.ALREADY_COMMITTED, f"{name} is unknown to Kafka")
        code, lost_detail = self._settled(
            name,
            lambda left_ms: (
                self._wire.init_producer_id(name, _FENCING_TIMEOUT_MS, connect_within_ms=left_ms).code
            ),
        )
        if code != Code.NONE:
            return CommitAnswer(Outcome.RETRY, f"{name} was not fenced: {lost_detail or name_of(code)}")
        if view.state == "PrepareCommit":
            return CommitAnswer(Outcome.FENCED, f"{name} was committed by another owner")
        if view.state in _OPEN_STATES:
            return CommitAnswer(Outcome.COMMITTED, f"{name} was open and is aborted")
        return CommitAnswer(Outcome.ALREADY_COMMITTED, f"nothing was open under {name} ({view.state})")

    # -- inside -------------------------------------------------------------------------------

    def _ended(self, one: KafkaCommittable, action: EndAction) -> CommitAnswer:
        code, lost_detail = self._settled(
            one.transactional_id,
            lambda left_ms: self._wire.end_transaction(
                one.transactional_id,
                one.producer_id,
                one.producer_epoch,
                action,
                version=one.protocol_version,
                connect_within_ms=left_ms,
            ),
        )
        if code == Code.NONE:
            return CommitAnswer(Outcome.COMMITTED, f"{one.transactional_id}: {action.value.lower()} accepted")
        if lost_detail or code in UNSETTLED:
            return CommitAnswer(Outcome.RETRY, f"{one.transactional_id}: {lost_detail or name_of(code)}")
        try:
            finding = self._reader.read(one.evidence, one.producer_id, one.producer_epoch)
        except BrokerUnavailableError as lost:
            return CommitAnswer(Outcome.RETRY, f"{one.transactional_id}: {name_of(code)}; {lost}")
        return _concluded(action, finding, f"{one.transactional_id}: Kafka answered {name_of(code)}")

    def _settled(self, transactional_id: str, ask: Callable[[int], int]) -> tuple[int, str]:
        """Ask until the coordinator settles; return the last code and why nobody answered, if so."""
        code, lost_detail = int(Code.COORDINATOR_NOT_AVAILABLE), ""
        for left_ms in pauses_ms(self._budget_ms, self._wire.clock):
            try:
                code, lost_detail = ask(left_ms), ""
            except BrokerUnavailableError as lost:
                lost_detail = str(lost)
                continue
            if code in UNAUTHORIZED:
                raise AuthorizationError(
                    f"Kafka refuses this principal WRITE on transactional id {transactional_id!r} "
                    f"or on a topic of its transaction ({name_of(code)})",
                    code=code,
                )
            if code not in UNSETTLED:
                break
        return code, lost_detail

    def _described(self, transactional_ids: list[str]) -> dict[str, TransactionView]:
        views: dict[str, TransactionView] = {}
        waiting = transactional_ids
        for _left_ms in pauses_ms(self._budget_ms, self._wire.clock):
            views.update(self._wire.describe_transactions(waiting))
            waiting = [one for one in waiting if one not in views or views[one].code in UNSETTLED]
            if not waiting:
                break
        else:
            raise BrokerUnavailableError(
                f"The coordinator of {len(waiting)} Kafka transactions, among them {waiting[0]}, could not "
                f"describe them within {self._budget_ms} ms",
                what_to_do="wait for the cluster to settle",
                transactional_ids=waiting,
            )
        for transactional_id, view in views.items():
            if view.code in UNAUTHORIZED:
                raise AuthorizationError(
                    f"Kafka refuses this principal DESCRIBE on transactional id {transactional_id!r} "
                    f"({name_of(view.code)})",
                    code=view.code,
                )
        return views


def _liveness(one: KafkaCommittable, view: TransactionView) -> Liveness:
    if view.code != Code.NONE:
        return Liveness(False, f"Kafka answered {name_of(view.code)}")
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


def _concluded(action: EndAction, finding: Finding, said: str) -> CommitAnswer:
    if action is EndAction.COMMIT:
        return CommitAnswer(
            _COMMIT_OUTCOMES[finding.fate], f"{said}; {finding.detail}", finding.fate is Fate.ABORTED
        )
    outcome = _ABORT_OUTCOMES[finding.fate]
    if outcome is Outcome.FENCED:
        return CommitAnswer(outcome, f"was committed by another owner ({said}; {finding.detail})")
    return CommitAnswer(outcome, f"{said}; {finding.detail}")
