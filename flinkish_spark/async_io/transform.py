"""Async functions as DataFrame functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar
from uuid import uuid4

from pyspark.sql import types as T

from flinkish_spark.async_io.functions import AsyncBatchFunction
from flinkish_spark.async_io.recorded_answers import AnswerRecording, Outputs, Readers
from flinkish_spark.async_io.rows import AnswerPlace, AsyncRows
from flinkish_spark.async_io.wait import AsyncSpec
from flinkish_spark.contracts.calls import NO_PLACE, CallPlace, Evaluation, Stream
from flinkish_spark.core.arrow_pass import Worker
from flinkish_spark.core.elements import OutputType
from flinkish_spark.core.errors import GraphError
from flinkish_spark.core.job_dir import answers_folder
from flinkish_spark.planning.declare import check_can_be_sent
from flinkish_spark.planning.recorded_functions import RecordedTransform
from flinkish_spark.planning.transforms import (
    TransformSettings,
    find_control_fields,
    resolve_output_fields,
)
from flinkish_spark.worker.functions import RowFunction


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
class AsyncTransform(RecordedTransform):
    settings: AsyncSettings
    spec: AsyncSpec = field(kw_only=True)
    #: Name of the side output; empty for the main output.
    side: str = ""
    place: CallPlace = NO_PLACE
    #: The readers of recorded answers; None if answers are not recorded.
    readers: Readers | None = None
    #: Name of the source or of the operator's output that the elements come from.
    path_name: str = ""
    stream: Stream = Stream.OF_SOURCE
    does: ClassVar[str] = "async function"

    @property
    def known_as(self) -> str:
        return self.settings.kept_as

    def select_side_output(self, name: str, output: T.StructType) -> AsyncTransform:
        self.settings.sides[name] = output
        return replace(self, side=name, output=output)

    def set_place(
        self, path_name: str, stream: Stream, evaluations: Sequence[Evaluation], place: CallPlace
    ) -> tuple[AsyncTransform, AnswerRecording | None]:
        if stream is Stream.OF_MICRO_BATCH and len({one.chain for one in evaluations}) > 1:
            raise _no_common_places(self.settings, path_name)
        readers = self._find_readers(evaluations)
        placed = replace(self, place=place, path_name=path_name, readers=readers, stream=stream)
        if readers is None:
            return placed, None
        return placed, AnswerRecording(answers_folder(self.settings.uid, path_name), stream, readers)

    def _find_readers(self, evaluations: Sequence[Evaluation]) -> Readers | None:
        """Return the readers of recorded answers; None if one caller asks once about each element."""
        if not evaluations:
            return None
        # For a sink the function may run more than once: it counts its records, for example.
        is_once = len(evaluations) == 1 and evaluations[0].is_planned
        if is_once and not self.spec.is_recorded:
            return None
        planned = sum(one.is_planned for one in evaluations)
        paths_of_reader = Counter(one.reader for one in evaluations)
        is_alone = planned in (0, len(evaluations)) and planned < 2 and max(paths_of_reader.values()) == 1
        return Readers.ONE_WAY if is_alone else Readers.SEVERAL_WAYS

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


def _no_common_places(settings: AsyncSettings, name: str) -> GraphError:
    return GraphError(
        f"the async function '{settings.name}' gets elements of '{name}' for several readers that do not "
        "read them together",
        why="Spark evaluates its input once for each of these sinks and keyed operators, in different "
        "micro-batches, and the elements have no lasting ids; so nobody can tell whether two of them are "
        "the same",
        what_to_do="let one keyed operator read it, or only sinks; or write its input to a topic that other "
        "jobs read (docs/chained-jobs.md)",
    )
