"""Requests of other processes to a running job, as files in the job directory, with the answers.

    requests/<name>.json          the request, with the owner epoch it is for; created by the asker
    requests/<name>.claim.json    who settles it: the owner, or the asker that withdraws it
    requests/<name>.answer.json   the outcome; created by an owner

Rules:

1. A request names the owner epoch that was the newest when it was asked. Only that owner's process
   carries it out: a request that waited for a dead job must not surprise the next one.
2. The owner claims a request before it carries it out, and an asker that gives up claims it, too.
   A claim is created if absent, so exactly one of them has it: a request is carried out at most
   once, and one that was taken back never.
3. A later owner that finds a request with a claim and without an answer answers UNKNOWN: its
   owner ended in between. The asker has to look at what is there before it asks again.
4. The asker deletes what it has read: request, then claim, then answer. In another order a request
   that was carried out would look like a new one. Askers get killed, so the owner deletes what has
   been settled for :data:`KEPT_MS`.

What is wrong with a request is answered or logged and never ends the job. Wall clock times are compared
here, and nowhere else: asker and owner may be on two machines and share no other clock.
"""

from __future__ import annotations

import enum
import logging
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from flinkish_spark.checkpoint.answers import AnswerKind, CheckpointAnswer, CheckpointTriggerRequest
from flinkish_spark.core.clock import Clock, RunningThread, Threads
from flinkish_spark.core.errors import (
    CorruptObjectError,
    EnvironmentFault,
    FlinkishError,
    JobDirError,
    StoreError,
)
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import CreateResult, SealedObjects
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.codec import StoredObject, expect_object, expect_text, get_member, store_as
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose, OwnerEpoch, check_name
from flinkish_spark.protocol.limits import check_whole

LOG = logging.getLogger(__name__)


FOLDER = "requests"
_LONGEST_TARGET = 4_096
_NAME = re.compile(r"[0-9a-f]{32}")
_FILE = re.compile(r"([0-9a-f]{32})(\.claim|\.answer|)\.json")


class Part(enum.Enum):
    """The objects of one request by their file suffixes, in the order in which they are deleted."""

    REQUEST = ".json"
    CLAIM = ".claim.json"
    ANSWER = ".answer.json"


def parse_file(file: str) -> tuple[str, Part] | None:
    """Split a file name into the request's name and its part; None for other files."""
    match = _FILE.fullmatch(file)
    return None if match is None else (match[1], Part(f"{match[2]}.json"))


class RequestKind(enum.Enum):
    CHECKPOINT = "CHECKPOINT"
    SAVEPOINT = "SAVEPOINT"
    #: A savepoint at `target`, and no micro-batch after it.
    STOP_WITH_SAVEPOINT = "STOP_WITH_SAVEPOINT"
    #: End at once; answered when the job begins to end.
    CANCEL = "CANCEL"
    #: Carry out the rewind order with the id `target`. Answered when the job begins with it; the job
    #: directory shows when the order is closed.
    REWIND = "REWIND"


class StopMode(Choice):
    """The mode of a stop with savepoint; named as in Flink."""

    #: The job may be started again from the savepoint and continues as if it had not stopped.
    SUSPEND = "SUSPEND"
    #: The job ends for good: before the savepoint the watermark rises to its maximum.
    DRAIN = "DRAIN"

    @property
    def purpose(self) -> CheckpointPurpose:
        """Purpose of the checkpoint of such a stop."""
        is_drained = self is StopMode.DRAIN
        return CheckpointPurpose.DRAINED_SAVEPOINT if is_drained else CheckpointPurpose.FINAL_SAVEPOINT


#: Kinds whose target is the directory of a savepoint.
_TO_A_DIRECTORY = (RequestKind.SAVEPOINT, RequestKind.STOP_WITH_SAVEPOINT)
_PURPOSES = {
    RequestKind.CHECKPOINT: CheckpointPurpose.USER,
    RequestKind.SAVEPOINT: CheckpointPurpose.SAVEPOINT,
}


