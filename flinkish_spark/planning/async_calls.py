"""Async functions as DataFrame functions, and who evaluates them over the same elements."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from pyspark.sql import types as T

from flinkish_spark.core.elements import OutputType
from flinkish_spark.core.errors import GraphError
from flinkish_spark.core.job_dir import answers_folder
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.functions.async_io import AsyncBatchFunction
from flinkish_spark.operators.async_wait import AsyncSpec, AsyncStatistics
from flinkish_spark.operators.recorded_answers import Outputs, Readers, Recording, Stream
from flinkish_spark.planning.declare import check_can_be_sent, inferred_output
from flinkish_spark.planning.stream_graph import (
    KeyedNode,
    Leg,
    SideNode,
    SinkNode,
    StreamGraph,
    StreamNode,
    TimedNode,
    TransformNode,
    feeds,
    legs,
    operator_of,
    operators_upto,
    uid_of,
)
from flinkish_spark.planning.transforms import RowTransform, TransformSettings, carried
from flinkish_spark.protocol.plan_layout import Chain
from flinkish_spark.transport.columns import Worker
from flinkish_spark.types.schemas import output_schema
from flinkish_spark.worker.async_rows import AnswerPlace, AsyncRows
from flinkish_spark.worker.functions import RowFunction


@dataclass(frozen=True)
class AsyncPlace:
    #: Where answers are recorded; None for a plan that belongs to no job.
    job_dir: StoreSpec | None = None
    job: str = ""
    #: How many Python workers may run at once.
    workers: int = 1
    #: Takes what calls of an operator cost; called in workers.
    report: Callable[[str, AsyncStatistics], None] | None = None


#: Of a plan that belongs to no job.
NO_PLACE = AsyncPlace()


@dataclass
class AsyncSettings(TransformSettings):
    """What is known of an async operator up to the start of its job; all of its outputs share it."""

    #: Fields of the main output.
    main: T.StructType = field(default_factory=T.StructType)
    #: By which its answers are found again.
    uid: str = ""
    #: Fields of the side outputs that somebody reads, by name.
    sides: dict[str, T.StructType] = field(default_factory=dict)
    #: By what name workers keep the opened function.
    kept_as: str = field(default_factory=lambda: uuid4().hex)

    @property
    def outputs(self) -> Outputs:
        return Outputs(("", *self.sides), (self.main, *self.sides.values()))


@dataclass(frozen=True)
class AsyncTransform(RowTransform):
    """Calls an async function, for one of its outputs."""

    settings: AsyncSettings
    spec: AsyncSpec = field(kw_only=True)
    #: Name of the side output; empty for the main output.
    side: str = ""
    place: AsyncPlace = NO_PLACE
    #: Who reads recorded answers; None: they are not recorded.
    readers: Readers | None = None
    #: Name of the source or of the operator's output that the elements come from.
    way: str = ""
    stream: Stream = Stream.OF_SOURCE

    def of_side(self, name: str, output: T.StructType) -> AsyncTransform:
        self.settings.sides[name] = output
        return replace(self, side=name, output=output)

    def _worker(self, function: RowFunction, given: T.StructType) -> tuple[Worker, T.StructType]:
        assert self.output is not None
        settings, place = self.settings, self.place
        uid, answers = settings.uid, None
        if self.readers is not None and place.job_dir is not None:
            answers = AnswerPlace(place.job_dir, answers_folder(uid, self.way), self.readers)
        report = None if place.report is None else _Reporting(place.report, uid)
        rows = AsyncRows(
            function,
            self.output,
            carried(given),
            self.spec,
            settings.outputs,
            settings.kept_as,
            place.workers,
            self.stream,
            f"{place.job}/{uid}/{self.way}",
            self.side,
            answers,
            report,
        )
        return rows, rows.columns


@dataclass(frozen=True)
class _Reporting:
    report: Callable[[str, AsyncStatistics], None]
    uid: str

    def __call__(self, cost: AsyncStatistics) -> None:
        self.report(self.uid, cost)


def async_calls(spec: AsyncSpec, output: OutputType | None, uid: str) -> AsyncTransform:
    function = spec.function
    called: Any
    if isinstance(function, AsyncBatchFunction):
        called = function.async_invoke_batch
    else:
        called = function.async_invoke
    if output is None:
        fields = inferred_output(called, f"'{uid}'", is_iterable=True)
    else:
        fields = output_schema(output, uid)
    check_can_be_sent(spec, "of", uid)
    settings = AsyncSettings(uid, main=fields, uid=uid)
    return AsyncTransform(RowFunction(uid, called), fields, settings, spec=spec)


@dataclass(frozen=True)
class _Evaluation:
    """One place in a plan, or behind it, where an async operator runs over the elements of a way."""

    function: AsyncTransform
    way: str
    #: Of the plan: what stands in several of them reads sources several times, and may see other elements.
    chain: Chain
    #: Whether it is part of the streaming plan, and not done for a sink on the evaluated micro-batch.
    is_planned: bool
    #: The operator or the sink that reads it.
    reader: str


def way_of(leg: Leg) -> str:
    if not isinstance(leg.base, SideNode):
        return uid_of(leg)
    # A tag may be called anything, and this becomes a path.
    side = hashlib.sha256(leg.base.tag.name.encode()).hexdigest()[:16]
    return f"{uid_of(leg)}.side-{side}"


class AsyncCalls:
    """The async operators of a graph, as a plan has them."""

    def __init__(self, evaluations: Iterable[_Evaluation], place: AsyncPlace) -> None:
        self._place = place
        self._of: dict[tuple[str, str], list[_Evaluation]] = defaultdict(list)
        for one in evaluations:
            self._of[one.function.settings.kept_as, one.way].append(one)
        #: What is recorded, as the planner has come by it.
        self._recordings: dict[str, Recording] = {}

    def on_way(self, function: Any, leg: Leg, stream: Stream) -> Any:
        """Return a function as it runs on a way; one that is not async stays as it is."""
        if not isinstance(function, AsyncTransform):
            return function
        way, settings = way_of(leg), function.settings
        evaluations = self._of.get((settings.kept_as, way), [])
        if stream is Stream.OF_MICRO_BATCH and operator_of(leg.base) is None:
            # Another count of the same elements, beside which the source's own may stand.
            way = f"{way}.anew"
        readers = _readers(evaluations)
        if stream is Stream.OF_MICRO_BATCH and len({one.chain for one in evaluations}) > 1:
            raise _no_common_places(settings, way)
        if readers is not None:
            folder = answers_folder(settings.uid, way)
            self._recordings[folder] = Recording(folder, stream, readers)
        return replace(function, place=self._place, way=way, readers=readers, stream=stream)

    @property
    def recordings(self) -> tuple[Recording, ...]:
        return tuple(self._recordings.values())


def _readers(evaluations: Sequence[_Evaluation]) -> Readers | None:
    """Return who may ask about the same elements at the same time; None where one alone does, once."""
    # For a sink the function may run more than once: it counts its records, for example.
    is_once = len(evaluations) == 1 and evaluations[0].is_planned
    if not evaluations or (is_once and not evaluations[0].function.spec.is_recorded):
        return None
    planned = sum(one.is_planned for one in evaluations)
    ways_of_reader = Counter(one.reader for one in evaluations)
    is_alone = planned in (0, len(evaluations)) and planned < 2 and max(ways_of_reader.values()) == 1
    return Readers.ONE_WAY if is_alone else Readers.SEVERAL_WAYS


def _no_common_places(settings: AsyncSettings, way: str) -> GraphError:
    return GraphError(
        f"'{settings.name}' calls a system outside about elements of '{way}', for readers that do not read "
        "them together",
        why="Spark runs what is in front of it once for each of these sinks and keyed operators, each time "
        "with other micro-batches, and the elements have no places that outlast one; so nobody can tell "
        "whether two are the same",
        what_to_do="let one keyed operator, or sinks alone, read it; or write it to a topic that other jobs "
        "read (docs/chained-jobs.md)",
        uid=settings.uid,
    )


#: Of a sink's stream, or of a chain's end: the chain, and the ways that are its end.
_Ends = Sequence[tuple[Chain, Sequence[Leg]]]


def async_evaluations(graph: StreamGraph, ends_of: Callable[[StreamNode], _Ends]) -> Iterator[_Evaluation]:
    planned: dict[Chain, set[KeyedNode]] = {}
    for sink in graph.sinks:
        for chain, ways in ends_of(sink.parent):
            is_new = chain not in planned
            there = planned.setdefault(chain, set())
            for leg in ways:
                operator = operator_of(leg.base)
                if operator is not None or shared_from(graph, leg, len(ways)) is not None:
                    # On the evaluated micro-batch each sink runs what is in front of it.
                    yield from _on(leg, chain, sink.uid, is_planned=False)
                elif is_new:
                    yield from _on(leg, chain, chain.name, is_planned=True)
                operators = () if operator is None else operators_upto(operator)
                for node in (one for one in operators if one not in there):
                    there.add(node)
                    for other in (way for feed in feeds(node) for i in feed.inlets for way in i.legs):
                        yield from _on(other, chain, node.uid, is_planned=True)


def _on(leg: Leg, chain: Chain, reader: str, *, is_planned: bool) -> Iterator[_Evaluation]:
    for function in _async_functions(leg):
        yield _Evaluation(function, way_of(leg), chain, is_planned, reader)


def _async_functions(leg: Leg) -> Iterator[AsyncTransform]:
    for step in leg.steps:
        if isinstance(step, TransformNode):
            function: Any = step.function
            if isinstance(function, AsyncTransform):
                yield function


def is_async(function: object) -> bool:
    return isinstance(function, AsyncTransform)


# Streams from a source to sinks are chains of their own, each with its own scan. An async operator whose
# outputs go to different sinks is to run over the same elements for all of them. So the chain ends in front
# of it, and what follows is done for each sink on the evaluated micro-batch, as behind a keyed operator.
def shared_from(graph: StreamGraph, leg: Leg, ways: int) -> int | None:
    """Return the number of the step with which the part of a way begins that each sink runs for itself."""
    if ways > 1 or operator_of(leg.base) is not None:
        return None
    found = next(_async_functions(leg), None)
    if found is None or len({id(sink.parent) for sink in sharing(graph, leg)}) < 2:
        return None
    at = next(at for at, step in enumerate(leg.steps) if _is_of(step, found.settings))
    # What gives times is planned.
    return None if any(isinstance(step, TimedNode) for step in leg.steps[at:]) else at


def sharing(graph: StreamGraph, leg: Leg) -> tuple[SinkNode, ...]:
    """Return the sinks that read outputs of the first async operator on a way from a source."""
    found = next(_async_functions(leg), None)
    if found is None:
        return ()
    return tuple(sink for sink in graph.sinks if _reads(sink, leg, found.settings))


def _reads(sink: SinkNode, leg: Leg, settings: AsyncSettings) -> bool:
    ways = legs(sink.parent)
    if len(ways) > 1 or ways[0].base is not leg.base:
        return False
    steps = ways[0].steps
    at = next((at for at, step in enumerate(steps) if _is_of(step, settings)), None)
    return at is not None and not any(isinstance(step, TimedNode) for step in steps[at:])


def _is_of(step: object, settings: AsyncSettings) -> bool:
    function: Any = step.function if isinstance(step, TransformNode) else None
    return isinstance(function, AsyncTransform) and function.settings is settings
