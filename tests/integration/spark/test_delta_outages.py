"""Every call into the JVM that a checkpoint of a Delta sink makes fails once, and none keeps a cancel out."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import Append, Upsert
from flinkish_spark.checkpoint.failures import classify
from flinkish_spark.connectors.delta import rows as delta_rows
from flinkish_spark.core.errors import FlinkishError
from flinkish_spark.protocol.records import Committable, Outcome
from tests.crash.sweep.files import OUTAGE
from tests.crash.sweep.gateway import hook_gateway
from tests.crash.sweep.points import Call, Effect, Fault, Layer, Point, Run
from tests.crash.sweep.switch import Switch
from tests.support.delta_rig import DeltaRig, Way

_WHOLE = Call("checkpoint", Layer.SINK, Effect.WRITE)


@pytest.fixture
def unhook(spark: Any) -> Iterator[None]:
    out = hook_gateway(spark)
    yield
    out()


def within(switch: Switch, work: Callable[[], Any]) -> Any:
    return switch.around(_WHOLE, work, lambda: AssertionError("nothing was to happen to the whole"))


def points_in(switch: Switch, work: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Do it, and return which calls into the JVM that took."""
    switch.begin(None)
    done = within(switch, work)
    return done, list(dict.fromkeys(call.name for call in switch.end() if call.layer is Layer.JVM))


def fails_at_each(
    switch: Switch, fired: list[str], work: Callable[[], Any], points: list[str]
) -> list[tuple[str, Any]]:
    """Let it fail at each point; return those that it does not come by any more, and its answers there."""
    passed = []
    for point in points:
        fired.clear()
        switch.begin(Run(Point(point), Fault.FAIL))
        try:
            answer = within(switch, work)
        except Exception as error:
            told = classify(error)
            assert isinstance(told, FlinkishError) and OUTAGE in str(told), f"{point}: {told}"
            assert error.__cause__ is not error
        else:
            assert not fired, f"nobody heard that {point} failed"
            passed.append((point, answer))
    switch.begin(None)
    return passed


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mode", "way"),
    [(Append(), Way.DELTA_RS), (Append(), Way.SPARK), (Upsert(("id",)), Way.SPARK)],
    ids=["files", "rows", "merged rows"],
)
def test_every_call_into_the_jvm_fails_once(
    spark: Any, tmp_path: Path, unhook: None, mode: Any, way: Way
) -> None:
    rig = DeltaRig(spark, tmp_path / "t", "id LONG, v STRING", mode=mode, way=way)
    rig.put(1, [(1, "a")])
    fired: list[str] = []
    switch = Switch(fired.append)

    def stage(checkpoint: int) -> list[Committable]:
        return rig.stage(checkpoint * 100, [(checkpoint, "b")])

    def commit(checkpoint: int, staged: list[Committable]) -> Outcome:
        assert not rig.committer.why_dead(staged)
        return rig.commit(checkpoint, staged).outcome

    staged, while_staging = points_in(switch, partial(stage, 2))
    outcome, while_committing = points_in(switch, partial(commit, 2, staged))
    assert outcome is Outcome.COMMITTED
    assert "select" in {name.split()[1] for name in while_staging}
    # delta-rs asks no JVM; Spark reads rows that wait, and writes them.
    wanted = set() if way is Way.DELTA_RS else {"parquet"}
    assert wanted <= {name.split()[1] for name in while_committing}, while_committing
    assert not fails_at_each(switch, fired, partial(stage, 3), while_staging)
    staged = stage(3)
    passed = fails_at_each(switch, fired, partial(commit, 3, staged), while_committing)
    # Behind a MERGE its version is looked up. If that fails, the next try finds the rows in the table.
    assert {answer for _, answer in passed} <= {Outcome.ALREADY_COMMITTED}, passed
    assert way is Way.DELTA_RS or len(passed) < len(while_committing) / 2
    assert commit(3, staged).is_done
    assert rig.rows("id", "v") == Counter({(1, "a"): 1, (2, "b"): 1, (3, "b"): 1})


def test_a_merge_that_takes_hours_lets_a_cancel_through(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = DeltaRig(spark, tmp_path / "t", "id LONG, v STRING", mode=Upsert(("id",)), way=Way.SPARK)
    rig.put(1, [(1, "a")])
    staged = rig.stage(200, [(2, "b")])
    for_hours = "SELECT sum(sqrt(id)) FROM range(0, 1000000000000, 1, 1)"
    ended: list[BaseException] = []

    def commit() -> None:
        with monkeypatch.context() as slow:
            slow.setattr(delta_rows, "merge_statement", lambda *args, **kwargs: for_hours)
            try:
                rig.commit(2, staged)
            except Exception as error:
                ended.append(error)

    thread = threading.Thread(target=commit, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.5)
        rig.committer.interrupt()
    thread.join(1)
    assert len(ended) == 1, "the commit did not end"
    assert isinstance(classify(ended[0]), FlinkishError) and "ancel" in str(classify(ended[0]))
    # The next start commits it.
    assert rig.commit(2, staged).outcome is Outcome.COMMITTED
    assert rig.rows("id", "v") == Counter({(1, "a"): 1, (2, "b"): 1})
