"""Putting dead letters back into the topics that they were meant for, each once, chosen by their headers.

What was put back is told by a consumer group on the letters' topic: its offset says how far letters were
looked at, and a note beside it which of them were left behind, since a filter did not choose them or they
are no whole records. Records, offset and note are in one transaction. So a run that is cut off has done
nothing of its last portion, and another filter later finds what an earlier one has left, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.serializer import Serializer
from kafka.structs import OffsetAndMetadata

from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin, unknown_topic
from flinkish_spark.connectors.kafka.client.client import Isolation, KafkaWire
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.core.errors import ConfigError, EnvironmentFault, UserError
from flinkish_spark.protocol.ids import Place

_OURS = "flinkish-"
_ERROR, _TOPIC, _PARTITION, _SIZE = "flinkish-error", "flinkish-topic", "flinkish-partition", "flinkish-size"
#: Its value is the record's fields as JSON, and not what the record would have been.
_OTHER_FORM = "does-not-fit"
#: Of a letter that the topic of letters did not take with its record's headers.
_LEFT_OUT = "flinkish-headers-left-out"
#: What is kept of a value that its letter's topic did not take; in earlier versions only the length said so.
_HEAD_BYTES = 1_024
_PORTION = 500
_QUIET_POLLS, _POLL_MS = 20, 500
_TIMEOUT_MS = 60_000
#: Brokers take 4,096 bytes by default (offset.metadata.max.bytes).
_NOTE_BYTES = 4_000
_NOTE = "left:"


class TooManyLeftBehind(UserError):
    """Letters that are left behind are too many to be remembered one by one."""


@dataclass(frozen=True)
class LetterFilter:
    """Which letters are put back: those that have one of the values of every header that is named.

    Examples
    --------
    >>> wanted = LetterFilter.of(["flinkish-error=unreadable", "flinkish-source=orders"])
    >>> wanted.chooses([("flinkish-error", b"unreadable"), ("flinkish-source", b"orders")])
    True
    >>> wanted.chooses([("flinkish-error", b"unreadable")])
    False
    """

    values: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, words: Iterable[str]) -> LetterFilter:
        """Read ``NAME=VALUE`` words; several of one name are alternatives.

        Raises
        ------
        ConfigError
            One has no equals sign or no name.
        """
        found: dict[str, set[str]] = {}
        for word in words:
            name, equals, value = word.partition("=")
            if not name or not equals:
                raise ConfigError(f"{word!r} names no header and value", what_to_do="give NAME=VALUE")
            found.setdefault(name, set()).add(value)
        return cls({name: frozenset(values) for name, values in found.items()})

    def chooses(self, headers: Sequence[tuple[str, bytes | None]]) -> bool:
        """Whether a letter with these headers is put back."""
        return all(
            any(
                name == given and (value or b"").decode(errors="replace") in values
                for given, value in headers
            )
            for name, values in self.values.items()
        )


@dataclass
class ReplayCounts:
    """What became of the letters that were looked at.

    Parameters
    ----------
    put_back
        By topic.
    not_chosen
        The filter did not choose them; they are left behind.
    not_whole
        They are no whole records (too large, or in another form) and are left behind.
    """

    put_back: dict[str, int] = field(default_factory=dict)
    not_chosen: int = 0
    not_whole: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` says; see `docs/command-line.md`."""
        return {"put_back": dict(self.put_back), "not_chosen": self.not_chosen, "not_whole": self.not_whole}


