"""What a writer of savepoints does to each operator.

Plans are values. They refer to files of the savepoint that they come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pyspark.sql import types as T

from flinkish_spark.protocol.savepoints import OperatorState, StateFile
from flinkish_spark.savepoints.bootstrap import KeyedRows
from flinkish_spark.savepoints.bootstrap_function import KeyedStateBootstrapFunction
from flinkish_spark.savepoints.edited_state import EditRows, PartitionRows
from flinkish_spark.savepoints.saved_parts import DueTimers

if TYPE_CHECKING:
    pass

#: About how many bytes of state files one task rewrites.
_TASK_BYTES = 64 << 20
#: Types whose values cannot be compared reliably; a job refuses them as keys, too.
_UNFIT_KEYS = (T.ArrayType, T.MapType, T.StructType, T.FloatType, T.DoubleType, T.VariantType)


@dataclass(frozen=True)
class Filling:
    """New state of an operator, from rows by key.

    Parameters
    ----------
    chain
        Name of the chain in which the operator is.
    """

    chain: str
    rows: KeyedRows
    function: KeyedStateBootstrapFunction


@dataclass(frozen=True)
class PlannedOperator:
    """What one operator of a new savepoint has.

    Parameters
    ----------
    state
        Of which `states` are known for what is stored already.
    origin
        State files of the old savepoint, as they are named there, by the present name of the chain.
    edits
        By chain, states that are replaced.
    filling
        For an operator that is new; it has no origin and no edits.
    partition
        By chain, states without keys that are replaced.
    """

    state: OperatorState
    origin: Mapping[str, tuple[StateFile, ...]] = field(default_factory=dict)
    edits: Mapping[str, tuple[EditRows, ...]] = field(default_factory=dict)
    filling: Filling | None = None
    partition: Mapping[str, tuple[PartitionRows, ...]] = field(default_factory=dict)

    @classmethod
    def of_stored(cls, uid: str, state: OperatorState, files: Sequence[StateFile]) -> PlannedOperator:
        """Return an operator as a savepoint has it.

        Parameters
        ----------
        files
            All of the savepoint.
        """
        own = [file for file in files if file.operator == uid]
        chains = dict.fromkeys(file.chain for file in own)
        return cls(state, {chain: tuple(one for one in own if one.chain == chain) for chain in chains})

    def with_edit(self, chain: str, rows: EditRows) -> PlannedOperator:
        """Return the plan with one more edit; an earlier edit of the same is forgotten."""
        others = tuple(one for one in self.edits.get(chain, ()) if one.edit.name != rows.edit.name)
        return replace(self, edits={**self.edits, chain: (*others, rows)})

    def with_partition(self, chain: str, rows: PartitionRows) -> PlannedOperator:
        """Return the plan with one more state without keys that is replaced."""
        others = tuple(one for one in self.partition.get(chain, ()) if one.edit.name != rows.edit.name)
        return replace(self, partition={**self.partition, chain: (*others, rows)})

    def with_chains(self, names: Mapping[str, str]) -> PlannedOperator:
        """Return the plan with other names of chains, by the old ones."""
        filling = self.filling
        if filling is not None:
            filling = replace(filling, chain=names.get(filling.chain, filling.chain))
        return replace(
            self,
            origin={names.get(chain, chain): files for chain, files in self.origin.items()},
            edits={names.get(chain, chain): rows for chain, rows in self.edits.items()},
            filling=filling,
            partition={names.get(chain, chain): rows for chain, rows in self.partition.items()},
        )


@dataclass(frozen=True)
class WrittenOperator:
    """Files of an operator in a new savepoint.

    Parameters
    ----------
    state
        With all of its states.
    due
        By chain in which the timers are new: key group, next event-time timer, next processing-time timer.
    """

    state: OperatorState
    files: tuple[StateFile, ...]
    due: Mapping[str, tuple[DueTimers, ...]] = field(default_factory=dict)
