"""Async functions as DataFrame functions, and their places on the paths of a plan."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
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
from flinkish_spark.planning.declare import check_can_be_sent
from flinkish_spark.planning.logical_plan import AsyncReaders
from flinkish_spark.planning.stream_graph import Path, SideNode, TransformNode, find_operator, find_uid
from flinkish_spark.planning.transforms import (
    RowTransform,
    TransformSettings,
    find_control_fields,
    resolve_output_fields,
)
from flinkish_spark.transport.columns import Worker
from flinkish_spark.worker.async_rows import AnswerPlace, AsyncRows
from flinkish_spark.worker.functions import RowFunction


@dataclass(frozen=True)
class AsyncPlace:
    #: Where answers are recorded; None for a plan that belongs to no job.
    job_dir: StoreSpec | None = None
    job: str = ""
    #: How many Python workers may run at once.
    workers: int = 1
    #: Gets the statistics of an operator's calls; called in workers.
    report: Callable[[str, AsyncStatistics], None] | None = None


#: Of a plan that belongs to no job.
NO_PLACE = AsyncPlace()


@dataclass
class AsyncSettings(TransformSettings):
    """Settings of an async operator until its job starts, shared by all of its outputs."""

    #: Fields of the main output.
    main: T.StructType = field(default_factory=T.StructType)
    #: Names the folder of its recorded answers.
    uid: str = ""
    #: Fields of the side outputs that are read, by name.
    sides: dict[str, T.StructType] = field(default_factory=dict)
    #: Key under which a Python worker keeps the opened function.
    kept_as: str = field(default_factory=lambda: uuid4().hex)

    @property
    def outputs(self) -> Outputs:
        return Outputs(("", *self.sides), (self.main, *self.sides.values()))


@dataclass(frozen=True)
class AsyncTransform(RowTransform):
    """A call of an async function, for one of its outputs."""

    settings: AsyncSettings
    spec: AsyncSpec = field(kw_only=True)
    #: Name of the side output; empty for the main output.
    side: str = ""
    place: AsyncPlace = NO_PLACE
    #: The readers of recorded answers; None if answers are not recorded.
    readers: Readers | None = None
    #: Name of the source or of the operator's output that the elements come from.
    path_name: str = ""
    stream: Stream = Stream.OF_SOURCE

    def select_side_output(self, name: str, output: T.StructType) -> AsyncTransform:
        self.settings.sides[name] = output
        return replace(self, side=name, output=output)

    def _make_row_worker(self, function: RowFunction, given: T.StructType) -> tuple[Worker, T.StructType]:
        assert self.output is not None
        settings, place = self.settings, self.place
        uid, answers = settings.uid, None
        if self.readers is not None and place.job_dir is not None:
            answers = AnswerPlace(place.job_dir, answers_folder(uid, self.path_name), self.readers)
        report = None if place.report is None else partial(place.report, uid)
        rows = AsyncRows(
            function,
            self.output,
            find_control_fields(given),
            self.spec,
            settings.outputs,
            settings.kept_as,
            place.workers,
            self.stream,
            f"{place.job}/{uid}/{self.path_name}",
            self.side,
            answers,
            report,
        )
        return rows, rows.columns


def make_async_calls(spec: AsyncSpec, output: OutputType | None, uid: str) -> AsyncTransform:
    function: Any = spec.function
    is_batch = isinstance(function, AsyncBatchFunction)
    called = function.async_invoke_batch if is_batch else function.async_invoke
    fields = resolve_output_fields(output, called, uid, is_iterable=True)
    check_can_be_sent(spec, "of", uid)
    settings = AsyncSettings(uid, main=fields, uid=uid)
    return AsyncTransform(RowFunction(uid, called), fields, settings, spec=spec)


def find_input_name(path: Path) -> str:
    if not isinstance(path.base, SideNode):
        return find_uid(path)
    # A tag may be called anything, and this becomes the name of a folder.
    side = hashlib.sha256(path.base.tag.name.encode()).hexdigest()[:16]
    return f"{find_uid(path)}.side-{side}"


def find_async_functions(path: Path) -> Iterator[AsyncTransform]:
    for step in path.steps:
        if isinstance(step, TransformNode):
            function: Any = step.function
            if isinstance(function, AsyncTransform):
                yield function


def is_async(function: object) -> bool:
    return isinstance(function, AsyncTransform)


#: For elements that no sink reads.
_NOBODY = AsyncReaders(None, False)


class AsyncCalls:
    """The async operators of a plan, as they run on its paths."""

    def __init__(self, asking: Mapping[tuple[str, str], AsyncReaders], place: AsyncPlace) -> None:
        self._place, self._asking = place, asking
        #: The recordings by folder, in the order of planning.
        self.recordings: dict[str, Recording] = {}

    def place_on_path(self, function: Any, path: Path, stream: Stream) -> Any:
        """Return a function with its place on a path; a function that is not async is returned unchanged."""
        if not isinstance(function, AsyncTransform):
            return function
        name, settings = find_input_name(path), function.settings
        asking = self._asking.get((settings.kept_as, name), _NOBODY)
        if stream is Stream.OF_MICRO_BATCH and find_operator(path.base) is None:
            # These elements are numbered by micro-batch; other paths may number them by the source's offsets.
            name = f"{name}.anew"
        if stream is Stream.OF_MICRO_BATCH and asking.is_in_several_chains:
            raise _no_common_places(settings, name)
        if asking.readers is not None:
            folder = answers_folder(settings.uid, name)
            self.recordings[folder] = Recording(folder, stream, asking.readers)
        return replace(function, place=self._place, path_name=name, readers=asking.readers, stream=stream)

    def place_between_operators(self, path: Path) -> Path:
        """Return a path between two keyed operators whose async functions know their place."""

        def place(step: TransformNode) -> TransformNode:
            return replace(step, function=self.place_on_path(step.function, path, Stream.OF_MICRO_BATCH))

        return path.replace_transforms(place)


def _no_common_places(settings: AsyncSettings, name: str) -> GraphError:
    return GraphError(
        f"the async function '{settings.name}' gets elements of '{name}' for several readers that do not "
        "read them together",
        why="Spark evaluates its input once for each of these sinks and keyed operators, in different "
        "micro-batches, and the elements have no lasting ids; so nobody can tell whether two of them are "
        "the same",
        what_to_do="let one keyed operator read it, or only sinks; or write its input to a topic that other "
        "jobs read (docs/chained-jobs.md)",
        uid=settings.uid,
    )
