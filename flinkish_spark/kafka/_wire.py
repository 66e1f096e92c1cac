"""Requests that kafka-python's public API lacks; only `_wire*` and `_connecting` touch its internals.

Rules of this file:

- A broker's answer is a value (an error code, a slice of a log); only "nobody answered" and
  "you may not" are exceptions, so that nothing is concluded from a lost connection.
- After a lost connection the client is thrown away and built again by the next call. Its own
  reconnecting backs off for up to 30 s and keeps stale coordinators.
- One attempt is :meth:`KafkaWire.attempt`; :meth:`KafkaWire.call` repeats it until the time
  allowed is over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NoReturn, TypeVar

from flinkish_spark.clock import Clock, SystemClock
from flinkish_spark.errors import AuthorizationError, BrokerUnavailableError, EnvironmentFault
from flinkish_spark.forks import Connected, never_finalized
from flinkish_spark.kafka._pace import pauses_ms
from flinkish_spark.kafka.answers import (
    END_TXN_VERSION,
    Batch,
    Code,
    EndAction,
    Isolation,
    ListedTransaction,
    LogSlice,
    Marker,
    ProducerGrant,
    TransactionView,
)
from flinkish_spark.kafka.options import KafkaConnection

#: The release whose internals this module was written against.
PINNED_VERSION = "3.0.12"
#: The newest Fetch that names topics by name; later ones want the topic id.
_FETCH_VERSION = 12
_INIT_PRODUCER_ID_VERSION = 4
_MAX_CACHED_COORDINATORS = 10_000
_THROTTLE_POLL_S = 0.005

_WRONG_CLIENT = (
    f"The installed kafka-python lacks what flinkish_spark needs; install kafka-python=={PINNED_VERSION}"
)

try:
    import kafka.errors as kafka_errors
    from kafka import KafkaAdminClient, TopicPartition
    from kafka.protocol.admin.transactions import DescribeTransactionsRequest, ListTransactionsRequest
    from kafka.protocol.consumer import FetchRequest
    from kafka.protocol.metadata import CoordinatorType
    from kafka.protocol.producer import EndTxnRequest, InitProducerIdRequest
    from kafka.record import MemoryRecords

    from flinkish_spark.kafka._connecting import connected_admin
except ImportError as missing:
    raise EnvironmentFault(_WRONG_CLIENT, why=str(missing)) from missing
for _internal in ("_find_coordinator_ids", "_async_get_leader_for_partitions"):
    if not hasattr(KafkaAdminClient, _internal):
        raise EnvironmentFault(_WRONG_CLIENT, why=f"KafkaAdminClient.{_internal} is missing")

_T = TypeVar("_T")
_CLOCK = SystemClock()
_REFUSALS = (kafka_errors.AuthorizationError, kafka_errors.SaslAuthenticationFailedError)


class KafkaWire(Connected):
    """Synchronous requests to Kafka over one kafka-python admin client.

    The client is built by the first call, and again by the first call after a lost connection.
    One instance belongs to one thread. Nothing survives a crash, and nothing needs to.

    Parameters
    ----------
    connection
        Where Kafka is.
    timeout_ms
        The longest a call may wait for a broker before :class:`BrokerUnavailableError`.
    clock
        Time, replaceable in tests.
    """

    def __init__(
        self,
        connection: KafkaConnection,
        *,
        timeout_ms: int = 15_000,
        clock: Clock = _CLOCK,
    ) -> None:
        self.connection = connection
        self.timeout_ms = timeout_ms
        self.clock = clock
        connection.for_python()  # what cannot be used is refused here, not by the first call
        self._admin: Any = None
        self.keep_from_children()

    def leave_to_parent(self) -> None:
        """Forget the client, in a child: closing it would take the parent's sockets out of its selector."""
        if self._admin is not None:
            never_finalized(self._admin)
            self._admin = None

    def close(self) -> None:
        """Close the client; a later call opens it again."""
        admin, self._admin = self._admin, None
        if admin is not None:
            admin.close()

    # -- calling ------------------------------------------------------------------------------

    def attempt(self, what: str, body: Callable[[Any], _T], *, connect_within_ms: int) -> _T:
        """Run `body(admin client)` once.

        Raises
        ------
        BrokerUnavailableError
            If no broker answered. The broker may nevertheless have acted on the request.
        AuthorizationError
            If Kafka refuses the principal.
        kafka.errors.BrokerResponseError
            Any other error code, for the caller to decide on.
        """
        if self._admin is None:
            self._admin = self._connected(connect_within_ms)
        try:
            return body(self._admin)
        except _REFUSALS as refused:
            self._refused(what, refused)
        except kafka_errors.BrokerResponseError as answer:
            if answer.errno != kafka_errors.RequestTimedOutError.errno:
                raise
            self._unanswered(what, answer)
        except (kafka_errors.KafkaError, OSError) as lost:
            self._unanswered(what, lost)

    def call(self, what: str, body: Callable[[Any], _T]) -> _T:
        """Run `body(admin client)`, again after a lost connection or a retriable answer.

        Raises
        ------
        BrokerUnavailableError
            If that did not help within the time allowed.
        AuthorizationError, EnvironmentFault
            If Kafka answered with something that asking again cannot change.
        """
        last: BaseException | None = None
        for left_ms in pauses_ms(self.timeout_ms, self.clock):
            try:
                return self.attempt(what, body, connect_within_ms=left_ms)
            except BrokerUnavailableError as lost:
                last = lost.__cause__ or lost
            except kafka_errors.BrokerResponseError as answer:
                if not answer.retriable:
                    raise EnvironmentFault(
                        f"Kafka refused to {what}", why=str(answer), code=answer.errno
                    ) from answer
                last = answer
        raise self._unavailable(what, last) from last

    def _connected(self, within_ms: int) -> Any:
        arguments = {
            "reconnect_backoff_max_ms": 1000,
            # A hung broker must leave time to find another one within the time allowed.
            "request_timeout_ms": max(1000, self.timeout_ms * 2 // 3),
            # Anew every time: a certificate may have been renewed since.
            **self.connection.for_python(),
        }
        try:
            return connected_admin(arguments, self.connection.servers, within_ms)
        except (kafka_errors.KafkaError, OSError) as failed:
            raise self._unavailable("connect", failed) from failed

    def _unanswered(self, what: str, cause: BaseException) -> NoReturn:
        self.close()
        raise self._unavailable(what, cause) from cause

    def _unavailable(self, what: str, cause: BaseException | None) -> BrokerUnavailableError:
        servers = self.connection.servers
        return BrokerUnavailableError(
            f"No Kafka broker at {servers} answered the request to {what}",
            why=str(cause) if cause is not None else f"{self.timeout_ms} ms passed",
            what_to_do="start the broker, or correct bootstrap_servers and the security options",
            bootstrap_servers=servers,
        )

    def _refused(self, what: str, cause: BaseException) -> NoReturn:
        self.close()
        raise AuthorizationError(f"Kafka refuses this principal the request to {what} ({cause})") from cause

    # -- transactions -------------------------------------------------------------------------

    def end_transaction(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        action: EndAction,
        *,
        version: int = END_TXN_VERSION,
        connect_within_ms: int | None = None,
    ) -> int:
        """Ask the coordinator once to end a transaction; return its error code, 0 if it did."""
        request = EndTxnRequest(
            transactional_id=transactional_id,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            committed=action is EndAction.COMMIT,
            min_version=version,
            max_version=version,
        )
        what = f"{action.value.lower()} transaction {transactional_id}"
        answer = self._ask_coordinator(what, transactional_id, request, connect_within_ms)
        return answer if isinstance(answer, int) else int(answer.error_code)

    def init_producer_id(
        self, transactional_id: str, timeout_ms: int, *, connect_within_ms: int | None = None
    ) -> ProducerGrant:
        """Ask once for a new epoch of `transactional_id`: fences its producers, aborts what is open."""
        request = InitProducerIdRequest(
            transactional_id=transactional_id,
            transaction_timeout_ms=timeout_ms,
            producer_id=-1,
            producer_epoch=-1,
            max_version=_INIT_PRODUCER_ID_VERSION,
        )
        what = f"initialise transactional id {transactional_id}"
        answer = self._ask_coordinator(what, transactional_id, request, connect_within_ms)
        if isinstance(answer, int):
            return ProducerGrant(answer, -1, -1)
        return ProducerGrant(int(answer.error_code), answer.producer_id, answer.producer_epoch)

    def _ask_coordinator(self, what: str, transactional_id: str, request: Any, within_ms: int | None) -> Any:
        """Send `request` to the coordinator of the id; return its response, or an error code."""

        async def body(admin: Any) -> Any:
            nodes = await _coordinators(admin, [transactional_id])
            return await admin._manager.send(request, node_id=nodes[transactional_id])

        try:
            within_ms = self.timeout_ms if within_ms is None else within_ms
            answer = self.attempt(what, _blocking(body), connect_within_ms=within_ms)
        except kafka_errors.BrokerResponseError as refused:
            answer = int(refused.errno)
        code = answer if isinstance(answer, int) else answer.error_code
        if code in (Code.COORDINATOR_NOT_AVAILABLE, Code.NOT_COORDINATOR):
            self._forget_coordinator(transactional_id)
        return answer

    def _forget_coordinator(self, transactional_id: str) -> None:
        if self._admin is not None:
            cache = self._admin._manager.cluster._coordinators
            cache.pop((CoordinatorType.TRANSACTION, transactional_id), None)

    def describe_transactions(self, transactional_ids: Iterable[str]) -> dict[str, TransactionView]:
        """Return what the coordinators say about each id, with one request to each coordinator.

        A code in `UNSETTLED` stands for an id that may be described later.
        """
        wanted = sorted(set(transactional_ids))

        async def body(admin: Any) -> dict[str, TransactionView]:
            by_node: dict[int, list[str]] = defaultdict(list)
            for transactional_id, node in (await _coordinators(admin, wanted)).items():
                by_node[node].append(transactional_id)
            views: dict[str, TransactionView] = {}
            for node, ids in by_node.items():
                request = DescribeTransactionsRequest(transactional_ids=ids)
                response = await admin._manager.send(request, node_id=node)
                for row in response.transaction_states:
                    views[row.transactional_id] = TransactionView.of(row)
            return views

        views = self.call("describe transactions", _blocking(body)) if wanted else {}
        for transactional_id, view in views.items():
            if view.code == Code.NOT_COORDINATOR:
                self._forget_coordinator(transactional_id)
        return views

    def list_transactions(self, states: Iterable[str] = ()) -> list[ListedTransaction]:
        """Return the transactions in one of `states` on all brokers; without states, all.

        Transactional ids that the principal may not describe are silently left out by Kafka.
        """
        filters = list(states)

        async def body(admin: Any) -> list[ListedTransaction]:
            # A broker that joined a minute ago is not in the cached list yet.
            await admin._manager.cluster.refresh_metadata()
            found: list[ListedTransaction] = []
            for broker in admin._manager.cluster.brokers():
                request = ListTransactionsRequest(state_filters=filters, producer_id_filters=[])
                response = await admin._manager.send(request, node_id=broker.node_id)
                _raise_for(response.error_code)
                rows = response.transaction_states
                found += [
                    ListedTransaction(r.transactional_id, r.producer_id, r.transaction_state) for r in rows
                ]
            return found

        return self.call("list transactions", _blocking(body))

    # -- reading ------------------------------------------------------------------------------

    def fetch(
        self, topic: str, partition: int, offset: int, isolation: Isolation, max_bytes: int
    ) -> LogSlice:
        """Read batch headers from `offset` on, without waiting for new data; one attempt.

        A raw Fetch is used and not a consumer: a consumer hides producer ids, the last stable
        offset and markers, and needs the codec of every compressed batch.
        """
        wanted = FetchRequest.FetchTopic.FetchPartition(
            partition=partition, fetch_offset=offset, partition_max_bytes=max_bytes
        )
        request = FetchRequest(
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=max_bytes,
            isolation_level=int(isolation),
            session_id=0,
            session_epoch=-1,
            topics=[FetchRequest.FetchTopic(topic=topic, partitions=[wanted])],
            forgotten_topics_data=[],
            max_version=_FETCH_VERSION,
        )

        async def body(admin: Any) -> LogSlice:
            leaders = await admin._async_get_leader_for_partitions([TopicPartition(topic, partition)])
            response = await admin._manager.send(request, node_id=next(iter(leaders)))
            _raise_for(response.error_code)
            return _slice_of(response.responses[0].partitions[0])

        what = f"read {topic}-{partition} at offset {offset}"
        try:
            return self.attempt(what, _blocking(body), connect_within_ms=self.timeout_ms)
        except kafka_errors.BrokerResponseError as refused:
            return LogSlice(int(refused.errno))


def _blocking(body: Callable[[Any], Coroutine[Any, Any, _T]]) -> Callable[[Any], _T]:
    """Turn a coroutine function of the admin client into a plain one."""

    def run(admin: Any) -> _T:
        result: _T = admin._manager.run(body, admin)
        return result

    return run


async def _patiently_sent(admin: Any, request: Any, node: int, request_timeout_ms: int) -> Any:
    """Send a request; where the broker throttles this client it waits, while kafka-python would refuse it."""
    connection = admin._manager.get_connection(node)
    while connection.paused and not connection.closed:
        await admin._net.sleep(_THROTTLE_POLL_S)
    try:
        return await admin._manager.send(request, node_id=node, request_timeout_ms=request_timeout_ms)
    except RuntimeError as closed:
        # kafka-python's way to say that the socket closed under its feet.
        raise kafka_errors.KafkaConnectionError(str(closed)) from closed


async def _coordinators(admin: Any, transactional_ids: list[str]) -> dict[str, int]:
    # kafka-python keeps the coordinator of every id for ever; a job uses new ids for hours.
    if len(admin._manager.cluster._coordinators) > _MAX_CACHED_COORDINATORS:
        admin._manager.cluster._coordinators.clear()
    nodes: dict[str, int] = await admin._find_coordinator_ids(transactional_ids, CoordinatorType.TRANSACTION)
    return nodes


def _raise_for(code: int) -> None:
    if code:
        raise kafka_errors.for_code(code)()


def _slice_of(answer: Any) -> LogSlice:
    batches: list[Batch] = []
    for batch in MemoryRecords(answer.records or b""):
        if batch.magic < 2:
            continue  # written before transactions existed: nobody's evidence
        marker = None
        if batch.is_control_batch:
            kind = next(iter(batch)).type if batch.records_count else None
            marker = Marker(kind) if kind in (Marker.ABORT.value, Marker.COMMIT.value) else None
        batches.append(
            Batch(
                batch.base_offset,
                batch.last_offset,
                batch.producer_id,
                batch.producer_epoch,
                batch.records_count,
                marker,
            )
        )
    return LogSlice(
        int(answer.error_code),
        answer.log_start_offset,
        answer.last_stable_offset,
        answer.high_watermark,
        tuple((entry.producer_id, entry.first_offset) for entry in answer.aborted_transactions or ()),
        tuple(batches),
    )
