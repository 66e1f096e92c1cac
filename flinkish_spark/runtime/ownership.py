"""One owner per job directory (DESIGN 6).

Taking over has five steps, and this order is the fence:

1. the lock: refused while the process that holds it lives, whatever it is doing;
2. the owner epoch, by create-if-absent: of two newcomers one wins;
3. every checkpoint id that may be pending is sealed with ABORT: a zombie that has not decided
   it never can;
4. the stretch of the timeline that this owner decides begins above all of these ids;
5. Spark's checkpoint is renamed to carry the new epoch, so that a JVM that outlived its driver
   writes into a folder that is no longer there (`spark_log.fence_spark_folder`).

Only after that does the new owner read facts or abort anything.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from flinkish_spark.clock import Clock
from flinkish_spark.errors import FencedError, OwnedElsewhereError, StoreError
from flinkish_spark.job_dir import JobDir
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.ids import CheckpointId, OwnerEpoch
from flinkish_spark.protocol.timeline import NO_TIMELINE, Stretch, Timeline
from flinkish_spark.store import CreateResult


class JobLock:
    """An advisory lock that the operating system drops when the process dies, however it dies.

    The file is opened close-on-exec, so neither the JVM nor a Python worker inherits the lock:
    orphans of a dead driver do not keep the next one out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Take the lock or raise OwnedElsewhereError at once."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = open(self._path, "a+", encoding="utf-8")  # noqa: SIM115 - held until release
        except OSError as error:
            raise StoreError(
                f"cannot lock the job directory {self._path.parent}",
                why=str(error),
                what_to_do="check that it exists and may be written by this user",
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise OwnedElsewhereError(
                f"the job directory {self._path.parent} is owned by {holder}, which is alive",
                why="two processes on one job directory would stage and commit against each other",
                what_to_do="stop that process first, or use another job_dir",
                holder=holder,
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        self._file = file

    def release(self) -> None:
        """Drop the lock; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True, slots=True)
class Ownership:
    """Proof of having taken the job over; re-checked before every effect on the outside.

    Parameters
    ----------
    timeline
        The past of the directory, up to and with what this owner decides.
    """

    job_dir: JobDir
    epoch: OwnerEpoch
    timeline: Timeline = NO_TIMELINE

    def check(self) -> None:
        """Raise FencedError if a newer owner exists."""
        newest = self.job_dir.newest_owner()
        if newest != self.epoch:
            raise FencedError(
                f"owner {newest} has taken this job over from owner {self.epoch}",
                why="another process took the job directory while this one seemed dead",
                what_to_do="let this process end; the newer owner goes on",
                mine=self.epoch,
                newest=newest,
            )


def new_token() -> str:
    """Return a token that no other takeover has, of this directory or of a copy of it."""
    return secrets.token_hex(8)


def take_over(job_dir: JobDir, clock: Clock, token: Callable[[], str] = new_token) -> Ownership:
    """Raise the owner epoch, seal the ids that a zombie may be about to decide, begin a stretch.

    The caller holds the :class:`JobLock`.

    Parameters
    ----------
    token
        Makes the stretch's.

    Raises
    ------
    OwnedElsewhereError
        Another process took the same epoch at the same moment.
    """
    epoch = OwnerEpoch(job_dir.newest_owner().value + 1)
    body = {
        "owner_epoch": int(epoch),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "taken_at_ms": clock.wall_ms(),
    }
    if job_dir.create_owner(epoch, body) is CreateResult.EXISTS:
        raise OwnedElsewhereError(
            f"another process became owner {epoch} of this job directory at the same moment",
            what_to_do="start only one driver per job directory",
        )
    seal_open_ids(Ownership(job_dir, epoch), clock)
    # This order matters: behind the seal nobody else decides an id any more, so that every id that is decided
    # later is this owner's, and has its token.
    first = max(job_dir.decided_ids(), default=CheckpointId(0)).next()
    job_dir.begin_stretch(epoch, Stretch(first, token()))
    return Ownership(job_dir, epoch, job_dir.timeline())


def seal_open_ids(ownership: Ownership, clock: Clock) -> tuple[CheckpointId, ...]:
    """Write ABORT for every id that may be pending somewhere, and return those it won.

    An id gets its record before its barrier goes out, so what may be pending are the ids with a
    folder and no decision. Whoever gets an id after this looked was an owner before the newer
    owner record existed, and meets that record when it checks its ownership before it decides.
    If a zombie wins the race for an id, its decision stands and is finished by the new owner.
    """
    job_dir = ownership.job_dir
    won = []
    for checkpoint in job_dir.decided_ids():
        if job_dir.decision(checkpoint) is None:
            # A newer owner's ids are not ours to seal; what slips through costs it one checkpoint.
            ownership.check()
            created = job_dir.create_decision(_sealed(checkpoint, ownership, clock))
            if created is CreateResult.CREATED:
                won.append(checkpoint)
    return tuple(won)


def _sealed(checkpoint: CheckpointId, ownership: Ownership, clock: Clock) -> Decision:
    reason = f"sealed by owner {ownership.epoch} when it took the job over"
    return Decision(checkpoint, Verdict.ABORT, ownership.epoch, clock.wall_ms(), reason=reason)
