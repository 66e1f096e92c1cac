"""Catch up and stop: a run ends when all that its sources had at its start has been processed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flinkish_spark.contracts.source import SourceNode
from flinkish_spark.core.errors import GraphError
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.job.inputs import Inputs
from flinkish_spark.protocol.ids import BatchId

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class CaughtUp:
    """Ends a run when all input that was there at its start has been processed; the next run goes on.

    At each start every source says where its input ends. When the job has read up to there it takes a last
    checkpoint, commits it in every sink, and stops: `execute` returns. State, timers and open windows stay
    for the next run, which asks the sources anew. So a scheduler that starts the program each hour runs a
    stream at the price of a batch. If nothing is new, and no timer is due, no query is started.

    After a failure within a run the ends stay the same. After a crash of the driver they are asked for again.
    A micro-batch may read beyond an end if more came in while the job ran.

    Raises
    ------
    GraphError
        At the start: a source cannot say where its input ends (`from_dataframe`, a socket), follows an
        upstream job, or is held back by `with_watermark_alignment`.

    Examples
    --------
    >>> env.execute(until=CaughtUp())  # doctest: +SKIP
    """


def check_can_catch_up(sources: Sequence[SourceNode], aligned: Sequence[str]) -> None:
    """Refuse sources that have no end at a start, and those of `aligned`, which others hold back."""
    for node in sources:
        why = "" if node.source.has_ends else "nobody can tell where its input ends now"
        if getattr(node.source, "aligned_with", None) is not None:
            why = "its checkpoints wait for those of the upstream job, which may not run"
        if node.uid in aligned:
            why = "with_watermark_alignment() may hold it back from its end for ever"
        if why:
            raise GraphError(
                f"the source '{node.uid}' cannot be read until the job has caught up",
                why=why,
                what_to_do="read Kafka with KafkaSource, files with FileSource, Delta with DeltaSource, "
                "without aligned_with and with_watermark_alignment(); or leave until= out",
            )


class CatchUp:
    """Where the sources of one `execute` end, and whether they were read up to there."""

    def __init__(self, operators: int = 0, *, is_wanted: bool = True) -> None:
        #: Whether the job ends when it has caught up; otherwise nothing is ever reached.
        self.is_wanted = is_wanted
        self._ends: dict[str, Any] = {}
        self._operators = operators
        #: Whether all was read; decided anew at each start of the query.
        self.is_reached = False
        #: Micro-batches since then.
        self._more = 0

    @property
    def has_waited(self) -> bool:
        """Return whether timers that were due at the end of the input have had their micro-batches."""
        # A watermark passes one operator a micro-batch. An input that goes on makes timers due for ever.
        return self._more > self._operators

    def fix_ends(self, inputs: Inputs) -> bool:
        """Ask each source where its input ends, once; return whether all have answered."""
        position = inputs.position()

        def ask(node: SourceNode) -> None:
            if node.uid not in self._ends:
                self._ends[node.uid] = node.source.newest(inputs.job_dir, node.uid, position)

        has_answers = inputs.ask(ask)
        self.is_reached = has_answers and position is not None and self._is_reached(inputs.sources, position)
        self._more = 0
        return has_answers

    def look(self, inputs: Inputs, batch: BatchId) -> None:
        if self.is_reached:
            self._more += 1
        elif self.is_wanted and self._is_reached(inputs.sources, inputs.read_by(batch)):
            LOG.info("all input of the start has been read; the job takes its last checkpoint")
            self.is_reached = True

    def _is_reached(self, sources: Sequence[SourceNode], position: LoggedOffsets) -> bool:
        # A scan without an entry has not said yet where it begins.
        return None not in position.sources and all(
            node.source.has_reached(self._ends[node.uid], position) for node in sources
        )
