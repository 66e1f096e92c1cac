"""Async functions on unkeyed streams, run by mapInArrow; all calls of a worker share one event loop."""

from __future__ import annotations

import asyncio
import atexit
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from pyspark import TaskContext

from flinkish_spark.async_io.recorded_answers import (
    Answer,
    AnswerKey,
    Outputs,
    Readers,
    RecordedAnswers,
    compute_digest,
)
from flinkish_spark.async_io.wait import (
    AsyncElement,
    AsyncSpec,
    AsyncWait,
    DurableAnswers,
    Rows,
)
from flinkish_spark.contracts.calls import AsyncStatistics, Stream
from flinkish_spark.core.errors import InternalError
from flinkish_spark.core.micro_batch import micro_batch_of_task
from flinkish_spark.core.store import Store
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.operators.context import close_operator
from flinkish_spark.operators.process import ElementError
from flinkish_spark.transport.columns import CHANNEL, SEQUENCE
from flinkish_spark.types.rows import OutputError
from flinkish_spark.worker.daemon import freeze_modules
from flinkish_spark.worker.functions import ExpandRows, StatelessContext, records_of

# PySpark unpickles a function anew for each task, and a task is one micro-batch. A client that `open` made
# must outlive the task, with its connections and limits; so opened functions are cached by name.
_KEPT: OrderedDict[str, AsyncWait] = OrderedDict()
#: Bounded, since a worker may outlive jobs.
_MOST_KEPT = 16


def _get_or_open(name: str, make: Callable[[], AsyncWait]) -> AsyncWait:
    found = _KEPT.get(name)
    if found is None:
        found = _KEPT[name] = make()
    _KEPT.move_to_end(name)
    while len(_KEPT) > _MOST_KEPT:
        _, oldest = _KEPT.popitem(last=False)
        close_operator(oldest, name)
    return found


def close_kept(suffix: str = "") -> None:
    for name in [one for one in _KEPT if one.endswith(suffix)]:
        close_operator(_KEPT.pop(name), name)


atexit.register(close_kept)


class CallsInHarness(Protocol):
    """Clock and store of a test harness, in place of a worker's clock and the job directory."""

    @property
    def name(self) -> str: ...

    @property
    def store(self) -> Store: ...

    def make_loop(self) -> asyncio.AbstractEventLoop:
        """Return an event loop that runs on the harness's clock."""

    def folder(self, uid: str, *, is_kept: bool) -> str:
        """Return the folder of an operator's answers; `is_kept`: they survive a crash."""


CALLS_IN_HARNESS: ContextVar[CallsInHarness | None] = ContextVar("CALLS_IN_HARNESS", default=None)


@dataclass(frozen=True)
class AnswerPlace:
    """Place of an operator's recorded answers, and their readers; pickled into the plan."""

    job_dir: StoreSpec
    #: The operator's folder below it.
    folder: str
    readers: Readers


@dataclass(frozen=True)
class AsyncRows(ExpandRows):
    """Makes rows of each row by async calls; emits those of one output."""

    spec: AsyncSpec
    outputs: Outputs
    #: Name under which workers cache the opened function; the same for all outputs.
    kept_as: str
    #: Number of workers that share the limits of the job.
    workers: int = 1
    stream: Stream = Stream.OF_SOURCE
    #: Prefix of idempotency keys: job, operator and path.
    key_prefix: str = ""
    #: Name of the side output; empty for the main output.
    side: str = ""
    #: Place of recorded answers; None if they are not recorded.
    answers: AnswerPlace | None = None
    #: Reports the statistics of calls to the driver.
    report: Callable[[AsyncStatistics], None] | None = None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        write = self.make_writer()
        harness = CALLS_IN_HARNESS.get()
        name = self.kept_as if harness is None else f"{self.kept_as}-{harness.name}"
        waiting = _get_or_open(name, self._open)
        freeze_modules()
        try:
            task = _Task(self, waiting)
            for batch in batches:
                yield write(batch, *task.process(batch))
        except GeneratorExit:
            raise
        except BaseException:
            # A function may be in an unknown state after an aborted call: the next task opens a new one.
            if _KEPT.pop(name, None) is not None:
                close_operator(waiting, self.function.name)
            raise
        finally:
            if self.report is not None:
                self.report(waiting.take_statistics())

    def _open(self) -> AsyncWait:
        harness = CALLS_IN_HARNESS.get()
        waiting = AsyncWait(self.spec, self.workers, None if harness is None else harness.make_loop())
        try:
            with self.function.translate_errors("open"):
                waiting.open(_AsyncContext(self.function.name, self.function.parallelism))
        except BaseException:
            close_operator(waiting, self.function.name)
            raise
        return waiting


class _AsyncContext(StatelessContext):
    why_no_accumulators = (
        "an async function has none: a repeated task reads recorded answers and calls nothing; count in a "
        "function after it"
    )


