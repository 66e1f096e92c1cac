"""Requests to a running job: write the request, wait until the job takes it, wait for the answer.

The rules of the files are in :mod:`flinkish_spark.job.requests`. A request that no job takes is withdrawn:
after "nobody took it" it is never carried out; after "no answer in time" it still may be.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace

from flinkish_spark.job.requests import (
    KEPT_MS,
    Claim,
    Claimant,
    OutsideRequest,
    Reply,
    ReplyKind,
    RequestFiles,
    RequestKind,
    StopMode,
)
from flinkish_spark.job.rewind import RewindStatus, find_rewind_status
from flinkish_spark.job.snapshot import JobSnapshot
from flinkish_spark.job.stored_job import StoredJob
from flinkish_spark.protocol.ids import OwnerEpoch
from flinkish_spark.protocol.lineage import RewindOrder

_POLL_MS = 100
#: A job takes a request within half a second, even while it recovers or waits for a restart; only during a
#: takeover it needs longer.
TAKEN_WITHIN_MS = 30_000
_OVER = "the job does not run: it has ended, or is just starting; no request was sent"
_LEFT_TO_NEXT_START = (
    "the next start finishes the checkpoint if it was decided, and writes no savepoint of it; "
    "look at `flinkish checkpoints list`"
)

assert KEPT_MS > 100 * _POLL_MS, "an answer must not be deleted before its asker can have read it"


@dataclass(frozen=True, slots=True)
class RequestTimeouts:
    """The asker's timeouts in milliseconds: until the job takes the request, and in all."""

    taken_within_ms: int
    answered_within_ms: int

    @classmethod
    def from_seconds(cls, timeout_s: float, taken_within_ms: int = TAKEN_WITHIN_MS) -> RequestTimeouts:
        timeout_ms = max(1, round(timeout_s * 1_000))
        return cls(min(timeout_ms, taken_within_ms), timeout_ms)


class RequestInterrupt(KeyboardInterrupt):
    """Ctrl-C while the asker waited; `reply` tells whether the request will still be carried out."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.text)
        self.reply = reply


def ask(
    job: StoredJob,
    kind: RequestKind,
    patience: RequestTimeouts,
    *,
    target: str = "",
    stop_mode: StopMode = StopMode.SUSPEND,
) -> Reply:
    """Send a request and wait for the reply; Ctrl-C ends in a reply, too."""
    try:
        return ask_until_interrupted(job, kind, patience, target=target, stop_mode=stop_mode)
    except RequestInterrupt as interrupted:
        return interrupted.reply


def ask_until_interrupted(
    job: StoredJob,
    kind: RequestKind,
    patience: RequestTimeouts,
    *,
    target: str = "",
    stop_mode: StopMode = StopMode.SUSPEND,
) -> Reply:
    """Send a request and wait for the reply; delete the request's files in any case."""
    owner = job.job_dir.newest_owner()
    if owner.value == 0:
        return Reply(ReplyKind.NOT_TAKEN, text="the job has never run")
    if JobSnapshot(str(job.uuid), job).is_over:
        return Reply(ReplyKind.NOT_TAKEN, text=_OVER)
    name = uuid.uuid4().hex
    request = OutsideRequest(name, kind, owner, job.clock.wall_ms(), target, stop_mode)
    files = RequestFiles(job.job_dir, name)
    try:
        files.create(request)
        return _wait(job, request, files, patience)
    except KeyboardInterrupt:
        reply = Reply(
            ReplyKind.NOT_ANSWERED, text="interrupted; the job has taken the request and carries it out"
        )
        if _take_back(request, files):
            reply = Reply(ReplyKind.NOT_TAKEN, text="interrupted; the request was withdrawn")
        raise RequestInterrupt(reply) from None
    finally:
        files.delete()


def _wait(job: StoredJob, request: OutsideRequest, files: RequestFiles, patience: RequestTimeouts) -> Reply:
    begin_ms, is_taken = job.clock.monotonic_ms(), False
    while True:
        answer = files.answer()
        if answer is not None:
            if answer.kind is not ReplyKind.LEFT_TO_NEXT_START:
                return answer
            return replace(answer, text=": ".join(filter(None, (answer.text, _LEFT_TO_NEXT_START))))
        waited_ms = job.clock.monotonic_ms() - begin_ms
        is_taken = is_taken or files.read_claim() is not None
        if not is_taken and waited_ms >= patience.taken_within_ms:
            if _take_back(request, files):
                return Reply(ReplyKind.NOT_TAKEN, text=_not_taken(job, request, waited_ms))
            is_taken = True
        if waited_ms >= patience.answered_within_ms:
            return Reply(
                ReplyKind.NOT_ANSWERED,
                text=f"the job took the request and has not answered within {_seconds(waited_ms)}: "
                "it may still be carried out; look at `flinkish checkpoints list` before you ask again",
            )
        job.clock.sleep_ms(_POLL_MS)


def _take_back(request: OutsideRequest, files: RequestFiles) -> bool:
    """Claim the request; return True if no owner had claimed it before."""
    return files.claim(Claim(Claimant.ASKER, request.owner_epoch)).by is Claimant.ASKER


def _not_taken(job: StoredJob, request: OutsideRequest, waited_ms: int) -> str:
    newest = job.job_dir.newest_owner()
    if newest != request.owner_epoch:
        return f"the job was taken over by owner {newest} meanwhile; ask again"
    return (
        f"nobody took the request within {_seconds(waited_ms)}, and it was withdrawn: "
        "the job does not run, or is just starting; a standby takes no requests"
    )


def _seconds(duration_ms: int) -> str:
    return f"{duration_ms / 1_000:g} s"


def follow_rewind(
    job: StoredJob, order: RewindOrder, owner: OwnerEpoch, patience: RequestTimeouts
) -> tuple[RewindStatus | None, Reply]:
    """Ask a running job to obey an order, and wait until it is closed or the time is over.

    `owner` is the newest one before the order. The status is None if no job runs that could obey.
    """
    begin_ms = job.clock.monotonic_ms()
    reply = ask_until_interrupted(job, RequestKind.REWIND, patience, target=order.order_id)
    while True:
        status = find_rewind_status(job.job_dir, order)
        if status.state.is_closed:
            return status, reply
        # A job that has found the order by itself takes no request while it rewinds, and gets a new owner
        # epoch.
        if reply.kind is ReplyKind.NOT_TAKEN and job.job_dir.newest_owner() == owner:
            return None, reply
        # A job that refuses the request finds the order all the same, or its successor does.
        if job.clock.monotonic_ms() - begin_ms >= patience.answered_within_ms:
            return status, reply
        job.clock.sleep_ms(_POLL_MS)


def describe(reply: Reply) -> str:
    """Format a reply that is not COMPLETED as one line."""
    match reply.kind:
        case ReplyKind.REFUSED:
            what = "refused"
        case ReplyKind.ABORTED:
            what = f"checkpoint {reply.checkpoint} was aborted"
        case ReplyKind.SAVEPOINT_FAILED:
            what = f"checkpoint {reply.checkpoint} is complete, but its savepoint could not be written"
        case ReplyKind.LEFT_TO_NEXT_START:
            what = f"no answer about checkpoint {reply.checkpoint}"
        case _:
            what = "no answer"
    reason = "" if reply.reason is None else reply.reason.value
    text = reply.text or ("" if reply.reason is None else reply.reason.text)
    return f"{what}: {', '.join(filter(None, (reason, text)))}"
