"""One owner per job directory.

Taking over has five steps, and this order is the fence:

1. the lock: refused while the process that holds it lives, whatever it is doing; in a bucket, where there
   are no locks, while it beats;
2. the owner epoch, by create-if-absent: one of two newcomers wins;
3. every checkpoint id that may be pending is sealed with ABORT: a zombie that has not decided
   it never can;
4. the stretch of the timeline that this owner decides begins above all of these ids, and lists those that
   it aborted for earlier owners: in a copy of the directory an earlier owner may still commit them;
5. Spark's checkpoint is renamed to carry the new epoch, so that a JVM that outlived its driver
   writes into a folder that is no longer there (`spark_log.fence_spark_folder`); in a bucket a new one
   begins with copies (`retention.fence_in_bucket`).

Only then does the new owner read facts or abort anything.
"""

from __future__ import annotations

import enum
import fcntl
import itertools
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeGuard

from flinkish_spark.core.clock import Clock, RunningThread, Threads
from flinkish_spark.core.errors import FencedError, OwnedElsewhereError, StoreError
from flinkish_spark.core.forks import OwnFile
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import CreateResult
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.ids import CheckpointId, OwnerEpoch
from flinkish_spark.protocol.timeline import NO_TIMELINE, Mark, Stretch, Timeline

LOG = logging.getLogger(__name__)
#: Notes of an owner in the job directory, see :class:`BeatLease`.
_BEAT, _ENDED = "beat", "ended"
#: Longest text of a holder, in bytes: a host name has 255 at most.
_MOST_HOLDER = 1_000
_WHY_ONE = "two jobs on one job directory would stage and commit against each other"
#: How often the lock of another process is tried, and the pause after each try.
_TRIES, _PAUSE_S = 8, 0.05


class JobLock:
    """An advisory lock that the operating system drops when the process dies, however it dies.

    Started programs, such as the JVM and its Python workers, and forked children do not inherit it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: OwnFile | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> JobLock:
        return cls(folder / "owner.lock")

    def acquire(self) -> None:
        """Take the lock or raise OwnedElsewhereError, within a second."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = OwnFile(self._path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise self._to_store_error(error) from error
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
            raise self._to_store_error(error) from error
        self._file = file

    def check_free(self) -> None:
        """Raise OwnedElsewhereError if a process holds the lock; takes and writes nothing."""
        try:
            file = OwnFile(self._path, os.O_RDWR)
        except OSError:
            # There is no lock file yet, or the start will raise a better error.
            return
        try:
            self._lock(file)
        except BlockingIOError:
            raise self._refusal(_holder(file)) from None
        finally:
            file.close()

    def on_taken_over(self, epoch: OwnerEpoch) -> None:
        """Do nothing: the lock is held."""

    def release(self) -> None:
        """Drop the lock; a second call does nothing, nor does one in a forked child."""
        file, self._file = self._file, None
        if file is not None and file.is_open:
            # Closing is not enough if another process has a copy of the descriptor, as after a fork in C.
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
                # An owner was killed right after a fork, and its child has not closed the file yet.
                time.sleep(_PAUSE_S)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _to_store_error(self, error: OSError) -> StoreError:
        return StoreError.from_os_error(
            error,
            f"cannot lock the job directory {self._path.parent}",
            what_to_do="check that it exists and may be written by this user",
        )

    def _refusal(self, holder: str) -> OwnedElsewhereError:
        what_to_do = "stop that process first, or use another job_dir"
        if holder == _this_process():
            holder, what_to_do = f"{holder} (this one)", "stop the job that runs here first"
        owned, state = f"the job directory {self._path.parent} is owned by {holder}", "which is alive"
        found = re.fullmatch(r"process (\d+) on (.+)", holder)
        if found is not None and found.group(2) == socket.gethostname() and _is_gone(int(found.group(1))):
            state = "which has ended, and a child of it that it forked past Python holds the lock"
            what_to_do = f"end that child ('fuser {self._path}' names it), or wait until it ends"
        return OwnedElsewhereError(f"{owned}, {state}", why=_WHY_ONE, what_to_do=what_to_do, holder=holder)


