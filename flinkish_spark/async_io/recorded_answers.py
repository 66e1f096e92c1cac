"""Answers of an async operator that are part of the checkpoint: durable before anything downstream uses them.

An external system may answer differently when asked again. So each answer is written at once, and everybody
who processes the same element again (a retried task, a repeated micro-batch, another sink, a replay) reads
it. The driver deletes it when its checkpoint is confirmed.

    answers/<uid>/<lineage>-<micro-batch>-<log>-<number>

An object holds several answers and is created once. Concurrent attempts on the same elements each read the
objects of a *log* in order and append after the last one; so all of them see the same answer to an element,
the one that was written first.
"""

from __future__ import annotations

import enum
import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.async_io.functions import side_of
from flinkish_spark.contracts.calls import Stream
from flinkish_spark.core.errors import CorruptObjectError
from flinkish_spark.core.store import CreateResult, ObjectMissing, Store
from flinkish_spark.operators.process import ElementError
from flinkish_spark.state.codec import FrameError, pack_frame, read_table, table_bytes, unpack_frame
from flinkish_spark.types.rows import OutputError, RowReader, RowWriter, arrow_schema

#: Number of logs for all channels, and greatest distance in micro-batches between two paths of a plan.
_LOGS_OF_CHANNELS, _MOST_APART = 8, 16
#: Number of checkpoints after which the answers of an abandoned lineage are deleted in any case.
_LEFT_FOR = 20
#: Section with the keys of the answers.
_PLACES = "places"
_PLACE_COLUMNS = ("channel", "sequence", "number", "digest")


class AnswerKey(NamedTuple):
    """Key of an answer: the element's position in its stream, and a digest of its content."""

    channel: int
    sequence: int
    #: Counts elements with the same position and content, which are interchangeable.
    number: int
    #: Digest of its content, so that a changed program does not find answers to other elements.
    digest: bytes


def compute_digest(element: Sequence[Any]) -> bytes:
    return hashlib.blake2b(repr(tuple(element)).encode("utf-8", "surrogatepass"), digest_size=16).digest()


#: The rows made of an element for each output, in the order of the outputs' declaration.
Answer = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Outputs:
    """Names and fields of an operator's outputs; the main output is first, its name is empty."""

    names: tuple[str, ...]
    fields: tuple[T.StructType, ...]

    def group_rows(self, rows: Iterable[Any]) -> Answer:
        """Return the rows of an element by output, without those for side outputs that no stream reads."""
        found: dict[str, list[Any]] = {name: [] for name in self.names}
        for row in rows:
            side = side_of(row)
            if side is None:
                found[""].append(row)
            elif side in found:
                found[side].append(row.row)
        return tuple(tuple(found[name]) for name in self.names)


class Readers(enum.Enum):
    """Tasks that may process the same elements at the same time."""

    #: Attempts of one task.
    ONE_WAY = "ONE_WAY"
    #: Tasks on several paths of a plan, which may process an element in different micro-batches.
    SEVERAL_WAYS = "SEVERAL_WAYS"


@dataclass(frozen=True)
class _Object:
    key: str
    lineage: int
    batch: int
    log: str
    number: int

    @classmethod
    def of(cls, key: str) -> _Object:
        try:
            lineage, batch, log, number = key.rsplit("/", 1)[1].split("-")
            return cls(key, int(lineage), int(batch), log, int(number))
        except (IndexError, ValueError):
            raise CorruptObjectError(
                f"{key} is no object of answers", what_to_do="take it out of the job directory"
            ) from None


def list_objects(store: Store, folder: str) -> list[_Object]:
    found = map(_Object.of, store.list(folder))
    return sorted(found, key=lambda one: (one.lineage, one.batch, one.log, one.number))


