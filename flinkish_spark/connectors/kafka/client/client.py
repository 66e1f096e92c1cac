"""The Kafka client: calls to brokers, transactions at their coordinators, and the pool of connections.

A broker's answer is a value (an error code, a slice of a log). Only a missing answer and a missing right are
exceptions, so that no caller concludes anything from a lost connection. After a lost connection the client
closes kafka-python's admin client, and the next call makes a new one: its own reconnecting backs off for up
to 30 s and keeps stale coordinators. Topics are never created, even with ``auto.create.topics.enable``.
"""

from __future__ import annotations

import enum
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Self, TypeVar

from flinkish_spark.core.clock import Clock, SystemClock, tries
from flinkish_spark.core.errors import AuthorizationError, BrokerUnavailableError, EnvironmentFault
from flinkish_spark.core.forks import ProcessConnection, keep_forever
from flinkish_spark.protocol.ids import Place

#: The release whose internals this module was written against.
PINNED_VERSION = "3.0.12"
_WRONG_CLIENT = "The installed kafka-python lacks what flinkish_spark needs"
_INSTALL = f"install kafka-python=={PINNED_VERSION}"

try:
    import kafka.errors as kafka_errors
    from kafka import KafkaAdminClient, TopicPartition
    from kafka.admin import TransactionListing
    from kafka.protocol.admin.transactions import DescribeTransactionsRequest
    from kafka.protocol.metadata import CoordinatorType
    from kafka.protocol.producer import EndTxnRequest, InitProducerIdRequest, ProduceRequest

    from flinkish_spark.connectors.kafka.client.connection import KafkaConnection, connect_admin
except ImportError as missing:
    raise EnvironmentFault(_WRONG_CLIENT, why=str(missing), what_to_do=_INSTALL) from missing

_INIT_PRODUCER_ID_VERSION = 4
_PRODUCE_VERSION_OF_3_7 = 10
_MAX_CACHED_COORDINATORS = 10_000
#: kafka-python closes the connection on a larger answer.
MAX_FRAME_BYTES = 100_000_000
#: EndTxn v3 does not raise the epoch. Mixing it with v5, which does, makes a repeat answer
#: "fenced", so a committable stores the version it was prepared for.
END_TXN_VERSION = 3


def _codes(*errors: Any) -> frozenset[int]:
    return frozenset(error.errno for error in errors)


#: Errors: another broker is the coordinator, or none is now.
_MOVED = _codes(kafka_errors.CoordinatorNotAvailableError, kafka_errors.NotCoordinatorError)
#: Errors to retry: the coordinator moves, loads, or still writes the markers of the previous call.
UNSETTLED = _MOVED | _codes(
    kafka_errors.CoordinatorLoadInProgressError, kafka_errors.ConcurrentTransactionsError
)
#: Errors of missing rights: retrying cannot help.
UNAUTHORIZED = _codes(
    kafka_errors.TopicAuthorizationFailedError,
    kafka_errors.GroupAuthorizationFailedError,
    kafka_errors.ClusterAuthorizationFailedError,
    kafka_errors.TransactionalIdAuthorizationFailedError,
)
UNKNOWN_PARTITION: int = kafka_errors.UnknownTopicOrPartitionError.errno


def describe_code(code: int) -> str:
    return f"{code} {kafka_errors.for_code(code).message}"


class EndAction(enum.Enum):
    COMMIT = "COMMIT"
    ABORT = "ABORT"


class Isolation(enum.IntEnum):
    """Isolation level of a reader; the numbers are the protocol's."""

    READ_UNCOMMITTED = 0
    READ_COMMITTED = 1


class Handle(NamedTuple):
    transactional_id: str
    producer_id: int
    producer_epoch: int


@dataclass(frozen=True, slots=True)
class ProducerGrant:
    """Answer to InitProducerId; `producer_id` and `producer_epoch` are valid only if `code` is 0."""

    code: int
    producer_id: int = -1
    producer_epoch: int = -1


@dataclass(frozen=True, slots=True)
class TransactionView:
    """A coordinator's description of a transactional id; all but `code` is valid only if it is 0."""

    code: int
    state: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int | None = None
    #: Start of the open transaction by the broker's wall clock; None if none is open.
    began_at_ms: int | None = None

    def age_ms(self, now_ms: int) -> int | None:
        return None if self.began_at_ms is None else max(0, now_ms - self.began_at_ms)