class _Task:
    def __init__(self, rows: AsyncRows, waiting: AsyncWait) -> None:
        self._rows, self._waiting = rows, waiting
        self._places = _Places()
        self._micro_batch = micro_batch_of_task()
        self._recorded: RecordedAnswers | None = None
        self._is_opened = False

    def _open_answers(self) -> RecordedAnswers | None:
        """Return the recorded answers, or None; a harness always has them, for its side outputs."""
        rows, harness, task = self._rows, CALLS_IN_HARNESS.get(), TaskContext.get()
        index = 0 if task is None else task.partitionId()
        here = self._micro_batch.lineage, self._micro_batch.number, index
        if harness is not None:
            stream, readers = Stream.OF_MICRO_BATCH, Readers.ONE_WAY
            folder = harness.folder(rows.function.name, is_kept=rows.spec.is_recorded)
            return RecordedAnswers(harness.store, folder, rows.outputs, stream, readers, here)
        place = rows.answers
        if place is None:
            return None
        store = place.job_dir.open()
        return RecordedAnswers(store, place.folder, rows.outputs, rows.stream, place.readers, here)

    def process(self, batch: pa.RecordBatch) -> tuple[list[Any], np.ndarray[Any, Any]]:
        values = list(records_of(batch))
        if values and not self._is_opened:
            # Open the answers with the first elements only.
            self._recorded, self._is_opened = self._open_answers(), True
        asked = self._places.of(batch, values)
        found: dict[int, Answer] = {}
        try:
            if self._recorded is None:
                self._waiting.run_until_complete(self._answer_all(values, asked, found))
            else:
                work = self._answer_unrecorded(values, asked, found, self._recorded)
                self._waiting.run_until_complete(work)
        except ElementError as failed:
            error = failed.error
            says = f"the function {error}" if isinstance(error, OutputError) else ""
            raise self._rows.function.make_error(batch, failed.at, error, says) from error
        if len(found) != len(values):
            raise InternalError(f"{len(found)} of {len(values)} elements have an answer")
        output = self._rows.outputs.names.index(self._rows.side)
        rows = [found[at][output] for at in range(len(values))]
        counts = [len(one) for one in rows]
        return [row for one in rows for row in one], np.repeat(np.arange(len(values)), counts)

    def _list_missing(
        self, values: Sequence[Any], asked: Sequence[AnswerKey], found: dict[int, Answer]
    ) -> list[AsyncElement]:
        return [
            AsyncElement(at, value, self._make_key(one))
            for at, (value, one) in enumerate(zip(values, asked, strict=True))
            if at not in found
        ]

    def _make_key(self, asked: AnswerKey) -> str:
        # Several elements may be made of one record; they differ in content.
        place = f"{asked.channel}/{asked.sequence}/{asked.digest.hex()}/{asked.number}"
        if self._rows.stream is Stream.OF_MICRO_BATCH:
            # Sequences restart in each micro-batch.
            place = f"{self._micro_batch.lineage}-{self._micro_batch.number}/{place}"
        return f"{self._rows.key_prefix}/{place}"

    async def _answer_all(
        self, values: Sequence[Any], asked: Sequence[AnswerKey], found: dict[int, Answer]
    ) -> None:
        async def take(answers: Sequence[tuple[int, Rows]]) -> None:
            for at, rows in answers:
                found[at] = self._rows.outputs.group_rows(rows)

        await self._waiting.answer(self._list_missing(values, asked, found), take)

    async def _answer_unrecorded(
        self,
        values: Sequence[Any],
        asked: Sequence[AnswerKey],
        found: dict[int, Answer],
        recorded: RecordedAnswers,
    ) -> None:
        earlier: list[tuple[AnswerKey, Answer, int]] = []
        for at, one in enumerate(asked):
            own = recorded.find(one)
            if own is not None:
                found[at] = own
            elif (left := recorded.find_earlier(one)) is not None:
                earlier.append((one, left, at))
        for (_, _, at), answer in zip(earlier, recorded.append(earlier), strict=True):
            found[at] = answer
        missing = self._list_missing(values, asked, found)
        if not missing:
            return

        def append(answers: list[tuple[int, Rows]]) -> list[tuple[int, Answer]]:
            given = [(asked[at], self._rows.outputs.group_rows(rows), at) for at, rows in answers]
            return list(zip([at for at, _ in answers], recorded.append(given), strict=True))

        durable = DurableAnswers[list[tuple[int, Answer]]](append, found.update, self._rows.spec.capacity)
        async with durable.run_writer():
            await self._waiting.answer(missing, durable.put)


class _Places:
    """Makes the keys of answers: counts elements with the same position and content."""

    def __init__(self) -> None:
        self._before: Counter[tuple[int, int, bytes]] = Counter()
        self._rows = 0

    def of(self, batch: pa.RecordBatch, values: Sequence[Any]) -> list[AnswerKey]:
        names = batch.schema.names
        if CHANNEL in names and SEQUENCE in names:
            channels, sequences = batch.column(CHANNEL).to_pylist(), batch.column(SEQUENCE).to_pylist()
        else:
            # A plan without a job.
            channels, sequences = [0] * len(values), range(self._rows, self._rows + len(values))
        self._rows += len(values)
        # Elements made of one record are adjacent, so they are in at most two batches.
        seen, own = self._before, Counter[tuple[int, int, bytes]]()
        found = []
        for channel, sequence, value in zip(channels, sequences, values, strict=True):
            place = channel, sequence, compute_digest(value)
            found.append(AnswerKey(channel, sequence, seen[place] + own[place], place[2]))
            own[place] += 1
        self._before = own
        return found
