"""Layout of a plan: names for Spark's numbered sources and operators.

Spark runs a plan as a tree: an operator whose output is used twice runs twice, each time over its own scan
of the source, and in one micro-batch the two scans may end at different positions. So a job is a set of
*chains*: from sources through operators to the end of a stream that sinks read. Positions, and the state of
an operator, belong to a chain.

Spark's logs have no names: offsets are a list in the order of the sources in the plan, and state is in
folders numbered in the order of the operators. The :class:`PlanLayout` gives names to both.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flinkish_spark.protocol.codec import LEFT_OUT, StoredObject, StoredRow

#: Prefix of our own keys in an offset, beside the topics; no topic can have such a name.
OWN_KEYS = "flinkish:"
#: Key of the position of a source of splits: a list of pairs of split and offset.
SPLITS = f"{OWN_KEYS}splits"
#: Offsets of a seed: before and after its state.
UNSEEDED: Mapping[str, int] = {"flinkish:seed": 0}
SEEDED: Mapping[str, int] = {"flinkish:seed": 1}

#: Offset that a source logged, as JSON; of Kafka topic -> partition -> next offset.
Position = Any


#: Separates a source's uid from a number in the name of an input; no uid contains it.
_AGAIN = "#"


def make_input_names(sources: Sequence[str]) -> tuple[str, ...]:
    """Return the names of a chain's scans; further scans of the same source get a number."""
    numbers = [sources[: at + 1].count(uid) for at, uid in enumerate(sources)]
    return tuple(
        uid if number == 1 else f"{uid}{_AGAIN}{number}" for uid, number in zip(sources, numbers, strict=True)
    )


def source_of(name: str) -> str:
    return name.split(_AGAIN)[0]


@dataclass(frozen=True, slots=True)
class Chain(StoredObject):
    """A chain of the job, from its sources to the end of a stream."""

    #: Its scans of sources in the order of the plan, by the names that :func:`make_input_names` gives.
    inputs: tuple[str, ...]
    #: Uids, each after the operators that it reads.
    operators: tuple[str, ...]
    #: Uid of the last operator; without operators, the uids of the sinks that read the stream.
    consumers: tuple[str, ...]

    @property
    def name(self) -> str:
        return ",".join(self.consumers)

    @property
    def sources(self) -> frozenset[str]:
        return frozenset(map(source_of, self.inputs))


class ScanRole(enum.Enum):
    #: Records of a source, maybe with the barriers that the source injects.
    RECORDS = "records"
    #: Barriers only; its position means nothing.
    BARRIERS = "barriers"
    #: Initial state of an operator.
    SEED = "seed"


@dataclass(frozen=True, slots=True)
class Scan(StoredRow):
    role: ScanRole
    #: The name of the chain's input, or for a seed the operator's uid; empty for barriers.
    uid: str
    #: Name of its chain; several chains whose operators share tasks are separated by commas.
    chain: str


@dataclass(frozen=True, slots=True)
class ScannedInput(StoredRow):
    scan: int
    chain: str
    name: str


@dataclass(frozen=True, slots=True)
class OperatorInstance(StoredRow):
    uid: str
    chain: str


@dataclass(frozen=True, slots=True)
class NativeOperator(StoredRow):
    """A stateful operator of Spark's own, in a DataFrame or transform of the user's."""

    #: Spark's number of the stateful operator.
    number: int
    #: Name of the input whose records it computes.
    uid: str
    #: As of a scan.
    chain: str
    #: The kind of operator in the user's words.
    what: str


@dataclass(frozen=True, slots=True)
class StateInstance:
    """Place of an operator instance's state in Spark's checkpoint."""

    uid: str
    chain: str
    #: Spark's number of the stateful operator; operators that share tasks have the same number.
    number: int
    #: Position among the operators that share its tasks.
    place: int