@dataclass(frozen=True, slots=True)
class ActiveProducer:
    producer_id: int
    producer_epoch: int
    #: -1 before its first record of this epoch.
    last_sequence: int
    #: First offset of its open transaction in the partition; None if it has none there.
    open_since: int | None

    @property
    def handle(self) -> tuple[int, int]:
        return (self.producer_id, self.producer_epoch)


#: A broker that has just started may not know its topics or the end of its logs yet. So a loss is confirmed
#: after this many answers in a row, with this pause.
_LOSSES_BELIEVED, _LOSS_PAUSE_MS = 4, 500

_T = TypeVar("_T")


class ConfirmationCounter:
    """Counts missing answers in a row, until the loss is confirmed: the broker may just have started."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def is_confirmed(self, is_missing: bool) -> bool:
        self._in_a_row = self._in_a_row + 1 if is_missing else 0
        return not is_missing or self._in_a_row >= _LOSSES_BELIEVED


def poll_until_confirmed(look: Callable[[], _T], is_missing: Callable[[_T], bool], clock: Clock) -> _T:
    """Call `look` until nothing is missing, or until the loss is confirmed; return its result."""
    doubt = ConfirmationCounter()
    while not doubt.is_confirmed(is_missing(seen := look())):
        clock.sleep_ms(_LOSS_PAUSE_MS)
    return seen


for _internal in (
    "_async_get_leader_for_partitions",
    "_find_coordinator_ids",
    "_list_group_offsets_process_response",
    "_list_group_offsets_requests",
):
    if not hasattr(KafkaAdminClient, _internal):
        raise EnvironmentFault(_WRONG_CLIENT, why=f"KafkaAdminClient has no {_internal}", what_to_do=_INSTALL)
_CLOCK = SystemClock()
_REFUSALS = (kafka_errors.AuthorizationError, kafka_errors.SaslAuthenticationFailedError)
#: Error -> the missing right; READ and WRITE include DESCRIBE.
_RIGHTS = {
    kafka_errors.TopicAuthorizationFailedError: "READ on it for a source, WRITE for a sink",
    kafka_errors.GroupAuthorizationFailedError: "READ on it",
    kafka_errors.TransactionalIdAuthorizationFailedError: "WRITE and DESCRIBE on transactional ids with the "
    "prefix 'flinkish-'",
}


class UnknownRequest(EnvironmentFault):
    """The brokers do not support a request in a usable version: they are too old, or not Apache Kafka."""


class KafkaWire(ProcessConnection):
    """Synchronous requests to Kafka over one kafka-python admin client; belongs to one thread."""

    def __init__(
        self, connection: KafkaConnection, *, timeout_ms: int = 15_000, clock: Clock = _CLOCK
    ) -> None:
        self.connection = connection
        self.timeout_ms = timeout_ms
        self.clock = clock
        connection.to_client_arguments()  # refuse unusable options here, not in the first call
        self._admin: Any = None
        self.keep_from_children()

    def leave_to_parent(self) -> None:
        if self._admin is not None:
            keep_forever(self._admin)
            self._admin = None

    def close(self) -> None:
        admin, self._admin = self._admin, None
        if admin is not None:
            admin.close()

    def attempt(
        self,
        what: str,
        body: Callable[[Any], _T],
        *,
        connect_within_ms: int | None = None,
        refused: Callable[[int], _T] | None = None,
    ) -> _T:
        """Run `body(admin client)` once; `refused` converts an error code from Kafka to the result."""
        if self._admin is None:
            arguments = {
                "reconnect_backoff_max_ms": 1000,
                # A hung broker must leave enough time to try another one.
                "request_timeout_ms": max(1000, self.timeout_ms * 2 // 3),
                # Read again each time: a certificate may have been renewed.
                **self.connection.to_client_arguments(),
            }
            try:
                within_ms = self.timeout_ms if connect_within_ms is None else connect_within_ms
                self._admin = connect_admin(arguments, self.connection.servers, within_ms)
            except (kafka_errors.KafkaError, OSError) as failed:
                raise self._make_unavailable_error("connect", failed) from failed
        try:
            return body(self._admin)
        except _REFUSALS as denied:
            self._raise_authorization_error(what, denied)
        except kafka_errors.IncompatibleBrokerVersion as unknown:
            raise UnknownRequest(
                f"The Kafka brokers at {self.connection.servers} do not know the request to {what}",
                why=str(unknown),
                what_to_do="use Kafka 3.0 or later",
                bootstrap_servers=self.connection.servers,
            ) from unknown
        except kafka_errors.BrokerResponseError as answer:
            self.forget_moved_coordinators([answer.errno])
            if isinstance(answer, kafka_errors.RequestTimedOutError):
                self._raise_unavailable(what, answer)
            if refused is None:
                raise
            return refused(int(answer.errno))
        except (kafka_errors.KafkaError, OSError) as lost:
            self._raise_unavailable(what, lost)

    def call(self, what: str, body: Callable[[Any], _T]) -> _T:
        """Run `body(admin client)`; retry after a lost connection or a retriable error."""
        last: BaseException | None = None
        for left_ms in tries(self.timeout_ms, self.clock):
            try:
                return self.attempt(what, body, connect_within_ms=left_ms)
            except BrokerUnavailableError as lost:
                last = lost.__cause__ or lost
            except kafka_errors.BrokerResponseError as answer:
                if not answer.retriable:
                    raise EnvironmentFault(
                        f"Kafka refused to {what}",
                        why=str(answer),
                        what_to_do="see what the brokers' logs say about it",
                        code=answer.errno,
                    ) from answer
                last = answer
        raise self._make_unavailable_error(what, last) from last

    def _raise_unavailable(self, what: str, cause: BaseException) -> NoReturn:
        self.close()
        raise self._make_unavailable_error(what, cause) from cause

    def _make_unavailable_error(self, what: str, cause: BaseException | None) -> BrokerUnavailableError:
        servers = self.connection.servers
        return BrokerUnavailableError(
            f"No Kafka broker at {servers} answered the request to {what}",
            why=str(cause) if cause is not None else f"{self.timeout_ms} ms passed",
            what_to_do="start the broker, or correct bootstrap_servers and the security options",
            bootstrap_servers=servers,
        )

    def _raise_authorization_error(self, what: str, cause: BaseException) -> NoReturn:
        self.close()
        right = next((right for kind, right in _RIGHTS.items() if isinstance(cause, kind)), "")
        raise AuthorizationError(
            f"Kafka refuses this principal the request to {what}",
            why=str(cause),
            what_to_do=f"add an ACL that allows {right}" if right else "",
        ) from cause

    def end_transaction(
        self, handle: Handle, action: EndAction, *, version: int = END_TXN_VERSION, connect_within_ms: int
    ) -> int:
        """Ask the coordinator once to end a transaction; return its error code, 0 if it did."""
        request = EndTxnRequest(
            **handle._asdict(), committed=action is EndAction.COMMIT, min_version=version, max_version=version
        )
        what = f"{action.value.lower()} transaction {handle.transactional_id}"
        return self.ask_coordinator(what, handle.transactional_id, request, connect_within_ms)[0]

    def init_producer_id(
        self, transactional_id: str, timeout_ms: int, *, connect_within_ms: int | None = None
    ) -> ProducerGrant:
        """Ask once for a new epoch of `transactional_id`, which fences producers and aborts what is open."""
        request = make_init_request(transactional_id, timeout_ms)
        what = f"initialise transactional id {transactional_id}"
        code, answer = self.ask_coordinator(what, transactional_id, request, connect_within_ms)
        ids = () if answer is None else (answer.producer_id, answer.producer_epoch)
        return ProducerGrant(code, *ids)

    def ask_coordinator(
        self, what: str, transactional_id: str, request: Any, within_ms: int | None
    ) -> tuple[int, Any]:
        async def body(admin: Any) -> tuple[int, Any]:
            nodes = await _coordinators(admin, [transactional_id])
            answer = await admin._manager.send(request, node_id=nodes[transactional_id])
            return int(answer.error_code), answer

        found = self.attempt(
            what, make_blocking(body), connect_within_ms=within_ms, refused=lambda code: (code, None)
        )
        self.forget_moved_coordinators([found[0]])
        return found

    def forget_moved_coordinators(self, codes: Iterable[int]) -> None:
        """Clear the coordinator cache if one of the codes says that a coordinator has moved."""
        # kafka-python never clears it, and the broker coordinated more than one id.
        if self._admin is not None and not _MOVED.isdisjoint(codes):
            self._admin._manager.cluster._coordinators.clear()

    def group_offsets(self, group: str, isolation: Isolation) -> dict[Place, tuple[int, str]]:
        async def body(admin: Any) -> dict[Any, Any]:
            nodes = await admin._find_coordinator_ids([group], CoordinatorType.GROUP)
            # A single request: there is one group.
            ((name, request),) = admin._list_group_offsets_requests({group: None})
            request.require_stable = isolation is Isolation.READ_COMMITTED
            response = await admin._manager.send(request, node_id=nodes[group])
            found: dict[Any, Any] = admin._list_group_offsets_process_response(response, group_id=name)
            return found

        found = self.call(f"read the offsets of group {group}", make_blocking(body))
        return {
            (place.topic, place.partition): (int(entry.offset), str(entry.metadata or ""))
            for place, entry in found[group].items()
            if entry.offset >= 0
        }

    def describe_transactions(self, transactional_ids: Iterable[str]) -> dict[str, TransactionView]:
        """Describe the transaction of each id; ask again about one whose code is in `UNSETTLED`."""
        wanted = sorted(set(transactional_ids))

        async def body(admin: Any) -> dict[str, TransactionView]:
            by_node: dict[int, list[str]] = defaultdict(list)
            for transactional_id, node in (await _coordinators(admin, wanted)).items():
                by_node[node].append(transactional_id)
            views: dict[str, TransactionView] = {}
            for node, ids in by_node.items():
                # Not kafka-python's method, which raises at the first unknown id.
                request = DescribeTransactionsRequest(transactional_ids=ids)
                response = await admin._manager.send(request, node_id=node)
                for row in response.transaction_states:
                    began_at_ms = int(row.transaction_start_time_ms)
                    views[row.transactional_id] = TransactionView(
                        int(row.error_code),
                        row.transaction_state,
                        row.producer_id,
                        row.producer_epoch,
                        int(row.transaction_timeout_ms),
                        began_at_ms if began_at_ms >= 0 else None,
                    )
            return views

        views = self.call("describe transactions", make_blocking(body)) if wanted else {}
        self.forget_moved_coordinators(view.code for view in views.values())
        return views

    def list_transactions(self, states: Iterable[str] = ()) -> list[TransactionListing]:
        """Return the transactions of all brokers that this principal may describe."""
        filters = list(states)

        def look(admin: Any) -> list[TransactionListing]:
            # The cached list may lack a broker that has just joined.
            admin._manager.run(admin._manager.cluster.refresh_metadata)
            found = admin.list_transactions(state_filters=filters).values()
            return [row for rows in found for row in rows]

        return self.call("list transactions", look)

    def last_sequences(
        self, places: Iterable[Place], producer_id: int, producer_epoch: int
    ) -> dict[Place, int | None]:
        seen: dict[Place, int | None] = {}
        for place, producers in self.producers(places).items():
            mine = [one for one in producers if one.handle == (producer_id, producer_epoch)]
            seen[place] = mine[0].last_sequence if mine and mine[0].last_sequence >= 0 else None
        return seen

    def producers(self, places: Iterable[Place]) -> dict[Place, tuple[ActiveProducer, ...]]:
        """Return the producers known to each partition's leader; this needs READ on the topics."""
        wanted = [TopicPartition(*place) for place in places]

        def look(admin: Any) -> dict[Place, tuple[ActiveProducer, ...]]:
            return {
                (place.topic, place.partition): tuple(map(_active_producer, state.active_producers))
                for place, state in admin.describe_producers(wanted).items()
            }

        return self.call("describe producers", look) if wanted else {}

    def verifies_partitions(self) -> bool:
        """Return whether the brokers refuse records for partitions outside an open transaction."""

        def look(admin: Any) -> bool:
            # They do since Kafka 3.6 (KIP-890); only the request versions of 3.7 prove it.
            known = admin._manager.broker_version_data
            _, newest = known.api_versions.get(ProduceRequest.API_KEY, (0, 0))
            return int(newest) >= _PRODUCE_VERSION_OF_3_7

        return self.call("ask for the versions of its requests", look)


