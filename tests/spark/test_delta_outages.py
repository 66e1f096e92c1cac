"""Every call into the JVM that a checkpoint of a Delta sink makes fails once, and none keeps a cancel out."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import Upsert
from flinkish_spark.bridge import delta_rows
from flinkish_spark.errors import FlinkishError
from flinkish_spark.protocol.outcomes import Outcome
from flinkish_spark.runtime.failures import classify
from tests.crash.sweep.files import OUTAGE
from tests.crash.sweep.gateway import hook_gateway
from tests.crash.sweep.points import Call, Effect, Fault, Layer, Point, Run
from tests.crash.sweep.switch import Switch
from tests.delta_rig import DeltaRig

_WHOLE = Call("checkpoint", Layer.SINK, Effect.WRITE)


@pytest.fixture
def unhook(spark: Any) -> Iterator[None]:
    out = hook_gateway(spark)
    yield
    out()


def checkpointed(rig: DeltaRig, checkpoint: int) -> None:
    """Take one checkpoint of one row."""
    staged = rig.stage(checkpoint * 100, [(checkpoint, "x")])
    assert not rig.committer.why_dead(staged)
    assert rig.commit(checkpoint, staged).outcome.is_done


def within(switch: Switch, work: Any) -> Any:
    return switch.around(_WHOLE, work, lambda: AssertionError("nothing was to happen to the whole"))


@pytest.mark.parametrize("mode", [None, Upsert(("id",))], ids=["files", "rows"])
def test_every_call_into_the_jvm_fails_once(spark: Any, tmp_path: Path, unhook: None, mode: Any) -> None:
    settings = {} if mode is None else {"mode": mode}
    rig = DeltaRig(spark, tmp_path / "t", "id LONG, v STRING", **settings)
    rig.put(1, [(1, "a")])
    switch = Switch(lambda event: None)
    switch.begin(None)
    staged = within(switch, lambda: rig.stage(200, [(2, "b")]))
    within(switch, lambda: rig.committer.why_dead(staged))
    assert within(switch, lambda: rig.commit(2, staged)).outcome.is_done
    points = list(dict.fromkeys(call.name for call in switch.end() if call.layer is Layer.JVM))
    # Of the transactions, the session, and the files below the table.
    assert {"startTransaction", "forTable", "getFileStatus"} <= {name.split()[1] for name in points}
    checkpoint = 3
    for name in points:
        switch.begin(Run(Point(name), Fault.FAIL))
        try:
            within(switch, partial(checkpointed, rig, checkpoint))
        except Exception as error:
            told = classify(error)
            assert isinstance(told, FlinkishError) and OUTAGE in str(told), f"{name}: {told}"
            assert error.__cause__ is not error
        else:
            pytest.fail(f"{name} did not fail")
        # What was staged before is in no log; a try under new names makes it whole.
        checkpointed(rig, checkpoint)
        checkpoint += 1
    wanted = Counter({(1, "a"): 1, (2, "b"): 1} | {(n, "x"): 1 for n in range(3, checkpoint)})
    assert rig.rows("id", "v") == wanted


def test_a_merge_that_takes_hours_lets_a_cancel_through(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = DeltaRig(spark, tmp_path / "t", "id LONG, v STRING", mode=Upsert(("id",)))
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
