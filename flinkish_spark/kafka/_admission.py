"""Which records can be written as they are, and what becomes of the others.

The rules, their order and their words are those of the JVM writer (`Admission`, `Refusal` in jvm-shim).
A record is judged before anything of it is sent: what a broker refuses ends the whole transaction.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flinkish_spark.clock import Clock
from flinkish_spark.kafka import staging_faults as faults
from flinkish_spark.kafka._columns import Addressed
from flinkish_spark.kafka.record_batch import (
    HEADERS_TYPE,
    Column,
    CommonHeaders,
    Int64s,
    lengths,
    record_sizes,
)
from flinkish_spark.kafka.record_times import LAST_MS
from flinkish_spark.kafka.staging_settings import OnRefusal, StagingSettings

_DEAD_LETTER_BYTES = 1_024


class Reason(enum.Enum):
    """Why a record is refused; the text is what a dead letter's header ``flinkish-error`` says."""

    DOES_NOT_FIT = "does-not-fit"
    UNDECLARED_TOPIC = "undeclared-topic"
    NO_SUCH_PARTITION = "no-such-partition"
    BAD_TIMESTAMP = "bad-timestamp"
    OVERSIZE = "oversize"


@dataclass(frozen=True, slots=True)
class Judged:
    """What becomes of some records of one topic.

    Attributes
    ----------
    admitted
        To be written as they are.
    letters
        Dead letters, by their topic.
    dropped
        How many are left out.
    """

    admitted: Addressed
    letters: tuple[tuple[str, Addressed], ...] = ()
    dropped: int = 0


@dataclass(slots=True)
class _Letters:
    keys: list[bytes | None] = field(default_factory=list)
    values: list[bytes | None] = field(default_factory=list)
    headers: list[list[dict[str, Any]]] = field(default_factory=list)
    timestamps_ms: list[int] = field(default_factory=list)


