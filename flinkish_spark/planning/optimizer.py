"""From the stream graph to the logical plan: rules, each of which decides one thing, and their order.

A rule is a function from a logical plan to a logical plan, and knows no session and no DataFrame.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from flinkish_spark.contracts.source import SourceNode
from flinkish_spark.operators.recorded_answers import Readers
from flinkish_spark.planning.async_calls import (
    AsyncSettings,
    AsyncTransform,
    async_functions,
    is_async,
    name_of,
)
from flinkish_spark.planning.beginning import NOTHING, Beginning
from flinkish_spark.planning.logical_plan import (
    Asking,
    Counting,
    End,
    LineOperator,
    LogicalPlan,
    Reader,
    SharedScan,
    TaskGroup,
    counted_as,
    operators_below,
)
from flinkish_spark.planning.partitioning import Narrow, is_partitioning
from flinkish_spark.planning.stream_graph import (
    Base,
    KeyedNode,
    Path,
    SinkNode,
    Step,
    StreamGraph,
    StreamNode,
    TimedNode,
    TransformNode,
    has_paths_that_meet,
    operator_of,
    operator_scans,
    operators_upto,
    paths_to,
    upstreams,
)
from flinkish_spark.planning.transforms import RecordFunction, frame_function, has_frames_first
from flinkish_spark.protocol.job_graph import Chained
from flinkish_spark.protocol.plan_layout import Chain, PlanLayout, ScanRole, input_names, source_of


def cut_chains(plan: LogicalPlan) -> LogicalPlan:
    """Note the chains whose ends each sink reads."""
    ends = {sink.uid: chains_to(plan.graph, sink.parent) for sink in plan.graph.sinks}
    return replace(plan, ends=ends)


def chains_to(graph: StreamGraph, node: StreamNode) -> tuple[End, ...]:
    """Return the chains whose ends a stream is, each with the paths that are its end."""
    # All paths from sources to sinks without an operator on them are one chain. An operator's outputs are
    # ends of the operator's chain, whoever reads them: transforms behind it are no part of the plan. So it is
    # with the outputs of an async operator behind a source, if several sinks read them.
    paths = paths_to(node)
    plain = tuple(path for path in paths if isinstance(path.base, SourceNode))
    found: list[End] = []
    if plain:
        deferred_from, sharing = _deferred(graph, plain[0]) if len(plain) == 1 else (None, ())
        together = sharing if len(paths) == 1 else ()
        readers = tuple(sink.uid for sink in graph.sinks if sink.parent is node or sink in together)
        sources = [path.base.uid for path in plain if isinstance(path.base, SourceNode)]
        found.append(End(Chain(input_names(sources), (), readers), plain, deferred_from))
    for path in paths:
        operator = operator_of(path.base)
        if operator is not None:
            found.append(End(chain_of(graph, operator), (path,)))
    return tuple(found)


# Streams from a source to sinks are chains of their own, each with its own scan. An async operator whose
# outputs go to different sinks is to run over the same elements for all of them. So the chain ends in front
# of it, and what follows is done for each sink on the evaluated micro-batch, as behind a keyed operator.
def _deferred(graph: StreamGraph, path: Path) -> tuple[int | None, tuple[SinkNode, ...]]:
    """Return with which step the part begins that each sink runs for itself, and the sinks that share it."""
    found = next(async_functions(path), None)
    if found is None:
        return None, ()
    sharing = tuple(sink for sink in graph.sinks if _reads(sink, path.base, found.settings))
    at = _async_step(path, found.settings)
    if at is None or len({id(sink.parent) for sink in sharing}) < 2:
        return None, ()
    return at, sharing


def _reads(sink: SinkNode, base: Base, settings: AsyncSettings) -> bool:
    first, *more = paths_to(sink.parent)
    return not more and first.base is base and _async_step(first, settings) is not None


def _async_step(path: Path, settings: AsyncSettings) -> int | None:
    """Return the place of an async operator on a path; None if it is not there, or times are given behind."""
    functions = (getattr(step, "function", None) for step in path.steps)
    places = (at for at, one in enumerate(functions) if getattr(one, "settings", None) is settings)
    at = next(places, None)
    # What gives times is planned.
    return None if at is None or any(isinstance(step, TimedNode) for step in path.steps[at:]) else at


def inputs_of(graph: StreamGraph) -> tuple[str, ...]:
    """Return the names of all inputs of a job's chains, those of the same source one behind the other."""
    names = {
        name for sink in graph.sinks for end in chains_to(graph, sink.parent) for name in end.chain.inputs
    }
    order = [source.uid for source in graph.sources]
    known = {uid: place for place, uid in enumerate(order)}
    return tuple(sorted(names, key=lambda name: (known[source_of(name)], len(name), name)))