@dataclass(frozen=True, slots=True)
class OutsideRequest:
    #: 32 hexadecimal digits; the answer has the same name.
    name: str
    kind: RequestKind
    #: Epoch of the newest owner when the request was written.
    owner_epoch: OwnerEpoch
    #: Wall-clock time of the asker.
    asked_at_ms: int
    #: See :class:`RequestKind`; empty for kinds without a target.
    target: str = ""
    #: Only for a stop with savepoint; SUSPEND for all others.
    stop_mode: StopMode = StopMode.SUSPEND

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"the name of a request is 32 hex digits, got {self.name!r}")
        check_whole("asked_at_ms", self.asked_at_ms, least=0)
        if self.kind in _TO_A_DIRECTORY:
            is_place = self.target.startswith("/") or "://" in self.target
            if not is_place or len(self.target) > _LONGEST_TARGET or "\0" in self.target:
                raise ValueError(f"the target must be an absolute path or a URL, got {self.target[:200]!r}")
        elif self.kind is RequestKind.REWIND:
            check_name(self.target, "order id")
        elif self.target:
            raise ValueError(f"{self.kind.value} has no target, got {self.target[:200]!r}")

    @property
    def purpose(self) -> CheckpointPurpose | None:
        if self.kind is RequestKind.STOP_WITH_SAVEPOINT:
            return self.stop_mode.purpose
        return _PURPOSES.get(self.kind)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind.value,
            "owner_epoch": int(self.owner_epoch),
            "asked_at_ms": self.asked_at_ms,
            "target": self.target,
            "stop_mode": self.stop_mode.value,
        }

    @classmethod
    def from_json(cls, name: str, value: Any) -> OutsideRequest:
        told = expect_object(value, "a request")
        return cls(
            name,
            RequestKind(get_member(told, "kind")),
            OwnerEpoch(get_member(told, "owner_epoch")),
            get_member(told, "asked_at_ms"),
            expect_text(get_member(told, "target"), "target"),
            StopMode(get_member(told, "stop_mode")),
        )


class ReplyKind(enum.Enum):
    """The outcome of a request for its asker: one of `answers.AnswerKind`, or unknown."""

    #: The request was carried out; CANCEL and REWIND have begun.
    COMPLETED = "COMPLETED"
    #: Nothing was done.
    REFUSED = "REFUSED"
    #: The checkpoint was aborted.
    ABORTED = "ABORTED"
    #: The checkpoint is confirmed, but its savepoint could not be written.
    SAVEPOINT_FAILED = "SAVEPOINT_FAILED"
    #: The job ended while the checkpoint was being decided; the next start finishes it if it was.
    LEFT_TO_NEXT_START = "LEFT_TO_NEXT_START"
    #: The process that took the request ended before it answered.
    UNKNOWN = "UNKNOWN"
    #: No owner took the request, and it was withdrawn: it is never carried out. Never stored.
    NOT_TAKEN = "NOT_TAKEN"
    #: The job took the request but did not answer in time: it may still carry it out. Never stored.
    NOT_ANSWERED = "NOT_ANSWERED"


@dataclass(frozen=True, slots=True)
class Reply(StoredObject):
    """The answer to a request, as it is stored; see :class:`.CheckpointAnswer`."""

    kind: ReplyKind = field(metadata=store_as("outcome"))
    #: The checkpoint of the request; None if there was none, or it is not known.
    checkpoint: CheckpointId | None = None
    #: Reason of the failure, if the job gave one.
    reason: CheckpointFailureReason | None = None
    #: The reason in words; for a completed savepoint its path.
    text: str = ""

    @classmethod
    def of(cls, answer: CheckpointAnswer) -> Reply:
        return cls(ReplyKind(answer.kind.value), answer.checkpoint, answer.reason, answer.text)


class Claimant(enum.Enum):
    #: An owner carries the request out or refuses it.
    OWNER = "OWNER"
    #: The asker has withdrawn it.
    ASKER = "ASKER"


@dataclass(frozen=True, slots=True)
class Claim(StoredObject):
    by: Claimant
    owner_epoch: OwnerEpoch


class RequestFiles:
    def __init__(self, job_dir: JobDir, name: str) -> None:
        self._store, self._name = job_dir.store, name
        self._objects = SealedObjects(job_dir.store, "the job directory")

    def create(self, request: OutsideRequest) -> None:
        self._store.create_if_absent(self._key(Part.REQUEST), seal("request", request.to_json()))

    def request(self) -> OutsideRequest | None:
        return self._objects.optional(
            self._key(Part.REQUEST), "request", lambda value: OutsideRequest.from_json(self._name, value)
        )

    def claim(self, claim: Claim) -> Claim:
        """Claim the request; return the valid claim, which may be another process's."""
        while True:
            created = self._store.create_if_absent(self._key(Part.CLAIM), seal("claim", claim.to_json()))
            holds = claim if created is CreateResult.CREATED else self.read_claim()
            if holds is not None:
                return holds

    def read_claim(self) -> Claim | None:
        return self._objects.optional(self._key(Part.CLAIM), "claim", Claim.from_json)

    def give_answer(self, answer: Reply) -> None:
        self._store.create_if_absent(self._key(Part.ANSWER), seal("answer", answer.to_json()))

    def answer(self) -> Reply | None:
        return self._objects.optional(self._key(Part.ANSWER), "answer", Reply.from_json)

    def delete(self) -> None:
        for part in Part:
            self._store.delete(self._key(part))

    def delete_claim(self) -> None:
        self._store.delete(self._key(Part.CLAIM))

    def _key(self, part: Part) -> str:
        return f"{FOLDER}/{self._name}{part.value}"


