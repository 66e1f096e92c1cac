"""Savepoints and seeds: their stored records, written once and never changed.

A savepoint contains no name of a machine or a folder: it may be moved and copied.
"""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Self, cast

from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.codec import INLINE, LEFT_OUT, Check, StoredObject, expect_object, read, store_as
from flinkish_spark.protocol.envelope import NewerFormatError
from flinkish_spark.protocol.html import html_table, utc_text
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage, Uid, check_name
from flinkish_spark.protocol.key_groups import BUNDLES_PER_PARTITION
from flinkish_spark.protocol.plan_layout import Chain, Position
from flinkish_spark.protocol.watermarks import EventTime

#: Version of savepoints; other versions of this package than the writer's may read one.
SAVEPOINT_VERSION = 1
#: Below the savepoint's directory, and below a seed's: ``state/<operator uid>/<name>.parquet``.
STATE_FOLDER = "state"
STATE_ENDING = ".parquet"
_FACT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class StateFile(StoredObject):
    """Keyed state of one operator: rows of key group and state value."""

    operator: str
    #: Name of the chain in which the operator has this state.
    chain: str
    #: Name of the file in the operator's folder, without ending.
    name: str
    rows: int
    #: Size of the stored file.
    size_bytes: int = field(metadata=store_as("bytes"))
    sha256: str

    def __post_init__(self) -> None:
        # These values come from a file and become a path.
        check_name(self.operator, "uid")
        check_name(self.name, "name of a state file")

    @property
    def path(self) -> str:
        return state_path(self.operator, self.name)


def state_path(operator: str, name: str) -> str:
    return f"{STATE_FOLDER}/{operator}/{name}{STATE_ENDING}"


@dataclass(frozen=True, slots=True)
class OperatorState(StoredObject):
    #: Number of its key groups.
    max_parallelism: int
    #: Spark types of its key, in order.
    key_types: tuple[str, ...]
    #: Stored types by the name of each declared state; empty if it has stored none yet.
    states: Mapping[str, str] = field(default_factory=dict)
    #: Settings that define the meaning of the states, by name; empty if unknown, as after a
    #: `SavepointWriter`.
    meaning: Mapping[str, str] = field(default_factory=dict, metadata=LEFT_OUT)


@dataclass(frozen=True, slots=True)
class SourceFacts(StoredObject):
    kind: str
    #: By name, what distinguishes the input from another one of the same name: for Kafka the topics' ids.
    identity: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.identity:
            # These names come from a file and become names of files.
            if not _FACT.fullmatch(name):
                raise ValueError(f"{name!r} cannot be the name of a fact")


@dataclass(frozen=True, slots=True)
class SavedChain(StoredObject):
    chain: Chain = field(metadata=INLINE)
    #: By input; an input that Spark had not read yet has none.
    positions: Mapping[str, Position]
    sinks: tuple[str, ...] = ()

    @property
    def readers(self) -> frozenset[str]:
        return find_readers(self.chain, self.sinks)


def find_readers(chain: Chain, sinks: Collection[str]) -> frozenset[str]:
    return frozenset(sinks) | frozenset(() if chain.operators else chain.consumers)


@dataclass(frozen=True, slots=True)
class SavepointMetadata(StoredObject):
    """Content of ``savepoint.json``; its existence proves that the savepoint is complete."""

    #: Permanent id of this savepoint: 32 hex digits.
    savepoint: Annotated[str, Check(partial(check_name, what="savepoint"))]
    job: str
    job_uuid: JobUuid
    #: The checkpoint from which it was exported.
    checkpoint: CheckpointId
    lineage: Lineage
    batch: BatchId
    decided_at_ms: int
    #: Number of the job at that time; a job with another number may restore it.
    shuffle_partitions: int
    operators: Mapping[Uid, OperatorState]
    sources: Mapping[Uid, SourceFacts]
    #: The chains of sources and operators, and their positions.
    chains: tuple[SavedChain, ...]
    sinks: tuple[str, ...] = ()
    #: State of each master hook, by name.
    hooks: Mapping[str, Any] = field(default_factory=dict)
    #: Uids that had finished before: a restore does not run them again.
    finished: tuple[str, ...] = ()
    #: By topic, the upstream job and its checkpoint at which this savepoint was taken.
    upstream: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    files: tuple[StateFile, ...] = ()
    #: Event time of the job; None if it had none.
    times: EventTime | None = field(default=None, metadata=LEFT_OUT)
    #: Token of the checkpoint's timeline: it distinguishes the checkpoint from one with the same id that a
    #: copy of the job directory took. Empty if unknown.
    timeline: str = field(default="", metadata=LEFT_OUT)

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def _repr_html_(self) -> str:
        # Only names of hooks: their states belong to other systems and may contain secrets.
        facts = [
            ("job", self.job),
            ("job_uuid", self.job_uuid),
            ("checkpoint", self.checkpoint),
            ("decided", utc_text(self.decided_at_ms)),
            ("operators", ", ".join(self.operators)),
            ("sources", ", ".join(self.sources)),
            ("sinks", ", ".join(self.sinks)),
            ("hooks", ", ".join(self.hooks)),
            ("finished", ", ".join(self.finished)),
            ("shuffle_partitions", self.shuffle_partitions),
            ("rows", self.rows),
            ("size_bytes", self.size_bytes),
        ]
        return html_table(facts, caption=f"Savepoint {self.savepoint}")

    def to_json(self) -> dict[str, Any]:
        more = {"rows": self.rows, "bytes": self.size_bytes}
        return {"version": SAVEPOINT_VERSION, **StoredObject.to_json(self), **more}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        version = expect_object(value, "a savepoint").get("version")
        if version != SAVEPOINT_VERSION:
            raise NewerFormatError(
                f"written as version {version} of savepoints, but this package reads {SAVEPOINT_VERSION}"
            )
        return cast(Self, read(cls, value))


