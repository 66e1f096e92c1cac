"""The protocol of what people and other systems see of a job, and what they say to show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from flinkish_spark.checkpoint.hooks import QuietListener
from flinkish_spark.contracts.source import SourceNode
from flinkish_spark.core.config import UiConfig
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.core.wings import load_part
from flinkish_spark.job.client import ExecutionListener, JobClient, JobPage
from flinkish_spark.protocol.job_graph import JobGraph, PlanForm

if TYPE_CHECKING:
    from flinkish_spark.planning.sink_rows import PlannedJob
    from flinkish_spark.protocol.statistics import StatisticsHistory


@dataclass(frozen=True)
class ReportedJob:
    name: str
    sources: Sequence[SourceNode] = ()
    #: Returns the planned job; None until its checks have passed.
    planned: Callable[[], PlannedJob | None] = lambda: None


class Reporter:
    """The base class of reporters, which send the state of a job to another system, in a separate thread.

    An exception in `report` is logged and has no other effect. A job waits only for the last report, ten
    seconds at most.
    """

    def open(self, job: ReportedJob) -> None:
        """Connect; called before the job is submitted, in the user's thread.

        Raises
        ------
        FlinkishError
            The reporter cannot work; the job is refused.
        """

    # Core passes no snapshots on, so that it need not know `JobSnapshot`.
    def report(self, snapshot: Any) -> None:
        """Send the state of the job: after each checkpoint and change of its status, and every ten seconds.

        With a job directory in a bucket only every minute, since each look costs requests.
        """

    def close(self) -> None:
        """Send the last report and disconnect; called after the end of the job, also if it was refused."""


class Reporting(QuietListener, ExecutionListener):
    """The reports of one execution; without reporters there are none."""

    def begin(self, job: ReportedJob) -> None:
        """Open all reporters; if one fails, :meth:`end` closes the open ones."""

    def end(self) -> None:
        """Send the last reports, with a time limit. A second call does nothing."""


class JobFace(Protocol):
    """Shows a job: its page, its live line, its reports, pictures of its plan."""

    def serve_page(self, place: StoreSpec, config: UiConfig) -> JobPage: ...

    def show_line(
        self,
        name: str,
        client: JobClient,
        sources: Sequence[SourceNode],
        hold_bars: Callable[[], None],
    ) -> AbstractContextManager[object]:
        """Show a status line on standard error until the context ends; `hold_bars` hides Spark's own."""

    def make_reporting(self, place: StoreSpec, reporters: Sequence[Reporter]) -> Reporting: ...

    def plan_in(self, graph: JobGraph, form: PlanForm) -> str: ...

    def markdown(self, graph: JobGraph) -> str: ...

    def print_tree(self, graph: JobGraph, history: StatisticsHistory | None) -> None: ...


def job_face() -> JobFace:
    face: JobFace = load_part("job face")
    return face