class WireClient:
    """Base of clients that own or borrow a wire; belongs to one thread."""

    def __init__(self, connection: KafkaConnection, *, timeout_ms: int = 15_000) -> None:
        self._use(KafkaWire(connection, timeout_ms=timeout_ms))

    @classmethod
    def from_wire(cls, wire: KafkaWire) -> Self:
        client = cls.__new__(cls)
        client._use(wire)
        return client

    def _use(self, wire: KafkaWire) -> None:
        self._wire = wire

    def close(self) -> None:
        self._wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ask_until_settled(
    wire: KafkaWire, within_ms: int, ask: Callable[[int], int]
) -> tuple[int, BrokerUnavailableError | None]:
    """Ask until the coordinator is settled; return the last code, and the error if nobody answered."""
    code, lost = int(kafka_errors.CoordinatorNotAvailableError.errno), None
    for left_ms in tries(within_ms, wire.clock):
        try:
            code, lost = ask(left_ms), None
        except BrokerUnavailableError as unanswered:
            lost = unanswered
            continue
        if code not in UNSETTLED:
            break
    return code, lost


def make_blocking(body: Callable[[Any], Coroutine[Any, Any, _T]]) -> Callable[[Any], _T]:
    def run(admin: Any) -> _T:
        result: _T = admin._manager.run(body, admin)
        return result

    return run


