"""Routing of a task's records to partitions: admission, policies for bad records, partitioning."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flinkish_spark.connectors.kafka.client.batches import (
    HEADERS_TYPE,
    Column,
    CommonHeaders,
    all_within,
    binary,
    extents,
    lengths,
    record_sizes,
)
from flinkish_spark.connectors.kafka.client.faults import (
    describe_unknown_partition,
    make_bad_record_error,
    make_no_topic_error,
)
from flinkish_spark.connectors.kafka.client.produce import TopicLayout
from flinkish_spark.connectors.kafka.client.settings import OnRefusal, StagingSettings
from flinkish_spark.core.clock import Clock
from flinkish_spark.core.errors import SchemaError
from flinkish_spark.types.record_time import Int64s, TimeLimits


@dataclass(frozen=True, slots=True)
class OutgoingRecords:
    keys: Any
    values: Any
    #: Headers as in :func:`~.batches.encode_batches`; a column is one chunk.
    headers: Any
    #: Timestamps in milliseconds since 1970.
    timestamps_ms: Int64s
    #: One topic for all, or a string column; None and null mean the default topic.
    topics: Any = None
    #: None, or an int64 column; with null the key decides.
    partitions: Any = None
    #: None, or a string column with the reason why a record does not fit its format, or null.
    misfits: Any = None

    @classmethod
    def of(
        cls,
        keys: Column | None,
        values: Column,
        headers: Column | CommonHeaders | None,
        topics: Column | str | None,
        partitions: Column | None,
        timestamps_ms: Int64s | int,
        misfits: Column | None = None,
    ) -> OutgoingRecords:
        """Convert a caller's columns to one chunk each and to the types used here."""
        if topics is not None and not isinstance(topics, str):
            topics = _cast("The topic", topics, pa.string(), pa.types.is_integer)
        if partitions is not None:
            partitions = _cast("The partition", partitions, pa.int64(), pa.types.is_floating)
        if misfits is not None:
            misfits = _cast("What does not fit", misfits, pa.string(), pa.types.is_integer)
        headers = headers.combine_chunks() if isinstance(headers, pa.ChunkedArray) else headers
        timestamps = np.asarray(timestamps_ms, np.int64)
        keys = pa.nulls(len(values)) if keys is None else keys
        others: list[Any] = [keys, headers, topics, partitions, misfits]
        others.append(timestamps if timestamps.ndim else None)
        for column in others:
            if is_column(column) and len(column) != len(values):
                raise SchemaError(
                    f"{len(values)} values came with a column of {len(column)}",
                    what_to_do="give columns of equal length",
                )
        timestamps = np.broadcast_to(timestamps, len(values))
        return cls(binary(keys), binary(values), headers, timestamps, topics, partitions, misfits)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def about_bytes(self) -> int:
        """Memory of keys and values, a cheap estimate of their size on the wire."""
        return int(self.keys.nbytes + self.values.nbytes)

    @property
    def highest_partition(self) -> int:
        if self.partitions is None or self.partitions.null_count == len(self.partitions):
            return -1
        return int(self.partitions.drop_null().to_numpy().max())

    @property
    def _columns(self) -> tuple[Any, ...]:
        return tuple(getattr(self, one.name) for one in fields(self))

    def slice(self, start: int, length: int) -> OutgoingRecords:
        end = start + length
        return OutgoingRecords(*(one[start:end] if is_column(one) else one for one in self._columns))

    def take(self, indices: npt.NDArray[Any]) -> OutgoingRecords:
        at = pa.array(indices)
        taken = (
            one[indices] if isinstance(one, np.ndarray) else one.take(at) if is_column(one) else one
            for one in self._columns
        )
        return OutgoingRecords(*taken)

    def continues(self, other: OutgoingRecords) -> bool:
        """Return whether both can be concatenated: each part is a column in both, or one value in both."""
        for mine, theirs in zip(self._columns, other._columns, strict=True):
            if is_column(mine) is not is_column(theirs):
                return False
            if isinstance(mine, pa.Array) and mine.type != theirs.type:
                return False
            if not is_column(mine) and mine != theirs:
                return False
        return True

    @classmethod
    def concat(cls, parts: Sequence[OutgoingRecords]) -> OutgoingRecords:
        """Concatenate `parts`; each must continue the one before it."""
        if len(parts) == 1:
            return parts[0]
        whole = []
        for columns in zip(*(part._columns for part in parts), strict=True):
            first = columns[0]
            if isinstance(first, np.ndarray):
                whole.append(np.concatenate(columns))
            else:
                whole.append(pa.concat_arrays(columns) if is_column(first) else first)
        return cls(*whole)