class Admission:
    """Judges the records of one task.

    Parameters
    ----------
    settings
        Limits, declared topics and policies.
    common
        Headers that every record and every dead letter has.
    clock
        The time of dead letters whose own is impossible.
    """

    def __init__(self, settings: StagingSettings, common: CommonHeaders, clock: Clock) -> None:
        self._settings, self._common, self._clock = settings, tuple(common), clock

    def with_common(
        self, headers: Column | CommonHeaders | None, records: int
    ) -> Column | CommonHeaders | None:
        """Return the headers of records with the common ones in front."""
        if not self._common:
            return headers
        if not isinstance(headers, pa.Array | pa.ChunkedArray):
            return (*self._common, *(headers or ()))
        return prefixed(self._common, headers)

    def judged(self, topic: str, records: Addressed) -> Judged:
        """Return what becomes of records for `topic`.

        Raises
        ------
        BadRecordError
            If one of them cannot be written and its policy is to fail.
        """
        settings, rows = self._settings, records.rows
        sizes = record_sizes(rows.keys, rows.values, rows.headers)
        checks = {Reason.OVERSIZE: sizes > settings.record_limit_bytes}
        if (bad := (rows.timestamps_ms < 0) | (rows.timestamps_ms > LAST_MS)).any():
            checks[Reason.BAD_TIMESTAMP] = bad
        if settings.partitions is not None and records.partitions is not None:
            checks[Reason.NO_SUCH_PARTITION] = _outside(records.partitions, self._partitions(topic))
        if settings.topics is not None and topic not in settings.topics:
            checks[Reason.UNDECLARED_TOPIC] = np.ones(len(rows), np.bool_)
        if records.misfits is not None and records.misfits.null_count < len(rows):
            checks[Reason.DOES_NOT_FIT] = records.misfits.is_valid().to_numpy(zero_copy_only=False)
        refused = np.flatnonzero(np.logical_or.reduce(list(checks.values())))
        if not len(refused):
            return Judged(records)
        fine = np.ones(len(rows), np.bool_)
        fine[refused] = False
        return self._refused(topic, records, sizes, refused, checks, fine)

    def _refused(
        self,
        topic: str,
        records: Addressed,
        sizes: Int64s,
        refused: npt.NDArray[np.int64],
        checks: dict[Reason, npt.NDArray[np.bool_]],
        fine: npt.NDArray[np.bool_],
    ) -> Judged:
        by_topic: dict[str, _Letters] = {}
        dropped = 0
        for index in refused.tolist():
            reason = next(one for one in Reason if one in checks and checks[one][index])
            sentence = self._sentence(reason, topic, records, index, int(sizes[index]))
            match self._policy(reason):
                case (OnRefusal.DEAD_LETTER, str(name)):
                    letters = by_topic.setdefault(name, _Letters())
                    self._add(letters, reason, sentence, topic, records, index, int(sizes[index]))
                case (OnRefusal.DROP, _):
                    dropped += 1
                case _:
                    raise faults.refused_record(sentence, topic)
        made = tuple((name, _addressed(letters)) for name, letters in by_topic.items())
        return Judged(records.take(np.flatnonzero(fine)), made, dropped)

    def _policy(self, reason: Reason) -> tuple[OnRefusal, str | None]:
        settings = self._settings
        if reason is Reason.OVERSIZE:
            return settings.oversize, settings.dead_letter_topic
        return settings.bad_record, settings.bad_record_topic

    def _partitions(self, topic: str) -> int:
        return (self._settings.partitions or {}).get(topic, 0)

    def _sentence(self, reason: Reason, topic: str, records: Addressed, index: int, size: int) -> str:
        rows = records.rows
        match reason:
            case Reason.DOES_NOT_FIT:
                return f"a record for topic {topic} does not fit its format: {records.misfits[index].as_py()}"
            case Reason.UNDECLARED_TOPIC:
                return f"a record names the topic {topic}, which the sink does not declare"
            case Reason.NO_SUCH_PARTITION:
                named = records.partitions[index].as_py()
                return faults.unknown_partition(topic, named, self._partitions(topic))
            case Reason.BAD_TIMESTAMP:
                at_ms = int(rows.timestamps_ms[index])
                where = "before 1970" if at_ms < 0 else "after 9999"
                return f"a record for topic {topic} has a timestamp of {at_ms} ms, {where}"
            case Reason.OVERSIZE:
                key_bytes = max(0, int(lengths(rows.keys)[index]))
                return (
                    f"a record for topic {topic} takes up to {size} bytes and the limit is "
                    f"{self._settings.record_limit_bytes} (its key: {key_bytes} bytes); raise "
                    "max_record_bytes and the topic's max.message.bytes, or choose another oversize policy"
                )

    def _add(
        self,
        letters: _Letters,
        reason: Reason,
        sentence: str,
        topic: str,
        records: Addressed,
        index: int,
        size: int,
    ) -> None:
        """Add what tells of a refused record: whole if the dead-letter topic takes it, else its head."""
        rows = records.rows
        key, value = rows.keys[index].as_py(), rows.values[index].as_py()
        about = {"flinkish-error": reason.value, "flinkish-topic": topic}
        if reason is Reason.OVERSIZE:
            about["flinkish-size"] = str(size)
        else:
            about["flinkish-detail"] = sentence
        headers = [(name, text.encode()) for name, text in about.items()]
        headers += [(name, b"" if content is None else content) for name, content in self._common]
        keys, values = pa.array([key], pa.large_binary()), pa.array([value], pa.large_binary())
        takes = int(record_sizes(keys, values, headers)[0])
        if reason is Reason.OVERSIZE or takes > self._settings.dead_letter_limit_bytes:
            key = key if key is None or len(key) <= _DEAD_LETTER_BYTES else None
            value = None if value is None else value[:_DEAD_LETTER_BYTES]
        at_ms = int(rows.timestamps_ms[index])
        letters.keys.append(key)
        letters.values.append(value)
        letters.headers.append([{"key": name, "value": content} for name, content in headers])
        letters.timestamps_ms.append(at_ms if 0 <= at_ms <= LAST_MS else self._clock.wall_ms())


def prefixed(common: CommonHeaders, headers: Column) -> Any:
    """Return a column of headers with `common` in front of each list; null counts as an empty list."""
    if isinstance(headers, pa.ChunkedArray):
        headers = headers.combine_chunks()
    counts = headers.value_lengths().fill_null(0).to_numpy().astype(np.int64)
    entry = HEADERS_TYPE.value_type
    ahead = pa.array([{"key": name, "value": content} for name, content in common], entry)
    entries = pa.concat_arrays([ahead, headers.flatten().cast(entry)])
    ends = np.cumsum(counts + len(common))
    begins = ends - counts - len(common)
    places = np.arange(int(ends[-1]) if len(ends) else 0)
    within = places - np.repeat(begins, counts + len(common))
    # Where the entries of a row begin among those of all rows, behind the common ones.
    firsts = np.repeat(np.cumsum(counts) - counts, counts + len(common))
    chosen = np.where(within < len(common), within, within + firsts)
    offsets = np.concatenate((np.zeros(1, np.int64), ends)).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), entries.take(pa.array(chosen)), type=HEADERS_TYPE)


def _outside(partitions: Any, count: int) -> npt.NDArray[np.bool_]:
    given = partitions.is_valid().to_numpy(zero_copy_only=False)
    named = partitions.fill_null(0).to_numpy()
    found: npt.NDArray[np.bool_] = given & ((named < 0) | (named >= count))
    return found


def _addressed(letters: _Letters) -> Addressed:
    return Addressed.of(
        pa.array(letters.keys, pa.binary()),
        pa.array(letters.values, pa.binary()),
        pa.array(letters.headers, HEADERS_TYPE),
        None,
        None,
        np.array(letters.timestamps_ms, np.int64),
    )
