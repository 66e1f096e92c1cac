"""The part of a task's output that is talk about it: who we are, where we write.

A session for each guarantee: a transaction, a producer id alone, or nothing. Rules:

- InitProducerId comes before every transaction. Without it (transactional id, producer id, epoch)
  would name two transactions, and committing the older handle would commit the newer data.
- A partition is part of the transaction (AddPartitionsToTxn) before anything is written to it.
- Every question is asked again until it is settled or the delivery timeout is over; an error code
  that asking again cannot change ends it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from flinkish_spark.errors import (
    AuthorizationError,
    BrokerUnavailableError,
    EnvironmentFault,
    FlinkishError,
)
from flinkish_spark.kafka import staging_faults as faults
from flinkish_spark.kafka._pace import pauses_ms
from flinkish_spark.kafka._wire import KafkaWire
from flinkish_spark.kafka._wire_produce import ProduceClient, TopicLayout
from flinkish_spark.kafka.answers import Place, ProducerGrant
from flinkish_spark.kafka.delivery import DeliveryGuarantee
from flinkish_spark.kafka.options import KafkaConnection
from flinkish_spark.kafka.record_batch import TRANSACTIONAL_BIT
from flinkish_spark.kafka.staging_settings import StagingSettings
from flinkish_spark.kafka.write_answers import Reaction, WriteCode, described, reaction_to

_T = TypeVar("_T")
#: Partitions can be added to a topic: this old, what we know is asked for again.
_LAYOUT_MAX_AGE_MS = 300_000
#: A broker that just started may not know a topic yet; this many answers in a row are believed.
_ABSENCES_BELIEVED = 4

#: What this process knows about topics, and since when on the monotonic clock. Plain values, so a
#: forked worker may use what its parent knew.
_known: dict[KafkaConnection, dict[str, tuple[TopicLayout, int]]] = {}


class ProducerSession:
    """Topics and their partitions, and who writes into them: here nobody in particular.

    Parameters
    ----------
    wire
        Borrowed for the output.
    settings
        Of the output.

    Attributes
    ----------
    producer_id, producer_epoch
        -1 without idempotence.
    is_begun
        Whether :meth:`begin` was called with success.
    """

    #: What every batch is, as bits of its attributes.
    batch_attributes = 0
    #: Whether something may have to be aborted, once it is begun.
    is_transactional = False

    def __init__(self, wire: KafkaWire, settings: StagingSettings) -> None:
        self.wire, self.client, self.settings = wire, ProduceClient(wire), settings
        self._layouts = _known.setdefault(wire.connection, {})
        self.producer_id = -1
        self.producer_epoch = -1
        self.is_begun = False

    def begin(self) -> None:
        """Become who writes.

        Raises
        ------
        AuthorizationError, StagingFailed
            If Kafka refuses it, or nobody answered in time.
        """
        self.is_begun = True

    def join(self, places: Iterable[Place]) -> None:
        """Make partitions part of what is written, unless they are; raises as :meth:`begin`."""

    def _take(self, what: str, right: str, ask: Callable[[int], ProducerGrant]) -> None:
        grant = self._asked(what, right, ask, lambda grant: self._unsettled(what, [grant.code]))
        self.producer_id, self.producer_epoch = grant.producer_id, grant.producer_epoch
        self.is_begun = True

    def layout(self, topic: str) -> TopicLayout:
        """Return partitions and leaders of a topic, at most five minutes old.

        Raises
        ------
        AuthorizationError, StagingFailed
            If the topic does not exist or may not be described, or nobody answered in time.
        """
        known = self._layouts.get(topic)
        now_ms = self.wire.clock.monotonic_ms()
        if known is None or now_ms - known[1] > _LAYOUT_MAX_AGE_MS:
            self.refresh([topic])
        return self._layouts[topic][0]

    def layout_with(self, topic: str, partition: int) -> TopicLayout:
        """Return the layout of a topic, asked for again if it does not have `partition` yet."""
        if partition >= len(self.layout(topic).leaders):
            self.refresh([topic])
        return self.layout(topic)

    def leader(self, place: Place) -> int:
        """Return the broker that leads a partition as far as we know, or -1."""
        leaders = self.layout(place[0]).leaders
        return leaders[place[1]] if place[1] < len(leaders) else -1

    def refresh(self, topics: Iterable[str]) -> None:
        """Ask for partitions and leaders now; see :meth:`layout`."""
        wanted = sorted(set(topics))
        for topic in wanted:
            self._layouts.pop(topic, None)
        absences = 0

        def unsettled(found: dict[str, TopicLayout]) -> str:
            nonlocal absences
            codes = {topic: layout.code for topic, layout in found.items()}
            denied = [topic for topic, code in codes.items() if _is_topic_denied(code)]
            if denied:
                raise faults.not_authorized(
                    faults.missing_right(_TOPIC_DENIED, denied, self.settings.transactional_id)
                )
            absences = absences + 1 if WriteCode.UNKNOWN_TOPIC_OR_PARTITION in codes.values() else 0
            believed = _ABSENT if absences == _ABSENCES_BELIEVED else (WriteCode.INVALID_TOPIC_EXCEPTION,)
            for topic, code in codes.items():
                if code in believed:
                    raise faults.no_such_topic(topic, self.wire.connection.servers)
            return self._unsettled(f"describe topics {', '.join(wanted)}", codes.values())

        found = self._asked(
            f"describe topics {', '.join(wanted)}",
            f"DESCRIBE on topics [{', '.join(wanted)}]",
            lambda left_ms: self.client.layouts(wanted, connect_within_ms=left_ms),
            unsettled,
        )
        now_ms = self.wire.clock.monotonic_ms()
        self._layouts.update((topic, (layout, now_ms)) for topic, layout in found.items())

    # -- inside -------------------------------------------------------------------------------

    def _asked(self, what: str, right: str, ask: Callable[[int], _T], unsettled: Callable[[_T], str]) -> _T:
        """Ask until `unsettled` has nothing to say about the answer; it raises on a refusal."""
        budget_ms = self.settings.producer.delivery_timeout_ms
        last = ""
        for left_ms in pauses_ms(budget_ms, self.wire.clock):
            try:
                answer = ask(left_ms)
            except BrokerUnavailableError as lost:
                last = lost.why
                continue
            except AuthorizationError as denied:
                raise faults.denied(denied, right) from None
            except EnvironmentFault as broken:
                raise faults.unreachable(what, broken) from None
            last = unsettled(answer)
            if not last:
                return answer
        raise faults.unanswered(what, budget_ms, last)

    def _unsettled(self, what: str, codes: Iterable[int]) -> str:
        """Return why to ask again, if so; raise if that cannot help."""
        last = ""
        for code in codes:
            match reaction_to(code):
                case Reaction.DONE:
                    continue
                case Reaction.AGAIN | Reaction.ASK_FOR_LEADER:
                    last = f"Kafka answered {described(code)}"
                case _:
                    raise self.fault(what, code)
        return last

    def fault(self, what: str, code: int, topics: Iterable[str] = (), detail: str = "") -> FlinkishError:
        """Return the error for a code that asking again cannot change."""
        name = self.settings.transactional_id
        match reaction_to(code):
            case Reaction.NOT_AUTHORIZED:
                return faults.not_authorized(faults.missing_right(code, topics, name))
            case Reaction.FENCED:
                return faults.fenced(name, code)
            case _:
                return faults.refused(what, code, detail)


class IdempotentSession(ProducerSession):
    """A producer id of its own: a batch that is sent again is written once."""

    def begin(self) -> None:
        """Get a producer id that nobody else has."""
        right = faults.missing_right(WriteCode.CLUSTER_AUTHORIZATION_FAILED, (), None)
        self._take(
            "get a producer id", right, lambda left_ms: self.client.init_idempotent(connect_within_ms=left_ms)
        )


class TransactionSession(ProducerSession):
    """One producer id and epoch, and the partitions of its transaction; for one transaction."""

    batch_attributes = TRANSACTIONAL_BIT
    is_transactional = True

    def __init__(self, wire: KafkaWire, settings: StagingSettings) -> None:
        super().__init__(wire, settings)
        assert settings.transactional_id is not None
        self._name = settings.transactional_id
        self._joined: set[Place] = set()

    def begin(self) -> None:
        """Take a new epoch of the transactional id; fences its producers, aborts what they left open."""
        name, timeout_ms = self._name, self.settings.transaction_timeout_ms

        def ask(left_ms: int) -> ProducerGrant:
            return self.wire.init_producer_id(name, timeout_ms, connect_within_ms=left_ms)

        right = faults.missing_right(WriteCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, (), name)
        self._take(f"initialise transactional id {name}", right, ask)

    def join(self, places: Iterable[Place]) -> None:
        """Make partitions part of the transaction, unless they are."""
        new = sorted(set(places) - self._joined)
        if not new:
            return
        name = self._name
        what = f"add partitions to the transaction of {name}"

        def ask(left_ms: int) -> dict[Place, int]:
            return self.client.add_partitions(
                name, self.producer_id, self.producer_epoch, new, connect_within_ms=left_ms
            )

        def unsettled(codes: dict[Place, int]) -> str:
            denied = [topic for (topic, _), code in codes.items() if _is_topic_denied(code)]
            if denied:
                raise faults.not_authorized(faults.missing_right(_TOPIC_DENIED, denied, name))
            if any(reaction_to(code) is Reaction.ASK_FOR_LEADER for code in codes.values()):
                # Raises if the topic is gone; the coordinator may also just not know it yet.
                self.refresh({topic for topic, _ in new})
            return self._unsettled(what, codes.values())

        right = faults.missing_right(WriteCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, (), name)
        self._asked(what, right, ask, unsettled)
        self._joined.update(new)


_SESSIONS = {
    DeliveryGuarantee.EXACTLY_ONCE: TransactionSession,
    DeliveryGuarantee.AT_LEAST_ONCE: IdempotentSession,
    DeliveryGuarantee.NONE: ProducerSession,
}


def session_for(wire: KafkaWire, settings: StagingSettings) -> ProducerSession:
    """Return the session that the guarantee of `settings` needs; it is not begun yet."""
    return _SESSIONS[settings.guarantee](wire, settings)


_TOPIC_DENIED = WriteCode.TOPIC_AUTHORIZATION_FAILED
_ABSENT = (WriteCode.UNKNOWN_TOPIC_OR_PARTITION, WriteCode.INVALID_TOPIC_EXCEPTION)


def _is_topic_denied(code: int) -> bool:
    return code == _TOPIC_DENIED