def is_column(value: Any) -> bool:
    return isinstance(value, pa.Array | pa.ChunkedArray | np.ndarray)


def _cast(what: str, column: Any, kind: Any, is_refused: Any) -> Any:
    # Arrow would turn numbers into text and cut off fractions; neither is ever intended.
    refused = is_refused(column.type)
    try:
        column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        if not refused:
            return column.cast(kind)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        refused = True
    raise SchemaError(f"{what} of a Kafka record must be {kind}, not {column.type}", what_to_do="cast it")


#: Bytes kept of a value that is too large, and longest header that this package writes.
_DEAD_LETTER_BYTES = 1_024
#: Header of a truncated letter with the record's size; a letter without it is complete.
_SIZE = "flinkish-size"
#: Header with the record's timestamp in milliseconds since 1970. The letter's own timestamp is the time of
#: writing: with the record's, the topic's retention would delete the letter of an old record at once.
_TIME = "flinkish-timestamp"
#: Header with the number of the record's own headers that did not fit into the letter.
_LEFT_OUT = "flinkish-headers-left-out"


class Reason(enum.Enum):
    """Reason to refuse a record; the text is the dead letter's header ``flinkish-error``."""

    DOES_NOT_FIT = "does-not-fit"
    UNDECLARED_TOPIC = "undeclared-topic"
    NO_SUCH_PARTITION = "no-such-partition"
    BAD_TIMESTAMP = "bad-timestamp"
    NO_KEY = "no-key"
    OVERSIZE = "oversize"


@dataclass(frozen=True, slots=True)
class AdmissionResult:
    admitted: OutgoingRecords
    #: Pairs of a dead-letter topic and its letters.
    letters: tuple[tuple[str, OutgoingRecords], ...] = ()
    dropped: int = 0


#: Key, value, headers and time of a dead letter.
_Letter = tuple[bytes | None, bytes | None, list[dict[str, Any]], int]


