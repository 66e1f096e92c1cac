"""What a savepoint says about itself, whether it fits a job, and what a job remembers of it.

Savepoints and seeds are written once and never changed. Nothing in a savepoint names a machine or a folder:
it may be moved and copied. Whether it fits a job is checked whole before anything is created: state,
positions and hooks are found again by uid or name, so operators may be added, moved and, with the user's
word, removed. What cannot be put right is refused: another number of key groups or another type of key would
send a key to the wrong state.
"""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Self, cast

from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.codec import INLINE, LEFT_OUT, Check, Stored, object_of, read, stored
from flinkish_spark.protocol.envelope import NewerFormatError
from flinkish_spark.protocol.html import html_table, utc_text
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage, Uid, checked_name
from flinkish_spark.protocol.key_groups import BUNDLES_PER_PARTITION
from flinkish_spark.protocol.plan_layout import Chain, Position, lowest, offsets_in, source_of
from flinkish_spark.protocol.watermarks import EventTime

#: A savepoint outlives the version that wrote it, so it has one of its own.
SAVEPOINT_VERSION = 1
#: Below the savepoint's directory, and below a seed's: ``state/<operator uid>/<name>.parquet``.
STATE_FOLDER = "state"
STATE_ENDING = ".parquet"
_FACT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class StateFile(Stored):
    """Keyed state of one operator: rows of key group and state value."""

    operator: str
    #: Name of the chain in which the operator has this state.
    chain: str
    #: Name of the file in the operator's folder, without ending.
    name: str
    rows: int
    #: Of the file as it stands.
    size_bytes: int = field(metadata=stored("bytes"))
    sha256: str

    def __post_init__(self) -> None:
        # They come from a file and become a path.
        checked_name(self.operator, "uid")
        checked_name(self.name, "name of a state file")

    @property
    def path(self) -> str:
        return state_path(self.operator, self.name)


def state_path(operator: str, name: str) -> str:
    return f"{STATE_FOLDER}/{operator}/{name}{STATE_ENDING}"


@dataclass(frozen=True, slots=True)
class OperatorState(Stored):
    """What is known of an operator's state without reading it."""

    #: Number of its key groups.
    max_parallelism: int
    #: Spark types of its key, in order.
    key_types: tuple[str, ...]
    #: Stored types by the name of each declared state; empty if it has stored none yet.
    states: Mapping[str, str] = field(default_factory=dict)
    #: What the states mean, by the name of each fact; empty if nobody has said it, as of what a
    #: `SavepointWriter` makes.
    meaning: Mapping[str, str] = field(default_factory=dict, metadata=LEFT_OUT)


@dataclass(frozen=True, slots=True)
class SourceFacts(Stored):
    """What is known of a source beside where it stood."""

    kind: str
    #: What tells the input from another one of the same name, by name: for Kafka the topics' ids.
    identity: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.identity:
            # They come from a file and become the names of files.
            if not _FACT.fullmatch(name):
                raise ValueError(f"{name!r} cannot be the name of a fact")


@dataclass(frozen=True, slots=True)
class SavedChain(Stored):
    chain: Chain = field(metadata=INLINE)
    #: By input; one that Spark had not asked yet has none.
    positions: Mapping[str, Position]
    sinks: tuple[str, ...] = ()

    @property
    def readers(self) -> frozenset[str]:
        return _find_readers(self.chain, self.sinks)


def _find_readers(chain: Chain, sinks: Collection[str]) -> frozenset[str]:
    return frozenset(sinks) | frozenset(() if chain.operators else chain.consumers)


