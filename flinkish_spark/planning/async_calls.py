"""Async functions as DataFrame functions, and who evaluates them over the same elements."""

from __future__ import annotations

from collections import defaultdict
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
    TimedNode,
    TransformNode,
    feeds,
    legs,
    operator_of,
    uid_of,
)
from flinkish_spark.planning.transforms import RowTransform, TransformSettings, carried
from flinkish_spark.transport.columns import Worker
from flinkish_spark.types.schemas import output_schema
from flinkish_spark.worker.async_rows import AnswerPlace, AsyncRows
from flinkish_spark.worker.functions import RowFunction

# ----------------------------------------------------------------------------------------------------------
# Async functions as DataFrame functions.


@dataclass(frozen=True)
class AsyncPlace:
    """What a plan knows of the job and its async operators.

    Parameters
    ----------
    job_dir
        Where answers are recorded; None for a plan that belongs to no job.
    job
        Begins idempotency keys.
    workers
        How many Python workers may run at once.
    report
        Takes what calls of an operator cost; called in workers.
    """

    job_dir: StoreSpec | None = None
    job: str = ""
    workers: int = 1
    report: Callable[[str, AsyncStatistics], None] | None = None


#: Of a plan that belongs to no job.
NO_PLACE = AsyncPlace()


@dataclass
class AsyncSettings(TransformSettings):
    """What is known of an async operator up to the start of its job; all of its outputs share it.

    Parameters
    ----------
    main
        Fields of the main output.
    uid
        By which its answers are found again.
    sides
        Fields of the side outputs that somebody reads, by name.
    kept_as
        By what name workers keep the opened function.
    """

    main: T.StructType = field(default_factory=T.StructType)
    uid: str = ""
    sides: dict[str, T.StructType] = field(default_factory=dict)
    kept_as: str = field(default_factory=lambda: uuid4().hex)

    @property
    def outputs(self) -> Outputs:
        """All outputs that somebody reads."""
        return Outputs(("", *self.sides), (self.main, *self.sides.values()))


@dataclass(frozen=True)
class AsyncTransform(RowTransform):
    """Calls an async function, for one of its outputs.

    Parameters
    ----------
    spec
        What the program says.
    side
        Name of the side output; empty for the main output.
    place, readers, way, stream
        What the planner knows: of the job, who reads recorded answers (None: nobody, they are not recorded),
        from which source or operator the elements come, and what their places mean.
    """

    settings: AsyncSettings
    spec: AsyncSpec = field(kw_only=True)
    side: str = ""
    place: AsyncPlace = NO_PLACE
    readers: Readers | None = None
    way: str = ""
    stream: Stream = Stream.OF_SOURCE

    def of_side(self, name: str, output: T.StructType) -> AsyncTransform:
        """Return the same function, for a side output."""
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
            min(place.workers, function.parallelism or place.workers),
            self.stream,
            f"{place.job}/{uid}/{self.way}",
            self.side,
            answers,
            report,
        )
        return rows, rows.columns


@dataclass(frozen=True)
class _Reporting:
    """Reports for one operator; travels in the plan."""

    report: Callable[[str, AsyncStatistics], None]
    uid: str

    def __call__(self, cost: AsyncStatistics) -> None:
        self.report(self.uid, cost)


def async_calls(spec: AsyncSpec, output: OutputType | None, uid: str) -> AsyncTransform:
    """Return the transform that calls an async function.

    Raises
    ------
    SchemaError
        The output is not known.
    UserFunctionError
        The function cannot be sent to the workers.
    """
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


# ----------------------------------------------------------------------------------------------------------
# Who evaluates an async function: over the same elements it may run for each sink, and on each way.


@dataclass(frozen=True)
class _Evaluation:
    """One place in a plan, or behind it, where an async operator runs over the elements of a way.

    Parameters
    ----------
    is_planned
        Whether it is part of the streaming plan, and not done for a sink on the evaluated micro-batch.
    """

    function: AsyncTransform
    way: str
    stream: Stream
    is_planned: bool

    @property
    def settings(self) -> AsyncSettings:
        """What all outputs of the operator share."""
        return self.function.settings


def way_of(leg: Leg) -> str:
    """Return a name for where a way begins: a source, or an output of an operator."""
    side = f".{leg.base.tag.name}" if isinstance(leg.base, SideNode) else ""
    return f"{uid_of(leg)}{side}"


def stream_of(leg: Leg) -> Stream:
    """Return what the places of a way's elements mean."""
    return Stream.OF_SOURCE if operator_of(leg.base) is None else Stream.BEHIND_OPERATOR


