"""What a job remembers of the state that it began with.

Written once and never changed; `to_json` and `from_json` are exact inverses and use JSON values only.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from flinkish_spark.protocol.codec import INLINE, LEFT_OUT, Check, Stored
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, Lineage
from flinkish_spark.protocol.savepoints import StateFile
from flinkish_spark.protocol.scans import Chain, Position, chain_of_older
from flinkish_spark.protocol.watermarks import EventTime


class ClaimMode(enum.Enum):
    """Who owns a savepoint's files after a job was restored from it."""

    #: The user. The job copies what it needs and never touches them again.
    NO_CLAIM = "NO_CLAIM"
    #: The job: it deletes them as soon as a checkpoint of its own makes them unneeded.
    CLAIM = "CLAIM"


@dataclass(frozen=True, slots=True)
class Claim(Stored):
    """Who owns the files of a savepoint: ``claimed.json`` beside them.

    It binds one savepoint at one place. A copy of the directory has a copy of this file and is
    nobody's: its original is what the owner deletes.

    Parameters
    ----------
    savepoint
        Name of the savepoint.
    path
        Where it lay when it was claimed, with links resolved.
    job
        Uuid of the owner; its job directory may be moved.
    owner
        The owner's job directory at that time, for people.
    """

    savepoint: str
    path: str
    job: JobUuid
    owner: str


class SeedOrigin(enum.Enum):
    """Where the state of a seed comes from."""

    SAVEPOINT = "SAVEPOINT"
    #: A checkpoint of the same job, for another number of shuffle partitions.
    RESCALE = "RESCALE"


def _without_none(positions: Mapping[str, Position]) -> Mapping[str, Position]:
    return {name: at for name, at in positions.items() if at is not None}


@dataclass(frozen=True, slots=True)
class SeededChain(Stored):
    """How a chain begins.

    Parameters
    ----------
    positions
        By input, where its source begins; none where the source itself says so.
    states
        By operator, the chain in whose files its state is; an operator without begins with nothing.
    """

    chain: Chain = field(metadata=INLINE)
    positions: Annotated[Mapping[str, Position], Check(_without_none)]
    states: Mapping[str, str]

    @classmethod
    def _of_older(cls, value: dict[str, Any]) -> dict[str, Any]:
        return chain_of_older(value)


@dataclass(frozen=True, slots=True)
class Seed(Stored):
    """What a lineage begins with: ``seeds/<lineage>/seed.json``.

    Written once, after the state files were copied beside it and before Spark starts. A job whose
    live lineage has one is self-contained: it needs the savepoint no more.

    Parameters
    ----------
    lineage
        The lineage that begins with it; 0 for a job that was restored from a savepoint.
    origin, savepoint, checkpoint
        Where it comes from; `savepoint` is empty for a rescale.
    shuffle_partitions
        With which number the lineage runs.
    chains
        All chains of the job. An operator with state has a scan in the plan for the life of the lineage.
    hooks
        What to restore the master hooks with, by name.
    finished
        Uids that are not run again.
    files
        Below ``seeds/<lineage>/``.
    claim, path
        Who owns the savepoint, and where it was found.
    times
        Where event time stood; None if the savepoint says nothing of it, and for a rescale, in which the
        checkpoint itself does.
    """

    lineage: Lineage
    origin: SeedOrigin
    savepoint: str
    checkpoint: CheckpointId
    shuffle_partitions: int
    chains: tuple[SeededChain, ...]
    hooks: Mapping[str, Any] = field(default_factory=dict)
    finished: tuple[str, ...] = ()
    files: tuple[StateFile, ...] = ()
    claim: ClaimMode = ClaimMode.NO_CLAIM
    path: str = ""
    times: EventTime | None = field(default=None, metadata=LEFT_OUT)

    def chain(self, name: str) -> SeededChain | None:
        """Return how the chain of that name begins; None if the job had none such."""
        return next((chain for chain in self.chains if chain.chain.name == name), None)

    def files_of(self, operator: str, chain: str) -> tuple[StateFile, ...]:
        """Return the state files of an operator in a chain of the job, in a fixed order."""
        begins = self.chain(chain)
        origin = None if begins is None else begins.states.get(operator)
        found = [f for f in self.files if f.operator == operator and f.chain == origin]
        return tuple(sorted(found, key=lambda f: f.name))
