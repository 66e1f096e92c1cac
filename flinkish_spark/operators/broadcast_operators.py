"""Operators with a broadcast input: keyed ones, and such as have no key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from flinkish_spark.functions import BroadcastProcessFunction, KeyedBroadcastProcessFunction
from flinkish_spark.operators.broadcast_side import (
    NO_KEY,
    ApplicationFailed,
    BroadcastSide,
    BroadcastSideContext,
    ContextFacts,
    KeyedSideContext,
)
from flinkish_spark.operators.broadcast_state import ReadOnlyBroadcastState
from flinkish_spark.operators.declaring import declared_state
from flinkish_spark.operators.elements import TimeDomain, Timer
from flinkish_spark.operators.group_run import (
    NO_ELEMENTS,
    Check,
    Elements,
    Emitted,
    GroupRun,
    Progress,
)
from flinkish_spark.operators.group_state import GroupState
from flinkish_spark.operators.key_index import Array
from flinkish_spark.operators.keyed_context import FunctionContext, KeyedStates, Timers
from flinkish_spark.operators.keyed_operators import KeyedStreamOperator, Processor
from flinkish_spark.operators.without_keys import NoKeyedState
from flinkish_spark.state import MapStateDescriptor, StateDescriptor
from flinkish_spark.user_iterators import USER_ERRORS, elements_of


class KeyedBroadcastOperator(KeyedStreamOperator):
    """Runs a :class:`~flinkish_spark.functions.KeyedBroadcastProcessFunction`.

    It has one keyed input. The broadcast one is :attr:`side`, which the runtime drives once per partition
    and micro-batch, before the key groups of that partition.

    Parameters
    ----------
    descriptors
        Of the broadcast states.
    """

    def __init__(
        self, function: KeyedBroadcastProcessFunction, descriptors: Sequence[MapStateDescriptor]
    ) -> None:
        self._function, self._descriptors = function, tuple(descriptors)

    def open(self, states: KeyedStates, context: FunctionContext, timers: Timers) -> None:
        """Open the function."""
        self._states = states = states.of_function()
        #: The broadcast half; there once the operator is open.
        self.side = BroadcastSide(states.uid, self._descriptors, self._process_broadcast, self._is_declared)
        self._context = KeyedSideContext(context, self.side)
        self._function.open(states)

    def processors(self) -> tuple[Processor, ...]:
        """Return what handles an element of the keyed input."""
        return (self._process,)

    def on_timer(self, timer: Timer, domain: TimeDomain) -> Iterable[Any] | None:
        """Call the function's `on_timer`."""
        return self._function.on_timer(timer.time_ms, self._context)

    def close(self) -> None:
        """Close the function."""
        self._function.close()

    # -- keyed state, from the broadcast side ---------------------------------------------------------
    def hashes_to_load(self, group: GroupState) -> Array:
        """Return the hashes of the keys to which something is to be applied, for `GroupState.load`."""
        names = {one.descriptor.name for one in self.side.applications}
        found = [group.hashes_of(name) for name in sorted(names)]
        return np.unique(np.concatenate(found)) if found else np.empty(0, dtype=np.int64)

    def apply(self, run: GroupRun, progress: Progress) -> None:
        """Do what `apply_to_keyed_state` was asked for, with the key group that is loaded.

        Called behind `GroupState.load` and before `GroupRun.run`, for every key group of the partition: also
        for those that have no elements and no timers in this micro-batch.

        Raises
        ------
        ApplicationFailed
            A function raised; nothing of the micro-batch counts.
        """
        scope = run.states.scope
        scope.now_ms = progress.processing_time_ms
        for one in self.side.applications:
            state = declared_state(self._states, one.descriptor)
            table = self._states.tables[one.descriptor.name]
            for key in list(table.entries):
                scope.enter(key)
                # What is expired is not there.
                if table.read(scope) is None:
                    continue
                try:
                    one.function(key, state)
                except USER_ERRORS as error:
                    raise ApplicationFailed(one.descriptor.name, key, error) from error

    # -- parts ----------------------------------------------------------------------------------------
    def _process(self, value: Any, _: FunctionContext) -> Iterable[Any] | None:
        return self._function.process_element(value, self._context)

    def _process_broadcast(self, value: Any, context: BroadcastSideContext) -> Iterable[Any]:
        self._states.scope.enter(NO_KEY)
        # As a list: a generator would run when nobody knows any more whose turn it is.
        return list(elements_of(self._function.process_broadcast_element(value, context) or ()))

    def _is_declared(self, descriptor: StateDescriptor) -> bool:
        return self._states.descriptors.get(descriptor.name) == descriptor


class BroadcastRun:
    """Runs a :class:`~flinkish_spark.functions.BroadcastProcessFunction` in one partition.

    Parameters
    ----------
    function
        The function; opened here.
    descriptors
        Of the broadcast states.
    uid, max_parallelism
        Of the operator.
    """

    def __init__(
        self,
        function: BroadcastProcessFunction,
        descriptors: Sequence[MapStateDescriptor],
        uid: str,
        max_parallelism: int,
    ) -> None:
        self._function = function
        self._context = _ElementContext()
        self.side = BroadcastSide(uid, descriptors, function.process_broadcast_element, lambda _: False)
        self._context.get_broadcast_state = self.side.readable
        function.open(NoKeyedState(uid, max_parallelism))

    def run(
        self,
        value: bytes | None,
        broadcast: Elements,
        elements: Elements,
        progress: Progress,
        check: Check | None = None,
        broadcast_before: Elements = NO_ELEMENTS,
        elements_before: Elements = NO_ELEMENTS,
    ) -> tuple[Emitted, bytes | None]:
        """Work through a micro-batch of the partition.

        Parameters
        ----------
        value
            What was stored for the partition; None at the beginning.
        broadcast, elements
            Those behind the watermark; their keys are not looked at.
        check
            Looks at what each call emits; None: nobody does.
        broadcast_before, elements_before
            Those before the watermark.

        Returns
        -------
        emitted, bytes or None
            What to store; None if nothing has changed.

        Raises
        ------
        ElementFailed
            The function raised: `BroadcastElementFailed` where it was at a broadcast element.
        """
        self.side.begin(value)
        emitted = self.side.process(broadcast, progress, check, broadcast_before)
        stored = self.side.dump()
        self._context.check = check
        process = self._function.process_element
        later = self._context.process_sides(process, elements_before, elements, progress)
        return emitted.then(later), stored

    def close(self) -> None:
        """Close the function."""
        self._function.close()


class _ElementContext(ContextFacts):
    """Given to a function without keys for an element."""

    __slots__ = ("get_broadcast_state",)
    get_broadcast_state: Callable[[MapStateDescriptor], ReadOnlyBroadcastState[Any, Any]]
