"""What a job remembers of the state that it began with.

Written once and never changed; `to_json` and `from_json` are exact inverses and use JSON values only.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flinkish_spark.protocol.ids import CheckpointId, JobUuid, Lineage
from flinkish_spark.protocol.records import Json
from flinkish_spark.protocol.savepoints import StateFile
from flinkish_spark.protocol.scans import Chain, Position, positions_from_json
from flinkish_spark.protocol.watermarks import EventTime


class ClaimMode(enum.Enum):
    """Who owns a savepoint's files after a job was restored from it."""

    #: The user. The job copies what it needs and never touches them again.
    NO_CLAIM = "NO_CLAIM"
    #: The job: it deletes them as soon as a checkpoint of its own makes them unneeded.
    CLAIM = "CLAIM"


@dataclass(frozen=True, slots=True)
class Claim:
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

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        return {
            "savepoint": self.savepoint,
            "path": self.path,
            "job": str(self.job),
            "owner": self.owner,
        }

    @classmethod
    def from_json(cls, value: Json) -> Claim:
        """Read the stored form."""
        return cls(str(value["savepoint"]), str(value["path"]), JobUuid(value["job"]), str(value["owner"]))


class SeedOrigin(enum.Enum):
    """Where the state of a seed comes from."""

    SAVEPOINT = "SAVEPOINT"
    #: A checkpoint of the same job, for another number of shuffle partitions.
    RESCALE = "RESCALE"


@dataclass(frozen=True, slots=True)
class SeededChain:
    """How a chain begins.

    Parameters
    ----------
    positions
        By input, where its source begins; none where the source itself says so.
    states
        By operator, the chain in whose files its state is; an operator without begins with nothing.
    """

    chain: Chain
    positions: Mapping[str, Position]
    states: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        return {**self.chain.to_json(), "positions": dict(self.positions), "states": dict(self.states)}

    @classmethod
    def from_json(cls, value: Json) -> SeededChain:
        """Read the stored form."""
        begins = {name: at for name, at in positions_from_json(value).items() if at is not None}
        return cls(Chain.from_json(value), begins, dict(value["states"]))


@dataclass(frozen=True, slots=True)
class Seed:
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
    times: EventTime | None = None

    def chain(self, name: str) -> SeededChain | None:
        """Return how the chain of that name begins; None if the job had none such."""
        return next((chain for chain in self.chains if chain.chain.name == name), None)

    def files_of(self, operator: str, chain: str) -> tuple[StateFile, ...]:
        """Return the state files of an operator in a chain of the job, in a fixed order."""
        begins = self.chain(chain)
        origin = None if begins is None else begins.states.get(operator)
        found = [f for f in self.files if f.operator == operator and f.chain == origin]
        return tuple(sorted(found, key=lambda f: f.name))

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        stored: dict[str, Any] = {
            "lineage": int(self.lineage),
            "origin": self.origin.value,
            "savepoint": self.savepoint,
            "checkpoint": int(self.checkpoint),
            "shuffle_partitions": self.shuffle_partitions,
            "chains": [chain.to_json() for chain in self.chains],
            "hooks": dict(self.hooks),
            "finished": list(self.finished),
            "files": [file.to_json() for file in self.files],
            "claim": self.claim.value,
            "path": self.path,
        }
        if self.times is not None:
            stored["times"] = self.times.to_json()
        return stored

    @classmethod
    def from_json(cls, value: Json) -> Seed:
        """Read the stored form."""
        return cls(
            Lineage(value["lineage"]),
            SeedOrigin(value["origin"]),
            str(value["savepoint"]),
            CheckpointId(value["checkpoint"]),
            int(value["shuffle_partitions"]),
            tuple(SeededChain.from_json(c) for c in value["chains"]),
            dict(value["hooks"]),
            tuple(str(uid) for uid in value["finished"]),
            tuple(StateFile.from_json(f) for f in value["files"]),
            ClaimMode(value["claim"]),
            str(value["path"]),
            None if value.get("times") is None else EventTime.from_json(value["times"]),
        )
