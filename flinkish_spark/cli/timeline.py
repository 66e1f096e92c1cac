"""`flinkish timeline`: go on from a job directory that is behind what sinks and sources hold."""

from __future__ import annotations

import click

from flinkish_spark.cli.exits import say
from flinkish_spark.cli.params import Job, confirm, job_argument, json_option, yes_option
from flinkish_spark.cli.replies import print_json
from flinkish_spark.store import CreateResult


@click.group()
def timeline() -> None:
    """See to a job directory that is an older copy of itself."""


@timeline.command()
@job_argument
@yes_option
@json_option
def accept(job: Job, yes: bool, as_json: bool) -> None:
    """Let the next start go on, whatever the sinks hold.

    For a job that refuses to start because a sink, a source or the manifest holds a checkpoint that
    the directory does not know. Put the newest directory back instead, if there is one: then nothing
    is lost and nothing is there twice.
    """
    newest = max(job.job_dir.decided_ids(), default=None)
    behind = "its beginning" if newest is None else f"checkpoint {newest}"
    confirm(
        f"The next start of the job '{job.name}' goes on from {behind} of this directory:\n"
        "- sinks keep what they have; nothing is taken back\n"
        "- what was read behind that checkpoint is read and written again, so rows may be there twice\n"
        "- new checkpoints have ids above all that sinks, sources and manifest hold",
        "Accept what is there?",
        yes,
        as_json,
    )
    created = job.job_dir.order_timeline(job.clock.wall_ms())
    if as_json:
        print_json({**job.to_json(), "outcome": "WAITS_FOR_START"})
        return
    again = " (it was ordered before)" if created is CreateResult.EXISTS else ""
    say(f"ordered{again}: the next start accepts what sinks, sources and manifest hold")