class RecordedAnswers:
    """Recorded answers for the elements of one task, and the log to which it appends new ones."""

    def __init__(
        self,
        store: Store,
        folder: str,
        outputs: Outputs,
        stream: Stream,
        readers: Readers,
        place: tuple[int, int, int],
    ) -> None:
        self._store, self._folder, self._outputs = store, folder, outputs
        self._stream, self._readers = stream, readers
        self._lineage, self._batch, self._task = place
        self._known: dict[AnswerKey, Answer] = {}
        self._earlier: dict[AnswerKey, Answer] = {}
        #: Answers of abandoned lineages in order, by channel and digest.
        self._left: dict[tuple[int, bytes], list[Answer]] = defaultdict(list)
        self._ends: Counter[str] = Counter()
        self._load()

    def find(self, asked: AnswerKey) -> Answer | None:
        return self._known.get(asked)

    def find_earlier(self, asked: AnswerKey) -> Answer | None:
        """Return an answer of another micro-batch or abandoned lineage; append it before using it."""
        if self._stream is Stream.OF_SOURCE:
            return self._earlier.get(asked)
        # Equal elements are interchangeable, so the first one gets the first answer.
        left = self._left.get((asked.channel, asked.digest))
        return left.pop(0) if left else None

    def append(self, answers: Sequence[tuple[AnswerKey, Answer, int]]) -> list[Answer]:
        """Write answers durably; return the valid ones, maybe of another attempt, in the same order."""
        by_log: dict[str, list[tuple[AnswerKey, Answer, int]]] = defaultdict(list)
        for one in answers:
            # Tasks on several paths differ in number, but share channels.
            is_shared = self._readers is Readers.SEVERAL_WAYS
            log = f"c{one[0].channel % _LOGS_OF_CHANNELS}" if is_shared else f"t{self._task}"
            by_log[log].append(one)
        for log, own in by_log.items():
            self._append_to(log, own)
        return [self._known[asked] for asked, _, _ in answers]

    def _append_to(self, log: str, answers: list[tuple[AnswerKey, Answer, int]]) -> None:
        answers = [one for one in answers if one[0] not in self._known]
        while answers:
            key = f"{self._folder}/{self._lineage}-{self._batch}-{log}-{self._ends[log]}"
            try:
                data = encode(self._outputs, answers)
            except ElementError:
                # Each answer cost a call, so keep all but those that cannot be written.
                self._append_to(log, [one for one in answers if _can_encode(self._outputs, one)])
                raise
            # This create makes the answers valid. Another attempt's may win before it, never after it.
            created = self._store.create_if_absent(key, data)
            if created is CreateResult.EXISTS:
                self._take(key)
            else:
                self._known |= {asked: answer for asked, answer, _ in answers}
            self._ends[log] += 1
            answers = [one for one in answers if one[0] not in self._known]

    def _take(self, key: str) -> None:
        for asked, answer in self._read(key):
            # The answer that was written first is valid.
            self._known.setdefault(asked, answer)

    def _read(self, key: str) -> list[tuple[AnswerKey, Answer]]:
        try:
            return decode(self._outputs, self._store.read(key))
        except ObjectMissing:
            # Its checkpoint has been confirmed since it was listed.
            return []
        except FrameError as error:
            raise CorruptObjectError(
                f"{key} cannot be read",
                why=str(error),
                what_to_do="check the job directory's disk; delete the object if its calls may be repeated",
            ) from error

    def _load(self) -> None:
        others: list[_Object] = []
        for one in list_objects(self._store, self._folder):
            if (one.lineage, one.batch) == (self._lineage, self._batch):
                self._take(one.key)
                self._ends[one.log] = one.number + 1
            elif one.lineage <= self._lineage:
                others.append(one)
        has_left = any(one.lineage < self._lineage for one in others)
        if self._stream is Stream.OF_SOURCE:
            for one in others:
                is_near = self._readers is Readers.SEVERAL_WAYS and one.batch >= self._batch - _MOST_APART
                if one.lineage < self._lineage or is_near:
                    self._earlier |= dict(self._read(one.key))
        elif has_left:
            self._load_left(others)

    def _load_left(self, others: Iterable[_Object]) -> None:
        """Load the answers of abandoned lineages, without those that this lineage has already taken over."""
        used = Counter((asked.channel, asked.digest) for asked in self._known)
        left: dict[int, dict[tuple[int, bytes], list[Answer]]] = defaultdict(lambda: defaultdict(list))
        for one in others:
            for asked, answer in self._read(one.key):
                alike = asked.channel, asked.digest
                if one.lineage < self._lineage:
                    left[one.lineage][alike].append(answer)
                else:
                    used[alike] += 1
        for lineage in sorted(left):
            for alike, answers in left[lineage].items():
                # A lineage's own answers include those that it took over from earlier lineages.
                self._left[alike] = answers + self._left[alike][len(answers) :]
        for alike, count in used.items():
            del self._left[alike][:count]


def _can_encode(outputs: Outputs, answer: tuple[AnswerKey, Answer, int]) -> bool:
    try:
        encode(outputs, [answer])
    except ElementError:
        return False
    return True