class Admission:
    # Records are checked before they are sent: a refusal by the broker would end the whole transaction.

    def __init__(self, settings: StagingSettings, common: CommonHeaders, clock: Clock) -> None:
        self._settings, self._common, self._clock = settings, tuple(common), clock

    def add_common_headers(self, headers: Column | CommonHeaders | None) -> Column | CommonHeaders | None:
        if not self._common:
            return headers
        if not isinstance(headers, pa.Array | pa.ChunkedArray):
            return (*self._common, *(headers or ()))
        return prepend_headers(self._common, headers)

    def _make_letter_headers(
        self, reason: Reason, sentence: str, topic: str, records: OutgoingRecords, index: int
    ) -> list[tuple[str, bytes | None]]:
        about = {"flinkish-error": reason.value}
        if self._settings.uid:
            about["flinkish-sink"] = self._settings.uid
        about["flinkish-topic"] = topic
        partition = None if records.partitions is None else records.partitions[index].as_py()
        if partition is not None:
            about["flinkish-partition"] = str(partition)
        if reason is not Reason.BAD_TIMESTAMP:
            about[_TIME] = str(int(records.timestamps_ms[index]))
        if reason is not Reason.OVERSIZE:
            about["flinkish-detail"] = sentence
        heads = ((name, text.encode()[:_DEAD_LETTER_BYTES]) for name, text in about.items())
        return [(name, head.decode(errors="ignore").encode()) for name, head in heads]

    def _fits(self, key: bytes | None, value: bytes | None, headers: CommonHeaders) -> bool:
        keys, values = pa.array([key], pa.large_binary()), pa.array([value], pa.large_binary())
        return int(record_sizes(keys, values, headers)[0]) <= self._settings.dead_letter_limit_bytes

    def admit(self, topic: str, records: OutgoingRecords) -> AdmissionResult:
        settings = self._settings
        checks: dict[Reason, npt.NDArray[np.bool_]] = {}
        parts = (records.keys, records.values, records.headers)
        if not all_within(settings.record_limit_bytes, *parts):
            checks[Reason.OVERSIZE] = record_sizes(*parts) > settings.record_limit_bytes
        first_ms, last_ms = settings.times.range_at(self._clock.wall_ms())
        if (bad := (records.timestamps_ms < first_ms) | (records.timestamps_ms > last_ms)).any():
            checks[Reason.BAD_TIMESTAMP] = bad
        if topic in settings.compacted and records.keys.null_count:
            checks[Reason.NO_KEY] = records.keys.is_null().to_numpy(zero_copy_only=False)
        if settings.partitions is not None and records.partitions is not None:
            is_named = records.partitions.is_valid().to_numpy(zero_copy_only=False)
            named, count = records.partitions.fill_null(0).to_numpy(), settings.partitions.get(topic, 0)
            checks[Reason.NO_SUCH_PARTITION] = is_named & ((named < 0) | (named >= count))
        if settings.topics is not None and topic not in settings.topics:
            checks[Reason.UNDECLARED_TOPIC] = np.ones(len(records), np.bool_)
        if records.misfits is not None and records.misfits.null_count < len(records):
            checks[Reason.DOES_NOT_FIT] = records.misfits.is_valid().to_numpy(zero_copy_only=False)
        if not any(check.any() for check in checks.values()):
            return AdmissionResult(records)
        return self._refuse(topic, records, checks)

    def _refuse(
        self, topic: str, records: OutgoingRecords, checks: dict[Reason, npt.NDArray[np.bool_]]
    ) -> AdmissionResult:
        settings = self._settings
        refused = np.logical_or.reduce(list(checks.values()))
        sizes = record_sizes(records.keys, records.values, records.headers).tolist()
        by_topic: dict[str, list[_Letter]] = {}
        dropped = 0
        for index in np.flatnonzero(refused).tolist():
            reason = next(one for one in Reason if one in checks and checks[one][index])
            sentence = self._describe(reason, topic, records, index, sizes[index])
            policy, name = (settings.bad_record, settings.bad_record_topic)
            if reason is Reason.OVERSIZE:
                policy, name = (settings.oversize, settings.dead_letter_topic)
            if policy is OnRefusal.DEAD_LETTER and name is not None:
                about = self._make_letter_headers(reason, sentence, topic, records, index)
                # A record that is itself a dead letter has these headers already.
                about = [] if topic == name else about
                letter = self._make_letter(records, index, about, sizes[index], reason is Reason.OVERSIZE)
                by_topic.setdefault(name, []).append(letter)
            elif policy is OnRefusal.DROP:
                dropped += 1
            else:
                raise make_bad_record_error(sentence, topic)
        made = []
        for name, letters in by_topic.items():
            kinds = (pa.binary(), pa.binary(), HEADERS_TYPE, pa.int64())
            keys, values, headers, times = map(pa.array, zip(*letters, strict=True), kinds)
            made.append((name, OutgoingRecords.of(keys, values, headers, None, None, times.to_numpy())))
        return AdmissionResult(records.take(np.flatnonzero(~refused)), tuple(made), dropped)

    def _describe(self, reason: Reason, topic: str, records: OutgoingRecords, index: int, size: int) -> str:
        match reason:
            case Reason.DOES_NOT_FIT:
                return f"a record for topic {topic} does not fit its format: {records.misfits[index].as_py()}"
            case Reason.UNDECLARED_TOPIC:
                return f"a record names the topic {topic}, which the sink does not declare"
            case Reason.NO_SUCH_PARTITION:
                named = records.partitions[index].as_py()
                count = (self._settings.partitions or {}).get(topic, 0)
                return describe_unknown_partition(topic, named, count)
            case Reason.BAD_TIMESTAMP:
                at_ms = int(records.timestamps_ms[index])
                where = TimeLimits.why_outside(at_ms, self._clock.wall_ms())
                return f"a record for topic {topic} has a timestamp of {at_ms} ms, {where}"
            case Reason.NO_KEY:
                return f"a record for topic {topic} has no key, and the topic is compacted"
            case Reason.OVERSIZE:
                key_bytes = max(0, int(lengths(records.keys)[index]))
                return (
                    f"a record for topic {topic} takes up to {size} bytes and the limit is "
                    f"{self._settings.record_limit_bytes} (its key: {key_bytes} bytes); raise "
                    "max_record_bytes and the topic's max.message.bytes, or choose another oversize policy"
                )

    def _make_letter(
        self,
        records: OutgoingRecords,
        index: int,
        about: list[tuple[str, bytes | None]],
        size: int,
        is_cut: bool,
    ) -> _Letter:
        """Make the dead letter of a refused record: complete if its topic takes it, else truncated."""
        key, value = records.keys[index].as_py(), records.values[index].as_py()
        given = records.headers
        if is_column(given):
            given = [(entry["key"], entry["value"]) for entry in given[index].as_py() or []]
        own = list(given or ())[len(self._common) :]
        headers = [*own, *about, *self._common]
        if is_cut or not self._fits(key, value, headers):
            key = key if key is None or len(key) <= _DEAD_LETTER_BYTES else None
            value = None if value is None else value[:_DEAD_LETTER_BYTES]
            about = [*about, (_SIZE, str(size).encode())]
            headers = [*own, *about, *self._common]
            if not self._fits(key, value, headers):
                headers = [*about, (_LEFT_OUT, str(len(own)).encode()), *self._common]
        entries = [{"key": name, "value": content} for name, content in headers]
        return key, value, entries, self._clock.wall_ms()


