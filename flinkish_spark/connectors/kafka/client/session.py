"""Identity of a producer: topic metadata, producer id and epoch, and the partitions of its transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import kafka.errors as kafka_errors

from flinkish_spark.connectors.kafka.client import faults
from flinkish_spark.connectors.kafka.client.batches import TRANSACTIONAL_BIT
from flinkish_spark.connectors.kafka.client.client import (
    ConfirmationCounter,
    EndAction,
    Handle,
    KafkaWire,
    ProducerGrant,
    describe_code,
)
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.faults import Reaction, find_reaction
from flinkish_spark.connectors.kafka.client.produce import ProduceClient, TopicLayout
from flinkish_spark.connectors.kafka.client.settings import DeliveryGuarantee, StagingSettings, TaskAttempt
from flinkish_spark.connectors.kafka.client.transactions import TransactionClient
from flinkish_spark.core.clock import tries
from flinkish_spark.core.errors import (
    AuthorizationError,
    BrokerUnavailableError,
    EnvironmentFault,
    FlinkishError,
)
from flinkish_spark.protocol.ids import Place

_T = TypeVar("_T")
#: Age at which cached partitions are asked for again, since partitions can be added.
_LAYOUT_MAX_AGE_MS = 300_000
_UNKNOWN: int = kafka_errors.UnknownTopicOrPartitionError.errno
_INVALID: int = kafka_errors.InvalidTopicError.errno

#: Cached topic layouts of this process, with their time on the monotonic clock. Plain values, so that a
#: forked worker can use its parent's.
_known: dict[KafkaConnection, dict[str, tuple[TopicLayout, int]]] = {}


@dataclass(frozen=True, slots=True)
class Ticket:
    """Producer id and epoch that an attempt got for its task's ticket id; increases with each attempt."""

    producer_id: int
    producer_epoch: int

    def follows(self, other: Ticket | None) -> bool:
        """Return whether no ticket was taken in between; None means that the id was never used."""
        if other is not None and other.producer_epoch < _LAST_EPOCH:
            return self == Ticket(other.producer_id, other.producer_epoch + 1)
        # A new producer id, or the next one after its epochs are used up.
        return self.producer_epoch == 0 and (other is None or self.producer_id != other.producer_id)


#: After this epoch Kafka assigns another producer id; it reserves one more epoch for fencing.
_LAST_EPOCH = 32_766


