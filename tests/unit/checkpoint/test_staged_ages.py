"""The job says when staged data has waited for half of the time in which it can be committed."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from flinkish_spark import QuietListener
from flinkish_spark.checkpoint.hooks import JobStates
from flinkish_spark.checkpoint.statistics import StagedAge, StagedAges
from flinkish_spark.protocol.ids import BatchId, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import Committable, StagedBatch
from tests.support.clocks import ManualClock
from tests.support.coordinator_rig import Rig, RiggedCommitter


class Ages:
    """What was said: the data of sink `a` lives for 1,000 ms, that of sink `b` for ever."""

    def __init__(self) -> None:
        self.clock = ManualClock(10_000)
        committers = {"a": RiggedCommitter(), "b": RiggedCommitter()}
        committers["a"].staged_lifetime_ms = 1_000
        self.said: list[StagedAge] = []
        self.ages = StagedAges(committers, self.clock, self.said.append)

    def after(self, ms: int, *waiting: StagedBatch) -> list[tuple[int, int]]:
        """Let time pass, look; return (micro-batch, age) of what was said."""
        self.clock.now_ms += ms
        self.ages.check(waiting)
        said, self.said[:] = [(int(one.batch), one.age_ms) for one in self.said], []
        return said


def staged(number: int, began_at_ms: int | None = None, sinks: str = "ab", lineage: int = 0) -> StagedBatch:
    committables = tuple(Committable(sink, {}) for sink in sinks)
    return StagedBatch(Lineage(lineage), BatchId(number), OwnerEpoch(1), 1, (), committables, (), began_at_ms)


def test_it_is_said_once_per_epoch_when_half_of_the_lifetime_has_passed() -> None:
    ages, first, second, third = Ages(), staged(1, 10_000), staged(2, 10_400), staged(3, 11_000)
    assert ages.after(0, first) == []
    assert ages.after(499, first, second) == []
    assert ages.after(1, first, second) == [(1, 500)]
    assert ages.after(300, first, second) == []
    # The epoch of the first is over; the second is 700 ms old by now.
    assert ages.after(300, second, third) == [(2, 700)]
    assert ages.after(300, third) == []


def test_what_a_restart_found_counts_from_its_staging() -> None:
    ages = Ages()
    assert ages.after(0, staged(1, 9_600)) == []
    assert ages.after(100, staged(1, 9_600)) == [(1, 500)]
    ages = Ages()
    assert ages.after(0, staged(1, None)) == [], "an older version wrote no time down"
    assert ages.after(500, staged(1, None)) == [(1, 500)]
    # A wall clock that was set back makes nothing younger than it is.
    ages = Ages()
    assert ages.after(0, staged(1, 99_999)) == [] and ages.after(500, staged(1, 99_999)) == [(1, 500)]


def test_what_holds_nothing_of_a_sink_does_not_age() -> None:
    ages = Ages()
    assert ages.after(5_000, staged(1, 10_000, sinks="b"), staged(2, 14_900)) == []
    assert ages.after(5_000) == []
    # The same number in another lineage is another micro-batch.
    assert ages.after(0, staged(2, 15_000, lineage=1)) == [(2, 5_000)]


def test_a_coordinator_says_so_of_what_is_staged_and_of_what_is_decided(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behaviour 129. Undecided, or decided with a sink that does not come round: the system's clock runs."""
    monkeypatch.setattr(RiggedCommitter, "staged_lifetime_ms", 60_000)

    def said() -> list[str]:
        texts = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return [text[:42] for text in texts if text.startswith("data that sink")]

    with caplog.at_level(logging.WARNING):
        rig = Rig(sinks="a")
        rig.run_batch()
        rig.tick(after_ms=29_000)
        assert said() == []
        rig.tick(after_ms=1_000)
        rig.tick(after_ms=1_000)
        assert said() == ["data that sink 'a' staged in micro-batch 0"]
        assert rig.take() == 1 and rig.confirmed == [1]
        # Decided, and the sink does not come round.
        rig.threads.held = ("complete",)
        assert rig.take() == 2
        rig.tick(after_ms=30_000)
        assert said() == ["data that sink 'a' staged in micro-batch 2"] and rig.confirmed == [1]
        rig.threads.let("complete-2")
        rig.tick(after_ms=60_000)
        assert said() == [] and rig.confirmed == [1, 2]


def test_listeners_hear_of_it_that_want_to() -> None:
    class Curious(QuietListener):
        def __init__(self) -> None:
            self.heard: list[StagedAge] = []

        def on_staged_data_aging(self, age: StagedAge) -> None:
            self.heard.append(age)

    class Other:
        """Has the methods of a listener, and no more."""

    age = StagedAge("a", BatchId(7), 30_000, 60_000)
    curious = Curious()
    JobStates((), (Other(), curious), ManualClock(10_000)).on_staged_data_aging(age)  # type: ignore[arg-type]
    assert curious.heard == [age]
    assert "sink 'a'" in str(age) and "30000 ms old" in str(age) and "60000 ms" in str(age)


def test_the_time_of_the_staging_is_stored_where_it_is_known() -> None:
    one = staged(1, 12_345)
    assert StagedBatch.from_json(one.to_json()) == one
    older = replace(one, began_at_ms=None)
    assert "began_at_ms" not in older.to_json() and StagedBatch.from_json(older.to_json()) == older
