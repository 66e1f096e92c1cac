"""`flinkish cancel`: end a running job."""

from __future__ import annotations

import click

from flinkish_spark.cli.asking import Patience, ask
from flinkish_spark.cli.params import Job, confirm, job_argument, json_option, timeout_option, yes_option
from flinkish_spark.cli.replies import report
from flinkish_spark.runtime.outside_requests import RequestKind


@click.command()
@job_argument
@yes_option
@timeout_option
@json_option
def cancel(job: Job, yes: bool, timeout_s: float, as_json: bool) -> None:
    """End a running job at once, without a last checkpoint.

    What it staged since its last checkpoint is finished or given up by the next start. If the job
    was configured with DELETE_ON_CANCELLATION its checkpoints are deleted, and the next start
    begins anew; savepoints stay in any case.
    """
    confirm(f"The job '{job.name}' ends without a last checkpoint.", "Cancel it?", yes, as_json)
    reply = ask(job, RequestKind.CANCEL, Patience.of_seconds(timeout_s))
    report(reply, job.to_json(), lambda _: "the job is being cancelled", as_json)
