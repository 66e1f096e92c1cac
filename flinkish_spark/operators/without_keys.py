"""What functions are given where a stream has no key."""

from __future__ import annotations

from typing import NoReturn

from flinkish_spark.operators.subtask import SubtaskFacts
from flinkish_spark.state import StateDescriptor


class KeyedStateWithoutKey(TypeError):
    """A state or timer of a key was asked for where no key is the current one."""


class NoKeyedState(SubtaskFacts):
    """Given to `open` of a function whose stream has no key.

    Parameters
    ----------
    uid, max_parallelism
        Of the operator.
    """

    def __init__(self, uid: str, max_parallelism: int) -> None:
        self.uid, self.max_parallelism = uid, max_parallelism

    def _refuse(self, descriptor: StateDescriptor) -> NoReturn:
        raise KeyedStateWithoutKey(
            f"operator '{self.uid}' asks for the state '{descriptor.name}', but its stream has no key; put "
            "key_by() before it and use a keyed function"
        )

    def drop_state(self, name: str) -> None:
        """Do nothing: there is no such state."""

    get_state = get_list_state = get_map_state = get_reducing_state = get_aggregating_state = _refuse
