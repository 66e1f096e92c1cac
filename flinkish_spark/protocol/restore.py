"""The check of a savepoint against a job, and the beginning of the job's chains in it.

The whole check is done before anything is created: state, positions and hooks are matched by uid or name, so
operators may be added, moved and, if the user allows it, removed. Other differences are refused: another
number of key groups or another type of key would send a key to the wrong state.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field

from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.plan_layout import Chain, Position, lowest, offsets_in, source_of
from flinkish_spark.protocol.savepoints import SavedChain, SavepointMetadata, SeededChain, find_readers


class NonRestoredState(Choice):
    """Policy for state, positions and hook states in the savepoint that the job has no use for."""

    REFUSE = "REFUSE"
    #: They are left out, as with Flink's `--allowNonRestoredState`.
    ALLOW = "ALLOW"


class UnpositionedSources(Choice):
    """Policy for sources that cannot start at a given position, such as a DataFrame."""

    REFUSE = "REFUSE"
    #: The user has made the DataFrame start at the savepoint's position.
    BEGIN_WHERE_THEY_ARE = "BEGIN_WHERE_THEY_ARE"


@dataclass(frozen=True, slots=True)
class OperatorShape:
    max_parallelism: int
    key_types: tuple[str, ...]
    meaning: Mapping[str, str] = field(default_factory=dict)


def find_changed_meaning(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return the differences between the settings that both have; empty if there are none."""
    changed = [name for name in before if now.get(name, before[name]) != before[name]]
    return "; ".join(f"{name}: {before[name]} -> {now[name]}" for name in changed)


@dataclass(frozen=True, slots=True)
class SourceShape:
    kind: str
    is_positionable: bool
    #: Names of its inputs such as topics, or a container that accepts these names. Empty without inputs.
    inputs: Container[str] = frozenset()


@dataclass(frozen=True, slots=True)
class JobShape:
    operators: Mapping[str, OperatorShape]
    sources: Mapping[str, SourceShape]
    #: Chains with the uids of the sinks that read them.
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
    MEANING = "the meaning of its state differs"
    SOURCE_MISSING = "its source is not in the job"
    SOURCE_KIND = "the source is of another kind"
    INPUT_MISSING = "the source no longer reads one of its inputs"
    NOT_POSITIONABLE = "the source cannot start at a given position"
    CHAINS_JOINED = "parts with different positions are in one chain now"
    FINISHED_CHANGED = "the source had finished and has new readers now"
    HOOK_MISSING = "its master hook is not in the job"


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason not to restore, and its subject."""

    misfit: Misfit
    subject: str
    detail: str


@dataclass(frozen=True, slots=True)
class RestoreReport:
    #: Uids of operators and sources that are restored.
    restored: tuple[str, ...]
    #: Operators and sources that start without state or position.
    added: tuple[str, ...]
    #: Uids and names of hooks that are left out, as the user allows.
    left_out: tuple[str, ...]
    #: Names of hooks whose state is restored.
    hooks: tuple[str, ...]
    #: Reasons not to restore; empty if the restore is possible.
    problems: tuple[Problem, ...] = field(default=())


#: Misfits that the user can allow.
_LEFT_OUT = (Misfit.OPERATOR_MISSING, Misfit.SOURCE_MISSING, Misfit.INPUT_MISSING, Misfit.HOOK_MISSING)


def check_restore(savepoint: SavepointMetadata, job: JobShape, rules: RestoreRules) -> RestoreReport:
    found = [
        *_check_operators(savepoint, job),
        *_check_sources(savepoint, job),
        *check_chains(savepoint, job),
    ]
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


def _check_operators(savepoint: SavepointMetadata, job: JobShape) -> list[Problem]:
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
        if changed := find_changed_meaning(saved.meaning, shape.meaning):
            problems.append(Problem(Misfit.MEANING, uid, changed))
    return problems


def _check_sources(savepoint: SavepointMetadata, job: JobShape) -> list[Problem]:
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
            detail = f"it stood at {_find_positions(savepoint, uid)}"
            problems.append(Problem(Misfit.NOT_POSITIONABLE, uid, detail))
        else:
            read = {name for position in _find_positions(savepoint, uid) for name in offsets_in(position)}
            gone = sorted(name for name in read if name not in shape.inputs)
            problems += [Problem(Misfit.INPUT_MISSING, uid, f"it stood in '{name}'") for name in gone]
    return problems


def _find_positions(savepoint: SavepointMetadata, source: str) -> list[Position]:
    """Return the positions of a source's scans, without scans that Spark had not read yet."""
    return [position for saved in savepoint.chains for position in _find_source_positions(saved, source)]


