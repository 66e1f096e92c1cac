"""Functions that must know where a plan evaluates them, since their answers are recorded."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pyspark.sql import types as T

from flinkish_spark.contracts.calls import CallPlace, Evaluation, Recording, Stream
from flinkish_spark.planning.stream_graph import Path, SideNode, TransformNode, find_operator, find_uid
from flinkish_spark.planning.transforms import RowTransform


class RecordedTransform(RowTransform, ABC):
    """A function that must get the same elements wherever it runs, so that its answers can be reused."""

    @property
    @abstractmethod
    def known_as(self) -> str:
        """Identity of the function, the same for all of its outputs."""

    @abstractmethod
    def select_side_output(self, name: str, output: T.StructType) -> RecordedTransform:
        """Return the function for one of its side outputs."""

    @abstractmethod
    def set_place(
        self, path_name: str, stream: Stream, evaluations: Sequence[Evaluation], place: CallPlace
    ) -> tuple[RecordedTransform, Recording | None]:
        """Return the function with its place on a path, and how its answers are recorded if they are.

        `path_name` names what the elements come from; `evaluations` has all places with the same elements.
        """


def find_recorded_functions(path: Path) -> Iterator[RecordedTransform]:
    for step in path.steps:
        function: object = step.function if isinstance(step, TransformNode) else None
        if isinstance(function, RecordedTransform):
            yield function


def find_input_name(path: Path) -> str:
    if not isinstance(path.base, SideNode):
        return find_uid(path)
    # A tag may be called anything, and this becomes the name of a folder.
    side = hashlib.sha256(path.base.tag.name.encode()).hexdigest()[:16]
    return f"{find_uid(path)}.side-{side}"


class RecordedFunctions:
    """The recorded functions of a plan, as they run on its paths."""

    def __init__(self, evaluations: Mapping[tuple[str, str], Sequence[Evaluation]], place: CallPlace) -> None:
        self._place, self._evaluations = place, evaluations
        #: The recordings by folder, in the order of planning.
        self.recordings: dict[str, Recording] = {}

    def place_on_path(self, function: Any, path: Path, stream: Stream) -> Any:
        """Return a function with its place on a path; a function that needs none is returned unchanged."""
        if not isinstance(function, RecordedTransform):
            return function
        name = find_input_name(path)
        # Elements that no sink reads have no evaluation.
        evaluations = self._evaluations.get((function.known_as, name), ())
        if stream is Stream.OF_MICRO_BATCH and find_operator(path.base) is None:
            # These elements are numbered by micro-batch; other paths may number them by the source's offsets.
            name = f"{name}.anew"
        placed, recording = function.set_place(name, stream, evaluations, self._place)
        if recording is not None:
            self.recordings[recording.folder] = recording
        return placed

    def place_between_operators(self, path: Path) -> Path:
        def place(step: TransformNode) -> TransformNode:
            return replace(step, function=self.place_on_path(step.function, path, Stream.OF_MICRO_BATCH))

        return path.replace_transforms(place)
