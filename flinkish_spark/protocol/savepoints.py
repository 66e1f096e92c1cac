"""What a savepoint says about itself.

Written once and never changed; `to_json` and `from_json` are exact inverses and use JSON values
only. Nothing in it names a machine or a folder: a savepoint may be moved and copied.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flinkish_spark.protocol.envelope import NewerFormatError
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage, checked_name
from flinkish_spark.protocol.records import Json
from flinkish_spark.protocol.scans import Chain, Position, positions_from_json
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
class StateFile:
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
    size_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        # They come from a file and become a path.
        checked_name(self.operator, "uid")
        checked_name(self.name, "name of a state file")

    @property
    def path(self) -> str:
        """Return its place relative to the savepoint's directory."""
        return state_path(self.operator, self.name)

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        return {
            "operator": self.operator,
            "chain": self.chain,
            "name": self.name,
            "rows": self.rows,
            "bytes": self.size_bytes,
            "sha256": self.sha256,
        }

    @classmethod
    def from_json(cls, value: Json) -> StateFile:
        """Read the stored form."""
        return cls(
            str(value["operator"]),
            str(value["chain"]),
            str(value["name"]),
            int(value["rows"]),
            int(value["bytes"]),
            str(value["sha256"]),
        )


def state_path(operator: str, name: str) -> str:
    """Return where a state file lies below a savepoint's directory or a seed's."""
    return f"{STATE_FOLDER}/{operator}/{name}{STATE_ENDING}"


@dataclass(frozen=True, slots=True)
class OperatorState:
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

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        return {
            "max_parallelism": self.max_parallelism,
            "key_types": list(self.key_types),
            "states": dict(self.states),
        }

    @classmethod
    def from_json(cls, value: Json) -> OperatorState:
        """Read the stored form."""
        return cls(
            int(value["max_parallelism"]),
            tuple(str(t) for t in value["key_types"]),
            {str(name): str(types) for name, types in value["states"].items()},
        )


@dataclass(frozen=True, slots=True)
class SourceFacts:
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

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        return {"kind": self.kind, "identity": dict(self.identity)}

    @classmethod
    def from_json(cls, value: Json) -> SourceFacts:
        """Read the stored form."""
        return cls(str(value["kind"]), dict(value["identity"]))


@dataclass(frozen=True, slots=True)
class SavedChain:
    """A chain and where its sources stood.

    Parameters
    ----------
    positions
        By input; one that Spark had not asked yet has none.
    sinks
        Uids of the sinks that read the end of the chain, behind an operator too. Empty for a chain
        with operators in a savepoint that does not say so.
    """

    chain: Chain
    positions: Mapping[str, Position]
    sinks: tuple[str, ...] = ()

    @property
    def readers(self) -> frozenset[str]:
        """Return the sinks that are known to read the chain."""
        return readers_of(self.chain, self.sinks)

    def to_json(self) -> dict[str, Any]:
        """Return the stored form."""
        return {**self.chain.to_json(), "positions": dict(self.positions), "sinks": list(self.sinks)}

    @classmethod
    def from_json(cls, value: Json) -> SavedChain:
        """Read the stored form."""
        # Early versions of this package did not write down the sinks.
        sinks = tuple(str(uid) for uid in value.get("sinks", ()))
        return cls(Chain.from_json(value), positions_from_json(value), sinks)


def readers_of(chain: Chain, sinks: Collection[str]) -> frozenset[str]:
    """Return the sinks that read a chain's end, given those that were written down for it."""
    return frozenset(sinks) | frozenset(() if chain.operators else chain.consumers)


@dataclass(frozen=True, slots=True)
class SavepointMetadata:
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

    savepoint: str
    job: str
    job_uuid: JobUuid
    checkpoint: CheckpointId
    lineage: Lineage
    batch: BatchId
    decided_at_ms: int
    shuffle_partitions: int
    operators: Mapping[str, OperatorState]
    sources: Mapping[str, SourceFacts]
    chains: tuple[SavedChain, ...]
    sinks: tuple[str, ...] = ()
    hooks: Mapping[str, Any] = field(default_factory=dict)
    finished: tuple[str, ...] = ()
    upstream: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    files: tuple[StateFile, ...] = ()
    times: EventTime | None = None
    timeline: str = ""

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
        stored: dict[str, Any] = {
            "version": SAVEPOINT_VERSION,
            "savepoint": self.savepoint,
            "job": self.job,
            "job_uuid": str(self.job_uuid),
            "checkpoint": int(self.checkpoint),
            "lineage": int(self.lineage),
            "batch": int(self.batch),
            "decided_at_ms": self.decided_at_ms,
            "shuffle_partitions": self.shuffle_partitions,
            "operators": {uid: state.to_json() for uid, state in self.operators.items()},
            "sources": {uid: source.to_json() for uid, source in self.sources.items()},
            "chains": [chain.to_json() for chain in self.chains],
            "sinks": list(self.sinks),
            "hooks": dict(self.hooks),
            "finished": list(self.finished),
            "upstream": dict(self.upstream),
            "files": [file.to_json() for file in self.files],
            "rows": self.rows,
            "bytes": self.size_bytes,
        }
        if self.times is not None:
            stored["times"] = self.times.to_json()
        if self.timeline:
            stored["timeline"] = self.timeline
        return stored

    @classmethod
    def from_json(cls, value: Json) -> SavepointMetadata:
        """Read the stored form.

        Raises
        ------
        NewerFormatError
            A later version of this package wrote it.
        """
        if value["version"] not in _READ_VERSIONS:
            raise NewerFormatError(
                f"written as version {value['version']} of savepoints, this one reads {SAVEPOINT_VERSION}"
            )
        return cls(
            checked_name(value["savepoint"], "savepoint"),
            str(value["job"]),
            JobUuid(value["job_uuid"]),
            CheckpointId(value["checkpoint"]),
            Lineage(value["lineage"]),
            BatchId(value["batch"]),
            int(value["decided_at_ms"]),
            int(value["shuffle_partitions"]),
            _by_uid(value["operators"], OperatorState.from_json),
            _by_uid(value["sources"], SourceFacts.from_json),
            tuple(SavedChain.from_json(c) for c in value["chains"]),
            tuple(str(uid) for uid in value["sinks"]),
            dict(value["hooks"]),
            tuple(str(uid) for uid in value["finished"]),
            dict(value["upstream"]),
            tuple(StateFile.from_json(f) for f in value["files"]),
            None if value.get("times") is None else EventTime.from_json(value["times"]),
            str(value.get("timeline", "")),
        )


def _by_uid(values: Mapping[str, Any], parse: Any) -> dict[str, Any]:
    return {checked_name(uid, "uid"): parse(value) for uid, value in values.items()}


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
