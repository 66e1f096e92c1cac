"""A micro-batch as the epoch writer is given it: rows and barriers in place of a DataFrame."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from flinkish_spark.planning.sink_rows import PlannedSink
from tests.simulation.input_topic import Row


@dataclass(frozen=True)
class SimFrame:
    """Rows of one micro-batch.

    Parameters
    ----------
    rows
        What the operator emitted.
    branches
        Checkpoint ids of the barriers that each branch carries, by stream number.
    job_step
        Called at every step of a Spark job over it; raises where the job is cancelled or fails.
    barriers
        Those of the stream that was selected.
    is_replay
        Whether it is staged again for a checkpoint that is decided.
    ends
        Up to where the input is read behind it.
    """

    rows: tuple[Row, ...]
    branches: tuple[tuple[int, ...], ...]
    job_step: Callable[[str, str], None]
    barriers: tuple[int, ...] = ()
    is_replay: bool = False
    ends: Mapping[int, int] = field(default_factory=dict)

    @property
    def sparkSession(self) -> SimFrame:
        """Return what has the context: there is nothing of a session here but what tasks are told."""
        return self

    @property
    def sparkContext(self) -> SimFrame:
        """Return what takes local properties."""
        return self

    def setLocalProperty(self, name: str, value: str) -> None:
        """Tell the tasks of this micro-batch something; those of a simulated job need nothing."""

    def persist(self) -> SimFrame:
        """Return the same rows."""
        return self

    def unpersist(self) -> SimFrame:
        """Return the same rows."""
        return self

    # -- a job that only runs ---------------------------------------------------------------------
    @property
    def write(self) -> SimFrame:
        """Return what writes the rows nowhere."""
        return self

    def format(self, name: str) -> SimFrame:
        """Return the same."""
        return self

    def mode(self, name: str) -> SimFrame:
        """Return the same."""
        return self

    def save(self) -> None:
        """Run."""
        self.job_step("task", "noop")


def select_rows(frame: SimFrame, planned: PlannedSink, streams: int) -> SimFrame:
    """Stand in for `graph.sink_rows.select_sink_rows`."""
    return replace(frame, barriers=frame.branches[planned.parts[0].stream])