def _holder(file: OwnFile) -> str:
    text = os.pread(file.fileno(), _MOST_HOLDER, 0).decode(errors="replace")
    return text.strip() or "another process"


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _is_gone(pid: int) -> bool:
    """Return whether no process of this machine has this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # The process is another user's.
    return False


class LivenessUnknown(OwnedElsewhereError):
    """It is not known yet whether the owner lives; try again soon."""


class BeatLease:
    """Heartbeats that show that the owner lives, for buckets, which have no locks; an :class:`.OwnerLock`.

        owners/<epoch>.beat     a number that the owner counts up
        owners/<epoch>.ended    written by an owner that ends in order

    A newcomer watches whether the number changes, by its own monotonic clock: clocks of two machines are
    never compared. An owner that was only paused may be taken for dead. That ends the paused driver and loses
    no record: owner epochs and seals keep the job safe.
    """

    def __init__(
        self,
        job_dir: JobDir,
        place: str,
        clock: Clock,
        threads: Threads,
        lease_ms: int,
        beat_ms: int = 5_000,
    ) -> None:
        self._job_dir, self._place, self._clock, self._threads = job_dir, place, clock, threads
        self._beat_ms, self._lease_ms = beat_ms, lease_ms
        #: The owner that is watched, its last number, and since when.
        self._watched: tuple[OwnerEpoch, str, int] | None = None
        self._asked_ms: int | None = None
        self._mine: OwnerEpoch | None = None
        self._stopping = threading.Event()
        self._thread: RunningThread | None = None

    def acquire(self) -> None:
        """Return if no living process owns the job, else raise; writes nothing."""
        now_ms = self._clock.monotonic_ms()
        if self._asked_ms is not None and now_ms - self._asked_ms < self._beat_ms // 5:
            raise self._refusal("", is_known=False)
        self._asked_ms = now_ms
        epoch = self._job_dir.newest_owner()
        if epoch == OwnerEpoch(0) or self._job_dir.owner_note(epoch, _ENDED):
            return
        owner = self._job_dir.owner(epoch) or {}
        holder = f"process {owner.get('pid')} on {owner.get('host')}"
        if has_ended(owner.get("process")):
            LOG.info("the owner %s, %s, has ended", epoch, holder)
            return
        beat = self._job_dir.owner_note(epoch, _BEAT)
        if self._watched is None or self._watched[0] != epoch:
            self._watched = epoch, beat, now_ms
        if self._watched[1] != beat:
            self._watched = None
            raise self._refusal(holder, is_known=True)
        if now_ms - self._watched[2] < self._lease_ms:
            raise self._refusal(holder, is_known=False)
        LOG.warning("nothing was heard for %s ms of the owner %s, %s", self._lease_ms, epoch, holder)

    def on_taken_over(self, epoch: OwnerEpoch) -> None:
        self._stop()
        self._mine, self._stopping = epoch, threading.Event()
        self._thread = self._threads.start("flinkish-beat", partial(self._beat, epoch, self._stopping))

    def release(self) -> None:
        """Stop to beat and write that this owner has ended; a second call does nothing."""
        self._stop()
        mine, self._mine = self._mine, None
        if mine is not None:
            try:
                self._job_dir.note_owner(mine, _ENDED, "")
            except StoreError as error:
                LOG.warning("the next start on another host waits for %s ms: %s", self._lease_ms, error)

    def _stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _beat(self, epoch: OwnerEpoch, stopping: threading.Event) -> None:
        for count in itertools.count(1):
            try:
                self._job_dir.note_owner(epoch, _BEAT, str(count))
            except StoreError as error:
                LOG.warning("the job directory does not take this owner's beat: %s", error)
            if self._clock.wait(stopping, self._beat_ms):
                return

    def _refusal(self, holder: str, *, is_known: bool) -> OwnedElsewhereError:
        if not is_known:
            return LivenessUnknown(
                f"it is not known yet whether the owner of the job directory {self._place} lives",
                why=f"{holder or 'it'} has not ended, as far as is known, and may beat again",
                what_to_do=f"wait: within {self._lease_ms // 1_000} s it has beaten, or counts as dead",
                holder=holder,
            )
        return OwnedElsewhereError(
            f"the job directory {self._place} is owned by {holder}, which is alive",
            why=_WHY_ONE,
            what_to_do="stop that process first, or use another job_dir",
            holder=holder,
        )


def process_key(pid: int) -> str | None:
    """Return a key that no other process on any machine has; None if /proc does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        started = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{pid}/{started}"
    except (OSError, ValueError, IndexError):
        return None


def has_ended(process: object) -> bool:
    """Return whether a process, given by :func:`process_key`, ran on this machine and has ended."""
    parts = process.split("/") if _is_of_this_machine(process) else []
    if len(parts) != 4 or not parts[2].isdecimal():
        return False
    there = process_key(int(parts[2]))
    # /proc may hide the processes of other users, so a process that is not seen there may live.
    return _is_gone(int(parts[2])) if there is None else there != process


def _is_of_this_machine(process: object) -> TypeGuard[str]:
    mine = process_key(os.getpid())
    return mine is not None and isinstance(process, str) and process.split("/")[:2] == mine.split("/")[:2]


class OwnerLife(enum.Enum):
    """The liveness of a job's owner, as far as another process can tell."""

    ALIVE = "ALIVE"
    ENDED = "ENDED"
    #: It is on another machine, or the operating system does not tell.
    UNKNOWN = "UNKNOWN"


def life_of_owner(job_dir: JobDir, epoch: OwnerEpoch) -> OwnerLife:
    """Return whether an owner's process lives; on another machine only its end in order is known."""
    process = (job_dir.owner(epoch) or {}).get("process")
    if job_dir.owner_note(epoch, _ENDED) or has_ended(process):
        return OwnerLife.ENDED
    return OwnerLife.ALIVE if _is_of_this_machine(process) else OwnerLife.UNKNOWN