class AsyncCalls:
    """The async operators of a graph, as a plan has them.

    Parameters
    ----------
    evaluations
        All of them.
    """

    def __init__(self, evaluations: Iterable[_Evaluation], place: AsyncPlace) -> None:
        self._place = place
        self._of: dict[tuple[str, str], list[_Evaluation]] = defaultdict(list)
        for one in evaluations:
            self._of[one.settings.kept_as, one.way].append(one)
        for found in self._of.values():
            _check(found)

    def on_way(self, function: Any, leg: Leg) -> Any:
        """Return a function as it runs on a way; one that is not async stays as it is."""
        if not isinstance(function, AsyncTransform):
            return function
        way, stream = way_of(leg), stream_of(leg)
        readers = self._readers(self._of.get((function.settings.kept_as, way), []))
        return replace(function, place=self._place, way=way, readers=readers, stream=stream)

    @property
    def recordings(self) -> tuple[tuple[str, Recording], ...]:
        """The folder of the answers of each operator and way that is recorded, and how."""
        found = []
        for (_, way), evaluations in self._of.items():
            readers = self._readers(evaluations)
            if readers is not None:
                recording = Recording(evaluations[0].stream, readers)
                found.append((answers_folder(evaluations[0].settings.uid, way), recording))
        return tuple(found)

    @staticmethod
    def _readers(evaluations: Sequence[_Evaluation]) -> Readers | None:
        # Whoever reads an operator's outputs apart is to see the same answers.
        if not evaluations or not (evaluations[0].function.spec.is_recorded or len(evaluations) > 1):
            return None
        planned = sum(one.is_planned for one in evaluations)
        is_apart = planned > 1 or 0 < planned < len(evaluations)
        return Readers.SEVERAL_WAYS if is_apart else Readers.ONE_WAY


def _check(evaluations: Sequence[_Evaluation]) -> None:
    settings = evaluations[0].settings
    planned = [one for one in evaluations if one.is_planned]
    if len(planned) > 1 and planned[0].stream is Stream.BEHIND_OPERATOR:
        raise GraphError(
            f"'{settings.name}' calls a system outside, behind the operator '{planned[0].way}', and other "
            "keyed operators read it on several ways",
            why="Spark runs that operator once for each of them, each time with other micro-batches, so that "
            "nobody can tell whether an element is the same",
            what_to_do="let one keyed operator read it; or write it to a topic that other jobs read "
            "(docs/chained-jobs.md)",
            uid=settings.uid,
        )


def async_evaluations(graph: StreamGraph, chains: Iterable[Sequence[KeyedNode]]) -> Iterator[_Evaluation]:
    """Go through the places where async operators run.

    Parameters
    ----------
    chains
        The keyed operators of each chain: of each, the ways into it are planned once for the chain.
    """
    parents: dict[int, list[SinkNode]] = defaultdict(list)
    for sink in graph.sinks:
        parents[id(sink.parent)].append(sink)
    for sinks in parents.values():
        for leg in legs(sinks[0].parent):
            in_plan = (
                operator_of(leg.base) is None and shared_from(graph, leg, len(legs(sinks[0].parent))) is None
            )
            # On the evaluated micro-batch each sink runs what is in front of it.
            for _ in range(1 if in_plan else len(sinks)):
                yield from _on(leg, in_plan)
    for operators in chains:
        for node in operators:
            for feed in feeds(node):
                for inlet in feed.inlets:
                    for leg in inlet.legs:
                        yield from _on(leg, True)


def _on(leg: Leg, is_planned: bool) -> Iterator[_Evaluation]:
    for function in _async_functions(leg):
        yield _Evaluation(function, way_of(leg), stream_of(leg), is_planned)


def _async_functions(leg: Leg) -> Iterator[AsyncTransform]:
    for step in leg.steps:
        if isinstance(step, TransformNode):
            function: Any = step.function
            if isinstance(function, AsyncTransform):
                yield function


def is_async(function: object) -> bool:
    """Whether a function calls a system outside."""
    return isinstance(function, AsyncTransform)


# ----------------------------------------------------------------------------------------------------------
# Sinks that read outputs of one async operator behind a source: they share a scan.
#
# Streams from a source to sinks are chains of their own, each with its own scan. An async operator whose
# outputs go to different sinks is to run over the same elements for all of them. So the chain ends in front
# of it, and what follows is done for each sink on the evaluated micro-batch, as behind a keyed operator.


def shared_from(graph: StreamGraph, leg: Leg, ways: int) -> int | None:
    """Return the number of the step with which a way's part begins that each sink does for itself.

    None where the whole way is planned.

    Parameters
    ----------
    ways
        How many the sink's stream has: those of a union are planned.
    """
    if ways > 1 or operator_of(leg.base) is not None:
        return None
    found = next(_async_functions(leg), None)
    if found is None or len({id(sink.parent) for sink in sharing(graph, leg)}) < 2:
        return None
    return next(at for at, step in enumerate(leg.steps) if _is_of(step, found.settings))


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
