"""The rules of coordination against a model that keeps lists and looks everything up in them.

`tests/support/coordination_script.py` says what the words mean. After each event both are asked what is due,
so what counts is what was done by then, not in which call. Behaviours 2, 7 to 15, 24 to 32, 36, 44
to 46, 57, 58.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flinkish_spark.protocol.coordination import Abort, Decide, Initialise, NotifyCompletion, Refuse
from flinkish_spark.protocol.failures import CheckpointFailureReason
from tests.support.coordination_script import Script, word
from tests.support.effort import examples

INTERVAL_MS, TIMEOUT_MS = 10, 60
IMPORTANCE = ("savepoint final final_savepoint", "user follow_up", "periodic")
SAVEPOINTS, LAST = ("savepoint", "final_savepoint"), ("final", "final_savepoint")
STAGES = ("initialising", "triggered", "acknowledged", "logged", "deciding", "decided")


@dataclass
class Wish:
    """A request of the model."""

    number: int
    purpose: str
    forced: bool

    @property
    def place(self) -> tuple[int, int, int]:
        rank = next(n for n, purposes in enumerate(IMPORTANCE) if self.purpose in purposes.split())
        return rank, 0 if self.forced else 1, self.number


@dataclass
class Flight:
    """A checkpoint of the model that has not ended."""

    wish: Wish
    begun_ms: int
    missing: set[str]
    stage: str = "initialising"
    batch: int | None = None

    def is_before(self, stage: str) -> bool:
        return STAGES.index(self.stage) < STAGES.index(stage)


@dataclass
class Model:
    """What should happen, from lists of what happened."""

    max_concurrent: int
    min_pause_ms: int
    room: int
    phase: str = "starting"
    timer: str = "on"
    statuses: dict[str, str] = field(default_factory=lambda: {"a": "-", "b": "-"})
    now_ms: int = 0
    wishes: int = 0
    waiting: list[Wish] = field(default_factory=list)
    flights: dict[int, Flight] = field(default_factory=dict)
    begun_at: list[int] = field(default_factory=list)
    ended_at: list[int] = field(default_factory=lambda: [0])
    words: list[str] = field(default_factory=list)
    is_over: bool = False

    def say(self, what: str, checkpoint: int, reason: str = "") -> None:
        self.words.append(f"{what}{checkpoint}{reason and ':'}{reason}")

    def refuse(self, wish: Wish, reason: str) -> None:
        self.words.append(f"refuse:{reason}({wish.purpose})")

    def end(self, checkpoint: int, reason: str) -> None:
        del self.flights[checkpoint]
        self.say("abort", checkpoint, reason)

    # -- events ---------------------------------------------------------------------------------
    def why_not(self, purpose: str) -> str:
        if self.phase == "stopped":
            return "SHUT_DOWN"
        if purpose == "periodic" and self.timer == "off":
            return "PERIODIC_SCHEDULING_OFF"
        if purpose in ("periodic", "follow_up") and purpose in [one.purpose for one in self.waiting]:
            return "ALREADY_QUEUED"
        if self.phase == "starting" or "-" in self.statuses.values():
            return "PARTICIPANT_NOT_RUNNING"
        return ""

    def wish(self, purpose: str, forced: bool = False) -> None:
        self.wishes += 1
        wish, reason = Wish(self.wishes, purpose, forced), self.why_not(purpose)
        if reason:
            self.refuse(wish, reason)
            return
        lost = self.queue(wish)
        if lost is not None:
            self.refuse(lost, "QUEUE_FULL")
        self.begin()

    def queue(self, wish: Wish) -> Wish | None:
        self.waiting = sorted([*self.waiting, wish], key=lambda one: one.place)
        if wish.forced or len(self.waiting) <= self.room:
            return None
        lost = [one for one in self.waiting if not one.forced][-1]
        self.waiting.remove(lost)
        return lost

    def wait(self, until_ms: int) -> None:
        self.now_ms = until_ms
        for checkpoint, flight in list(self.flights.items()):
            if flight.is_before("deciding") and until_ms - flight.begun_ms >= TIMEOUT_MS:
                self.end(checkpoint, "EXPIRED")
                self.ended_at.append(until_ms)

    def stop(self) -> None:
        self.phase = "stopped"
        while self.waiting:
            self.refuse(self.waiting.pop(0), "SHUT_DOWN")
        for checkpoint, flight in list(self.flights.items()):
            if flight.is_before("deciding"):
                early = flight.stage == "initialising"
                self.end(checkpoint, "INITIALISATION_CANCELLED" if early else "JOB_STOPPED")

    def switch(self, timer: str) -> None:
        self.timer = timer
        for one in [one for one in self.waiting if one.purpose == "periodic" and timer == "off"]:
            self.waiting.remove(one)
            self.refuse(one, "PERIODIC_SCHEDULING_OFF")

    def ready(self, checkpoint: int) -> None:
        self.flights[checkpoint].stage = "triggered"
        self.say("offer", checkpoint)

    def acknowledge(self, checkpoint: int, who: str, batch: int) -> None:
        flight = self.flights.get(checkpoint)
        if flight is None or flight.stage != "triggered" or not flight.missing & set(who):
            return
        flight.missing -= set(who)
        flight.batch = batch
        if not flight.missing:
            flight.stage = "acknowledged"

    def decline(self, checkpoint: int) -> None:
        if checkpoint in self.flights and self.flights[checkpoint].is_before("decided"):
            self.end(checkpoint, "DECLINED")
            self.ended_at.append(self.now_ms)

    def confirm(self, checkpoint: int) -> None:
        self.is_over = self.is_over or self.flights.pop(checkpoint).wish.purpose in LAST
        self.ended_at.append(self.now_ms)
        self.say("done", checkpoint)

    # -- what follows ---------------------------------------------------------------------------
    def settle(self) -> list[str]:
        self.decide()
        is_due = self.now_ms - max([0, *self.begun_at]) >= INTERVAL_MS
        if is_due and self.is_pause_over() and self.timer == "on" and not self.why_not("periodic"):
            self.wishes += 1
            mine = Wish(self.wishes, "periodic", forced=False)
            lost = self.queue(mine)
            if lost not in (None, mine):
                self.refuse(lost, "QUEUE_FULL")
        self.begin()
        words, self.words = self.words, []
        return sorted(words)

    def is_pause_over(self) -> bool:
        return self.now_ms - max(self.ended_at) >= self.min_pause_ms

    def decide(self) -> None:
        if any(not flight.is_before("deciding") for flight in self.flights.values()):
            return
        logged = [c for c, flight in self.flights.items() if flight.stage == "logged"]
        for checkpoint in sorted(logged)[:1]:
            older = [c for c in self.flights if c < checkpoint]
            if any(self.flights[c].wish.purpose in SAVEPOINTS for c in older):
                return
            for c in older:
                self.end(c, "SUBSUMED")
            self.flights[checkpoint].stage = "deciding"
            self.say(f"decide{checkpoint}@", self.flights[checkpoint].batch)

    def begin(self) -> None:
        if not self.waiting or any(flight.is_before("acknowledged") for flight in self.flights.values()):
            return
        if self.is_over or any(flight.wish.purpose in LAST for flight in self.flights.values()):
            return
        first = self.waiting[0]
        if not first.forced and len(self.flights) >= self.max_concurrent:
            return
        if first.purpose == "periodic" and not self.is_pause_over():
            return
        self.waiting.remove(first)
        self.begun_at.append(self.now_ms)
        asked = {uid for uid, status in self.statuses.items() if status != "$"}
        self.flights[len(self.begun_at)] = Flight(first, self.now_ms, asked)
        self.say("init", len(self.begun_at))


class CoordinationAgainstModel(RuleBasedStateMachine):
    """Every event goes to both; what was done, what is open and what waits must agree."""

    @initialize(
        max_concurrent=st.integers(1, 4),
        min_pause_ms=st.sampled_from([0, 5, 15]),
        room=st.integers(1, 4),
        early=st.sampled_from(["", "", "periodic user", "savepoint final"]),
    )
    def begin(self, max_concurrent: int, min_pause_ms: int, room: int, early: str) -> None:
        self.script = Script(max_concurrent, min_pause_ms, TIMEOUT_MS, room)
        self.model = Model(max_concurrent, min_pause_ms, room)
        for purpose in early.split():
            self.request(purpose)
        self.model.phase, self.model.statuses = "running", {"a": "+", "b": "+"}
        self.play("run")

    def play(self, event: str) -> None:
        """Let the rules meet an event that the model has met, and compare."""
        seen = len(self.script.effects)
        for one in (event, f"@{self.model.now_ms}"):
            self.script.play(one)
        new = self.script.effects[seen:]
        assert sorted(map(word, new)) == self.model.settle()

    @rule(
        purpose=st.sampled_from(("user savepoint " + " ".join(IMPORTANCE)).split()),
    )
    def request(self, purpose: str) -> None:
        self.model.wish(purpose, forced=purpose in ("savepoint", "final_savepoint", "drained_savepoint"))
        self.play(f"{purpose}?")

    @rule(passed_ms=st.sampled_from([1, 2, 4, 10, 30]))
    def wait(self, passed_ms: int) -> None:
        self.model.wait(self.model.now_ms + passed_ms)
        self.play(f"@{self.model.now_ms}")

    @precondition(lambda self: set(self.model.statuses.values()) == {"+"})
    @rule(uid=st.sampled_from("ab"), status=st.sampled_from("-$"))
    def fail_or_finish(self, uid: str, status: str) -> None:
        self.model.statuses[uid] = status
        self.play(uid + status if status == "$" else status + uid)

    @precondition(lambda self: set(self.model.statuses.values()) != {"+"})
    @rule()
    def run_again(self) -> None:
        self.model.statuses = {"a": "+", "b": "+"}
        self.play("run" if self.model.phase == "running" else f"@{self.model.now_ms}")

    @precondition(lambda self: self.model.timer == "off" or len(self.model.waiting) > 1)
    @rule()
    def switch(self) -> None:
        timer = "on" if self.model.timer == "off" else "off"
        self.model.switch(timer)
        self.play(timer)

    @precondition(lambda self: self.model.flights)
    @rule(number=st.integers(0, 9))
    def go_on(self, number: int) -> None:
        """One checkpoint takes its next step."""
        self.next_step_of(list(self.model.flights)[number % len(self.model.flights)])

    @precondition(lambda self: self.model.flights)
    @rule(which=st.sampled_from([min, max, max]), until=st.sampled_from(["acknowledged", "logged", "gone"]))
    def hurry(self, which: Callable[..., int], until: str) -> None:
        """The oldest or the youngest comes as far as that, if it can; the youngest may overtake others."""
        checkpoint = which(self.model.flights)
        for _ in STAGES:
            flight = self.model.flights.get(checkpoint)
            if flight is not None and flight.stage not in (until, "logged"):
                self.next_step_of(checkpoint)

    def next_step_of(self, checkpoint: int) -> None:
        flight = self.model.flights[checkpoint]
        match flight.stage:
            case "initialising":
                self.model.ready(checkpoint)
                self.play(f"ready{checkpoint}")
            case "triggered":
                self.acknowledge(checkpoint, "".join(sorted(flight.missing)))
            case "acknowledged":
                flight.stage = "logged"
                self.play(f"log{checkpoint}")
            case "deciding":
                flight.stage = "decided"
                self.play(f"won{checkpoint}")
            case "decided":
                self.model.confirm(checkpoint)
                self.play(f"conf{checkpoint}")

    @rule(checkpoint=st.integers(0, 9), who=st.sampled_from(["a", "b", "ab", "abc"]))
    def acknowledge(self, checkpoint: int, who: str) -> None:
        """Of an id of any kind: unknown, too early, awaited, late."""
        self.model.acknowledge(checkpoint, who, self.script.next_batch)
        self.play(f"{who}{checkpoint}")

    @rule(checkpoint=st.integers(0, 12))
    def decline(self, checkpoint: int) -> None:
        self.model.decline(checkpoint)
        self.play(f"no{checkpoint}")

    @precondition(lambda self: len(self.model.begun_at) > 4)
    @rule()
    def stop(self) -> None:
        self.model.stop()
        self.play("stop")

    # -- what always holds ----------------------------------------------------------------------
    @invariant()
    def they_agree(self) -> None:
        if not hasattr(self, "script"):
            return
        flights = " ".join(f"{c}:{flight.stage.upper()}" for c, flight in self.model.flights.items())
        assert self.script.open == flights
        assert self.script.queued == " ".join(one.purpose for one in self.model.waiting)

    @invariant()
    def the_rules_hold(self) -> None:
        """The head of the module under test lists them; here they are read off the effects alone."""
        if not hasattr(self, "script"):
            return
        effects, state = self.script.effects, self.script.state
        begun = [one for one in effects if isinstance(one, Initialise)]
        assert [int(one.checkpoint) for one in begun] == list(range(1, len(begun) + 1))
        decided = [one.checkpoint for one in effects if isinstance(one, Decide)]
        assert decided == sorted(set(decided))
        stages = Counter(one.state.value for one in state.open)
        assert stages["INITIALISING"] + stages["TRIGGERED"] <= 1
        assert stages["DECIDING"] + stages["DECIDED"] <= 1
        forced = sum(one.request.is_forced for one in state.open)
        assert len(state.open) - forced <= self.model.max_concurrent
        for one in effects:
            if isinstance(one, Abort) and one.reason is CheckpointFailureReason.SUBSUMED:
                assert not one.request.purpose.is_savepoint

    @invariant()
    def each_request_is_answered_once_or_still_open(self) -> None:
        if not hasattr(self, "script"):
            return
        answers = [e for e in self.script.effects if isinstance(e, Refuse | Abort | NotifyCompletion)]
        numbers = Counter(one.request.number for one in answers)
        numbers.update(one.number for one in self.script.state.queue.waiting)
        numbers.update(one.request.number for one in self.script.state.open)
        assert set(numbers.values()) <= {1}
        # The timer asks nobody and is told nothing when there is no room for it.
        begun = {e.request.number for e in self.script.effects if isinstance(e, Initialise)}
        assert begun <= numbers.keys()

    @invariant()
    def nothing_is_left_behind_a_stop(self) -> None:
        if hasattr(self, "script") and self.model.phase == "stopped":
            assert self.script.queued == ""
            assert {one.state.value for one in self.script.state.open} <= {"DECIDING", "DECIDED"}


class TestCoordinationAgainstModel(CoordinationAgainstModel.TestCase):
    settings = settings(
        max_examples=examples(200),
        stateful_step_count=examples(60, least=25),
        deadline=None,
        derandomize=True,
    )
