"""What a savepoint says about itself.

Written once and never changed; `to_json` and `from_json` are exact inverses and use JSON values
only. Nothing in it names a machine or a folder: a savepoint may be moved and copied.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from flinkish_spark.protocol.codec import ADDED, INLINE, LEFT_OUT, Check, Stored, stored
from flinkish_spark.protocol.envelope import NewerFormatError
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage, Uid, checked_name
from flinkish_spark.protocol.scans import Chain, Position, chain_of_older
from flinkish_spark.protocol.watermarks import EventTime

#: Version of what follows. A savepoint outlives the version that wrote it, so it has one of its own.
SAVEPOINT_VERSION = 2
#: Version 1 knew chains of one source, whose position stood alone.
_READ_VERSIONS = (1, SAVEPOINT_VERSION)
#: Below the savepoint's directory, and below a seed's: ``state/<operator uid>/<name>.parquet``.
STATE_FOLDER = "state"
STATE_ENDING = ".parquet"
_FACT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class StateFile(Stored):
    """Keyed state of one operator: rows of key group and state value.

    Parameters
    ----------
    operator
        Uid.
    chain
        Name of the chain in which the operator has this state.
    name
        Name of the file in the operator's folder, without ending.
    rows
        Key groups in it.
    size_bytes, sha256
        Of the file as it stands.
    """

    operator: str
    chain: str
    name: str
    rows: int
    size_bytes: int = field(metadata=stored("bytes"))
    sha256: str

    def __post_init__(self) -> None:
        # They come from a file and become a path.
        checked_name(self.operator, "uid")
        checked_name(self.name, "name of a state file")

    @property
    def path(self) -> str:
        """Return its place relative to the savepoint's directory."""
        return state_path(self.operator, self.name)


def state_path(operator: str, name: str) -> str:
    """Return where a state file lies below a savepoint's directory or a seed's."""
    return f"{STATE_FOLDER}/{operator}/{name}{STATE_ENDING}"


@dataclass(frozen=True, slots=True)
class OperatorState(Stored):
    """What is known of an operator's state without reading it.

    Parameters
    ----------
    max_parallelism
        Number of its key groups.
    key_types
        Spark types of its key, in order.
    states
        Stored types by the name of each declared state; empty if it has stored none yet.
    """

    max_parallelism: int
    key_types: tuple[str, ...]
    states: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SourceFacts(Stored):
    """What is known of a source beside where it stood.

    Parameters
    ----------
    kind
        ``"kafka"`` or ``"dataframe"``.
    identity
        What tells the input from another one of the same name, by name: for Kafka the topics' ids.
    """

    kind: str
    identity: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.identity:
            # They come from a file and become the names of files.
            if not _FACT.fullmatch(name):
                raise ValueError(f"{name!r} cannot be the name of a fact")


@dataclass(frozen=True, slots=True)
class SavedChain(Stored):
    """A chain and where its sources stood.

    Parameters
    ----------
    positions
        By input; one that Spark had not asked yet has none.
    sinks
        Uids of the sinks that read the end of the chain, behind an operator too. Empty for a chain
        with operators in a savepoint that does not say so.
    """

    chain: Chain = field(metadata=INLINE)
    positions: Mapping[str, Position]
    # Early versions of this package did not write down the sinks.
    sinks: tuple[str, ...] = field(default=(), metadata=ADDED)

    @property
    def readers(self) -> frozenset[str]:
        """Return the sinks that are known to read the chain."""
        return readers_of(self.chain, self.sinks)

    @classmethod
    def _of_older(cls, value: dict[str, Any]) -> dict[str, Any]:
        return chain_of_older(value)


def readers_of(chain: Chain, sinks: Collection[str]) -> frozenset[str]:
    """Return the sinks that read a chain's end, given those that were written down for it."""
    return frozenset(sinks) | frozenset(() if chain.operators else chain.consumers)


@dataclass(frozen=True, slots=True)
class SavepointMetadata(Stored):
    """Content of ``savepoint.json``; that the object exists is the proof that the savepoint is whole.

    Parameters
    ----------
    savepoint
        Name of this savepoint for ever: 32 hex digits.
    job, job_uuid
        Which job took it.
    checkpoint, lineage, batch, decided_at_ms
        Of the checkpoint that it is.
    shuffle_partitions
        Of the job then; says nothing about who may restore it.
    operators, sources, sinks
        By uid.
    chains
        How they hang together, and where each chain stood.
    hooks
        What each master hook gave, by name.
    finished
        Uids that had come to their end before: a restore does not run them again.
    upstream
        By topic, the upstream job and its checkpoint that this savepoint is one cut with.
    files
        All state files.
    times
        Where event time stood; None if the job had none.
    timeline
        Token of the checkpoint's timeline: tells it from one with the same id that a copy of the job
        directory took. Empty where it is not known.
    """

    savepoint: Annotated[str, Check(partial(checked_name, what="savepoint"))]
    job: str
    job_uuid: JobUuid
    checkpoint: CheckpointId
    lineage: Lineage
    batch: BatchId
    decided_at_ms: int
    shuffle_partitions: int
    operators: Mapping[Uid, OperatorState]
    sources: Mapping[Uid, SourceFacts]
    chains: tuple[SavedChain, ...]
    sinks: tuple[str, ...] = ()
    hooks: Mapping[str, Any] = field(default_factory=dict)
    finished: tuple[str, ...] = ()
    upstream: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    files: tuple[StateFile, ...] = ()
    times: EventTime | None = field(default=None, metadata=LEFT_OUT)
    timeline: str = field(default="", metadata=LEFT_OUT)

    @property
    def rows(self) -> int:
        """Key groups in all files."""
        return sum(file.rows for file in self.files)

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(file.size_bytes for file in self.files)

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        more = {"rows": self.rows, "bytes": self.size_bytes}
        return {"version": SAVEPOINT_VERSION, **Stored.to_json(self), **more}

    @classmethod
    def _of_older(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Return an object as it is written today; raise NewerFormatError if a later version wrote it."""
        version = value.get("version")
        if version not in _READ_VERSIONS:
            raise NewerFormatError(
                f"written as version {version} of savepoints, this one reads {SAVEPOINT_VERSION}"
            )
        return value


def check_groups(operator: str, groups: int, found: Sequence[int]) -> None:
    """Check that every key group of an operator occurs at most once and is one of its own.

    Raises
    ------
    ValueError
        A key group occurs twice, or lies beyond `groups`; names it.
    """
    seen: set[int] = set()
    for group in found:
        if not 0 <= group < groups:
            raise ValueError(f"operator '{operator}' has {groups} key groups and no key group {group}")
        if group in seen:
            raise ValueError(f"key group {group} of operator '{operator}' occurs twice")
        seen.add(group)