class ProducerSession:
    """Topic metadata and the producer's identity; this one writes without a producer id."""

    #: Attribute bits of every batch.
    batch_attributes = 0
    #: Whether a begun session may have a transaction to abort.
    is_transactional = False
    #: Ticket of a begun attempt that writes into a shared transaction.
    ticket: Ticket | None = None

    def __init__(self, wire: KafkaWire, settings: StagingSettings) -> None:
        self.settings = settings
        self.use(wire)
        self._layouts = _known.setdefault(wire.connection, {})
        self.producer_id = -1
        self.producer_epoch = -1
        self.is_begun = False

    def use(self, wire: KafkaWire) -> None:
        self.wire, self.client = wire, ProduceClient(wire)

    def begin(self) -> None:
        self.is_begun = True

    def join(self, places: Iterable[Place]) -> None:
        """Prepare writing to partitions; may raise the errors of :meth:`begin`."""

    def first_sequence(self, place: Place) -> int:
        return 0

    def _take(self, what: str, right: str, ask: Callable[[int], ProducerGrant]) -> None:
        grant = self.ask_brokers(what, right, ask, lambda grant: self.why_ask_again(what, [grant.code]))
        self.producer_id, self.producer_epoch = grant.producer_id, grant.producer_epoch
        self.is_begun = True

    def layout(self, topic: str) -> TopicLayout:
        """Return partitions and leaders of a topic, at most five minutes old."""
        known = self._layouts.get(topic)
        now_ms = self.wire.clock.monotonic_ms()
        if known is None or now_ms - known[1] > _LAYOUT_MAX_AGE_MS:
            self.refresh([topic])
        return self._layouts[topic][0]

    def layout_with(self, topic: str, partition: int) -> TopicLayout:
        if partition >= len(self.layout(topic).leaders):
            self.refresh([topic])
        return self.layout(topic)

    def leader(self, place: Place) -> int:
        leaders = self.layout(place[0]).leaders
        return leaders[place[1]] if place[1] < len(leaders) else -1

    def refresh(self, topics: Iterable[str]) -> None:
        """Ask for partitions and leaders of topics now."""
        wanted = sorted(set(topics))
        for topic in wanted:
            self._layouts.pop(topic, None)
        what, doubt = f"describe topics {', '.join(wanted)}", ConfirmationCounter()

        def why_ask_again(found: dict[str, TopicLayout]) -> str:
            codes = {topic: layout.code for topic, layout in found.items()}
            self.check_topics_allowed(codes.items())
            is_believed = doubt.is_confirmed(_UNKNOWN in codes.values())
            for topic, code in codes.items():
                if code == _INVALID or (code == _UNKNOWN and is_believed):
                    raise faults.make_staging_error(
                        f"topic '{topic}' does not exist",
                        why=f"the brokers at {self.wire.connection.servers} do not know it",
                        what_to_do="create it, or correct its name",
                        topic=topic,
                    )
            return self.why_ask_again(what, codes.values())

        found = self.ask_brokers(
            what,
            f"DESCRIBE on topics [{', '.join(wanted)}]",
            lambda left_ms: self.client.layouts(wanted, connect_within_ms=left_ms),
            why_ask_again,
        )
        now_ms = self.wire.clock.monotonic_ms()
        self._layouts.update((topic, (layout, now_ms)) for topic, layout in found.items())

    def check_topics_allowed(self, codes: Iterable[tuple[str, int]]) -> None:
        denied = [topic for topic, code in codes if code == faults.TOPIC_DENIED]
        if denied:
            right = faults.describe_missing_right(faults.TOPIC_DENIED, denied, self.settings.transactional_id)
            raise faults.make_missing_right_error(right)

    def ask_brokers(
        self, what: str, right: str, ask: Callable[[int], _T], why_ask_again: Callable[[_T], str]
    ) -> _T:
        """Ask until `why_ask_again` returns "" for the answer; it raises on a refusal."""
        budget_ms = self.settings.producer.delivery_timeout_ms
        last = ""
        for left_ms in tries(budget_ms, self.wire.clock):
            try:
                answer = ask(left_ms)
            except BrokerUnavailableError as lost:
                last = lost.why
                continue
            except AuthorizationError as denied:
                raise faults.mark_authorization_error(denied, right) from None
            except EnvironmentFault as broken:
                raise faults.make_staging_outage(
                    f"could not {what}: {faults.to_one_line(broken.what)}",
                    why=faults.to_one_line(broken.why),
                    what_to_do=broken.what_to_do,
                ) from None
            last = why_ask_again(answer)
            if not last:
                return answer
        raise faults.make_unanswered_error(what, budget_ms, last)

    def why_ask_again(self, what: str, codes: Iterable[int]) -> str:
        """Return the reason to ask again, or ""; raise if another attempt cannot help."""
        last = ""
        for code in codes:
            match find_reaction(code):
                case Reaction.DONE:
                    continue
                case Reaction.AGAIN | Reaction.ASK_FOR_LEADER:
                    last = f"Kafka answered {describe_code(code)}"
                case _:
                    raise self.make_error(what, code)
        return last

    def make_error(self, what: str, code: int, topics: Iterable[str] = (), detail: str = "") -> FlinkishError:
        name = self.settings.transactional_id
        match find_reaction(code):
            case Reaction.NOT_AUTHORIZED:
                return faults.make_missing_right_error(faults.describe_missing_right(code, topics, name))
            case Reaction.FENCED:
                return faults.make_staging_outage(
                    f"the transaction of {name} is no longer ours ({describe_code(code)})",
                    why="another attempt took its id, or its transaction timeout passed",
                    transactional_id=name,
                    code=code,
                )
            case _:
                if code == kafka_errors.InvalidTransactionTimeoutError.errno:
                    limit = "transaction.max.timeout.ms"
                    detail = detail or f"the transaction timeout is above the broker's {limit}"
                why = faults.to_one_line(detail)
                return faults.make_staging_error(
                    f"Kafka refused to {what} ({describe_code(code)})", why=why, code=code
                )