def chain_of(graph: StreamGraph, operator: KeyedNode) -> Chain:
    return _chain(ends_with(graph, operator))


def ends_with(graph: StreamGraph, operator: KeyedNode) -> tuple[KeyedNode, ...]:
    """Return the operators that sinks read in the chain of one of them, in the order of the sinks."""
    # What an operator makes for sinks and for others stands in one chain, so that it runs once. A job goes on
    # with the chains that it has begun with.
    together = next((ends for ends in _ends(tuple(graph.sinks)) if operator in ends), (operator,))
    if graph.begun_chains is None:
        return together
    begun = [end.uid for end in together if end.uid in graph.begun_chains]
    return together if begun == list(_chain(together).consumers) else (operator,)


def _chain(ends: tuple[KeyedNode, ...]) -> Chain:
    inputs = input_names([scan.source.uid for scan in operator_scans(*ends)])
    operators = tuple(node.uid for node in operators_upto(*ends))
    return Chain(inputs, operators, operators[-1:])


@lru_cache(maxsize=16)
def _ends(sinks: tuple[SinkNode, ...]) -> tuple[tuple[KeyedNode, ...], ...]:
    """Return the operators that sinks read, those together that read one operator, or each other."""
    read = dict.fromkeys(operator_of(path.base) for sink in sinks for path in paths_to(sink.parent))
    found: list[tuple[set[KeyedNode], list[KeyedNode]]] = []
    for end in read:
        if end is None:
            continue
        below, ends = set(operators_upto(end)), [end]
        for other in [one for one in found if not one[0].isdisjoint(below)]:
            if _go_in_line(below | other[0]):
                found.remove(other)
                below |= other[0]
                ends = [*other[1], *ends]
        found.append((below, ends))
    order = list(read)
    return tuple(tuple(sorted(ends, key=order.index)) for _, ends in found)


def _go_in_line(operators: Iterable[KeyedNode]) -> bool:
    """Whether operators can stand one behind the other, so that rows of one pass the next."""
    # A transform() between two of them that stands first on no path of its own would get the rows of all.
    inputs = (input_ for one in operators for upstream in upstreams(one) for input_ in upstream.inputs)
    between = (input_ for input_ in inputs if operator_of(input_.paths[0].base) is not None)
    return all(map(has_frames_first, between))


def mark_records(plan: LogicalPlan) -> LogicalPlan:
    """Note whether barriers may come from the source itself."""
    # Several scans that meet would each put a barrier into the micro-batch for which *they* saw the trigger.
    # Whether what stands in the plan can let control rows pass is seen when Spark has analysed it.
    sources = plan.graph.sources
    is_plain = len(sources) == 1 and not sources[0].source.has_side_outputs
    is_straight = all(len(end.chain.inputs) == 1 for end in plan.all_ends)
    has_unions = any(sum(len(end.paths) for end in ends) > 1 for ends in plan.ends.values())
    return replace(plan, marks_records=is_plain and is_straight and not has_unions)


# ----------------------------------------------------------------------------------------------------------
# Operators that share tasks, and scans.


def share_tasks(plan: LogicalPlan) -> LogicalPlan:
    """Note the groups of operators that share tasks; in a log that has begun, those that it has together."""
    if not plan.may_share:
        return plan
    recorded = {} if plan.recorded is None else {one.chain: one for one in plan.recorded.states}
    groups = []
    for operators in _of_one_slot_sharing_group(plan):
        together: dict[int | None, list[tuple[int, KeyedNode, Chain]]] = {}
        for operator in operators:
            chain = chain_of(plan.graph, operator)
            lies = recorded.get(chain.name)
            number, place = (None, 0) if lies is None else (lies.number, lies.place)
            together.setdefault(number, []).append((place, operator, chain))
        for members in together.values():
            # In the order of the live log; if that begins now, that of the program counts.
            members.sort(key=lambda one: one[0])
            groups.append(_group([(operator, chain) for _, operator, chain in members]))
    return replace(plan, groups=tuple(groups))