def prepend_headers(common: CommonHeaders, headers: Column) -> Any:
    """Prepend `common` to each list of headers; null counts as an empty list."""
    if isinstance(headers, pa.ChunkedArray):
        headers = headers.combine_chunks()
    counts = headers.value_lengths().fill_null(0).to_numpy().astype(np.int64)
    entry, rows = HEADERS_TYPE.value_type, np.arange(len(headers))
    ahead = pa.array([{"key": name, "value": content} for name, content in common], entry)
    tiled = ahead.take(pa.array(np.tile(np.arange(len(common)), len(headers))))
    entries = pa.concat_arrays([tiled, headers.flatten().cast(entry)])
    # A stable sort by row: the common entries come first in each.
    order = np.argsort(np.concatenate([np.repeat(rows, len(common)), np.repeat(rows, counts)]), kind="stable")
    offsets = np.concatenate([[0], np.cumsum(counts + len(common))])
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), entries.take(pa.array(order)), type=HEADERS_TYPE
    )


UInt32s = npt.NDArray[np.uint32]

#: MurmurHash2's constants, with the seed that Kafka chose.
_SEED = np.uint32(0x9747B28C)
_FACTOR = np.uint32(0x5BD1E995)
#: Number of bytes after a key's last whole word -> mask of these bytes in the next word.
_TAIL_MASKS = np.array([0, 0xFF, 0xFFFF, 0xFFFFFF], np.uint32)


def partitions_for_keys(keys: Column, partitions: int) -> npt.NDArray[np.int32]:
    """Return the partition of each key as Kafka's Java client chooses it, -1 for a null key."""
    keys = binary(keys)
    chosen = ((murmur2(keys) & np.uint32(0x7FFFFFFF)) % np.uint32(partitions)).astype(np.int32)
    if keys.null_count:
        chosen[keys.is_null().to_numpy(zero_copy_only=False)] = _NO_PARTITION
    return chosen


def murmur2(keys: Column) -> UInt32s:
    """Return the MurmurHash2 of each key as Kafka computes it; undefined for a null key."""
    keys = binary(keys)
    begins = extents(keys)
    sizes = np.diff(begins)
    # Longest first, so that the keys with a word left to mix in form a prefix. Numpy sorts 16-bit numbers ten
    # times faster.
    narrow = np.int16 if sizes.max(initial=0) < 2**15 else np.int64
    order = np.argsort((-sizes).astype(narrow), kind="stable")
    sizes, count = sizes[order], int(begins[-1] - begins[0])
    data = (
        np.frombuffer(keys.buffers()[2], np.uint8, count, int(begins[0])) if count else np.empty(0, np.uint8)
    )
    # The word that begins at each byte, padded with zeros.
    padded = np.concatenate((data, np.zeros(4, np.uint8)))
    words = np.ndarray((count + 1,), np.dtype("<u4"), padded, strides=(1,))
    at, whole = (begins[:-1] - begins[0])[order], sizes >> 2
    hashed = _SEED ^ sizes.astype(np.uint32)
    for place, longer in enumerate((len(whole) - np.cumsum(np.bincount(whole)))[:-1].tolist()):
        mixed = words[at[:longer] + 4 * place]
        mixed *= _FACTOR
        mixed ^= mixed >> np.uint32(24)
        mixed *= _FACTOR
        hashed[:longer] *= _FACTOR
        hashed[:longer] ^= mixed
    left = sizes & 3
    tails = words[at + 4 * whole] & _TAIL_MASKS[left]
    hashed = np.where(left, (hashed ^ tails) * _FACTOR, hashed)
    hashed ^= hashed >> np.uint32(13)
    hashed *= _FACTOR
    hashed ^= hashed >> np.uint32(15)
    in_order = np.empty_like(hashed)
    in_order[order] = hashed
    return in_order


