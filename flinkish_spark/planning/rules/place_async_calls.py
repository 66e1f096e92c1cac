"""The rule that finds async calls about the same elements, whose answers must be recorded."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flinkish_spark.operators.recorded_answers import Readers
from flinkish_spark.planning.async_calls import (
    AsyncTransform,
    find_async_functions,
    find_input_name,
)
from flinkish_spark.planning.logical_plan import (
    AsyncReaders,
    LogicalPlan,
)
from flinkish_spark.planning.stream_graph import (
    KeyedNode,
    Path,
    collect_operators,
    find_operator,
    find_upstreams,
)
from flinkish_spark.protocol.plan_layout import Chain


@dataclass(frozen=True)
class _Evaluation:
    """One place in or after a plan where an async operator runs over the elements of a path."""

    function: AsyncTransform
    #: An operator in several chains reads sources several times, and may see different elements.
    chain: Chain
    #: The operator or the sink that reads it.
    reader: str
    #: True if it is part of the streaming plan; else it runs for a sink on the evaluated micro-batch.
    is_planned: bool


def place_async_calls(plan: LogicalPlan) -> LogicalPlan:
    """Note, for each async operator and path, the readers of recorded answers."""
    found: dict[tuple[str, str], list[_Evaluation]] = defaultdict(list)
    for path, chain, reader, is_planned in _find_evaluations(plan):
        for function in find_async_functions(path):
            one = _Evaluation(function, chain, reader, is_planned)
            found[function.settings.kept_as, find_input_name(path)].append(one)
    calls = {
        known: AsyncReaders(_find_readers(own), len({one.chain for one in own}) > 1)
        for known, own in found.items()
    }
    return replace(plan, calls=calls)


def _find_evaluations(plan: LogicalPlan) -> Iterator[tuple[Path, Chain, str, bool]]:
    planned: dict[Chain, set[KeyedNode]] = {}
    for sink, ends in plan.ends.items():
        for end in ends:
            is_new = end.chain not in planned
            there = planned.setdefault(end.chain, set())
            for path in end.paths:
                operator = find_operator(path.base)
                if operator is not None or end.deferred_from is not None:
                    # Each sink runs its own steps on the evaluated micro-batch.
                    yield path, end.chain, sink, False
                elif is_new:
                    yield path, end.chain, end.chain.name, True
                operators = () if operator is None else collect_operators(operator)
                for node in (one for one in operators if one not in there):
                    there.add(node)
                    for upstream in find_upstreams(node):
                        yield from ((other, end.chain, node.uid, True) for other in upstream.paths)


def _find_readers(evaluations: Sequence[_Evaluation]) -> Readers | None:
    """Return the readers of recorded answers; None if one caller asks once about each element."""
    # For a sink the function may run more than once: it counts its records, for example.
    is_once = len(evaluations) == 1 and evaluations[0].is_planned
    if is_once and not evaluations[0].function.spec.is_recorded:
        return None
    planned = sum(one.is_planned for one in evaluations)
    paths_of_reader = Counter(one.reader for one in evaluations)
    is_alone = planned in (0, len(evaluations)) and planned < 2 and max(paths_of_reader.values()) == 1
    return Readers.ONE_WAY if is_alone else Readers.SEVERAL_WAYS
