"""The check after a takeover that sinks, sources and manifest know no more than the job directory.

If they do, the directory is an older copy of itself, or a copy of it runs elsewhere: the start fails before
it changes any external system. If a user has ordered to accept their state, new ids are greater than all of
theirs, so that no mark has two meanings.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from flinkish_spark.checkpoint.commit import JobInterruptedError
from flinkish_spark.checkpoint.context import JobContext
from flinkish_spark.checkpoint.failures import RetryPolicy
from flinkish_spark.contracts.sink import another_timeline
from flinkish_spark.core.clock import GivenUp, outcome_of
from flinkish_spark.core.watchdog import note_failure
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.ids import OwnerEpoch
from flinkish_spark.protocol.timeline import Mark

LOG = logging.getLogger(__name__)
_PAUSE_MS = 1_000
_ASKING = "reading the newest checkpoints of sinks and sources"


#: The holder of a mark, in words, and the mark.
_Found = tuple[str, Mark]


def settle_timeline(job: JobContext) -> bool:
    """Compare external marks with the directory; return True if the job must be taken over once more."""
    job_dir = job.ownership.job_dir
    marks = _all_marks(job)
    ownership = job.ownership
    newest = ownership.timeline.newest
    foreign = [(who, mark, why) for who, mark in marks if (why := ownership.why_foreign(mark, newest))]
    if not foreign:
        # The order may also be one that an earlier process carried out before it was killed.
        job_dir.close_timeline_order()
        return False
    who, mark, why = foreign[0]
    ahead = {who: mark.checkpoint for who, mark, _ in foreign}
    error = another_timeline(who, mark, newest, why, ahead)
    if not job_dir.timeline_is_ordered():
        # To a deposed process, its successor looks like another timeline.
        job.ownership.check()
        raise error
    _accept(job, [mark for _, mark in marks], error.what)
    return True


def _all_marks(job: JobContext) -> list[_Found]:
    retries = RetryPolicy()
    while True:
        try:
            # This only reads, so a call that hangs and is abandoned changes nothing. A stop waits for it: it
            # needs a last checkpoint.
            ask = partial(_marks, job)
            return outcome_of(ask, "flinkish-settle-timeline", job.threads, job.clock, job.is_cancelled)
        except GivenUp:
            raise JobInterruptedError(_ASKING) from None
        except Exception as error:
            fault = retries.check(error)
            LOG.warning("the start waits for the newest checkpoints of sinks and sources: %s", fault)
            note_failure(str(fault))
            if job.must_give_up():
                raise JobInterruptedError(_ASKING) from error
        job.clock.sleep_ms(_PAUSE_MS)
        job.ownership.check()


def _marks(job: JobContext) -> list[_Found]:
    found: list[_Found] = []
    for uid, committer in job.committers.items():
        found += ((f"sink '{uid}'", mark) for mark in committer.newest_marks())
    found += (("the manifest", mark) for mark in job.manifest.newest_marks())
    for node in job.sources:
        found += ((f"source '{node.uid}'", mark) for mark in node.source.newest_marks(job.job))
    return found


def _accept(job: JobContext, marks: Sequence[Mark], why: str) -> None:
    """Raise checkpoint ids and owner epochs above all external marks. Each step may be repeated."""
    ownership = job.ownership
    job_dir, epoch = ownership.job_dir, ownership.epoch
    upto = max([ownership.timeline.newest, *(mark.checkpoint for mark in marks)])
    newest = max([epoch, *(mark.owner_epoch for mark in marks if mark.owner_epoch is not None)])
    ownership.check()
    LOG.warning("the external timeline is accepted, and checkpoint ids continue above %s: %s", upto, why)
    if job_dir.decision(upto) is None:
        reason = "aborted: the external timeline up to here was accepted"
        job_dir.create_decision(Decision(upto, Verdict.ABORT, epoch, job.clock.wall_ms(), reason=reason))
    if newest > epoch:
        job_dir.create_owner(OwnerEpoch(int(newest)), {"owner_epoch": int(newest), "accepted_by": int(epoch)})
    # This order matters: once the marks are accepted, the next start finds nothing to refuse, and deletes the
    # order.
    job_dir.accept_marks(upto, why)
