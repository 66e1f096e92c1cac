"""Descriptions of an environment's job: its graph, its plan, its comparison with a savepoint."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from flinkish_spark.checkpoint.hooks import MasterHooks
from flinkish_spark.contracts.source import NO_JOB
from flinkish_spark.core.errors import CorruptObjectError, FlinkishError, StoreError
from flinkish_spark.core.fields import check_arguments
from flinkish_spark.core.job_dir import open_job_dir
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.core.validation import instance_of
from flinkish_spark.job.face import job_face
from flinkish_spark.planning.job_graph import describe_job
from flinkish_spark.planning.partitioning import fit_partitions, read_shuffle_partitions
from flinkish_spark.planning.planner import Planner
from flinkish_spark.planning.stream_graph import StreamGraph
from flinkish_spark.protocol.job_graph import PlanForm
from flinkish_spark.protocol.restore import RestoreRules
from flinkish_spark.savepoints.comparison import (
    Comparison,
    compare_saved,
    compare_with_savepoint,
    make_initial_metadata,
)
from flinkish_spark.savepoints.files import RestoreSettings
from flinkish_spark.savepoints.restore import job_shape
from flinkish_spark.savepoints.seeds import find_beginning, shuffle_partitions_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from flinkish_spark.planning.sink_rows import PlannedJob
    from flinkish_spark.protocol.job_graph import JobGraph
    from flinkish_spark.protocol.statistics import StatisticsHistory


class JobPlans:
    """The part of an environment that describes its job; nothing here runs it."""

    spark: SparkSession
    job: str
    graph: StreamGraph
    _place: StoreSpec
    _hooks: MasterHooks

    def get_job_graph(self) -> JobGraph:
        """Return the job graph: operators, their vertices, how records come to them, and why.

        The job is planned as at its start, but nothing is run.
        """
        return describe_job(self.job, self.graph, self._partitions(), self._plan_graph(self.graph))

    @check_arguments()
    def get_execution_plan(self, form: PlanForm = PlanForm.JSON) -> str:
        """Return the plan as text, for Flink's plan visualiser or a drawing tool.

        Parameters
        ----------
        form
            JSON in Flink's format; DOT for Graphviz; Mermaid, which pages and notebooks draw.

        Examples
        --------
        >>> Path("plan.mmd").write_text(env.get_execution_plan(PlanForm.MERMAID))  # doctest: +SKIP
        """
        return job_face().plan_in(self.get_job_graph(), form)

    def explain(self) -> None:
        """Print the job graph as a tree: vertices, where they run, shuffles, state and sinks.

        If `job_dir` has statistics, the costs of the newest checkpoint are shown too.
        """
        job_face().print_tree(self.get_job_graph(), self._statistics())

    def compare(self, other: str | RestoreSettings | JobPlans) -> Comparison:
        """Compare programs: what happens to state and positions if this program starts with another one's.

        Operators are compared by uid, with the checks of a restore; nothing is run or written.

        Parameters
        ----------
        other
            A savepoint, as a path, a URL or settings of a restore; or another program, as if it had just
            taken a savepoint.

        Examples
        --------
        >>> print(env.compare("/savepoints/7"))  # doctest: +SKIP
        totals   restored  operator  state by string, 128 key groups
        average  new       operator  it begins with nothing
        """
        hooks = self._hook_names()
        if isinstance(other, JobPlans):
            saved = make_initial_metadata(other.graph, other._plan_graph(other.graph), other._hook_names())
            return compare_saved(
                saved, job_shape(self.graph, self._plan_graph(self.graph), hooks), RestoreRules()
            )
        given = RestoreSettings(other) if isinstance(other, str) else other
        what_to_do = 'give a path, RestoreSettings("/absolute/path"), or another environment'
        settings = instance_of("other", given, RestoreSettings, what_to_do=what_to_do)
        return compare_with_savepoint(self.graph, self._plan_graph, hooks, settings)

    def _plan_graph(self, graph: StreamGraph) -> PlannedJob:
        graph.check_complete()
        return Planner(self.spark, NO_JOB, self._partitions()).plan(graph)

    def _partitions(self) -> int:
        # The session's setting, else the number in the job directory; a new job directory gets a number that
        # fits the cores.
        chosen = read_shuffle_partitions(self.spark)
        if chosen is None:
            # If the directory cannot be read now, the start will say so, with what to do.
            with contextlib.suppress(FlinkishError):
                job_dir = open_job_dir(self._place)
                chosen = shuffle_partitions_of(job_dir, find_beginning(job_dir, self._place))
        return fit_partitions(self.spark, self.graph.max_parallelism) if chosen is None else chosen

    def _hook_names(self) -> list[str]:
        return [hook.uid for hook in self._hooks.participants()]

    def _statistics(self) -> StatisticsHistory | None:
        """Return the statistics of checkpoints, which are only displayed; None if they cannot be read."""
        try:
            return open_job_dir(self._place).statistics()
        except (StoreError, CorruptObjectError):
            return None

    def _repr_markdown_(self) -> str:
        if not self.graph.sinks:
            return f"`{self.job}`: no sink yet"
        return job_face().markdown(describe_job(self.job, self.graph, self._partitions()))
