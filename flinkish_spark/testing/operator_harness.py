"""Runs one keyed operator step by step, without Spark: push elements, watermarks, times; see what comes.

State goes through the format in which a job stores it. A snapshot may be taken after any step, and restored
into other harnesses, each with some of the key groups; whoever wants a crash throws the harness away and
restores the last snapshot. A step that raises has done nothing, as a micro-batch that fails.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

from pyspark.sql import types as T

from flinkish_spark.functions import KeyedProcessFunction
from flinkish_spark.operators.elements import MIN_WATERMARK_MS, OutputTag, TimeDomain
from flinkish_spark.operators.frames import Frame
from flinkish_spark.operators.group_run import Elements, Emitted, GroupRun, Progress
from flinkish_spark.operators.group_state import BasePolicy, GroupLayout, GroupState
from flinkish_spark.operators.keyed_operators import KeyedProcessOperator, KeyedStreamOperator
from flinkish_spark.operators.payloads import BaseRef, checked_frame
from flinkish_spark.runtime.ddl import parse_ddl


class MemoryBases:
    """Bases in memory; a base stays as long as the object lives."""

    def __init__(self) -> None:
        self._frames: dict[str, bytes] = {}

    batch = 0
    retained_batch: int | None = None

    def read(self, ref: BaseRef) -> Frame:
        """Return a base's sections."""
        return checked_frame(self._frames[ref.file])

    def delete(self, file: str) -> None:
        """Forget a base."""
        self._frames.pop(file, None)

    def write(self, group: int, frame: bytes) -> BaseRef:
        """Keep a frame."""
        name = f"{group}-{len(self._frames)}"
        self._frames[name] = frame
        return BaseRef(name, 0, len(frame))


@dataclass(frozen=True)
class Snapshot:
    """What a harness can be restored from: stored values by key group, and where time stood."""

    values: dict[int, bytes]
    watermark_ms: int
    processing_time_ms: int

    def part(self, groups: Collection[int]) -> Self:
        """Return what a subtask with some of the key groups begins with.

        Examples
        --------
        >>> Snapshot({0: b"a", 3: b"b"}, 10, 20).part(range(2)).values
        {0: b'a'}
        """
        return replace(self, values={group: self.values[group] for group in self.values if group in groups})

    @staticmethod
    def together(parts: Iterable[Snapshot]) -> Snapshot:
        """Return the snapshot of an operator whose subtasks had these; all stood at the same time.

        Raises
        ------
        ValueError
            There is none, a key group is in two of them, or times differ.
        """
        taken = list(parts)
        if len({(one.watermark_ms, one.processing_time_ms) for one in taken}) != 1:
            raise ValueError("snapshots of subtasks must be of one time")
        groups = [group for one in taken for group in one.values]
        if len(set(groups)) < len(groups):
            raise ValueError("a key group is in two subtasks")
        return replace(taken[0], values={group: one.values[group] for one in taken for group in one.values})