def encode(outputs: Outputs, answers: Sequence[tuple[AnswerKey, Answer, int]]) -> bytes:
    places = list(zip(*(asked for asked, _, _ in answers), strict=True))
    kinds = (pa.int64(), pa.int64(), pa.int64(), pa.binary())
    columns = {
        name: pa.array(column, kind) for name, column, kind in zip(_PLACE_COLUMNS, places, kinds, strict=True)
    }
    sections: dict[str, memoryview] = {}
    for at, (name, fields) in enumerate(zip(outputs.names, outputs.fields, strict=True)):
        columns[f"rows:{name}"] = pa.array([len(answer[at]) for _, answer, _ in answers], pa.int64())
        of_row = [place for _, answer, place in answers for _ in answer[at]]
        rows = [row for _, answer, _ in answers for row in answer[at]]
        try:
            arrays = RowWriter.of(fields).write(rows)
        except OutputError as error:
            raise ElementError(of_row[error.row or 0], False, error) from error
        table = pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(fields))
        sections[f"output:{name}"] = table_bytes(table)
    sections[_PLACES] = table_bytes(pa.RecordBatch.from_pydict(columns))
    return pack_frame(sections)


def decode(outputs: Outputs, data: bytes) -> list[tuple[AnswerKey, Answer]]:
    """Return the answers in an object; none if the program had other outputs when it was written."""
    sections = unpack_frame(data)
    if _PLACES not in sections:
        raise FrameError("it has no section 'places'")
    places = read_table(_PLACES, sections[_PLACES])
    rows: list[list[tuple[Any, ...]]] = []
    for name, fields in zip(outputs.names, outputs.fields, strict=True):
        section = f"output:{name}"
        if section not in sections or f"rows:{name}" not in places.schema.names:
            return []
        table = read_table(section, sections[section])
        if not table.schema.equals(arrow_schema(fields)):
            return []
        counts, own = places.column(f"rows:{name}").to_pylist(), table.schema.names
        made = list(RowReader(own, own, ()).read(table)[1])
        if sum(counts) != len(made) or any(count < 0 for count in counts):
            raise FrameError("its keys and its rows do not match")
        left = iter(made)
        rows.append([tuple(islice(left, count)) for count in counts])
    asked = map(AnswerKey, *(places.column(name).to_pylist() for name in _PLACE_COLUMNS))
    return [(one, tuple(answer)) for one, *answer in zip(asked, *rows, strict=True)]


@dataclass(frozen=True)
class AnswerRecording:
    #: Their folder in the job directory.
    folder: str
    stream: Stream
    readers: Readers

    def make_retention(self, store: Store) -> AnswerRetention:
        return AnswerRetention(store, self)


class AnswerRetention:
    """Finds answers that are not needed any more; lives as long as a process owns the job."""

    def __init__(self, store: Store, recording: AnswerRecording) -> None:
        self._store, self._recording = store, recording
        #: Greatest sequence per channel in the live lineage, while there are abandoned ones.
        self._reached: dict[int, int] = {}
        self._checkpoints = 0

    def find_unneeded(self, lineage: int, batches: Collection[int]) -> list[str]:
        """Return the keys of objects to delete after a checkpoint is confirmed."""
        first, last = min(batches), max(batches)
        upto = first - 1 if self._recording.readers is Readers.SEVERAL_WAYS else last
        objects = list_objects(self._store, self._recording.folder)
        done = [one for one in objects if one.lineage == lineage and one.batch <= upto]
        left = [one for one in objects if one.lineage < lineage]
        if left and self._recording.stream is Stream.OF_SOURCE:
            left = self._find_passed(left, [one for one in objects if one.lineage == lineage])
        return [one.key for one in (*done, *left)]

    def _find_passed(self, left: list[_Object], live: list[_Object]) -> list[_Object]:
        self._checkpoints += 1
        for channel, sequence in _find_greatest(self._store, [one.key for one in live]).items():
            self._reached[channel] = max(sequence, self._reached.get(channel, sequence))
        if self._checkpoints >= _LEFT_FOR:
            # A channel may be silent, or the program may have changed.
            return left
        passed = []
        for one in left:
            ends = _find_greatest(self._store, [one.key])
            if all(at in self._reached and self._reached[at] >= end for at, end in ends.items()):
                passed.append(one)
        return passed


def _find_greatest(store: Store, keys: Iterable[str]) -> dict[int, int]:
    found: dict[int, int] = {}
    for key in keys:
        try:
            places = read_table(_PLACES, unpack_frame(store.read(key))[_PLACES])
        except (ObjectMissing, FrameError, KeyError):
            continue
        pairs = zip(places.column("channel").to_pylist(), places.column("sequence").to_pylist(), strict=True)
        for channel, sequence in pairs:
            found[channel] = max(sequence, found.get(channel, sequence))
    return found
