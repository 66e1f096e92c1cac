"""A program beside a savepoint, or beside another program: restored, new, dropped, refused."""

from __future__ import annotations

from typing import Any

from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage
from flinkish_spark.protocol.plan_layout import Chain
from flinkish_spark.protocol.restore import (
    JobShape,
    NonRestoredState,
    OperatorShape,
    RestoreRules,
    SourceShape,
)
from flinkish_spark.protocol.savepoints import OperatorState, SavedChain, SavepointMetadata, SourceFacts
from flinkish_spark.savepoints.comparison import Comparison, Fate, compare_saved

KAFKA = SourceShape("kafka", is_positionable=True, inputs={"orders"})
STRINGS = OperatorShape(128, ("string",))


def saved(**more: Any) -> SavepointMetadata:
    return SavepointMetadata(
        "a" * 32,
        "orders",
        JobUuid("0" * 32),
        CheckpointId(7),
        Lineage(0),
        BatchId(3),
        0,
        2,
        **{
            "operators": {"totals": OperatorState(128, ("string",)), "alarms": OperatorState(128, ("long",))},
            "sources": {"in": SourceFacts("kafka")},
            "chains": (),
            "hooks": {"catalog": {}},
            **more,
        },
    )


def program(**operators: OperatorShape) -> JobShape:
    return JobShape(operators, {"in": KAFKA}, hooks=("catalog",))


def fates(found: Comparison) -> dict[str, Fate]:
    return {one.uid: one.fate for one in found.parts}


def test_each_uid_has_a_fate() -> None:
    found = compare_saved(saved(), program(totals=STRINGS, average=STRINGS), RestoreRules())
    assert fates(found) == {
        "in": Fate.RESTORED,
        "totals": Fate.RESTORED,
        "average": Fate.NEW,
        "catalog": Fate.RESTORED,
        "alarms": Fate.DROPPED,
    }
    assert found.is_refused and found.uids(Fate.DROPPED) == ("alarms",)
    assert str(found).splitlines() == [
        "in       restored  source    kafka",
        "totals   restored  operator  state by string, 128 key groups",
        "average  new       operator  it begins without state",
        "catalog  restored  hook      it gets its state back",
        "alarms   dropped   operator  refused unless non_restored=NonRestoredState.ALLOW",
    ]


def test_what_may_be_left_behind_is_no_reason_to_refuse() -> None:
    allowed = RestoreRules(non_restored=NonRestoredState.ALLOW)
    found = compare_saved(saved(), program(totals=STRINGS), allowed)
    assert not found.is_refused and found.uids(Fate.DROPPED) == ("alarms",)
    assert found.parts[-1].says == "its state is dropped"


def test_what_has_changed_is_refused_with_all_its_reasons() -> None:
    found = compare_saved(
        saved(), program(totals=OperatorShape(64, ("long",)), alarms=STRINGS), RestoreRules()
    )
    totals = next(one for one in found.parts if one.uid == "totals")
    assert totals.fate is Fate.REFUSED and found.is_refused
    assert (
        "stored are 128, the job has 64" in totals.says
        and "stored is string, the job has long" in totals.says
    )


def test_chains_that_stood_at_different_places_are_refused_by_name() -> None:
    left, right = Chain(("in",), ("totals",), ("totals",)), Chain(("in",), ("alarms",), ("alarms",))
    both = Chain(("in",), ("totals", "alarms"), ("alarms",))
    at = saved(
        chains=(
            SavedChain(left, {"in": {"orders": {"0": 5}}}, ("out",)),
            SavedChain(right, {"in": {"orders": {"0": 9}}}, ("other",)),
        )
    )
    shape = JobShape({"totals": STRINGS, "alarms": STRINGS}, {"in": KAFKA}, {both: ("out",)}, ("catalog",))
    found = compare_saved(at, shape, RestoreRules())
    assert [(one.uid, one.what) for one in found.parts if one.fate is Fate.REFUSED][-1] == (
        "alarms",
        "operator",
    )


def test_without_anything_there_is_nothing_to_say() -> None:
    empty = saved(operators={}, sources={}, hooks={})
    assert str(compare_saved(empty, JobShape({}, {}), RestoreRules())) == ""