def _of_one_slot_sharing_group(plan: LogicalPlan) -> Iterator[Sequence[KeyedNode]]:
    """Yield the operators of each group that read sources and that only sinks read."""
    # One alone is left out, unless it reads a source several times, which is scanned once then.
    groups: dict[str, list[KeyedNode]] = {}
    for chain, base in {end.chain: end.paths[0].base for end in plan.all_ends}.items():
        operator = operator_of(base)
        if operator is not None and len(chain.operators) == 1:
            groups.setdefault(plan.graph.slot_sharing.get(operator.uid, "default"), []).append(operator)
    for group in groups.values():
        sources = [scan.source for scan in operator_scans(group[0])]
        if len(group) > 1 or len(set(map(id, sources))) < len(sources):
            yield group


def _group(members: Sequence[tuple[KeyedNode, Chain]]) -> TaskGroup:
    readers = []
    for place, (operator, chain) in enumerate(members):
        named = zip(upstreams(operator), chain.inputs, strict=True)
        inputs = sorted(
            ((upstream.inputs[0], name) for upstream, name in named), key=lambda one: one[0].entry
        )
        readers += [
            Reader(place, number, operator, chain, name, one.entry, one.paths[0])
            for number, (one, name) in enumerate(inputs)
        ]
    return TaskGroup(tuple(members), tuple(readers))


def share_scans(plan: LogicalPlan) -> LogicalPlan:
    """Note the scans of each group of operators, and where paths of several readers part behind one."""
    groups = (replace(group, scans=tuple(_shared_scans(plan, group))) for group in plan.groups)
    return replace(plan, groups=tuple(groups))


def _shared_scans(plan: LogicalPlan, group: TaskGroup) -> Iterator[SharedScan]:
    # Only what begins at the same place is read together; in a log that has begun, what it has together.
    scans: dict[object, list[Reader]] = {}
    for one in group.readers:
        label = plan.beginning.label_of_input(one.chain, one.name)
        known = id(one.path.base), label, _scanned_in(plan.recorded, one)
        scans.setdefault(known, []).append(one)
    for readers in scans.values():
        for common, branches in common_steps(plan.graph, [one.path for one in readers]):
            yield SharedScan(common, tuple(tuple(readers[at] for at in numbers) for numbers in branches))


def _scanned_in(layout: PlanLayout | None, reader: Reader) -> int | None:
    """Return the number of the scan that brings an input in the live log; None in one that begins now."""
    if layout is None:
        return None
    records = (at for at, scan in enumerate(layout.scans) if scan.role is ScanRole.RECORDS)
    return next((at for at in records if (reader.chain.name, reader.name) in layout.inputs_of(at)), None)


def common_steps(graph: StreamGraph, paths: Sequence[Path]) -> list[tuple[int, list[list[int]]]]:
    """Group paths that may share one scan: what follows the steps that all have can run in one pass."""
    # What gives event times comes before, and what calls a system outside.
    known = [tuple(map(id, path.steps)) for path in paths]
    needed = {own[: _branches_behind(graph, path.steps)] for own, path in zip(known, paths, strict=True)}
    behind: dict[tuple[int, ...], list[int]] = {}
    for number, own in enumerate(known):
        # Behind more common steps, if others need them.
        common = max((one for one in needed if one == own[: len(one)]), key=len)
        behind.setdefault(common, []).append(number)
    found = []
    for numbers in behind.values():
        alike: dict[tuple[int, ...], list[int]] = {}
        for number in numbers:
            alike.setdefault(known[number], []).append(number)
        at_each = enumerate(zip(*alike, strict=False))
        steps = next((at for at, steps in at_each if len(set(steps)) > 1), min(map(len, alike)))
        found.append((steps, [*alike.values()]))
    return found


def _branches_behind(graph: StreamGraph, steps: Sequence[Step]) -> int:
    at = len(steps)
    while at and _runs_beside(graph, steps[:at]) and frame_function(steps[at - 1]) is None:
        at -= 1
    while at and _runs_beside(graph, steps[:at]) and frame_function(steps[at - 1]) is not None:
        at -= 1
    return at


def _runs_beside(graph: StreamGraph, steps: Sequence[Step]) -> bool:
    """Whether the last of some steps can run beside steps of other paths, in one pass."""
    step = steps[-1]
    if not isinstance(step, TransformNode) or is_set_apart(graph, steps):
        return False
    if frame_function(step) is not None:
        return True
    function: object = step.function
    if not isinstance(function, RecordFunction) or is_async(function):
        return False
    return function.settings.parallelism is None and function.settings.resources is None


