"""Plays literal sequences of what happens to a job's checkpoints through the rules of coordination.

A script is a line of words, one per event. The job has the sinks `a` and `b`, the interval is 10 ms.

    run       the job runs, and all who take part       stop      the job stops
    -b +b b$  b does not run, runs, has finished        off, on   the timer is switched
    @50       the clock shows 50 and the rules are asked what is due
    user?     a request: periodic?, follow_up?, user?, savepoint?, final?, final_savepoint?
    ready3    3 is initialised, its hooks have answered
    a3, ab3   a, or a and b, acknowledge 3 in the next micro-batch; the first one is 0
    log3      commits/N of 3 was read                   no3       3 is declined
    won3      the decision of 3 was created             conf3     the receipt of 3 is durable

`play` returns what the rules want done, word by word.

    init3, offer3, decide3@0 (its micro-batch), done3
    abort3:EXPIRED, refuse:SHUT_DOWN(user)              with the reason
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from flinkish_spark.protocol.checkpoint import (
    FinishedParticipants,
    JobPhase,
    Participant,
    ParticipantKind,
    ParticipantStatus,
    Schedule,
)
from flinkish_spark.protocol.coordination import (
    Abort,
    Coordination,
    CoordinationRules,
    Decide,
    Effect,
    Initialise,
    NotifyCompletion,
    Offer,
    Refuse,
)
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.ids import BatchId, CheckpointId, CheckpointPurpose

SINKS = tuple(Participant(ParticipantKind.SINK, uid) for uid in "ab")
_REQUEST = re.compile(r"([a-z_]+)\?")
_STEP = re.compile(r"(ready|no|log|won|conf)(\d+)")
_ACK = re.compile(r"([a-w]+)(\d+)")
_STATUSES = {"-": ParticipantStatus.NOT_RUNNING, "+": ParticipantStatus.RUNNING}


class Script:
    """A coordination and the clock of its story; time moves by the word `@` only."""

    def __init__(
        self,
        max_concurrent: int = 1,
        min_pause_ms: int = 0,
        timeout_ms: int = 1_000,
        queue_limit: int = 100,
        finished: FinishedParticipants = FinishedParticipants.ALLOWED,
        hooks: Sequence[str] = (),
        next_id: int = 1,
    ) -> None:
        rules = CoordinationRules(10, min_pause_ms, timeout_ms, max_concurrent, queue_limit, finished)
        self.hooks = tuple(Participant(ParticipantKind.HOOK, name) for name in hooks)
        self.state = Coordination(rules, (*SINKS, *self.hooks), CheckpointId(next_id), 0)
        self.phase, self.statuses = JobPhase.STARTING, dict.fromkeys("ab", ParticipantStatus.NOT_RUNNING)
        self.now_ms, self.next_batch = 0, 0
        self.effects: list[Effect] = []

    def play(self, events: str) -> str:
        """Let these things happen; return the effects as words."""
        effects = [effect for event in events.split() for effect in self.event(event)]
        self.effects += effects
        return " ".join(map(word, effects))

    def event(self, event: str) -> Sequence[Effect]:
        if event.startswith("@"):
            self.now_ms = int(event[1:])
            return self.state.on_time(self.now_ms)
        if event in ("run", "stop") or event[0] in "+-" or event[-1] == "$":
            return self._job(event)
        if event in ("on", "off"):
            return self.state.on_schedule(Schedule[event.upper()])
        if request := _REQUEST.fullmatch(event):
            return self._request(*request.groups())
        if step := _STEP.fullmatch(event):
            return self._step(step[1], CheckpointId(int(step[2])))
        ack = _ACK.fullmatch(event)
        assert ack, event
        batch, self.next_batch = BatchId(self.next_batch), self.next_batch + 1
        who = [Participant(ParticipantKind.SINK, uid) for uid in ack[1]]
        return self.state.on_barriers(CheckpointId(int(ack[2])), batch, who, self.now_ms)

    def _job(self, event: str) -> Sequence[Effect]:
        if event == "stop":
            self.phase = JobPhase.STOPPED
            return self.state.on_stop(CheckpointFailureReason.JOB_STOPPED, "stopped")
        if event == "run":
            self.phase, self.statuses = JobPhase.RUNNING, dict.fromkeys("ab", ParticipantStatus.RUNNING)
        else:
            self.statuses[event.strip("+-$")] = _STATUSES.get(event[0], ParticipantStatus.FINISHED)
        self.state.on_phase(self.phase, self.statuses)
        return ()

    def _request(self, purpose: str) -> Sequence[Effect]:
        request = self.state.new_request(CheckpointPurpose[purpose.upper()], self.now_ms)
        return self.state.on_request(request, self.now_ms)

    def _step(self, step: str, checkpoint: CheckpointId) -> Sequence[Effect]:
        match step:
            case "ready":
                return self.state.on_initialised(checkpoint, dict.fromkeys(self.hooks, "given"))
            case "no":
                reason = CheckpointFailureReason.DECLINED
                return self.state.on_declined(checkpoint, reason, "declined", self.now_ms)
            case "log":
                return self.state.on_commit_log(checkpoint)
            case "won":
                self.state.on_decided(checkpoint)
                return ()
        return self.state.on_confirmed(checkpoint, self.now_ms)

    @property
    def open(self) -> str:
        """The checkpoints in flight and their states, as words."""
        return " ".join(f"{one.checkpoint}:{one.state.value}" for one in self.state.open)

    @property
    def queued(self) -> str:
        """The purposes that wait, in their order."""
        return " ".join(one.purpose.value.lower() for one in self.state.queue.waiting)


def word(effect: Effect) -> str:
    match effect:
        case Initialise(checkpoint):
            return f"init{checkpoint}"
        case Offer(checkpoint):
            return f"offer{checkpoint}"
        case Decide(checkpoint, batch):
            return f"decide{checkpoint}@{batch}"
        case Abort(checkpoint, _, reason):
            return f"abort{checkpoint}:{reason.value}"
        case NotifyCompletion(checkpoint):
            return f"done{checkpoint}"
        case Refuse(request, reason):
            return f"refuse:{reason.value}({request.purpose.value.lower()})"