def check_groups(operator: str, groups: int, found: Sequence[int]) -> None:
    """Raise ValueError if a key group occurs twice or is not one of the operator's."""
    for group, times in Counter(found).items():
        if not 0 <= group < groups:
            raise ValueError(f"operator '{operator}' has {groups} key groups and no key group {group}")
        if times > 1:
            raise ValueError(f"key group {group} of operator '{operator}' occurs twice")


class ClaimMode(Choice):
    """Who owns a savepoint's files after a job was restored from it."""

    #: The user. The job copies the files that it needs and never touches them again.
    NO_CLAIM = "NO_CLAIM"
    #: The job: it deletes them as soon as it has a checkpoint of its own that does not need them.
    CLAIM = "CLAIM"


@dataclass(frozen=True, slots=True)
class Claim(StoredObject):
    """Claim of a savepoint's files: ``claimed.json`` beside them; without effect in a copy."""

    savepoint: str
    #: Path of the savepoint when it was claimed, with links resolved.
    path: str
    #: Uuid of the owner; its job directory may be moved.
    job: JobUuid
    #: The owner's job directory at that time, for people.
    owner: str


class SeedOrigin(enum.Enum):
    SAVEPOINT = "SAVEPOINT"
    #: A checkpoint of the same job, for another number of shuffle partitions.
    RESCALE = "RESCALE"


def _leave_out_none(positions: Mapping[str, Position | None]) -> dict[str, Position]:
    return {name: at for name, at in positions.items() if at is not None}


@dataclass(frozen=True, slots=True)
class SeededChain(StoredObject):
    chain: Chain = field(metadata=INLINE)
    #: By input, the first position of its source; an input that is left out starts where its source says.
    positions: Annotated[Mapping[str, Position], Check(_leave_out_none)]
    #: By operator, the chain whose files have its state; an operator that is left out starts without state.
    states: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Seed(StoredObject):
    """Initial state and positions of a lineage: ``seeds/<lineage>/seed.json``, written before the start."""

    #: The lineage that begins with it; 0 for a job that was restored from a savepoint.
    lineage: Lineage
    #: Origin of the state; `savepoint` is empty for a rescale.
    origin: SeedOrigin
    savepoint: str
    checkpoint: CheckpointId
    #: Number of the lineage's shuffle partitions.
    shuffle_partitions: int
    #: All chains of the job. An operator with state has a scan in the plan for the life of the lineage.
    chains: tuple[SeededChain, ...]
    #: States to restore the master hooks with, by name.
    hooks: Mapping[str, Any] = field(default_factory=dict)
    #: Uids that are not run again.
    finished: tuple[str, ...] = ()
    files: tuple[StateFile, ...] = ()
    #: Owner of the savepoint's files, and path of the savepoint.
    claim: ClaimMode = ClaimMode.NO_CLAIM
    path: str = ""
    #: Event time; None if the savepoint has none, and for a rescale: then the checkpoint itself has it.
    times: EventTime | None = field(default=None, metadata=LEFT_OUT)
    #: Number of bundles of key groups per partition.
    bundles_per_partition: int = BUNDLES_PER_PARTITION

    def chain(self, name: str) -> SeededChain | None:
        return next((chain for chain in self.chains if chain.chain.name == name), None)

    def files_of(self, operator: str, chain: str) -> tuple[StateFile, ...]:
        begins = self.chain(chain)
        origin = None if begins is None else begins.states.get(operator)
        found = [f for f in self.files if f.operator == operator and f.chain == origin]
        return tuple(sorted(found, key=lambda f: f.name))
