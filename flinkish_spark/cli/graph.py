"""`flinkish graph`: shows the job graph that the newest start has recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from flinkish_spark.cli.client import (
    ExitStatus,
    complain,
    end_with,
    job_argument,
    json_option,
    print_json,
)
from flinkish_spark.job.stored_job import (
    StoredJob,
    raise_as_corrupt,
)

if TYPE_CHECKING:
    from flinkish_spark.protocol.job_graph import JobGraph
    from flinkish_spark.protocol.statistics import StatisticsHistory


@click.command()
@job_argument
@click.option("--plan", "form", flag_value="JSON", help="As JSON for Flink's plan visualiser.")
@click.option("--dot", "form", flag_value="DOT", help="As DOT for Graphviz.")
@click.option("--mermaid", "form", flag_value="MERMAID", help="As Mermaid, which pages and notebooks draw.")
@json_option
def graph(job: StoredJob, form: str | None, as_json: bool) -> None:
    """Show the operators of a job, which of them share tasks and why, and their last durations.

    Shows the graph of the job's newest start; the job may run or not.
    """
    with raise_as_corrupt("the job graph"):
        found = job.job_dir.job_graph()
    if found is None:
        complain("there is no job graph yet: the job has never started")
        end_with(ExitStatus.NOT_DONE)
    if as_json:
        print_json({**job.to_json(), "graph": found.to_json(), "plan": found.job_plan(str(job.uuid))})
        return
    with raise_as_corrupt("the statistics"):
        history = job.job_dir.statistics()
    for line in _render(found, form, history).splitlines():
        click.echo("".join(letter if letter.isprintable() else "?" for letter in line))


def _render(found: JobGraph, form: str | None, history: StatisticsHistory | None) -> str:
    # Imported here, since other commands do not need it.
    from flinkish_spark.job.plan_forms import plan_in, text
    from flinkish_spark.protocol.job_graph import PlanForm

    return text(found, history) if form is None else plan_in(found, PlanForm(form))