@dataclass(frozen=True, slots=True)
class SavepointMetadata(Stored):
    """Content of ``savepoint.json``; that the object exists is the proof that the savepoint is whole."""

    #: Name of this savepoint for ever: 32 hex digits.
    savepoint: Annotated[str, Check(partial(checked_name, what="savepoint"))]
    job: str
    job_uuid: JobUuid
    #: Of the checkpoint that it is.
    checkpoint: CheckpointId
    lineage: Lineage
    batch: BatchId
    decided_at_ms: int
    #: Of the job then; says nothing about who may restore it.
    shuffle_partitions: int
    operators: Mapping[Uid, OperatorState]
    sources: Mapping[Uid, SourceFacts]
    #: How they hang together, and where each chain stood.
    chains: tuple[SavedChain, ...]
    sinks: tuple[str, ...] = ()
    #: What each master hook gave, by name.
    hooks: Mapping[str, Any] = field(default_factory=dict)
    #: Uids that had come to their end before: a restore does not run them again.
    finished: tuple[str, ...] = ()
    #: By topic, the upstream job and its checkpoint that this savepoint is one cut with.
    upstream: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    files: tuple[StateFile, ...] = ()
    #: Where event time stood; None if the job had none.
    times: EventTime | None = field(default=None, metadata=LEFT_OUT)
    #: Token of the checkpoint's timeline: tells it from one with the same id that a copy of the job
    #: directory took. Empty where it is not known.
    timeline: str = field(default="", metadata=LEFT_OUT)

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def _repr_html_(self) -> str:
        # What hooks gave belongs to systems outside, and may be a secret of theirs.
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
        return {"version": SAVEPOINT_VERSION, **Stored.to_json(self), **more}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        version = object_of(value, "a savepoint").get("version")
        if version != SAVEPOINT_VERSION:
            raise NewerFormatError(
                f"written as version {version} of savepoints, this one reads {SAVEPOINT_VERSION}"
            )
        return cast(Self, read(cls, value))


def check_groups(operator: str, groups: int, found: Sequence[int]) -> None:
    """Check that every key group of an operator occurs at most once and is one of its own."""
    for group, times in Counter(found).items():
        if not 0 <= group < groups:
            raise ValueError(f"operator '{operator}' has {groups} key groups and no key group {group}")
        if times > 1:
            raise ValueError(f"key group {group} of operator '{operator}' occurs twice")


class ClaimMode(Choice):
    """Who owns a savepoint's files after a job was restored from it."""

    #: The user. The job copies what it needs and never touches them again.
    NO_CLAIM = "NO_CLAIM"
    #: The job: it deletes them as soon as a checkpoint of its own makes them unneeded.
    CLAIM = "CLAIM"


@dataclass(frozen=True, slots=True)
class Claim(Stored):
    """Who owns the files of a savepoint: ``claimed.json`` beside them; a copy of it binds nobody."""

    savepoint: str
    #: Where it lay when it was claimed, with links resolved.
    path: str
    #: Uuid of the owner; its job directory may be moved.
    job: JobUuid
    #: The owner's job directory at that time, for people.
    owner: str


class SeedOrigin(enum.Enum):
    """Where the state of a seed comes from."""

    SAVEPOINT = "SAVEPOINT"
    #: A checkpoint of the same job, for another number of shuffle partitions.
    RESCALE = "RESCALE"


def _leave_out_none(positions: Mapping[str, Position | None]) -> dict[str, Position]:
    return {name: at for name, at in positions.items() if at is not None}


@dataclass(frozen=True, slots=True)
class SeededChain(Stored):
    chain: Chain = field(metadata=INLINE)
    #: By input, where its source begins; none where the source itself says so.
    positions: Annotated[Mapping[str, Position], Check(_leave_out_none)]
    #: By operator, the chain in whose files its state is; an operator without begins with nothing.
    states: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Seed(Stored):
    """What a lineage begins with: ``seeds/<lineage>/seed.json``, written before Spark starts."""

    #: The lineage that begins with it; 0 for a job that was restored from a savepoint.
    lineage: Lineage
    #: Where it comes from; `savepoint` is empty for a rescale.
    origin: SeedOrigin
    savepoint: str
    checkpoint: CheckpointId
    #: With which number the lineage runs.
    shuffle_partitions: int
    #: All chains of the job. An operator with state has a scan in the plan for the life of the lineage.
    chains: tuple[SeededChain, ...]
    #: What to restore the master hooks with, by name.
    hooks: Mapping[str, Any] = field(default_factory=dict)
    #: Uids that are not run again.
    finished: tuple[str, ...] = ()
    files: tuple[StateFile, ...] = ()
    #: Who owns the savepoint, and where it was found.
    claim: ClaimMode = ClaimMode.NO_CLAIM
    path: str = ""
    #: Where event time stood; None if the savepoint says nothing of it, and for a rescale, in which the
    #: checkpoint itself does.
    times: EventTime | None = field(default=None, metadata=LEFT_OUT)
    #: In how many bundles a partition of the lineage has its key groups.
    bundles_per_partition: int = BUNDLES_PER_PARTITION

    def chain(self, name: str) -> SeededChain | None:
        return next((chain for chain in self.chains if chain.chain.name == name), None)

    def files_of(self, operator: str, chain: str) -> tuple[StateFile, ...]:
        begins = self.chain(chain)
        origin = None if begins is None else begins.states.get(operator)
        found = [f for f in self.files if f.operator == operator and f.chain == origin]
        return tuple(sorted(found, key=lambda f: f.name))