class IdempotentSession(ProducerSession):
    """Idempotent producer: a batch that is sent again is written once."""

    def begin(self) -> None:
        right = faults.describe_missing_right(faults.CLUSTER_DENIED, (), None)
        self._take(
            "get a producer id", right, lambda left_ms: self.client.init_idempotent(connect_within_ms=left_ms)
        )


class TransactionSession(ProducerSession):
    batch_attributes = TRANSACTIONAL_BIT
    is_transactional = True

    def __init__(self, wire: KafkaWire, settings: StagingSettings) -> None:
        super().__init__(wire, settings)
        assert settings.transactional_id is not None
        self._name = settings.transactional_id
        self._joined: set[Place] = set()

    @property
    def handle(self) -> Handle:
        return Handle(self._name, self.producer_id, self.producer_epoch)

    def begin(self) -> None:
        """Take a new epoch of the transactional id, which fences its producers and aborts what is open."""
        # This order matters: without a new epoch for every transaction a handle would name two of them, and a
        # commit of the older one would commit the newer data.
        if (attempt := self.settings.attempt) is not None:
            # Choose the id as late as possible, so that no other attempt takes it before its use.
            self._name = find_free_transactional_id(self.wire, self._name, attempt)
            self.settings = replace(self.settings, transactional_id=self._name, attempt=None)
        self._take_epoch(self._name)

    def _take_epoch(self, name: str) -> None:
        timeout_ms = self.settings.transaction_timeout_ms

        def ask(left_ms: int) -> ProducerGrant:
            return self.wire.init_producer_id(name, timeout_ms, connect_within_ms=left_ms)

        right = faults.describe_missing_right(faults.ID_DENIED, (), name)
        self._take(f"initialise transactional id {name}", right, ask)

    def join(self, places: Iterable[Place]) -> None:
        new = sorted(set(places) - self._joined)
        if not new:
            return
        name = self._name
        what = f"add partitions to the transaction of {name}"

        def ask(left_ms: int) -> dict[Place, int]:
            return self.client.add_partitions(self.handle, new, connect_within_ms=left_ms)

        def why_ask_again(codes: dict[Place, int]) -> str:
            self.check_topics_allowed((topic, code) for (topic, _), code in codes.items())
            if any(find_reaction(code) is Reaction.ASK_FOR_LEADER for code in codes.values()):
                # Raises if the topic was deleted; otherwise the coordinator may not know it yet.
                self.refresh({topic for topic, _ in new})
            return self.why_ask_again(what, codes.values())

        right = faults.describe_missing_right(faults.ID_DENIED, (), name)
        self.ask_brokers(what, right, ask, why_ask_again)
        self._joined.update(new)

    def commit_offsets(self, group: str, offsets: Mapping[Place, int], note: str) -> None:
        right = f"READ on the consumer group {group}"

        def check_codes(codes: Iterable[int]) -> str:
            found = [code for code in codes if code]
            if kafka_errors.GroupAuthorizationFailedError.errno in found:
                raise faults.make_missing_right_error(right)
            return self.why_ask_again(f"store the offsets of group {group}", found)

        self.ask_brokers(
            f"add the group {group} to {self._name}",
            right,
            lambda left_ms: self.client.add_group(self.handle, group, connect_within_ms=left_ms),
            lambda code: check_codes([code]),
        )
        self.ask_brokers(
            f"store the offsets of group {group}",
            right,
            lambda left_ms: self.client.commit_in_transaction(
                self.handle, group, offsets, note, connect_within_ms=left_ms
            ),
            lambda codes: check_codes(codes.values()),
        )

    def commit(self) -> None:
        """Commit the transaction; the next one may begin, under the same epoch."""
        what = f"commit the transaction of {self._name}"
        right = faults.describe_missing_right(faults.ID_DENIED, (), self._name)
        self.ask_brokers(
            what,
            right,
            lambda left_ms: self.wire.end_transaction(
                self.handle, EndAction.COMMIT, connect_within_ms=left_ms
            ),
            lambda code: self.why_ask_again(what, [code]),
        )
        self._joined.clear()


