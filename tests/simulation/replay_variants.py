"""Commit or replay, broken on purpose; see :mod:`tests.simulation.variants`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import CreateResult
from flinkish_spark.job.recovery import Recovery
from flinkish_spark.job.replay import Replayer, _Replay
from flinkish_spark.job.spark_engine import SinkStaging
from flinkish_spark.protocol import recovery
from flinkish_spark.protocol import replay as replaying
from flinkish_spark.protocol.envelope import seal
from tests.simulation.patching import Patch, Variant
from tests.simulation.spark_files import SimSparkLog


def _lost_not_aborted() -> Sequence[Patch]:
    original = Replayer.replay

    def replay(self: Any, decision: Any, lost: Any, abort: Any, patiently: Any) -> None:
        calls = itertools.count()

        def abort_later(sink: str, committables: Any) -> None:
            if next(calls):
                abort(sink, committables)

        original(self, decision, lost, abort_later, patiently)

    return [mock.patch.object(Replayer, "replay", replay)]


def _replayed_rows_not_compared() -> Sequence[Patch]:
    return [mock.patch.object(replaying, "_why_other", lambda *args: "")]


def _replays_replace_each_other() -> Sequence[Patch]:
    def create_restaged(self: Any, restaged: Any) -> CreateResult:
        key = f"restaged/{restaged.checkpoint}/{restaged.number}.json"
        self.store.put(key, seal("restaged", restaged.to_json()))
        return CreateResult.CREATED

    return [mock.patch.object(JobDir, "create_restaged", create_restaged)]


def _every_sink_staged_again() -> Sequence[Patch]:
    original = SinkStaging.stage_only

    def stage_only(self: Any, frame: Any, batch: Any, attempt: int, sinks: Any) -> Any:
        return original(self, frame, batch, attempt, frozenset(self._writers))

    return [mock.patch.object(SinkStaging, "stage_only", stage_only)]


def _lost_taken_as_proven() -> Sequence[Patch]:
    original = Replayer.replay

    def replay(self: Any, decision: Any, lost: Any, *args: Any) -> None:
        lost.facts["is_proven_aborted"] = True
        original(self, decision, lost, *args)

    return [mock.patch.object(Replayer, "replay", replay)]


def _loss_of_an_older_decision() -> Sequence[Patch]:
    """As it was before the simulator replayed: position and decision need not belong together."""
    original = Recovery._replay

    def replay(self: Any, checkpoint: Any) -> None:
        self._lost[checkpoint] = (self._job_dir.decision(checkpoint), self._lost[checkpoint][1])
        original(self, checkpoint)

    return [mock.patch.object(Recovery, "_replay", replay)]


def _folders_of_all_owners_cleared() -> Sequence[Patch]:
    """As it was before the simulator replayed."""

    def end_replay(self: Any) -> None:
        for folder in self.store.list("replay"):
            self.store.delete_folder(folder)

    return [mock.patch.object(SimSparkLog, "end_replay", end_replay)]


def _one_folder_for_all_owners() -> Sequence[Patch]:
    original = SimSparkLog.begin_replay

    def begin_replay(self: Any, checkpoint: Any) -> SimSparkLog:
        return original(SimSparkLog(self.store, "spark/1", "/simulated/spark/1"), checkpoint)

    return [mock.patch.object(SimSparkLog, "begin_replay", begin_replay)]


def _no_pin_no_replay() -> Sequence[Patch]:
    """As it was before the simulator replayed."""

    def why_no_state(self: Any, before: Any) -> str:
        why: str = self.parts.job.pins.why_not_restorable(before.checkpoint)
        return why

    return [mock.patch.object(_Replay, "_why_no_state", why_no_state)]


def _replay_before_orders_are_refused() -> Sequence[Patch]:
    """As it was before the simulator replayed."""
    refuse, replay = (next(r for r in recovery.RULES if r.applies is f) for f in _TWO)
    rules = [rule for rule in recovery.RULES if rule is not refuse]
    rules.insert(rules.index(replay) + 1, refuse)
    return [
        mock.patch.object(recovery, "RULES", tuple(_kept(rule, replay) for rule in rules)),
    ]


_TWO = (recovery._refuse, recovery._replay)


def _kept(rule: recovery.Rule, replay: recovery.Rule) -> recovery.Rule:
    if rule is not replay:
        return rule

    def applies(facts: Any) -> Any:
        is_refused = facts.order is not None and facts.refusal
        lost = sorted(d.checkpoint for d in facts.decided if not d.has_receipt and d.checkpoint in facts.lost)
        return recovery.Replay(lost[0]) if is_refused and lost else rule.applies(facts)

    return recovery.Rule(rule.condition, rule.step, rule.why, applies)


def _replays_not_read() -> Sequence[Patch]:
    return [mock.patch.object(JobDir, "find_restaged", lambda self, checkpoint: None)]


def _overtaking_kept() -> Sequence[Patch]:
    """As it was before the simulator looked at the order of what readers see."""
    return [mock.patch.object(Recovery, "_find_overtaking", lambda self, staged: "")]


#: Of commit or replay.
REPLAYS = (
    Variant("lost data not aborted before its replay", _lost_not_aborted),
    Variant("replayed rows not compared", _replayed_rows_not_compared),
    Variant("the last replay wins", _replays_replace_each_other),
    Variant("every sink staged again", _every_sink_staged_again),
    Variant("lost taken as proven", _lost_taken_as_proven),
    Variant("loss of an older decision", _loss_of_an_older_decision),
    Variant("folders of all owners cleared", _folders_of_all_owners_cleared),
    Variant("one replay folder for all owners", _one_folder_for_all_owners),
    Variant("without a pin no replay", _no_pin_no_replay),
    Variant("replays before orders are refused", _replay_before_orders_are_refused),
    Variant("replays not read", _replays_not_read),
    Variant("what overtakes a replay is kept", _overtaking_kept),
)