class NonRestoredState(Choice):
    """What becomes of state, positions and hook states that nothing in the job takes."""

    REFUSE = "REFUSE"
    #: They are left out, as Flink's `--allowNonRestoredState` does.
    ALLOW = "ALLOW"


class UnpositionedSources(Choice):
    """What becomes of sources that cannot be told where to begin, such as a DataFrame."""

    REFUSE = "REFUSE"
    #: The user has made the DataFrame so that it begins where the savepoint ends.
    BEGIN_WHERE_THEY_ARE = "BEGIN_WHERE_THEY_ARE"


@dataclass(frozen=True, slots=True)
class OperatorShape:
    """What a job says about a keyed operator."""

    max_parallelism: int
    key_types: tuple[str, ...]
    meaning: Mapping[str, str] = field(default_factory=dict)


def changed_meaning(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return which facts of an operator's state differ, as far as both have them; empty if none does."""
    changed = [name for name in before if now.get(name, before[name]) != before[name]]
    return "; ".join(f"{name}: {before[name]} -> {now[name]}" for name in changed)


@dataclass(frozen=True, slots=True)
class SourceShape:
    kind: str
    is_positionable: bool
    #: Names of its inputs: topics, or what says which names are. Empty where there are none.
    inputs: Container[str] = frozenset()


@dataclass(frozen=True, slots=True)
class JobShape:
    operators: Mapping[str, OperatorShape]
    sources: Mapping[str, SourceShape]
    #: Each with the uids of the sinks that read its end.
    chains: Mapping[Chain, Collection[str]] = field(default_factory=dict)
    #: Names of the master hooks.
    hooks: Collection[str] = ()

    @property
    def positionable(self) -> frozenset[str]:
        return frozenset(uid for uid, source in self.sources.items() if source.is_positionable)


@dataclass(frozen=True, slots=True)
class RestoreRules:
    non_restored: NonRestoredState = NonRestoredState.REFUSE
    unpositioned: UnpositionedSources = UnpositionedSources.REFUSE


class Misfit(enum.Enum):
    OPERATOR_MISSING = "its operator is not in the job"
    MAX_PARALLELISM = "the number of key groups differs"
    KEY_TYPE = "the type of the key differs"
    MEANING = "what its state means differs"
    SOURCE_MISSING = "its source is not in the job"
    SOURCE_KIND = "the source is of another kind"
    INPUT_MISSING = "the source no longer reads one of its inputs"
    NOT_POSITIONABLE = "the source cannot be told where to begin"
    CHAINS_JOINED = "parts that stood at different places belong together now"
    FINISHED_CHANGED = "the source had come to its end and is read by others now"
    HOOK_MISSING = "its master hook is not in the job"


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason not to restore, and what it is about."""

    misfit: Misfit
    subject: str
    detail: str


@dataclass(frozen=True, slots=True)
class RestoreReport:
    #: Uids of operators and sources that go on.
    restored: tuple[str, ...]
    #: Operators and sources that begin with nothing.
    added: tuple[str, ...]
    #: What the user allowed to leave out: uids and names of hooks.
    left_out: tuple[str, ...]
    #: Names of hooks whose state is restored.
    hooks: tuple[str, ...]
    #: Why it must not be done; empty if it may.
    problems: tuple[Problem, ...] = field(default=())


#: Misfits that the user can allow.
_LEFT_OUT = (Misfit.OPERATOR_MISSING, Misfit.SOURCE_MISSING, Misfit.INPUT_MISSING, Misfit.HOOK_MISSING)


def check_restore(savepoint: SavepointMetadata, job: JobShape, rules: RestoreRules) -> RestoreReport:
    found = [*_operators(savepoint, job), *_sources(savepoint, job), *chain_problems(savepoint, job)]
    detail = f"the job's hooks are {', '.join(sorted(job.hooks)) or 'none'}"
    missing = [name for name in savepoint.hooks if name not in job.hooks]
    found += [Problem(Misfit.HOOK_MISSING, name, detail) for name in missing]
    allowed = _LEFT_OUT if rules.non_restored is NonRestoredState.ALLOW else ()
    trusted = rules.unpositioned is UnpositionedSources.BEGIN_WHERE_THEY_ARE
    problems = tuple(
        problem
        for problem in found
        if problem.misfit not in allowed and not (trusted and problem.misfit is Misfit.NOT_POSITIONABLE)
    )
    known = {**savepoint.operators, **savepoint.sources}
    mine = [*job.operators, *job.sources]
    return RestoreReport(
        restored=tuple(uid for uid in mine if uid in known),
        added=tuple(uid for uid in mine if uid not in known),
        left_out=tuple(p.subject for p in found if p.misfit in allowed),
        hooks=tuple(name for name in savepoint.hooks if name in job.hooks),
        problems=problems,
    )


def _operators(savepoint: SavepointMetadata, job: JobShape) -> list[Problem]:
    problems = []
    for uid, saved in savepoint.operators.items():
        shape = job.operators.get(uid)
        if shape is None:
            detail = f"the job's operators are {', '.join(job.operators) or 'none'}"
            problems.append(Problem(Misfit.OPERATOR_MISSING, uid, detail))
            continue
        before, now = ", ".join(saved.key_types), ", ".join(shape.key_types)
        if shape.max_parallelism != saved.max_parallelism:
            detail = f"stored are {saved.max_parallelism}, the job has {shape.max_parallelism}"
            problems.append(Problem(Misfit.MAX_PARALLELISM, uid, detail))
        if shape.key_types != saved.key_types:
            problems.append(Problem(Misfit.KEY_TYPE, uid, f"stored is {before}, the job has {now}"))
        if changed := changed_meaning(saved.meaning, shape.meaning):
            problems.append(Problem(Misfit.MEANING, uid, changed))
    return problems


def _sources(savepoint: SavepointMetadata, job: JobShape) -> list[Problem]:
    problems = []
    for uid, saved in savepoint.sources.items():
        shape = job.sources.get(uid)
        if shape is None:
            detail = f"the job's sources are {', '.join(job.sources) or 'none'}"
            problems.append(Problem(Misfit.SOURCE_MISSING, uid, detail))
        elif shape.kind != saved.kind:
            detail = f"stored is {saved.kind}, the job has {shape.kind}"
            problems.append(Problem(Misfit.SOURCE_KIND, uid, detail))
        elif not shape.is_positionable:
            detail = f"it stood at {_positions(savepoint, uid)}"
            problems.append(Problem(Misfit.NOT_POSITIONABLE, uid, detail))
        else:
            read = {name for position in _positions(savepoint, uid) for name in offsets_in(position)}
            gone = sorted(name for name in read if name not in shape.inputs)
            problems += [Problem(Misfit.INPUT_MISSING, uid, f"it stood in '{name}'") for name in gone]
    return problems


def _positions(savepoint: SavepointMetadata, source: str) -> list[Position]:
    """Return where the scans of a source stood, without those that Spark had not asked yet."""
    return [position for saved in savepoint.chains for position in _of_source(saved, source)]


def chain_problems(savepoint: SavepointMetadata, job: JobShape) -> list[Problem]:
    """Return why chains of a job cannot begin where those of a savepoint stood."""
    problems = []
    for chain, sinks in job.chains.items():
        try:
            begin_chain(chain, sinks, savepoint.chains, job.positionable)
        except PositionsDiffer as error:
            problems.append(Problem(Misfit.CHAINS_JOINED, chain.name, str(error)))
        if chain not in [saved.chain for saved in savepoint.chains]:
            # Its readers would wait for ever: the source does not run again.
            detail, finished = f"the source is read by '{chain.name}'", set(savepoint.finished)
            problems += [
                Problem(Misfit.FINISHED_CHANGED, uid, detail) for uid in sorted(chain.sources & finished)
            ]
    return problems


class PositionsDiffer(ValueError):
    """Between parts of a chain lie records that one has read and the other has not."""


def begin_chain(
    chain: Chain, sinks: Collection[str], saved: Sequence[SavedChain], positionable: Collection[str]
) -> SeededChain:
    """Return how a chain of a job begins, given the chains of a savepoint.

    Each of its inputs goes on where it stood in the saved chain that has the last known operator, with that
    chain's states. Operators of other saved chains can join it only if those stood at the same places. An
    input without any known operator goes on where the sinks' stream stood, whatever was in front of them;
    one of new operators and new sinks begins at the lowest position of its source, so that it sees
    all that any other has not. A source that is not among `positionable` gets no position.
    """
    readers = _find_readers(chain, sinks)
    places = {name: _place(name, chain, readers, saved) for name in chain.inputs}
    begins = {name: at for name, at in places.items() if source_of(name) in positionable}
    for name, position in begins.items():
        own = [one for one in saved if one.readers & readers]
        if any(found != position for one in own for found in _compared(one, name)):
            raise PositionsDiffer(f"what the sinks of '{chain.name}' have read ends at another place")
    anchor = _anchor(chain, readers, saved)
    states = {}
    for operator in chain.operators:
        having = [one for one in saved if operator in one.chain.operators]
        if anchor is not None and having:
            fitting = [one for one in having if one == anchor or _stood_at(one, places, anchor)]
            if not fitting:
                raise PositionsDiffer(f"'{operator}' and '{anchor.chain.name}' stood at different places")
            states[operator] = (anchor if anchor in fitting else fitting[0]).chain.name
    return SeededChain(chain, _leave_out_none(begins), states)


def _anchor(chain: Chain, readers: frozenset[str], saved: Sequence[SavedChain]) -> SavedChain | None:
    """Return the saved chain that has the last known operator, of several the sinks' one."""
    for operator in reversed(chain.operators):
        having = [one for one in saved if operator in one.chain.operators]
        if having:
            return max(having, key=lambda one: (bool(one.readers & readers), one.chain.name == chain.name))
    return None


def _place(name: str, chain: Chain, readers: frozenset[str], saved: Sequence[SavedChain]) -> Position | None:
    source = source_of(name)
    having = [one for one in saved if source in one.chain.sources]
    anchor = _anchor(chain, readers, having)
    own = [one for one in having if one.readers & readers]
    if anchor is not None or own:
        found = _compared(anchor or own[0], name)
        return found[0] if found else None
    known = [position for one in having for position in _of_source(one, source)]
    return lowest(known) if known else None


def _compared(saved: SavedChain, name: str) -> list[Position | None]:
    if name in saved.chain.inputs:
        return [saved.positions.get(name)]
    return [saved.positions.get(one) for one in saved.chain.inputs if source_of(one) == source_of(name)]


def _of_source(saved: SavedChain, source: str) -> list[Position]:
    found = [saved.positions.get(name) for name in saved.chain.inputs if source_of(name) == source]
    return [position for position in found if position is not None]


def _stood_at(saved: SavedChain, places: Mapping[str, Position | None], anchor: SavedChain) -> bool:
    """Whether a saved chain stood where a chain begins, as far as they have inputs in common."""
    shared = [name for name in saved.chain.inputs if name in places]
    if not shared:
        return saved.positions == anchor.positions
    return all(saved.positions.get(name) == places[name] for name in shared)