def check_chains(savepoint: SavepointMetadata, job: JobShape) -> list[Problem]:
    problems = []
    for chain, sinks in job.chains.items():
        try:
            begin_chain(chain, sinks, savepoint.chains, job.positionable)
        except ValueError as error:
            problems.append(Problem(Misfit.CHAINS_JOINED, chain.name, str(error)))
        if chain not in [saved.chain for saved in savepoint.chains]:
            # The readers would wait for ever, since the source does not run again.
            detail, finished = f"the source is read by '{chain.name}'", set(savepoint.finished)
            problems += [
                Problem(Misfit.FINISHED_CHANGED, uid, detail) for uid in sorted(chain.sources & finished)
            ]
    return problems


def begin_chain(
    chain: Chain, sinks: Collection[str], saved: Sequence[SavedChain], positionable: Collection[str]
) -> SeededChain:
    """Return the initial states and positions of a job's chain, given the chains of a savepoint.

    Each input gets its position in the saved chain that has the last known operator, with that chain's
    states. Operators of other saved chains can join only if those chains have the same positions. An input
    without any known operator gets the position of its sinks' stream, whatever was before the sinks. For new
    operators and new sinks it gets the lowest position of its source, so that they see all records that any
    other chain has not read. A source that is not in `positionable` gets no position.
    """
    readers = find_readers(chain, sinks)
    places = {name: _find_position(name, chain, readers, saved) for name in chain.inputs}
    begins = {name: at for name, at in places.items() if source_of(name) in positionable}
    for name, position in begins.items():
        own = [one for one in saved if one.readers & readers]
        if any(found != position for one in own for found in _find_saved_positions(one, name)):
            raise ValueError(f"the sinks of '{chain.name}' have read up to another position")
    anchor = _find_anchor(chain, readers, saved)
    states = {}
    for operator in chain.operators:
        having = [one for one in saved if operator in one.chain.operators]
        if anchor is not None and having:
            fitting = [one for one in having if one == anchor or _has_positions(one, places, anchor)]
            if not fitting:
                raise ValueError(f"'{operator}' and '{anchor.chain.name}' had different positions")
            states[operator] = (anchor if anchor in fitting else fitting[0]).chain.name
    return SeededChain(chain, {name: at for name, at in begins.items() if at is not None}, states)


def _find_anchor(chain: Chain, readers: frozenset[str], saved: Sequence[SavedChain]) -> SavedChain | None:
    """Return the saved chain that has the last known operator; of several, the one that the sinks read."""
    for operator in reversed(chain.operators):
        having = [one for one in saved if operator in one.chain.operators]
        if having:
            return max(having, key=lambda one: (bool(one.readers & readers), one.chain.name == chain.name))
    return None


def _find_position(
    name: str, chain: Chain, readers: frozenset[str], saved: Sequence[SavedChain]
) -> Position | None:
    source = source_of(name)
    having = [one for one in saved if source in one.chain.sources]
    anchor = _find_anchor(chain, readers, having)
    own = [one for one in having if one.readers & readers]
    if anchor is not None or own:
        found = _find_saved_positions(anchor or own[0], name)
        return found[0] if found else None
    known = [position for one in having for position in _find_source_positions(one, source)]
    return lowest(known) if known else None


def _find_saved_positions(saved: SavedChain, name: str) -> list[Position | None]:
    if name in saved.chain.inputs:
        return [saved.positions.get(name)]
    return [saved.positions.get(one) for one in saved.chain.inputs if source_of(one) == source_of(name)]


def _find_source_positions(saved: SavedChain, source: str) -> list[Position]:
    found = [saved.positions.get(name) for name in saved.chain.inputs if source_of(name) == source]
    return [position for position in found if position is not None]


def _has_positions(saved: SavedChain, places: Mapping[str, Position | None], anchor: SavedChain) -> bool:
    shared = [name for name in saved.chain.inputs if name in places]
    if not shared:
        return saved.positions == anchor.positions
    return all(saved.positions.get(name) == places[name] for name in shared)