#: A request older than this belongs to an asker that is gone; it is refused.
OLDEST_MS = 600_000
#: How long settled requests are kept before the owner deletes them; an asker looks ten times a second.
KEPT_MS = 600_000


class Inbox:
    """The owner's side of requests; one for the life of the process that runs the job."""

    def __init__(self, job_dir: JobDir, clock: Clock) -> None:
        self._job_dir, self._clock = job_dir, clock
        self._mine: tuple[OwnerEpoch, ...] = ()
        self._lock = threading.Lock()
        #: Names of requests that are being carried out.
        self._taken: set[str] = set()
        #: Settled requests by name, with the monotonic time of that.
        self._settled: dict[str, int] = {}
        self._strange: frozenset[str] = frozenset()

    def took_over(self, epoch: OwnerEpoch) -> None:
        """Accept requests to this owner epoch, too; called after each takeover."""
        self._mine = (*self._mine, epoch)

    def take(self) -> tuple[OutsideRequest, ...]:
        """Return the requests to carry out now, oldest first, each once; log errors of the store."""
        # Called a few times a second by one thread: it lists one folder, which is usually empty.
        if not self._mine:
            return ()
        taken: list[OutsideRequest] = []
        try:
            found = self._list_requests()
            for name, parts in found.items():
                request = self._look_at(name, parts)
                if request is not None:
                    taken.append(request)
            self._forget(found)
        except StoreError as error:
            LOG.warning("requests of other processes are read later: %s", error)
        # Requests claimed before the store failed must not get lost.
        return tuple(sorted(taken, key=lambda request: (request.asked_at_ms, request.name)))

    def answer(self, name: str, answer: CheckpointAnswer) -> None:
        """Answer a request that :meth:`take` returned, before the process releases the job."""
        self._answer(name, Reply.of(answer))

    def _list_requests(self) -> dict[str, set[Part]]:
        found: dict[str, set[Part]] = {}
        strange = set()
        for key in self._job_dir.store.list(FOLDER):
            file = key.rsplit("/", 1)[1]
            parsed = parse_file(file)
            if parsed is None:
                strange.add(file)
            else:
                found.setdefault(parsed[0], set()).add(parsed[1])
        for file in strange - self._strange:
            LOG.warning("%s/%s is no request and is left alone", FOLDER, file)
        self._strange = frozenset(strange)
        return found

    def _look_at(self, name: str, parts: set[Part]) -> OutsideRequest | None:
        """Return the request if it must be carried out; otherwise settle it."""
        with self._lock:
            if name in self._taken or name in self._settled:
                return None
        if Part.REQUEST not in parts or Part.ANSWER in parts:
            # It was withdrawn, or its asker is gone.
            self._settle(name)
            return None
        files = RequestFiles(self._job_dir, name)
        try:
            request = files.request()
        except (CorruptObjectError, JobDirError) as error:
            LOG.warning("a request is refused: %s", error)
            self._answer(name, Reply(ReplyKind.REFUSED, text=" ".join(str(error).split())))
            return None
        if request is None or request.owner_epoch > self._mine[-1]:
            # It was withdrawn, or it is for a later owner.
            return None
        return request if self._claim(files, request) else None

    def _claim(self, files: RequestFiles, request: OutsideRequest) -> bool:
        """Claim a request; return True if it must be carried out, otherwise settle it."""
        name = request.name
        try:
            claim = files.claim(Claim(Claimant.OWNER, self._mine[-1]))
        except (CorruptObjectError, JobDirError) as error:
            LOG.warning("a request whose claim cannot be read: %s", error)
            self._answer(name, Reply(ReplyKind.UNKNOWN, text=" ".join(str(error).split())))
            return False
        if claim.by is Claimant.ASKER:
            self._settle(name)
            return False
        if claim.owner_epoch > self._mine[-1]:
            # The later owner settles it.
            return False
        if claim.owner_epoch not in self._mine:
            text = (
                f"owner {claim.owner_epoch} took it and ended before it answered: it may or may not have "
                "been carried out. Look at `flinkish checkpoints list` before you ask again"
            )
            self._answer(name, Reply(ReplyKind.UNKNOWN, text=text))
            return False
        if files.request() is None:
            # The asker withdrew it between the two reads, and had deleted its own claim by then.
            files.delete_claim()
            return False
        refusal = self._refusal(request)
        if refusal:
            LOG.info("a request for %s is refused: %s", request.kind.value, refusal)
            self._answer(name, Reply(ReplyKind.REFUSED, text=refusal))
            return False
        LOG.info("request from another process: %s %s", request.kind.value, request.target)
        with self._lock:
            self._taken.add(name)
        return True

    def _refusal(self, request: OutsideRequest) -> str:
        if request.owner_epoch not in self._mine:
            return (
                f"it was sent to owner {request.owner_epoch}, and owner {self._mine[-1]} has the job now; "
                "ask again"
            )
        age_ms = self._clock.wall_ms() - request.asked_at_ms
        if age_ms > OLDEST_MS:
            return f"it was asked {age_ms // 1_000} s ago, by the clock of this machine; ask again"
        return ""

    def _answer(self, name: str, answer: Reply) -> None:
        try:
            RequestFiles(self._job_dir, name).give_answer(answer)
        except StoreError as error:
            LOG.warning("the answer %s to a request is not written: %s", answer.kind.value, error)
        self._settle(name)

    def _settle(self, name: str) -> None:
        with self._lock:
            self._taken.discard(name)
            self._settled[name] = self._clock.monotonic_ms()

    def _forget(self, found: Mapping[str, set[Part]]) -> None:
        """Forget requests that their askers deleted, and delete abandoned ones."""
        now_ms = self._clock.monotonic_ms()
        with self._lock:
            gone = self._settled.keys() - found.keys()
            old = [name for name, since in self._settled.items() if now_ms - since > KEPT_MS]
            for name in gone:
                del self._settled[name]
        for name in old:
            RequestFiles(self._job_dir, name).delete()


