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
import re
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flinkish_spark.core.clock import Clock
from flinkish_spark.core.errors import FencedError, OwnedElsewhereError, StoreError
from flinkish_spark.core.forks import OwnFile
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import CreateResult
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.ids import CheckpointId, OwnerEpoch
from flinkish_spark.protocol.timeline import NO_TIMELINE, Stretch, Timeline

#: Longest text of a holder, in bytes: a host name has 255 at most.
_MOST_HOLDER = 1_000
#: How often the lock of another process is tried, and the pause behind each.
_TRIES, _PAUSE_S = 8, 0.05


class JobLock:
    """An advisory lock that the operating system drops when the process dies, however it dies.

    Nobody inherits it: the file is closed in a program that is started (so the JVM and its Python workers
    do not have it) and in a child that is forked, as by `multiprocessing`. Orphans of a dead driver do not
    keep the next one out. Two locks in one process exclude each other, too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: OwnFile | None = None

    def acquire(self) -> None:
        """Take the lock or raise OwnedElsewhereError, within a second."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = OwnFile(self._path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise self._failed(error) from error
        try:
            self._lock(file)
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), _this_process().encode())
        except BlockingIOError:
            refusal = self._refusal(_holder(file))
            file.close()
            raise refusal from None
        except OSError as error:
            file.close()
            raise self._failed(error) from error
        self._file = file

    def release(self) -> None:
        """Drop the lock; a second call does nothing, nor does one in a forked child."""
        file, self._file = self._file, None
        if file is not None and file.is_open:
            # Closing is not enough where somebody has a copy in spite of all, as after a fork in C.
            fcntl.flock(file, fcntl.LOCK_UN)
            file.close()

    def _lock(self, file: OwnFile) -> None:
        for _ in range(_TRIES):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if _holder(file) == _this_process():
                    raise
                # An owner that was killed right behind a fork: its child has not come to closing the file.
                time.sleep(_PAUSE_S)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _failed(self, error: OSError) -> StoreError:
        return StoreError.of_system(
            error,
            f"cannot lock the job directory {self._path.parent}",
            what_to_do="check that it exists and may be written by this user",
        )

    def _refusal(self, holder: str) -> OwnedElsewhereError:
        what_to_do = "stop that process first, or use another job_dir"
        if holder == _this_process():
            holder, what_to_do = f"{holder} (this one)", "stop the job that runs here first"
        owned, state = f"the job directory {self._path.parent} is owned by {holder}", "which is alive"
        if _has_ended(holder):
            state = "which has ended, and a child of it that it forked past Python holds the lock"
            what_to_do = f"end that child ('fuser {self._path}' names it), or wait until it ends"
        return OwnedElsewhereError(
            f"{owned}, {state}",
            why="two jobs on one job directory would stage and commit against each other",
            what_to_do=what_to_do,
            holder=holder,
        )


def _holder(file: OwnFile) -> str:
    text = os.pread(file.fileno(), _MOST_HOLDER, 0).decode(errors="replace")
    return text.strip() or "another process"


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _has_ended(holder: str) -> bool:
    """Whether this machine has no such process; of one elsewhere nothing is known."""
    found = re.fullmatch(r"process (\d+) on (.+)", holder)
    if found is None or found.group(2) != socket.gethostname():
        return False
    try:
        os.kill(int(found.group(1)), 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it is another user's
    return False


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