@dataclass(frozen=True, slots=True)
class Ownership:
    """Proof that this process has taken the job over; checked again before every external effect."""

    job_dir: JobDir
    epoch: OwnerEpoch
    #: The past of the directory, including this owner's stretch.
    timeline: Timeline = NO_TIMELINE
    _is_left: threading.Event = field(default_factory=threading.Event, compare=False, repr=False)

    def leave(self) -> None:
        """Give the ownership up; called when a thread of this owner does not end in time."""
        self._is_left.set()

    def why_foreign(self, mark: Mark, upto: CheckpointId) -> str:
        why, owner = self.timeline.why_not_ours(mark, upto), mark.owner_epoch
        if not why and owner is not None and owner > self.epoch:
            why = f"its owner {owner} is newer than any that the directory knows"
        return why

    def check(self) -> None:
        """Raise FencedError if a newer owner exists, or this one was given up."""
        if self._is_left.is_set():
            raise FencedError(
                f"owner {self.epoch} has given this job up",
                why="it was cancelled, and this thread did not end in time",
                what_to_do="none: the next owner finishes decided checkpoints",
                mine=self.epoch,
            )
        if self.job_dir.owner(OwnerEpoch(self.epoch.value + 1)) is not None:
            newest = self.job_dir.newest_owner()
            raise FencedError(
                f"owner {newest} has taken this job over from owner {self.epoch}",
                why="another process took the job directory while this one seemed dead",
                what_to_do="let this process end; the newer owner goes on",
                mine=self.epoch,
                newest=newest,
            )


def new_token() -> str:
    return secrets.token_hex(8)


def take_over(job_dir: JobDir, clock: Clock, token: Callable[[], str] = new_token) -> Ownership:
    """Raise the owner epoch, seal the ids that a zombie may be about to decide, begin a stretch."""
    # The caller holds the lock, or knows from the beats that no process owns the job.
    epoch = OwnerEpoch(job_dir.newest_owner().value + 1)
    body = {
        "owner_epoch": int(epoch),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process": process_key(os.getpid()),
        "taken_at_ms": clock.wall_ms(),
    }
    if job_dir.create_owner(epoch, body) is CreateResult.EXISTS:
        raise OwnedElsewhereError(
            f"another process became owner {epoch} of this job directory at the same moment",
            what_to_do="start only one driver per job directory",
        )
    seal_open_ids(Ownership(job_dir, epoch), clock)
    # This order matters: after the seals no other owner can decide an id, so every later decision is this
    # owner's and has its token.
    known, past = job_dir.list_checkpoint_ids(), job_dir.stretches()
    listed = {one for stretch in past.values() for one in stretch.given_up}
    given_up = [one for one in known if one not in listed and _was_given_up_for_another(job_dir, one, past)]
    first = max(known, default=CheckpointId(0)).next()
    job_dir.begin_stretch(epoch, Stretch(first, token(), tuple(given_up)))
    return Ownership(job_dir, epoch, job_dir.timeline())


def _was_given_up_for_another(
    job_dir: JobDir, checkpoint: CheckpointId, stretches: Mapping[OwnerEpoch, Stretch]
) -> bool:
    """Return whether an id was aborted by a later owner than the one that it belongs to."""
    decision = job_dir.first_decision(checkpoint)
    if decision is None or decision.verdict is not Verdict.ABORT:
        return False
    # An owner that aborts an id of its own never commits it, in no copy of the directory either: an earlier
    # copy has another owner. An atomic sink may have the id's mark, which becomes visible with a later id; to
    # list it would need a proof for as long as the mark stays, and decisions are deleted.
    belongs_to = max((e for e, one in stretches.items() if one.first <= checkpoint), default=OwnerEpoch(0))
    return decision.owner_epoch > belongs_to


def seal_open_ids(ownership: Ownership, clock: Clock) -> tuple[CheckpointId, ...]:
    """Write ABORT for every id that may be pending in another process; return the ids that it sealed."""
    # An id gets its record before its barrier goes out, so the ids that may be pending have a folder and
    # neither a decision nor a receipt. A zombie that takes an id after this finds the newer owner's record
    # when it checks its ownership before it decides. If a zombie wins the race for an id, its decision stands
    # and the new owner finishes it.
    job_dir = ownership.job_dir
    won = []
    for checkpoint in job_dir.list_checkpoint_ids():
        # A receipt without a decision is left by a deletion that a crash cut off: it was decided long ago,
        # and sinks that committed nothing since still hold its mark.
        if job_dir.decision(checkpoint) is None and job_dir.receipt(checkpoint) is None:
            # The ids of a newer owner must not be sealed; one that slips through costs it a checkpoint.
            ownership.check()
            reason = f"sealed by owner {ownership.epoch} when it took the job over"
            seal = Decision(checkpoint, Verdict.ABORT, ownership.epoch, clock.wall_ms(), reason=reason)
            if job_dir.create_decision(seal) is CreateResult.CREATED:
                won.append(checkpoint)
    return tuple(won)