async def _coordinators(admin: Any, transactional_ids: list[str]) -> dict[str, int]:
    # kafka-python caches the coordinator of every id without a limit, and a job uses many ids.
    if len(admin._manager.cluster._coordinators) > _MAX_CACHED_COORDINATORS:
        admin._manager.cluster._coordinators.clear()
    nodes: dict[str, int] = await admin._find_coordinator_ids(transactional_ids, CoordinatorType.TRANSACTION)
    return nodes


def _active_producer(row: Any) -> ActiveProducer:
    start = int(row.current_transaction_start_offset)
    handle = (int(row.producer_id), int(row.producer_epoch))
    return ActiveProducer(*handle, int(row.last_sequence), start if start >= 0 else None)


def make_init_request(transactional_id: str | None, timeout_ms: int) -> Any:
    return InitProducerIdRequest(
        transactional_id=transactional_id,
        transaction_timeout_ms=timeout_ms,
        producer_id=-1,
        producer_epoch=-1,
        max_version=_INIT_PRODUCER_ID_VERSION,
    )


def group_by_topic(values: Iterable[tuple[Place, _T]]) -> dict[str, list[tuple[int, _T]]]:
    found: dict[str, list[tuple[int, _T]]] = defaultdict(list)
    for (topic, partition), value in values:
        found[topic].append((partition, value))
    return found