def is_set_apart(graph: StreamGraph, steps: Sequence[Step]) -> bool:
    """Whether the program keeps the last of some steps from those before, so that there is a shuffle."""
    # Not where there is one anyway: behind `rebalance` and the like, and before a function with a number of
    # tasks of its own.
    *before, step = steps
    front = before[-1] if before else None
    if isinstance(step, TransformNode):
        settings = getattr(step.function, "settings", None)
        if is_partitioning(step.function) or getattr(settings, "parallelism", None) is not None:
            return False
    if isinstance(front, TransformNode) and is_partitioning(front.function):
        return isinstance(front.function, Narrow) and is_set_apart(graph, [*before[:-1], step])
    return graph.chained_of(front) is Chained.NEVER or graph.chained_of(step) is not Chained.ALWAYS


def pass_streams(plan: LogicalPlan) -> LogicalPlan:
    """Note the operators of each chain that stand in a line, and which streams pass which."""
    # Each operator stands in the plan once. What one behind it reads of an operator in front passes it, as
    # another output; so does what a sink reads.
    lines = {}
    for end in plan.all_ends:
        operator = operator_of(end.paths[0].base)
        if operator is not None:
            last = ends_with(plan.graph, operator)
            if len(last) > 1 or has_paths_that_meet(last[0]):
                lines[end.chain.name] = tuple(_line(plan.graph, last, end.chain.inputs))
    return replace(plan, lines=lines)


def _line(graph: StreamGraph, last: Sequence[KeyedNode], inputs: Sequence[str]) -> Iterator[LineOperator]:
    names: dict[KeyedNode, dict[int, str]] = {}
    for scan, name in zip(operator_scans(*last), inputs, strict=True):
        names.setdefault(scan.operator, {})[scan.upstream] = name
    of_sinks = {id(path.base) for sink in graph.sinks for path in paths_to(sink.parent)}
    operators, made = operators_upto(*last), list[Base]()
    for place, operator in enumerate(operators, start=1):
        behind = (upstream for one in operators[place:] for upstream in upstreams(one))
        read = of_sinks | {id(path.base) for upstream in behind for path in upstream.paths}
        passing = tuple(base for base in made if id(base) in read)
        yield LineOperator(operator, names.get(operator, {}), passing)
        made = [operator, *graph.sides_of(operator), *passing]


# ----------------------------------------------------------------------------------------------------------
# Async calls, and what adds to accumulators.


@dataclass(frozen=True)
class _Evaluation:
    """One place in a plan, or behind it, where an async operator runs over the elements of a path."""

    function: AsyncTransform
    #: Of the plan: what stands in several of them reads sources several times, and may see other elements.
    chain: Chain
    #: The operator or the sink that reads it.
    reader: str
    #: Whether it is part of the streaming plan, and not done for a sink on the evaluated micro-batch.
    is_planned: bool


def place_async_calls(plan: LogicalPlan) -> LogicalPlan:
    """Note of each async operator, by path, who asks about the elements, so that answers are recorded."""
    found: dict[tuple[str, str], list[_Evaluation]] = defaultdict(list)
    for path, chain, reader, is_planned in _evaluations(plan):
        for function in async_functions(path):
            one = _Evaluation(function, chain, reader, is_planned)
            found[function.settings.kept_as, name_of(path)].append(one)
    calls = {
        known: Asking(_readers(own), len({one.chain for one in own}) > 1) for known, own in found.items()
    }
    return replace(plan, calls=calls)


def _evaluations(plan: LogicalPlan) -> Iterator[tuple[Path, Chain, str, bool]]:
    planned: dict[Chain, set[KeyedNode]] = {}
    for sink, ends in plan.ends.items():
        for end in ends:
            is_new = end.chain not in planned
            there = planned.setdefault(end.chain, set())
            for path in end.paths:
                operator = operator_of(path.base)
                if operator is not None or end.deferred_from is not None:
                    # On the evaluated micro-batch each sink runs what is in front of it.
                    yield path, end.chain, sink, False
                elif is_new:
                    yield path, end.chain, end.chain.name, True
                operators = () if operator is None else operators_upto(operator)
                for node in (one for one in operators if one not in there):
                    there.add(node)
                    for upstream in upstreams(node):
                        yield from ((other, end.chain, node.uid, True) for other in upstream.paths)


