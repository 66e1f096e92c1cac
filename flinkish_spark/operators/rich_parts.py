"""Functions that are parts of an operator of ours, opened and closed with it: reductions, aggregates."""

from __future__ import annotations

from typing import NoReturn

from flinkish_spark.functions import RichFunction
from flinkish_spark.operators.without_keys import KeyedStateWithoutKey, NoKeyedState
from flinkish_spark.state import StateDescriptor


class _NoOwnState(NoKeyedState):
    """Given to `open` of a function whose values are the operator's state."""

    def _refuse(self, descriptor: StateDescriptor) -> NoReturn:
        raise KeyedStateWithoutKey(
            f"a reduce or aggregate function of operator '{self.uid}' asks for the state "
            f"'{descriptor.name}', but what it returns is all that is kept; use process() with a function "
            "that has states"
        )

    get_state = get_list_state = get_map_state = get_reducing_state = get_aggregating_state = _refuse


def open_part(function: object, uid: str, max_parallelism: int) -> None:
    """Open a function of the user's that is a part of an operator, if it wants to be."""
    if isinstance(function, RichFunction):
        function.open(_NoOwnState(uid, max_parallelism))


def close_part(function: object) -> None:
    """Close it."""
    if isinstance(function, RichFunction):
        function.close()