#: Shorter than the ten minutes of brokers; a running stream uses its connections more often.
_IDLE_MS = 60_000


class WirePool:
    """Pool of wires; safe to call from any thread and after a fork."""

    # A wire stays in the process that made it: Spark's workers are forked, and a child must neither use nor
    # close its parent's sockets. There is no cleaning thread: the next call closes wires idle for too long.

    def __init__(
        self,
        *,
        idle_ms: int = _IDLE_MS,
        clock: Clock = _CLOCK,
        make: Callable[[KafkaConnection], KafkaWire] = KafkaWire,
    ) -> None:
        self._idle_ms = idle_ms
        self._clock, self._make = clock, make
        #: Process id -> lock and idle wires, longest idle first, with the time of their return. By process,
        #: so that a forked child gets an empty list and a free lock.
        self._shelves: dict[int, tuple[threading.Lock, list[tuple[KafkaWire, int]]]] = {}

    @contextmanager
    def wire(self, connection: KafkaConnection) -> Iterator[KafkaWire]:
        wire = self.borrow(connection)
        try:
            yield wire
        finally:
            self.give_back(wire)

    def borrow(self, connection: KafkaConnection) -> KafkaWire:
        with self._idle() as wires:
            newest_first = range(len(wires) - 1, -1, -1)
            at = next((i for i in newest_first if wires[i][0].connection == connection), None)
            found = None if at is None else wires.pop(at)[0]
        return found if found is not None else self._make(connection)

    def give_back(self, wire: KafkaWire) -> None:
        """Take a wire back; the borrower must not use it any more."""
        with self._idle() as wires:
            wires.append((wire, self._clock.monotonic_ms()))

    def close(self) -> None:
        """Close the idle wires of this process; the pool can still be used."""
        with self._idle() as wires:
            idle = [wire for wire, _ in wires]
            wires.clear()
        for wire in idle:
            wire.close()

    @contextmanager
    def _idle(self) -> Iterator[list[tuple[KafkaWire, int]]]:
        """Yield the idle wires of this process, locked; close those idle for too long."""
        lock, wires = self._shelves.setdefault(os.getpid(), (threading.Lock(), []))
        with lock:
            oldest_ms = self._clock.monotonic_ms() - self._idle_ms
            expired = [wire for wire, since_ms in wires if since_ms < oldest_ms]
            del wires[: len(expired)]
            yield wires
        # Outside the lock: closing joins the wire's thread.
        for wire in expired:
            wire.close()


#: The pool of this process, shared by all readers and writers.
WIRES = WirePool()
