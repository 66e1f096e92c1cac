"""The operator harness for keyed operators with a broadcast input: several partitions, each with a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flinkish_spark.functions import KeyedBroadcastProcessFunction
from flinkish_spark.operators.broadcast_operators import KeyedBroadcastOperator
from flinkish_spark.operators.broadcast_state import any_copy
from flinkish_spark.operators.group_run import Elements, Progress
from flinkish_spark.operators.group_state import GroupState
from flinkish_spark.state import MapStateDescriptor
from flinkish_spark.testing.operator_harness import OperatorHarness, Snapshot

Timed = tuple[Any, int | None]


@dataclass(frozen=True)
class BroadcastSnapshot(Snapshot):
    """A snapshot with the broadcast state of each partition; None where nothing was stored yet."""

    broadcast: tuple[bytes | None, ...] = ()


class BroadcastHarness(OperatorHarness):
    """One keyed operator with a broadcast input, all its key groups and partitions.

    Parameters
    ----------
    function, descriptors
        The function, and its broadcast states.
    parallelism
        Number of partitions; key group g is in partition g modulo that. It may differ from that of the
        snapshot: any partition's copy is everybody's.
    settings
        What else an :class:`~flinkish_spark.testing.operator_harness.OperatorHarness` takes.

    Examples
    --------
    >>> from flinkish_spark.state import MapStateDescriptor
    >>> from flinkish_spark.functions import KeyedBroadcastProcessFunction
    >>> FACTORS = MapStateDescriptor("factors", "STRING", "LONG")
    >>> class Times(KeyedBroadcastProcessFunction):
    ...     def process_element(self, value, ctx):
    ...         yield value * ctx.get_broadcast_state(FACTORS).get("all", 1)
    ...     def process_broadcast_element(self, factor, ctx):
    ...         ctx.get_broadcast_state(FACTORS)["all"] = factor
    >>> harness = BroadcastHarness(Times(), [FACTORS], key=lambda value: value, key_type="LONG")
    >>> harness.micro_batch(broadcast=[(10, None)], elements=[(1, None), (2, None)])
    >>> sorted(harness.take().rows)
    [10, 20]
    """

    def __init__(
        self,
        function: KeyedBroadcastProcessFunction,
        descriptors: Sequence[MapStateDescriptor],
        *,
        key: Callable[[Any], Any],
        key_type: str,
        parallelism: int = 2,
        restore: BroadcastSnapshot | None = None,
        **settings: Any,
    ) -> None:
        self._keyed = KeyedBroadcastOperator(function, descriptors)
        super().__init__(self._keyed, key=key, key_type=key_type, restore=restore, **settings)
        copy = None if restore is None else any_copy(restore.broadcast)
        self._copies: list[bytes | None] = [copy] * parallelism

    def broadcast(self, value: Any, time_ms: int | None = None) -> None:
        """Process one broadcast element."""
        self.micro_batch([(value, time_ms)], [])

    def push_all(self, elements: Sequence[Timed], source: int = 0) -> None:
        """Process elements of the keyed input as one micro-batch."""
        self.micro_batch([], elements)

    def micro_batch(self, broadcast: Sequence[Timed], elements: Sequence[Timed]) -> None:
        """Process elements of both inputs as one micro-batch."""
        by_group: dict[int, list[Timed]] = {}
        for value, time_ms in elements:
            by_group.setdefault(self.group_of(self._key(value)), []).append((value, time_ms))
        copies = list(self._copies)
        try:
            with self._whole():
                self._micro_batch(broadcast, by_group, self._progress(self._watermark_ms))
        except BaseException:
            self._copies = copies
            raise

    def snapshot(self) -> BroadcastSnapshot:
        """Return the state as it is stored."""
        plain = super().snapshot()
        return BroadcastSnapshot(
            plain.values, plain.watermark_ms, plain.processing_time_ms, tuple(self._copies)
        )

    def copies(self, descriptor: MapStateDescriptor) -> list[dict[Any, Any]]:
        """Return each partition's copy of a broadcast state."""
        found = []
        for value in self._copies:
            self._keyed.side.begin(value)
            found.append(dict(self._keyed.side.readable(descriptor)))
        return found

    # -- parts ----------------------------------------------------------------------------------
    def _micro_batch(
        self, broadcast: Sequence[Timed], by_group: dict[int, list[Timed]], progress: Progress
    ) -> None:
        side = self._keyed.side
        values, times = [value for value, _ in broadcast], [time_ms for _, time_ms in broadcast]
        for partition, copy in enumerate(self._copies):
            side.begin(copy)
            if broadcast:
                self._collect(side.process(Elements(values, values, times), progress))
            self._copies[partition] = side.dump() or copy
            woken = set(by_group) | (set(self._values) if side.applications else set())
            for group in sorted(woken):
                if group % len(self._copies) == partition:
                    own = by_group.get(group, [])
                    keys = [self._key(value) for value, _ in own]
                    given = Elements(keys, [value for value, _ in own], [time for _, time in own])
                    self._step(group, [given], progress)

    def _wake_all(self, progress: Progress) -> None:
        self._micro_batch([], {group: [] for group in self._values}, progress)

    def _load(self, state: GroupState, hash_of: dict[Any, int], progress: Progress) -> None:
        run = self._run
        state.load(run.states, run.timers, hash_of, progress, self._keyed.hashes_to_load(state))
        self._keyed.apply(run, progress)
