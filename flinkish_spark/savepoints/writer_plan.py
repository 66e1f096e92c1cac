"""What a savepoint that is to be written will have."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from flinkish_spark.arguments import refused_as_config_errors
from flinkish_spark.clock import wall_ms
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage, checked_name
from flinkish_spark.protocol.savepoints import SavepointMetadata
from flinkish_spark.protocol.watermarks import EventTime
from flinkish_spark.savepoints.errors import BootstrapRefused
from flinkish_spark.savepoints.files import SavepointDir
from flinkish_spark.savepoints.planned_state import PlannedOperator
from flinkish_spark.savepoints.saved_parts import Chains


@dataclass(frozen=True)
class WriterPlan:
    """A value; writers make others of it.

    Parameters
    ----------
    metadata
        What is taken over as it is.
    origin
        The savepoint that the new one begins as a copy of; None for none.
    operators
        By uid.
    chains, times
        As they will be, without the timers that are new.
    max_parallelism
        Of operators that are added.
    """

    metadata: SavepointMetadata
    origin: SavepointDir | None
    operators: Mapping[str, PlannedOperator]
    chains: Chains
    times: EventTime | None
    max_parallelism: int

    @classmethod
    def of_nothing(cls, job: str, shuffle_partitions: int, max_parallelism: int) -> WriterPlan:
        """Return the plan of an empty savepoint; its checkpoint is 0, which no job has."""
        metadata = SavepointMetadata(
            savepoint=uuid.uuid4().hex,
            job=job,
            job_uuid=JobUuid(uuid.uuid4().hex),
            checkpoint=CheckpointId(0),
            lineage=Lineage(0),
            batch=BatchId(0),
            decided_at_ms=wall_ms(),
            shuffle_partitions=shuffle_partitions,
            operators={},
            sources={},
            chains=(),
        )
        return cls(metadata, None, {}, (), None, max_parallelism)

    @classmethod
    def of_stored(cls, place: SavepointDir, max_parallelism: int) -> WriterPlan:
        """Return the plan of a copy of a savepoint.

        Raises
        ------
        SavepointNotFound, SavepointDamaged
            It is not there, or not whole.
        """
        metadata = place.metadata()
        place.check_files(metadata.files)
        operators = {
            uid: PlannedOperator.of_stored(uid, state, metadata.files)
            for uid, state in metadata.operators.items()
        }
        return cls(metadata, place, operators, metadata.chains, metadata.times, max_parallelism)

    def check_new(self, uid: str) -> None:
        """Refuse a uid for one more operator.

        Raises
        ------
        ConfigError
            It cannot be a uid.
        BootstrapRefused
            It is taken.
        """
        with refused_as_config_errors("give the operator's uid in the job"):
            checked_name(uid, "uid")
        if uid in self.operators:
            raise BootstrapRefused(
                f"there is an operator '{uid}' already",
                what_to_do="use remove_operator() first, or with_state() to replace one of its states",
            )

    def planned(self, uid: str) -> PlannedOperator:
        """Return an operator.

        Raises
        ------
        BootstrapRefused
            There is none such.
        """
        found = self.operators.get(uid)
        if found is None:
            known = ", ".join(self.operators) or "none"
            raise BootstrapRefused(
                f"the savepoint has no operator '{uid}'", what_to_do=f"choose from: {known}"
            )
        return found

    def existing(self, uid: str) -> PlannedOperator:
        """Return an operator whose keyed state is stored.

        Raises
        ------
        BootstrapRefused
            There is none such, or its state is yet to be made.
        """
        planned = self.planned(uid)
        if not planned.state.key_types:
            raise BootstrapRefused(
                f"the operator '{uid}' has no keys, and so no keyed state",
                what_to_do="use with_broadcast_state() or with_list_state()",
            )
        if planned.filling is not None:
            raise BootstrapRefused(
                f"the operator '{uid}' is new in this writer",
                why="its keyed state is made by one function",
                what_to_do="let that fill the state; or write the savepoint, and edit that one",
            )
        return planned

    def chain_of(self, uid: str, chain: str | None) -> str:
        """Return the name of the chain in which an operator has the state that is meant.

        Raises
        ------
        BootstrapRefused
            There is no such chain, or several and it is not said which.
        """
        having = [one.chain.name for one in self.chains if uid in one.chain.operators]
        known = sorted(self.planned(uid).origin) or having
        if chain is None and len(known) == 1:
            return known[0]
        if chain is None or chain not in known:
            several = f"operator '{uid}' has state in {len(known)} chains"
            raise BootstrapRefused(
                several if chain is None else f"there is no chain '{chain}' of '{uid}'",
                what_to_do=f"say which: chain={' or '.join(map(repr, known))}",
            )
        return chain