def _readers(evaluations: Sequence[_Evaluation]) -> Readers | None:
    """Return who may ask about the same elements at the same time; None where one alone does, once."""
    # For a sink the function may run more than once: it counts its records, for example.
    is_once = len(evaluations) == 1 and evaluations[0].is_planned
    if is_once and not evaluations[0].function.spec.is_recorded:
        return None
    planned = sum(one.is_planned for one in evaluations)
    paths_of_reader = Counter(one.reader for one in evaluations)
    is_alone = planned in (0, len(evaluations)) and planned < 2 and max(paths_of_reader.values()) == 1
    return Readers.ONE_WAY if is_alone else Readers.SEVERAL_WAYS


def count_functions(plan: LogicalPlan) -> LogicalPlan:
    """Note the first place of the plan in which each function and operator stands: there it counts."""
    walk = _Walk(plan)
    for group in plan.groups:
        for reader in group.readers:
            walk.meet(reader.operator.uid, reader.operator, reader.chain)
        for scan in group.scans:
            for branch in scan.branches:
                walk.path(branch[0].path, branch[0].chain)
    for end in plan.all_ends:
        for path in end.paths:
            walk.path(path, end.chain)
    return replace(plan, counting=Counting(walk.first, walk.steps))


class _Walk:
    """Comes by all parts of a plan; this order matters, since numbers are part of what is stored."""

    def __init__(self, plan: LogicalPlan) -> None:
        self._lines = plan.lines
        self._seen = {(operator, chain) for group in plan.groups for operator, chain in group.members}
        self.first: dict[object, tuple[object, Chain]] = {}
        self.steps: dict[int, int] = {}

    def meet(self, known_as: object, node: object, chain: Chain) -> None:
        if known_as is not None:
            self.first.setdefault(known_as, (node, chain))

    def path(self, path: Path, chain: Chain) -> None:
        for operator in operators_below(path.base):
            self.meet(operator.uid, operator, chain)
        for step in path.steps:
            self.meet(counted_as(step), step, chain)
        self._base(path.base, chain)
        self._number(path)

    def _base(self, base: Base, chain: Chain) -> None:
        operator = operator_of(base)
        if operator is None or (operator, chain) in self._seen:
            return
        line = self._lines.get(chain.name)
        operators = (operator,) if line is None else tuple(one.operator for one in line)
        self._seen |= {(one, chain) for one in operators}
        for one in operators:
            self._operator(one, chain)

    def _operator(self, operator: KeyedNode, chain: Chain) -> None:
        for upstream in upstreams(operator):
            if isinstance(upstream.base, SourceNode):
                self.meet(operator.uid, operator, chain)
                self.path(upstream.paths[0], chain)
                continue
            for path in upstream.paths:
                self._number(path)
                for step in path.steps:
                    self.meet(counted_as(step), step, chain)
            for one in upstream.inputs:
                self._base(one.base, chain)
        self.meet(operator.uid, operator, chain)

    def _number(self, path: Path) -> None:
        # What gives times at the end has no number: only functions ask.
        last = max((at for at, step in enumerate(path.steps) if isinstance(step, TransformNode)), default=-1)
        for step in path.steps[: last + 1]:
            self.steps.setdefault(id(step), len(self.steps))


Rule = Callable[[LogicalPlan], LogicalPlan]

#: This order matters. All rules go by the chains. Scans are shared by operators that share tasks. What counts
#: is what the plan comes by first, so that rule sees all others' work.
RULES: tuple[Rule, ...] = (
    cut_chains,
    mark_records,
    share_tasks,
    share_scans,
    pass_streams,
    place_async_calls,
    count_functions,
)


def optimize(
    graph: StreamGraph, beginning: Beginning = NOTHING, recorded: PlanLayout | None = None
) -> LogicalPlan:
    """Return the plan of a job; `recorded` is the layout of the live log, if there is one."""
    plan = LogicalPlan(graph, beginning, recorded)
    for rule in RULES:
        plan = rule(plan)
    return plan


def plan_of_stream(graph: StreamGraph, node: StreamNode) -> LogicalPlan:
    """Return the plan of a stream's records outside of a job: nothing in it is shared or marked."""
    # Without what other streams of its operators would add. What counts in one chain is planned apart there.
    alone = replace(graph.ending_with(node), begun_chains=frozenset())
    return count_functions(pass_streams(cut_chains(LogicalPlan(alone))))