@dataclass(frozen=True, slots=True)
class PlanLayout(StoredObject):
    """Names for the entries of Spark's lists of sources and operators."""

    #: In the order of an entry of Spark's offset log.
    scans: tuple[Scan, ...]
    #: In the order of Spark's numbers; operators that share tasks have one number.
    operators: tuple[OperatorInstance, ...]
    #: Groups of chains that share tasks; each of these chains has one operator, and a group has their order.
    shared: tuple[tuple[str, ...], ...] = field(default=(), metadata=LEFT_OUT)
    #: Inputs of the scans that bring several inputs, or an input of another name.
    together: tuple[ScannedInput, ...] = field(default=(), metadata=LEFT_OUT)
    #: Operators with state of Spark's own, whose numbers no operator of ours has.
    natives: tuple[NativeOperator, ...] = field(default=(), metadata=LEFT_OUT)

    def inputs_of(self, number: int) -> tuple[tuple[str, str], ...]:
        """Return chain and name of the inputs that the scan with this number brings."""
        scan = self.scans[number]
        several = tuple((one.chain, one.name) for one in self.together if one.scan == number)
        names = scan.chain.split(",")
        # The name of a chain of several sinks has commas, too.
        is_shared = any(names[0] in group for group in self.shared)
        return several or tuple((chain, scan.uid) for chain in (names if is_shared else [scan.chain]))

    @property
    def states(self) -> tuple[StateInstance, ...]:
        found: list[StateInstance] = []
        native = {one.number for one in self.natives}
        free = (number for number in itertools.count() if number not in native)
        for one in self.operators:
            group = next((group for group in self.shared if one.chain in group), (one.chain,))
            place = group.index(one.chain)
            number = found[-1].number if place else next(free)
            found.append(StateInstance(one.uid, one.chain, number, place))
        return tuple(found)

    def positions(self, logged: Sequence[Position]) -> dict[str, dict[str, Position]]:
        parts: dict[str, dict[str, list[Position]]] = {}
        if len(self.scans) != len(logged):
            raise ValueError(
                f"the plan has {len(self.scans)} sources and the offset log entry {len(logged)} positions"
            )
        for number, (scan, position) in enumerate(zip(self.scans, logged, strict=True)):
            if scan.role is ScanRole.RECORDS and position is not None:
                for chain, name in self.inputs_of(number):
                    parts.setdefault(chain, {}).setdefault(name, []).append(position)
        # A DataFrame of the user's may read several inputs; the list of their positions is never used to
        # start a source.
        return {
            chain: {name: found[0] if len(found) == 1 else found for name, found in inputs.items()}
            for chain, inputs in parts.items()
        }


def lowest(positions: Sequence[Position]) -> Position:
    """Return the minimum of Kafka positions by partition; the position itself if all are equal."""
    if all(position == positions[0] for position in positions):
        return positions[0]
    if all(SPLITS in position for position in positions):
        return _find_lowest_splits(positions)
    found: dict[str, dict[str, int]] = {}
    for position in positions:
        for topic, offsets in offsets_in(position).items():
            known = found.setdefault(topic, {})
            for partition, offset in offsets.items():
                known[partition] = min(int(offset), known.get(partition, int(offset)))
    return found


def _find_lowest_splits(positions: Sequence[Position]) -> Position:
    """Return the minimum by split; a split without a common position is read from its beginning."""
    known = [dict(position[SPLITS]) for position in positions]
    found = []
    for name in (name for name in known[0] if all(name in offsets for offsets in known)):
        offsets = [one[name] for one in known]
        if all(type(offset) in (int, float) for offset in offsets):
            found.append([name, min(offsets)])
        elif all(offset == offsets[0] for offset in offsets):
            found.append([name, offsets[0]])
    same = {key: value for key, value in positions[0].items() if all(p.get(key) == value for p in positions)}
    return {**same, SPLITS: found}


def offsets_in(position: Position) -> dict[str, Mapping[str, int]]:
    """Return topic -> partition -> next offset of a Kafka position, without our own keys."""
    return {topic: offsets for topic, offsets in position.items() if not topic.startswith(OWN_KEYS)}