#: Interval of the looks at the job directory; in a bucket each look is two requests.
LOOK_MS, LOOK_IN_BUCKET_MS = 250, 5_000


class RestartForRewind(EnvironmentFault):
    """The query must restart to carry out a rewind order. No failure."""

    usual_advice = "wait: the job goes back by itself"
    restartable = True


class RequestWatcher:
    """Looks for requests and rewind orders in a thread of one ownership, also while no query runs."""

    def __init__(
        self,
        job_dir: JobDir,
        clock: Clock,
        ask: Callable[[CheckpointTriggerRequest], None],
        cancel: Callable[[], None],
        look_ms: int = LOOK_MS,
        report: Callable[[], None] = lambda: None,
    ) -> None:
        self._job_dir, self._clock, self._ask, self._cancel = job_dir, clock, ask, cancel
        self._look_ms, self._report = look_ms, report
        self._inbox = Inbox(job_dir, clock)
        self._stopping = threading.Event()
        self._thread: RunningThread | None = None
        self._sees_order = False
        self._trouble = ""

    def start(self, threads: Threads, epoch: OwnerEpoch) -> None:
        self._inbox.took_over(epoch)
        self._sees_order, self._stopping = False, threading.Event()
        self._thread = threads.start("flinkish-requests", partial(self._run, self._stopping))

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, stopping: threading.Event) -> None:
        while not stopping.is_set():
            self.look()
            self._report()
            self._clock.wait(stopping, self._look_ms)

    def look(self) -> None:
        """Carry out the new requests; usually only a listing. Never raises."""
        try:
            for request in self._inbox.take():
                answer = partial(self._inbox.answer, request.name)
                if request.purpose is not None:
                    self._ask(CheckpointTriggerRequest(request.purpose, answer, request.target))
                    continue
                # The answer says that CANCEL or REWIND has begun; the job directory shows its end.
                answer(CheckpointAnswer(AnswerKind.COMPLETED))
                if request.kind is RequestKind.CANCEL:
                    self._cancel()
            self._sees_order = self._job_dir.rewind_order() is not None
            self._trouble = ""
        except FlinkishError as error:
            if str(error) != self._trouble:
                LOG.warning("orders and requests of other processes are read later: %s", error)
            self._trouble = str(error)

    def raise_if_ordered(self) -> None:
        """Raise RestartForRewind if an order waits; called by the thread that watches the query."""
        if not self._sees_order:
            return
        self._sees_order = False
        # The recovery of a restart may have carried it out meanwhile.
        order = self._job_dir.rewind_order()
        if order is not None:
            raise RestartForRewind(f"the job goes back to checkpoint {order.target}: {order.reason}")
