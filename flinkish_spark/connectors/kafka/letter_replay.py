"""Replay of dead letters: writes them back to their topics, each once, chosen by their headers.

A consumer group on the letters' topic remembers what was replayed. Its offset says how far letters were read,
and the note stored with the offset lists the skipped letters: those that the filter did not choose, and those
that are incomplete records. One transaction holds the records, the offset and the note. So an interrupted run
leaves nothing of its last portion, and a later run with another filter finds exactly the skipped letters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from flinkish_spark.connectors.kafka.client.admin import (
    KafkaAdmin,
    make_unknown_topic_error,
    warn_of_old_times,
)
from flinkish_spark.connectors.kafka.client.admission import (
    OutgoingRecords,
    StickyPartitioner,
    split_by_partition,
)
from flinkish_spark.connectors.kafka.client.batches import HEADERS_TYPE
from flinkish_spark.connectors.kafka.client.client import Isolation, KafkaWire
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.producer import ABORT_BOUND_MS, Outbox
from flinkish_spark.connectors.kafka.client.reader import OffsetRange, RangeReader
from flinkish_spark.connectors.kafka.client.session import TransactionSession
from flinkish_spark.connectors.kafka.client.settings import ProducerSettings, ReaderSettings, StagingSettings
from flinkish_spark.connectors.kafka.client.transactions import abort_own
from flinkish_spark.core.errors import BadRecordError, ConfigError, EnvironmentFault, UserError
from flinkish_spark.protocol.ids import Place

_OURS = "flinkish-"
_ERROR, _TOPIC, _PARTITION = "flinkish-error", "flinkish-topic", "flinkish-partition"
#: The record's timestamp in milliseconds since 1970; the letter's own timestamp says when it was written.
_TIME = "flinkish-timestamp"
#: A letter with one of these headers is an incomplete record.
_CUT = ("flinkish-size", "flinkish-headers-left-out")
#: Error of a letter whose value is the record's fields as JSON instead of the encoded record.
_OTHER_FORM = "does-not-fit"
#: Most letters, and about the most bytes, of one transaction.
_PORTION, _PORTION_BYTES = 500, 16 * 1024 * 1024
_TIMEOUT_MS = 60_000
#: No limit here: the broker decides which record is too large.
_MAX_RECORD_BYTES = 2**31 - 1
#: Longest note; brokers accept 4,096 bytes by default (offset.metadata.max.bytes).
_NOTE_BYTES = 4_000
_NOTE = "left:"


@dataclass(frozen=True)
class LetterFilter:
    """Chooses letters that have, for every named header, one of its values."""

    values: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, words: Iterable[str]) -> LetterFilter:
        """Parse ``NAME=VALUE`` words; values of the same name are alternatives."""
        found: dict[str, set[str]] = {}
        for word in words:
            name, equals, value = word.partition("=")
            if not name or not equals:
                raise ConfigError(f"{word!r} names no header and value", what_to_do="give NAME=VALUE")
            found.setdefault(name, set()).add(value)
        return cls({name: frozenset(values) for name, values in found.items()})

    def chooses(self, headers: Sequence[tuple[str, bytes | None]]) -> bool:
        return all(
            any(
                name == given and (value or b"").decode(errors="replace") in values
                for given, value in headers
            )
            for name, values in self.values.items()
        )


class _Letter(NamedTuple):
    offset: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    timestamp_ms: int

    @property
    def size_bytes(self) -> int:
        return len(self.key or b"") + len(self.value or b"")

    @property
    def time_ms(self) -> int:
        named = self.read_header(_TIME)
        return int(named) if named.isdecimal() else self.timestamp_ms

    def read_header(self, header: str) -> str:
        return (dict(self.headers).get(header) or b"").decode(errors="replace")


@dataclass
class ReplayCounts:
    put_back: dict[str, int] = field(default_factory=dict)
    #: Skipped: the filter did not choose them.
    not_chosen: int = 0
    #: Skipped: they are incomplete records (too large, or in another form).
    not_whole: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class LetterReplay:
    def __init__(
        self, connection: KafkaConnection, letters: str, group: str, wanted: LetterFilter, target: str = ""
    ) -> None:
        self._connection, self._letters, self._group = connection, letters, group
        self._wanted, self._target = wanted, target
        self._counts = ReplayCounts()
        self._partitions: dict[str, int] = {}

    def run(self, *, dry: bool = False) -> ReplayCounts:
        """Replay the letters that exist now and return the counts; `dry` only counts. May be repeated."""
        if self._target and self._target == self._letters:
            what = f"the dead letters are read from {self._letters!r}"
            raise ConfigError(what, what_to_do="name another topic in --to")
        with KafkaAdmin(self._connection) as admin, ExitStack() as stack:
            places = self._places(admin, self._letters)
            out = None
            if not dry:
                out = stack.enter_context(closing(_Transactions(self._connection, self._group)))
                # This order matters: abort the open transaction of an earlier run before offsets are read.
                out.session.begin()
            for place in places:
                self._replay(admin, out, place)
        return self._counts

    def _places(self, admin: KafkaAdmin, topic: str) -> list[Place]:
        if topic not in self._partitions:
            known = admin.topics([topic])
            if topic not in known:
                raise make_unknown_topic_error(topic, self._connection.servers, of="dead letters")
            self._partitions[topic] = known[topic].partitions
            if topic != self._letters:
                warn_of_old_times(known, [topic], "replay-dead-letters")
        return [(topic, partition) for partition in range(self._partitions[topic])]

    def _replay(self, admin: KafkaAdmin, out: _Transactions | None, place: Place) -> None:
        begin, end = admin.beginning_offsets([place])[place], admin.end_offsets([place])[place]
        # A lower isolation could miss a committed offset, and letters would be replayed twice.
        stable = Isolation.READ_COMMITTED
        done = max(admin.committed_offsets(self._group, stable).get(place, 0), begin)
        if done > end:
            raise EnvironmentFault(
                f"the group {self._group} has read {place[0]}-{place[1]} up to offset {done}, "
                f"and the partition ends at {end}",
                why="the topic was deleted and created again, or a broker has lost records",
                what_to_do="run the command again in a minute; if it stays so, give another --group",
            )
        earlier = _parse_note(admin.find_committed_notes(self._group, stable).get(place, ""))
        first = min([done, *(max(begin, left[0]) for left in earlier if left[1] >= begin)])
        left = _SkippedLetters(earlier)
        chosen: list[_Letter] = []
        for letter in self._read_letters(OffsetRange(*place, first, end)):
            was_passed = letter.offset < done and not left.was(letter.offset)
            is_chosen = not was_passed and self._is_chosen(admin, letter)
            left.note(letter.offset, is_left=not was_passed and not is_chosen)
            chosen += [letter] if is_chosen else []
            done = max(done, letter.offset + 1)
            if len(chosen) >= _PORTION or sum(one.size_bytes for one in chosen) >= _PORTION_BYTES:
                self._commit(out, place, chosen, done, left.ranges)
                chosen = []
        left.note(end, is_left=False)
        self._commit(out, place, chosen, max(done, end), left.ranges)

    def _read_letters(self, wanted: OffsetRange) -> Iterator[_Letter]:
        reader = RangeReader(self._connection, ReaderSettings(include_headers=True))
        for batch in reader.read(wanted):
            columns = [batch.column(name).to_pylist() for name in ("offset", "key", "value", "headers")]
            times_ms = (batch.column("timestamp").cast(pa.int64()).to_numpy() // 1_000).tolist()
            for offset, key, value, headers, time_ms in zip(*columns, times_ms, strict=True):
                named = [(one["key"], one["value"]) for one in headers or ()]
                yield _Letter(offset, key, value, named, time_ms)

    def _is_chosen(self, admin: KafkaAdmin, letter: _Letter) -> bool:
        if not self._wanted.chooses(letter.headers):
            self._counts.not_chosen += 1
            return False
        is_other = letter.read_header(_ERROR) == _OTHER_FORM and not self._target
        target = self._target_of(letter)
        if is_other or any(name in _CUT for name, _ in letter.headers) or not target:
            self._counts.not_whole += 1
            return False
        self._places(admin, target)  # Raises before anything is sent if the topic does not exist.
        self._counts.put_back[target] = self._counts.put_back.get(target, 0) + 1
        return True

    def _target_of(self, letter: _Letter) -> str:
        return self._target or letter.read_header(_TOPIC)

    def _commit(
        self,
        out: _Transactions | None,
        place: Place,
        chosen: Sequence[_Letter],
        done: int,
        left: Iterable[tuple[int, int]],
    ) -> None:
        """Write a portion of letters back and store the progress, in one transaction."""
        note = _format_note(left)
        if len(note) > _NOTE_BYTES:
            raise UserError(
                f"the skipped dead letters of {place[0]}-{place[1]} are in too many pieces "
                "for the group's note",
                what_to_do="choose more dead letters with --where; or replay the skipped dead letters with "
                "another --group, and a --where that chooses no replayed dead letter",
            )
        if out is None:
            return
        by_topic: dict[str, list[_Letter]] = {}
        for letter in chosen:
            by_topic.setdefault(self._target_of(letter), []).append(letter)
        try:
            for topic, letters in by_topic.items():
                out.send(topic, self._to_outgoing(topic, letters))
            out.commit(self._group, {place: done}, note)
        except BadRecordError as refused:
            raise EnvironmentFault(
                f"the target topic of a dead letter of {place[0]}-{place[1]} refuses the record",
                why=f"{refused.what}".rstrip("."),
                what_to_do="change the topic (max.message.bytes, cleanup.policy, message.timestamp...), "
                "or skip these dead letters with --where",
            ) from refused

    def _to_outgoing(self, topic: str, letters: Sequence[_Letter]) -> OutgoingRecords:
        own = [
            [{"key": name, "value": value} for name, value in one.headers if not name.startswith(_OURS)]
            for one in letters
        ]
        numbers = [one.read_header(_PARTITION) for one in letters]
        # Keep the partition if the topic has it.
        known = range(0 if self._target else self._partitions[topic])
        partitions = [int(one) if one.isdecimal() and int(one) in known else None for one in numbers]
        return OutgoingRecords.of(
            pa.array([one.key for one in letters], pa.binary()),
            pa.array([one.value for one in letters], pa.binary()),
            pa.array(own, HEADERS_TYPE),
            topic,
            pa.array(partitions, pa.int64()),
            np.array([one.time_ms for one in letters], np.int64),
        )


class _Transactions:
    """Successive transactions under one transactional id and epoch; a second run fences this one."""

    def __init__(self, connection: KafkaConnection, group: str) -> None:
        settings = StagingSettings(
            connection=connection,
            transactional_id=f"flinkish-letters-{group}",
            transaction_timeout_ms=_TIMEOUT_MS,
            max_record_bytes=_MAX_RECORD_BYTES,
            producer=ProducerSettings(delivery_timeout_ms=_TIMEOUT_MS),
        )
        self._wire = KafkaWire(connection)
        self.session = TransactionSession(self._wire, settings)
        self._outbox, self._spreader = Outbox(self.session), StickyPartitioner(settings.producer.batch_bytes)
        self._is_open = False

    def send(self, topic: str, records: OutgoingRecords) -> None:
        layout = self.session.layout_with(topic, records.highest_partition)
        places = {
            (topic, at): rows
            for at, rows in split_by_partition(topic, records, layout, self._spreader).items()
        }
        self._is_open = True
        self.session.join(places)
        self._outbox.post(places)

    def commit(self, group: str, offsets: Mapping[Place, int], note: str) -> None:
        self._outbox.drain()
        self._is_open = True
        self.session.commit_offsets(group, offsets, note)
        # DECISION POINT: from here on the letters are in their topics and will not be replayed again.
        self.session.commit()
        self._is_open = False

    def close(self) -> None:
        """Abort the open transaction, so that readers need not wait for its timeout or the next run."""
        try:
            if self._is_open:
                self._outbox.wait_for_pending(ABORT_BOUND_MS)
                abort_own(self._wire, self.session.handle, ABORT_BOUND_MS)
        finally:
            self._wire.close()


class _SkippedLetters:
    """Skipped letters of a partition as ranges of offsets, collected while letters are read in order."""

    def __init__(self, earlier: Sequence[tuple[int, int]]) -> None:
        self._earlier, self._found = list(earlier), list[tuple[int, int]]()
        self._is_going_on = False

    def was(self, offset: int) -> bool:
        while self._earlier and self._earlier[0][1] < offset:
            del self._earlier[0]
        return bool(self._earlier) and self._earlier[0][0] <= offset

    def note(self, offset: int, *, is_left: bool) -> None:
        # A range spans transaction markers: between two of its letters there is no other letter.
        if is_left:
            first = self._found.pop()[0] if self._is_going_on else offset
            self._found.append((first, offset))
        if self.was(offset):
            self._earlier[0] = (offset + 1, self._earlier[0][1])
        self._is_going_on = is_left

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Ranges skipped by this run, and those of earlier runs that this one has not read yet."""
        return [*self._found, *(one for one in self._earlier if one[0] <= one[1])]


def _format_note(left: Iterable[tuple[int, int]]) -> str:
    """Format ranges of offsets as a note.

    >>> _format_note([(3, 3), (7, 9)]), _parse_note("left:3,7-9"), _format_note([])
    ('left:3,7-9', [(3, 3), (7, 9)], 'left:')
    """
    return _NOTE + ",".join(str(first) if first == last else f"{first}-{last}" for first, last in left)


def _parse_note(note: str) -> list[tuple[int, int]]:
    """Parse a note into ranges of offsets; return none if another program wrote it."""
    if not note.startswith(_NOTE):
        return []
    parts = (part.partition("-") for part in note.removeprefix(_NOTE).split(",") if part)
    return [(int(first), int(last or first)) for first, _, last in parts]