#: Estimated size of a record without key and value, for the sticky partitioner only.
_ABOUT_OVERHEAD_BYTES = 16
_NO_PARTITION = -1
#: Below this partition numbers fit 16 bits, which numpy sorts ten times faster.
_FAST_SORT_PARTITIONS = 2**15


def split_by_topic(records: OutgoingRecords, default: str | None) -> Iterator[tuple[str, OutgoingRecords]]:
    topics = records.topics
    if not is_column(topics) or topics.null_count == len(topics):
        named = topics if isinstance(topics, str) else default
        if named is None:
            raise make_no_topic_error()
        yield named, records
        return
    if topics.null_count:
        if default is None:
            raise make_no_topic_error()
        topics = topics.fill_null(default)
    coded = topics.dictionary_encode()
    names, codes = coded.dictionary.to_pylist(), coded.indices.to_numpy(zero_copy_only=False)
    if len(names) == 1:
        yield names[0], replace(records, topics=names[0])
        return
    for code, name in enumerate(names):
        yield name, replace(records.take(np.flatnonzero(codes == code)), topics=name)


class StickyPartitioner:
    """Chooses partitions for records without a key, the same one until a batch is full."""

    def __init__(self, run_bytes: int, start: Callable[[int], int] = random.randrange) -> None:
        self._run_bytes, self._start = run_bytes, start
        self._positions: dict[str, tuple[int, int]] = {}

    def choose_partitions(self, topic: str, sizes: Int64s, partitions: npt.NDArray[Any]) -> npt.NDArray[Any]:
        position, filled = self._positions.get(topic) or (self._start(len(partitions)), 0)
        ends = filled + np.cumsum(sizes)
        runs = (ends - sizes) // self._run_bytes
        last = int(runs[-1])
        self._positions[topic] = (position + last, int(ends[-1]) - last * self._run_bytes)
        chosen: npt.NDArray[Any] = partitions[(position + runs) % len(partitions)]
        return chosen


def split_by_partition(
    topic: str, records: OutgoingRecords, layout: TopicLayout, spreader: StickyPartitioner
) -> Mapping[int, OutgoingRecords]:
    # As in Kafka's Java producer: an explicit partition wins, then the key decides, then stickiness.
    rows, count = replace(records, topics=None, partitions=None, misfits=None), len(layout.leaders)
    chosen: Int64s = np.full(len(rows), _NO_PARTITION, np.int64)
    if records.partitions is not None:
        chosen = records.partitions.fill_null(_NO_PARTITION).to_numpy().copy()
        is_named = ~records.partitions.is_null().to_numpy(zero_copy_only=False)
        wrong = chosen[is_named & ((chosen < 0) | (chosen >= count))]
        if len(wrong):
            raise make_bad_record_error(describe_unknown_partition(topic, int(wrong[0]), count), topic)
    undecided = chosen == _NO_PARTITION
    if undecided.all():
        chosen = partitions_for_keys(rows.keys, count).astype(np.int64)
    elif undecided.any():
        by_key = partitions_for_keys(rows.keys, count)
        chosen[undecided] = by_key[undecided]
    keyless = chosen == _NO_PARTITION
    if keyless.any():
        sizes = np.maximum(lengths(rows.values), 0)[keyless] + _ABOUT_OVERHEAD_BYTES
        leaders = np.array(layout.leaders)
        led = np.flatnonzero(leaders >= 0) if (leaders >= 0).any() else np.arange(count)
        chosen[keyless] = spreader.choose_partitions(topic, sizes, led)
    return _group(rows, chosen, count)


def _group(rows: OutgoingRecords, chosen: Int64s, count: int) -> Mapping[int, OutgoingRecords]:
    sizes = np.bincount(chosen, minlength=count)
    used = np.flatnonzero(sizes)
    if len(used) == 1:
        return {int(used[0]): rows}
    narrow = np.int16 if count <= _FAST_SORT_PARTITIONS else np.int64
    # Stable sort: the records of a partition keep their order.
    ordered = rows.take(np.argsort(chosen.astype(narrow), kind="stable"))
    begins = np.concatenate(([0], np.cumsum(sizes)))
    return {int(p): ordered.slice(int(begins[p]), int(sizes[p])) for p in used}