@dataclass
class Output:
    """What an operator emitted since the last look.

    Parameters
    ----------
    rows, times_ms
        In order.
    side
        Rows by name of the side output.
    counts
        What the operator counted, by name.
    """

    rows: list[Any] = field(default_factory=list)
    times_ms: list[int | None] = field(default_factory=list)
    side: dict[str, list[Any]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def extend(self, later: Output) -> None:
        """Append what was emitted later."""
        self.rows += later.rows
        self.times_ms += later.times_ms
        for name, rows in later.side.items():
            self.side.setdefault(name, []).extend(rows)
        for name, count in later.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count


class OperatorHarness:
    """One keyed function with all its key groups, without declared types of its elements and results.

    A :class:`~flinkish_spark.testing.ProgramHarness` takes all other kinds of functions, windows, joins and
    whole programs, as they are written for a job.

    Parameters
    ----------
    operator
        A function, or an operator.
    key
        From an element to its key: a scalar, or a tuple for several columns; of all inputs alike.
    key_type
        DDL of the key.
    max_parallelism
        Number of key groups.
    restore
        What to begin with; nothing by default.
    policy, bases
        When key groups move into bases, and where those are. A harness that restores another's snapshot
        needs its bases.

    Examples
    --------
    >>> from flinkish_spark import KeyedProcessFunction, ValueStateDescriptor
    >>> class Count(KeyedProcessFunction):
    ...     def open(self, context):
    ...         self.n = context.get_state(ValueStateDescriptor("n", "LONG", default=0))
    ...     def process_element(self, value, ctx):
    ...         self.n.update(self.n.value() + 1)
    ...         yield value, self.n.value()
    >>> harness = OperatorHarness(Count(), key=lambda value: value, key_type="STRING")
    >>> harness.push("a"); harness.push("a")
    >>> harness.take().rows
    [('a', 1), ('a', 2)]
    """

    def __init__(
        self,
        operator: KeyedStreamOperator | KeyedProcessFunction,
        *,
        key: Callable[[Any], Any],
        key_type: str,
        uid: str = "operator",
        max_parallelism: int = 16,
        restore: Snapshot | None = None,
        policy: BasePolicy | None = None,
        bases: MemoryBases | None = None,
    ) -> None:
        if isinstance(operator, KeyedProcessFunction):
            operator = KeyedProcessOperator(operator)
        self._operator, self._key = operator, key
        self._run = GroupRun(operator, uid, max_parallelism)
        parsed = parse_ddl(key_type)
        kinds = [f.dataType for f in parsed] if isinstance(parsed, T.StructType) else [parsed]
        self._layout = GroupLayout.of(self._run.states, kinds)
        self._groups = max_parallelism
        self._policy = BasePolicy() if policy is None else policy
        self.bases = MemoryBases() if bases is None else bases
        self._values = {} if restore is None else dict(restore.values)
        self._watermark_ms = MIN_WATERMARK_MS if restore is None else restore.watermark_ms
        self._time_ms = 0 if restore is None else restore.processing_time_ms
        self._output = Output()

    # -- input ----------------------------------------------------------------------------------
    def push(self, value: Any, time_ms: int | None = None, source: int = 0) -> None:
        """Process one element of an input, by its number."""
        self.push_all([(value, time_ms)], source)

    def push_all(self, elements: Sequence[tuple[Any, int | None]], source: int = 0) -> None:
        """Process elements as one micro-batch: (value, event time)."""
        by_group: dict[int, list[tuple[Any, int | None]]] = {}
        for value, time_ms in elements:
            by_group.setdefault(self.group_of(self._key(value)), []).append((value, time_ms))
        with self._whole():
            for group, own in sorted(by_group.items()):
                keys = [self._key(value) for value, _ in own]
                given = Elements(keys, [value for value, _ in own], [time for _, time in own], source)
                self._step(group, [given], self._progress(self._watermark_ms))

    def watermark(self, time_ms: int) -> None:
        """Let event time advance; a watermark that does not is ignored."""
        if time_ms > self._watermark_ms:
            with self._whole():
                progress = self._progress(time_ms)
                self._watermark_ms = time_ms
                self._wake_all(progress)

    def processing_time(self, time_ms: int) -> None:
        """Let processing time advance.

        Raises
        ------
        ValueError
            It would go back.
        """
        if time_ms < self._time_ms:
            raise ValueError(f"processing time is {self._time_ms} and cannot go back to {time_ms}")
        with self._whole():
            self._time_ms = time_ms
            self._wake_all(self._progress(self._watermark_ms))

    # -- output ---------------------------------------------------------------------------------
    def take(self) -> Output:
        """Return what was emitted since the last call."""
        output, self._output = self._output, Output()
        return output

    def side(self, tag: OutputTag) -> list[Any]:
        """Return what is there of a side output, without taking it."""
        return self._output.side.get(tag.name, [])

    # -- state ----------------------------------------------------------------------------------
    def snapshot(self) -> Snapshot:
        """Return the state as it is stored."""
        return Snapshot(dict(self._values), self._watermark_ms, self._time_ms)

    def entries(self, state: str) -> dict[Any, Any]:
        """Return all entries of a state, by key or by (key, window)."""
        found = {}
        for value in self._values.values():
            stored = GroupState(self._layout, value, self.bases)
            found.update({row.slot: row.value for row in stored.rows(state)})
        return found

    def timer_count(self) -> int:
        """Return how many timers are registered, of both clocks."""
        return sum(
            GroupState(self._layout, value, self.bases).timer_count() for value in self._values.values()
        )

    def next_timer_ms(self, domain: TimeDomain) -> int | None:
        """Return when the next timer of a clock is due, of all key groups; None without one."""
        stored = [GroupState(self._layout, value, self.bases) for value in self._values.values()]
        due_ms = [one.next_due_ms(domain) for one in stored]
        return min((time_ms for time_ms in due_ms if time_ms is not None), default=None)

    def group_of(self, key: Any) -> int:
        """Return a key's group; the harness has a hash of its own."""
        return self._hash(key) % self._groups

    # -- parts ----------------------------------------------------------------------------------
    @staticmethod
    def _hash(key: Any) -> int:
        return zlib.crc32(repr(key).encode())

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Let a step have done everything, or nothing if it raises."""
        before = dict(self._values), self._watermark_ms, self._time_ms
        emitted, self._output = self._output, Output()
        try:
            yield
            emitted.extend(self._output)
        except BaseException:
            self._values, self._watermark_ms, self._time_ms = before
            raise
        finally:
            self._output = emitted

    def _progress(self, watermark_ms: int) -> Progress:
        return Progress(self._watermark_ms, watermark_ms, self._time_ms)

    def _wake_all(self, progress: Progress) -> None:
        for group in sorted(self._values):
            self._step(group, [], progress)

    def _step(self, group: int, behind: Sequence[Elements], progress: Progress) -> None:
        state = GroupState(self._layout, self._values.get(group), self.bases)
        hash_of = {key: self._hash(key) for elements in behind for key in elements.keys}
        state.clean_up(progress.processing_time_ms)
        self._load(state, hash_of, progress)
        self._collect(self._run.run([], progress, behind))
        if state.store(self._run.states, self._run.timers):
            self._values[group] = state.dump(group, self._policy, progress.processing_time_ms)

    def _load(self, state: GroupState, hash_of: dict[Any, int], progress: Progress) -> None:
        """Put a key group's entries into the run; a hook for operators that want more of them."""
        state.load(self._run.states, self._run.timers, hash_of, progress)

    def _collect(self, emitted: Emitted) -> None:
        side = {name: [row for row, _ in rows] for name, rows in emitted.side.items()}
        self._output.extend(Output(emitted.rows, emitted.times_ms, side, emitted.counts))