class SharedSession(TransactionSession):
    """Producer of a task in a shared transaction, which the driver begins and ends."""

    # Spark may run a task again while an earlier attempt still writes, and brokers cannot distinguish the
    # two: they acknowledge and drop a batch with the sequence numbers of an earlier one. So an attempt takes
    # a ticket first, and then checks whether another attempt has written. If two attempts check at the same
    # time, both have a ticket, and the driver gives the transaction up.

    #: The driver aborts, not the task.
    is_transactional = False

    def __init__(self, wire: KafkaWire, settings: StagingSettings) -> None:
        super().__init__(wire, settings)
        assert settings.shared is not None
        self._shared = settings.shared

    def begin(self) -> None:
        # This order matters: before the attempt writes, its ticket lets the driver know about it.
        self._take_epoch(self._shared.ticket)
        self.ticket = Ticket(self.producer_id, self.producer_epoch)
        self.producer_id, self.producer_epoch = self._shared.producer_id, self._shared.producer_epoch

    def join(self, places: Iterable[Place]) -> None:
        """Check that partitions have only the records that the driver knows of."""
        new = sorted(set(places) - self._joined)
        if not new:
            return
        found = self.ask_brokers(
            f"describe the producers of {len(new)} partitions",
            f"READ on topics [{', '.join(sorted({topic for topic, _ in new}))}]",
            lambda _left_ms: self.wire.last_sequences(new, self.producer_id, self.producer_epoch),
            lambda _found: "",
        )
        for place, last in found.items():
            wanted = self._shared.find_next_sequence(place)
            if wanted is None:
                raise faults.make_staging_error(
                    f"partition {place[1]} of topic {place[0]} is not in the checkpoint's transaction",
                    why="it was added to the topic since the checkpoint began",
                )
            # Sequence numbers wrap after 2**31 - 1 records; a transaction has fewer.
            if last != (wanted - 1 if wanted else None):
                raise faults.make_staging_error(
                    f"partition {place[1]} of topic {place[0]} is not as it was when the micro-batch began",
                    why="another attempt of its task has written to it, and brokers cannot tell them apart",
                    what_to_do="none: the transaction is given up, and its micro-batches run again",
                    transactional_id=self._name,
                    topic=place[0],
                    partition=place[1],
                )
        self._joined.update(new)

    def first_sequence(self, place: Place) -> int:
        return self._shared.find_next_sequence(place) or 0


SESSIONS = {
    DeliveryGuarantee.EXACTLY_ONCE: TransactionSession,
    DeliveryGuarantee.AT_LEAST_ONCE: IdempotentSession,
    DeliveryGuarantee.NONE: ProducerSession,
}


#: Transactional ids of a task per stage attempt; Spark restarts task attempt numbers in each of these.
_ATTEMPTS_PER_STAGE_ATTEMPT = 16
MAX_ATTEMPT_INDEX = 64
_ONGOING = "Ongoing"


def find_free_transactional_id(wire: KafkaWire, prefix: str, attempt: TaskAttempt) -> str:
    """Return an id ``<prefix>-<partition>-<index>`` without an open transaction."""
    # When executors are lost Spark runs a stage again while old tasks may still write, and numbers task
    # attempts from 0 again; PySpark does not tell the stage attempt. Taking the id of a task whose result
    # Spark has accepted would abort its transaction, so the coordinator is asked first.
    indexes = range(attempt.number, MAX_ATTEMPT_INDEX, _ATTEMPTS_PER_STAGE_ATTEMPT)
    names = [f"{prefix}-{attempt.partition}-{index}" for index in indexes]
    if attempt.number < _ATTEMPTS_PER_STAGE_ATTEMPT:
        views = TransactionClient.from_wire(wire).describe(names)
        for name in names:
            view = views.get(name)
            if view is None or view.code or view.state != _ONGOING:
                return name
    raise EnvironmentFault(
        f"attempt {attempt.number} of task {attempt.partition} has no transactional id left",
        why=f"a task has {_ATTEMPTS_PER_STAGE_ATTEMPT} for each of {len(names)} attempts of its stage",
        what_to_do="lower spark.task.maxFailures, or find out why tasks fail so often",
    )
