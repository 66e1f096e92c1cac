"""The sweep: every fault at every call of one checkpoint, for every sink.

First one process in which calls fail, lose their answers and are repeated, one after the other; then
lives that end with a kill. In each life every job goes to the next of its points and stands still
there; when all have come, the process is killed, and the next life begins with what that left.
"""

from __future__ import annotations

import time
from functools import partial

from tests.crash.sweep.life import Life
from tests.crash.sweep.points import union
from tests.crash.sweep.results import Result
from tests.crash.sweep.rounds import Lane, Rounds
from tests.crash.sweep.subject import Verdict

_WARM_UP = 3


class Sweep(Rounds):
    """Runs a plan: faults in one process first, then kills."""

    def _go(self, lanes: list[Lane]) -> None:
        self._in_process(lanes)
        self._kills(lanes)

    # -- one process ----------------------------------------------------------------------------
    def _in_process(self, lanes: list[Lane]) -> None:
        life = self._life(lanes)
        try:
            self._side_by_side(lanes, partial(self._prepare, life))
            self._say(f"{sum(len(lane.faults) for lane in lanes)} faults in one process")
            self._side_by_side(lanes, partial(self._faults, life))
        finally:
            life.kill()

    def _prepare(self, life: Life, lane: Lane) -> None:
        subject = lane.subject
        subject.warm_up(life, _WARM_UP)
        calls = lane.results.trace
        if calls is None:
            calls = union(subject.trace(life), subject.trace(life))
            lane.results.add_trace(calls)
        lane.plan(calls, self._plan.choose)

    def _faults(self, life: Life, lane: Lane) -> None:
        while lane.faults and not self._is_over and not lane.is_broken:
            run = lane.faults.pop(0)
            began = time.monotonic()
            is_met, verdict = lane.subject.under_fault(life, run)
            notes = "; ".join(note for note in lane.subject.notes if note != "fired")
            lane.note(Result(run, is_met, verdict, time.monotonic() - began, notes))
            self._said(lane, run, is_met, verdict)

    # -- lives that end with a kill -------------------------------------------------------------
    def _kills(self, lanes: list[Lane]) -> None:
        while True:
            # One more life than kills: the last one shows what the last kill left.
            going = [lane for lane in lanes if self._goes_on(lane)]
            if not going:
                return
            life = self._life(going)
            try:
                self._side_by_side(going, partial(self._live_and_die, life))
            finally:
                life.kill()

    def _goes_on(self, lane: Lane) -> bool:
        return lane.last is not None or (bool(lane.kills) and not self._is_over and not lane.is_broken)

    def _live_and_die(self, life: Life, lane: Lane) -> None:
        subject = lane.subject
        verdict = subject.recover(life)
        if lane.last is not None:
            (run, began), lane.last = lane.last, None
            lane.note(Result(run, True, verdict, time.monotonic() - began))
            self._said(lane, run, True, verdict)
        if not lane.kills or self._is_over or lane.is_broken:
            return
        run, began = lane.kills.pop(0), time.monotonic()
        if not subject.until_reached(life, run):
            lane.note(Result(run, False, Verdict(), time.monotonic() - began))
            self._said(lane, run, False, Verdict())
            return
        lane.last = (run, began)
        early = subject.too_early()
        if not early.is_exact:
            lane.last = None
            lane.note(Result(run, True, early, time.monotonic() - began))
            self._said(lane, run, True, early)