class LetterReplay:
    """Puts letters of one topic back.

    Parameters
    ----------
    letters
        The topic.
    group
        Who remembers; another group begins anew, and puts back what this one has put back already.
    wanted
        Which letters.
    target
        A topic for all of them, in place of the one that each names; also for letters in another form.
    """

    def __init__(
        self,
        connection: KafkaConnection,
        letters: str,
        group: str,
        wanted: LetterFilter,
        target: str = "",
    ) -> None:
        self._connection, self._letters, self._group = connection, letters, group
        self._wanted, self._target = wanted, target
        self._counts = ReplayCounts()
        self._partitions: dict[str, int] = {}

    def run(self, *, dry: bool = False) -> ReplayCounts:
        """Put back what there is now, and return the counts; with `dry` only count.

        May be cut off and called again. A second run of one group at the same time ends the first.

        Raises
        ------
        ConfigError
            A topic does not exist.
        TooManyLeftBehind
            A note would be longer than brokers take; what was put back before stays so.
        FlinkishError
            Kafka cannot be asked, or refuses.
        """
        producer = None if dry else self._producer()
        wire = KafkaWire(self._connection)
        try:
            with KafkaAdmin.over(wire) as admin:
                # This order matters: what an earlier run has left open is aborted before offsets are read.
                if producer is not None:
                    producer.init_transactions()
                for place in self._places(admin, self._letters):
                    self._replay(admin, producer, place)
        finally:
            if producer is not None:
                producer.close(timeout=5)
        return self._counts

    def _producer(self) -> KafkaProducer:
        return KafkaProducer(
            **self._connection.for_python(),
            transactional_id=f"flinkish-letters-{self._group}",
            transaction_timeout_ms=_TIMEOUT_MS,
            acks="all",
            value_serializer=_AsItIs(),
        )

    def _places(self, admin: KafkaAdmin, topic: str) -> list[Place]:
        if topic not in self._partitions:
            known = admin.topics([topic])
            if topic not in known:
                raise unknown_topic(topic, self._connection.servers, of="dead letters")
            self._partitions[topic] = known[topic].partitions
        return [(topic, partition) for partition in range(self._partitions[topic])]

    def _replay(self, admin: KafkaAdmin, producer: KafkaProducer | None, place: Place) -> None:
        begin, end = admin.beginning_offsets([place])[place], admin.end_offsets([place])[place]
        # What this does not show would be replayed once more.
        stable = Isolation.READ_COMMITTED
        done = max(admin.committed_offsets(self._group, stable).get(place, 0), begin)
        left = {at for at in _read(admin.committed_notes(self._group, stable).get(place, "")) if at >= begin}
        chosen: list[Any] = []
        for record in self._records(place, min([done, *left]), end):
            if record.offset >= done or record.offset in left:
                left.discard(record.offset)
                if self._is_chosen(admin, record):
                    chosen.append(record)
                else:
                    left.add(record.offset)
            done = max(done, record.offset + 1)
            if len(chosen) >= _PORTION:
                self._commit(producer, place, chosen, done, left)
                chosen = []
        self._commit(producer, place, chosen, max(done, end), left)

    def _records(self, place: Place, first: int, end: int) -> Iterator[Any]:
        """Yield the committed records before `end`; behind the last one may be markers."""
        if first >= end:
            return
        at = TopicPartition(*place)
        consumer = KafkaConsumer(
            **self._connection.for_python(),
            isolation_level="read_committed",
            enable_auto_commit=False,
            auto_offset_reset="none",
        )
        try:
            consumer.assign([at])
            consumer.seek(at, first)
            quiet = 0
            while consumer.position(at) < end:
                polled = consumer.poll(timeout_ms=_POLL_MS).get(at, [])
                quiet = 0 if polled else quiet + 1
                if quiet == _QUIET_POLLS:
                    raise EnvironmentFault(
                        f"letters of {place[0]}-{place[1]} before offset {end} did not come",
                        what_to_do="run the command again: it goes on where it was",
                    )
                yield from (record for record in polled if record.offset < end)
        finally:
            consumer.close()

    def _is_chosen(self, admin: KafkaAdmin, letter: Any) -> bool:
        headers = dict(letter.headers)
        if not self._wanted.chooses(letter.headers):
            self._counts.not_chosen += 1
            return False
        error = _text(headers.get(_ERROR))
        is_other = error == _OTHER_FORM and not self._target
        is_cut = _SIZE in headers or _LEFT_OUT in headers
        is_head = is_cut or (letter.value is not None and len(letter.value) == _HEAD_BYTES)
        target = self._target_of(headers)
        if is_other or is_head or not target:
            self._counts.not_whole += 1
            return False
        self._places(admin, target)  # Raises if there is no such topic, before anything of it is sent.
        self._counts.put_back[target] = self._counts.put_back.get(target, 0) + 1
        return True

    def _target_of(self, headers: Mapping[str, bytes | None]) -> str:
        return self._target or _text(headers.get(_TOPIC))

    def _commit(
        self,
        producer: KafkaProducer | None,
        place: Place,
        chosen: Sequence[Any],
        done: int,
        left: set[int],
    ) -> None:
        """Put a portion back, and remember it, in one transaction."""
        note = _written(left)
        if len(note) > _NOTE_BYTES:
            raise TooManyLeftBehind(
                f"{len(left)} letters of {place[0]}-{place[1]} are left behind in too many pieces",
                what_to_do="choose more with the filter, or use another group for what is left, "
                "with a filter that chooses none of what was put back",
            )
        if producer is None:
            return
        producer.begin_transaction()
        sent = [self._sent(producer, letter) for letter in chosen]
        for future in sent:
            future.get(timeout=_TIMEOUT_MS / 1_000)
        offsets = {TopicPartition(*place): OffsetAndMetadata(done, note, -1)}
        producer.send_offsets_to_transaction(offsets, self._group)
        # DECISION POINT: with this the letters are in their topic, and will not be put back again.
        producer.commit_transaction()

    def _sent(self, producer: KafkaProducer, letter: Any) -> Any:
        headers = dict(letter.headers)
        target, named = self._target_of(headers), _text(headers.get(_PARTITION))
        is_there = not self._target and named.isdecimal() and int(named) < self._partitions[target]
        return producer.send(
            target,
            key=letter.key,
            value=letter,
            headers=_Headers(),
            partition=int(named) if is_there else None,
            timestamp_ms=letter.timestamp,
        )


class _AsItIs(Serializer):  # type: ignore[misc]
    """Puts a letter's record in place of the letter.

    The client refuses a record without key and value, and a header without a value, of what it is given to
    send. Both are in topics, and it does write them.
    """

    def serialize(self, topic: str, headers: list[tuple[str, bytes | None]], data: Any) -> bytes | None:
        """Return the value, and add the headers."""
        headers += [(name, value) for name, value in data.headers if not name.startswith(_OURS)]
        value: bytes | None = data.value
        return value


class _Headers(list[tuple[str, "bytes | None"]]):
    """Headers whose bytes the client does not count: it would count those of one without a value."""

    def __bool__(self) -> bool:
        return False


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")


def _written(left: Iterable[int]) -> str:
    """Return offsets as a note: ranges, in order.

    >>> _written({3, 7, 8, 9}), sorted(_read("left:3,7-9")), _written([])
    ('left:3,7-9', [3, 7, 8, 9], 'left:')
    """
    ranges: list[list[int]] = []
    for at in sorted(left):
        if ranges and ranges[-1][1] == at - 1:
            ranges[-1][1] = at
        else:
            ranges.append([at, at])
    return _NOTE + ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _read(note: str) -> set[int]:
    """Return the offsets in a note; none if it is somebody else's."""
    found: set[int] = set()
    if note.startswith(_NOTE):
        for part in filter(None, note.removeprefix(_NOTE).split(",")):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return found
