"""How another process reaches a running job: requests in its directory, and their answers.

    requests/<name>.json          what is asked, and of which owner; created by the asker
    requests/<name>.claim.json    who settles it: the owner, or the asker who takes it back
    requests/<name>.answer.json   what became of it; created by an owner

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

What is wrong with a request is answered or logged and never ends the job. Wall clock times are
compared here, and nowhere else: asker and owner may be on two machines and share no other clock.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from flinkish_spark.answers import CheckpointAnswer
from flinkish_spark.clock import Clock
from flinkish_spark.errors import CorruptObjectError, FlinkishError, JobDirError, StoreError
from flinkish_spark.job_dir import JobDir
from flinkish_spark.protocol.ids import OwnerEpoch
from flinkish_spark.runtime.outside_requests import (
    FOLDER,
    Claim,
    Claimant,
    OutsideAnswer,
    OutsideOutcome,
    OutsideRequest,
    Part,
    RequestFiles,
    parse_file,
)

LOG = logging.getLogger(__name__)
#: A request that is older than this was left by an asker that is gone; it is refused.
OLDEST_MS = 600_000
#: How long settled requests lie before the owner deletes them; an asker looks ten times a second.
KEPT_MS = 600_000


class Inbox:
    """The owner's side; one for the life of the process that runs the job.

    Parameters
    ----------
    job_dir
        Of the job.
    clock
        Tells how old a request is.

    Examples
    --------
    See `tests/unit/test_inbox.py`; the owner's loop is::

        inbox.took_over(ownership.epoch)
        for request in inbox.take():
            inbox.answer(request.name, carry_out(request))
    """

    def __init__(self, job_dir: JobDir, clock: Clock) -> None:
        self._job_dir, self._clock = job_dir, clock
        self._mine: tuple[OwnerEpoch, ...] = ()
        self._lock = threading.Lock()
        #: Handed out; not answered yet.
        self._taken: set[str] = set()
        #: Nothing more will happen to them; monotonic time since when.
        self._settled: dict[str, int] = {}
        self._strange: frozenset[str] = frozenset()

    def took_over(self, epoch: OwnerEpoch) -> None:
        """Take requests of this owner epoch from now on, beside those of earlier ones of this process.

        Called after each `ownership.take_over`. Before the first call :meth:`take` returns nothing.
        """
        self._mine = (*self._mine, epoch)

    def take(self) -> tuple[OutsideRequest, ...]:
        """Return the requests to carry out now, oldest first; each is returned once.

        Called by one thread, some times a second; costs one listing of a folder that is empty or
        missing as a rule. Never raises because of what is in the folder, nor because the store
        fails: that is logged, and tried again with the next call.
        """
        if not self._mine:
            return ()
        taken: list[OutsideRequest] = []
        try:
            found = self._found()
            for name, parts in found.items():
                request = self._look_at(name, parts)
                if request is not None:
                    taken.append(request)
            self._forget(found)
        except StoreError as error:
            LOG.warning("requests from outside are looked at later: %s", error)
        # Those that were claimed before the store failed must not get lost.
        return tuple(sorted(taken, key=lambda request: (request.asked_at_ms, request.name)))

    def answer(self, name: str, answer: CheckpointAnswer) -> None:
        """Answer a request that :meth:`take` returned; the first answer stays.

        Called by any thread of the owner's. Every request must be answered before its process lets
        the job go, or its asker waits in vain and the next owner answers UNKNOWN. An answer that
        the store refuses is logged.
        """
        self._answer(name, OutsideAnswer.of(answer))

    # -- inside ---------------------------------------------------------------------------------
    def _found(self) -> dict[str, set[Part]]:
        """Return which parts are there, by the name of the request."""
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
        """Return the request if it is to be carried out; settle it if not."""
        with self._lock:
            if name in self._taken or name in self._settled:
                return None
        if Part.REQUEST not in parts or Part.ANSWER in parts:
            # Its asker has it, or has gone.
            self._settle(name)
            return None
        files = RequestFiles(self._job_dir, name)
        try:
            request = files.request()
        except (CorruptObjectError, JobDirError) as error:
            LOG.warning("a request is refused: %s", error)
            self._answer(name, OutsideAnswer(OutsideOutcome.REFUSED, text=_one_line(error)))
            return None
        if request is None or request.owner_epoch > self._mine[-1]:
            # Taken back, or for the owner that has followed this one.
            return None
        return request if self._claims(files, request) else None

    def _claims(self, files: RequestFiles, request: OutsideRequest) -> bool:
        """Claim a request; return whether it is to be carried out, and settle it if not."""
        name = request.name
        try:
            claim = files.claim(Claim(Claimant.OWNER, self._mine[-1]))
        except (CorruptObjectError, JobDirError) as error:
            LOG.warning("a request whose claim cannot be read: %s", error)
            self._answer(name, OutsideAnswer(OutsideOutcome.UNKNOWN, text=_one_line(error)))
            return False
        if claim.by is Claimant.ASKER:
            self._settle(name)
            return False
        if claim.owner_epoch > self._mine[-1]:
            # The owner that has followed this one settles it.
            return False
        if claim.owner_epoch not in self._mine:
            self._answer(name, _unknown(claim.owner_epoch))
            return False
        if files.request() is None:
            # Taken back between the look and the claim, which the asker had deleted by then.
            files.delete_claim()
            return False
        refusal = self._refusal(request)
        if refusal:
            LOG.info("a request for %s is refused: %s", request.kind.value, refusal)
            self._answer(name, OutsideAnswer(OutsideOutcome.REFUSED, text=refusal))
            return False
        LOG.info("asked from outside: %s %s", request.kind.value, request.target)
        with self._lock:
            self._taken.add(name)
        return True

    def _refusal(self, request: OutsideRequest) -> str:
        if request.owner_epoch not in self._mine:
            return (
                f"it was asked of owner {request.owner_epoch}, and owner {self._mine[-1]} has the job now; "
                "ask again"
            )
        age_ms = self._clock.wall_ms() - request.asked_at_ms
        if age_ms > OLDEST_MS:
            return f"it was asked {age_ms // 1_000} s ago, by the clock of this machine; ask again"
        return ""

    def _answer(self, name: str, answer: OutsideAnswer) -> None:
        try:
            RequestFiles(self._job_dir, name).give_answer(answer)
        except StoreError as error:
            LOG.warning("the answer %s to a request is not written: %s", answer.outcome.value, error)
        self._settle(name)

    def _settle(self, name: str) -> None:
        with self._lock:
            self._taken.discard(name)
            self._settled[name] = self._clock.monotonic_ms()

    def _forget(self, found: Mapping[str, set[Part]]) -> None:
        """Forget what its asker has deleted, and delete what nobody came for."""
        now_ms = self._clock.monotonic_ms()
        with self._lock:
            gone = self._settled.keys() - found.keys()
            old = [name for name, since in self._settled.items() if now_ms - since > KEPT_MS]
            for name in gone:
                del self._settled[name]
        for name in old:
            RequestFiles(self._job_dir, name).delete()


def _unknown(owner: OwnerEpoch) -> OutsideAnswer:
    text = (
        f"owner {owner} took it and ended before it answered: it may or may not have been carried out. "
        "Look at `flinkish checkpoints list` before you ask again"
    )
    return OutsideAnswer(OutsideOutcome.UNKNOWN, text=text)


def _one_line(error: FlinkishError) -> str:
    return " ".join(str(error).split())
