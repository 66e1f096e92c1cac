"""Fetch as raw bytes, sent ahead of being needed: what kafka-python's consumer cannot do.

It parses record by record, hides markers and producer ids, and polls. Rules of this file, beside
those of ``_wire``:

- A Fetch is sent by one call and answered by another; it travels on the client's own thread.
- Records stay the bytes that they were on the wire.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flinkish_spark.errors import EnvironmentFault
from flinkish_spark.kafka._wire import _WRONG_CLIENT, KafkaWire, _blocking, _patiently_sent
from flinkish_spark.kafka.answers import Code, Isolation, Place

try:
    import kafka.errors as kafka_errors
    from kafka.protocol.consumer import FetchRequest
except ImportError as missing:
    raise EnvironmentFault(_WRONG_CLIENT, why=str(missing)) from missing

#: The newest Fetch that names topics by name; later ones want the topic id.
_FETCH_VERSION = 12
#: Larger answers are refused by kafka-python's parser, which ends the connection.
MAX_FRAME_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """What a Fetch may take; sizes in bytes.

    Kafka sends the first batch whole even if it is larger than both sizes, so that a reader
    always gets on. `max_wait_ms` is how long the broker may hold the answer back until it has
    `min_bytes`; zero and zero is "what there is, now".
    """

    isolation: Isolation
    max_bytes: int
    partition_max_bytes: int
    request_timeout_ms: int
    max_wait_ms: int = 0
    min_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RawSlice:
    """Answer for one partition. Offsets are -1 where the broker did not tell them.

    `records` are whole record batches and maybe a cut-off last one. The first batch may begin
    before the offset that was asked for.
    """

    code: int
    log_start_offset: int = -1
    last_stable_offset: int = -1
    high_watermark: int = -1
    #: (producer id, first offset) of the aborted transactions that overlap what was read.
    aborted: tuple[tuple[int, int], ...] = ()
    records: bytes = b""


#: The partitions that were answered; a broker that throttles this client leaves all out.
FetchAnswer = Mapping[Place, RawSlice]


def is_retriable(code: int) -> bool:
    """Return whether the same request may succeed later, according to Kafka's list of errors."""
    return bool(kafka_errors.for_code(code).retriable)


class PendingFetch:
    """A Fetch on its way; nothing of it is lost by not asking for the result."""

    def __init__(self, wire: KafkaWire, future: Any, what: str, places: Sequence[Place]) -> None:
        self._wire, self._future, self._what, self._places = wire, future, what, places

    def result(self) -> FetchAnswer:
        """Wait for the answer; call it at most once.

        Raises
        ------
        BrokerUnavailableError
            If the connection was lost or the answer did not come within the request timeout.
        AuthorizationError
            If Kafka refuses the principal.
        """
        try:
            wait = _blocking(lambda _admin: _settled(self._future))
            return self._wire.attempt(self._what, wait, connect_within_ms=self._wire.timeout_ms)
        except kafka_errors.BrokerResponseError as refused:
            return dict.fromkeys(self._places, RawSlice(int(refused.errno)))


class FetchClient:
    """Sends Fetches for partitions with a common leader over a borrowed wire.

    Leaders are asked for once and again after any error; the pending results must have been
    taken before anything else is asked over the same wire.
    """

    def __init__(self, wire: KafkaWire) -> None:
        self._wire = wire
        self._leaders: dict[Place, int] = {}

    def send(
        self, offsets: Mapping[Place, int], limits: FetchLimits, *, connect_within_ms: int
    ) -> PendingFetch:
        """Send one Fetch from `offsets` on to the leader of the first place, and do not wait.

        A place that is led by another broker is answered with an error code.

        Raises
        ------
        BrokerUnavailableError, AuthorizationError
            If there is no connection yet and none can be made.
        """
        places = tuple(offsets)
        request = _request(offsets, limits)
        topic, partition = places[0]
        what = f"read {topic}-{partition} at offset {offsets[places[0]]}"

        async def body(admin: Any) -> FetchAnswer:
            code, node = await self._leader(admin, places[0])
            if code != Code.NONE:
                return dict.fromkeys(places, RawSlice(code))
            answer = _answer_of(
                await _patiently_sent(admin, request, node, limits.request_timeout_ms), places
            )
            if any(seen.code != Code.NONE for seen in answer.values()):
                self._leaders.clear()
            return answer

        future = self._wire.attempt(
            what, lambda admin: admin._manager.call_soon(body, admin), connect_within_ms=connect_within_ms
        )
        return PendingFetch(self._wire, future, what, places)

    async def _leader(self, admin: Any, place: Place) -> tuple[int, int]:
        """Return (error code, node) of the broker that leads `place`, from Kafka if not known."""
        if place in self._leaders:
            return Code.NONE, self._leaders[place]
        name, partition = place
        # Named topics come back with their own code, also those that the principal may not see.
        metadata = await admin._get_cluster_metadata([name])
        topic = metadata["topics"][0]
        if topic["error_code"] != Code.NONE:
            return int(topic["error_code"]), -1
        row = next((p for p in topic["partitions"] if p["partition_index"] == partition), None)
        if row is None:
            return Code.UNKNOWN_TOPIC_OR_PARTITION, -1
        if row["leader_id"] < 0:
            return kafka_errors.LeaderNotAvailableError.errno, -1
        self._leaders[place] = row["leader_id"]
        return Code.NONE, row["leader_id"]


async def _settled(future: Any) -> FetchAnswer:
    answer: FetchAnswer = await future
    return answer


def _request(offsets: Mapping[Place, int], limits: FetchLimits) -> Any:
    by_topic: dict[str, list[Any]] = defaultdict(list)
    for (topic, partition), offset in offsets.items():
        by_topic[topic].append(
            FetchRequest.FetchTopic.FetchPartition(
                partition=partition, fetch_offset=offset, partition_max_bytes=limits.partition_max_bytes
            )
        )
    return FetchRequest(
        max_wait_ms=limits.max_wait_ms,
        min_bytes=limits.min_bytes,
        max_bytes=limits.max_bytes,
        isolation_level=int(limits.isolation),
        session_id=0,
        session_epoch=-1,
        topics=[FetchRequest.FetchTopic(topic=topic, partitions=rows) for topic, rows in by_topic.items()],
        forgotten_topics_data=[],
        max_version=_FETCH_VERSION,
    )


def _answer_of(response: Any, places: Iterable[Place]) -> FetchAnswer:
    if response.error_code:
        return dict.fromkeys(places, RawSlice(int(response.error_code)))
    return {
        (topic.topic, row.partition_index): RawSlice(
            int(row.error_code),
            row.log_start_offset,
            row.last_stable_offset,
            row.high_watermark,
            tuple((entry.producer_id, entry.first_offset) for entry in row.aborted_transactions or ()),
            row.records or b"",
        )
        for topic in response.responses
        for row in topic.partitions
    }
