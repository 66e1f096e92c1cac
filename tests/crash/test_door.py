"""Kills of a query with the drop-in door on both ends: nothing lost, nothing twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.process import Victim
from flinkish_spark.checkpoint.micro_batch_commits import STEPS
from flinkish_spark.core.steps import Step
from flinkish_spark.testing import LocalBroker
from tests.crash.door_harness import (
    EVERY_POINT,
    At,
    ConnectDoorRun,
    ConnectFormatRun,
    ConnectSinkGroupRun,
    Crash,
    DoorRun,
    FormatRun,
    Shot,
    SinkGroupRun,
)
from tests.crash.families_rig import Servers


def test_the_list_holds_every_victim_and_both_sides_of_every_step() -> None:
    at = [crash for crash in EVERY_POINT if isinstance(crash, At)]
    assert {(c.step, c.moment) for c in at} == {(s, m) for s in STEPS for m in ("before", "after")}
    assert {c.victim for c in at} == set(Victim)
    assert {c.victim for c in EVERY_POINT if isinstance(c, Shot)} == set(Victim)
    assert len(EVERY_POINT) == 20


LEAST = 10_000


# What of it is tried by day is in tests/integration/broker/test_door.py.
@pytest.mark.nightly
@pytest.mark.timeout(1_800)
def test_twenty_kills_at_the_door(run_directory: Path, broker: LocalBroker) -> None:
    outcome = DoorRun(run_directory, broker, seed=4).run(EVERY_POINT, least=LEAST)

    assert outcome.is_exact, outcome
    assert outcome.sent > LEAST, outcome


#: Around the decision and the sinks' commits, and by chance.
OF_A_GROUP = (
    At(Step.DECISION, "before", Victim.GROUP, 2),
    At(Step.DECISION, "after", Victim.JVM, 2),
    At(Step.SINK_COMMIT, "after", Victim.GROUP, 2),
    Shot(Victim.JVM),
    At(Step.SINK_COMMIT, "before", Victim.DRIVER, 7),
    At(Step.RECEIPT, "before", Victim.GROUP, 1),
    Shot(Victim.WORKER),
    At(Step.RECEIPT, "after", Victim.DRIVER, 1),
    Shot(Victim.GROUP),
)


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize(
    ("kind", "crashes"),
    [
        pytest.param(SinkGroupRun, OF_A_GROUP[:4], id="some"),
        pytest.param(SinkGroupRun, OF_A_GROUP, id="all", marks=pytest.mark.nightly),
        pytest.param(ConnectSinkGroupRun, OF_A_GROUP[1:2], id="connect"),
        pytest.param(ConnectSinkGroupRun, OF_A_GROUP, id="connect-all", marks=pytest.mark.nightly),
        pytest.param(FormatRun, OF_A_GROUP[:3], id="format"),
        pytest.param(FormatRun, OF_A_GROUP, id="format-all", marks=pytest.mark.nightly),
        pytest.param(ConnectFormatRun, OF_A_GROUP[1:2], id="connect-format"),
        pytest.param(ConnectFormatRun, OF_A_GROUP, id="connect-format-all", marks=pytest.mark.nightly),
    ],
)
def test_kills_of_a_group_of_sinks(
    run_directory: Path, servers: Servers, kind: type[SinkGroupRun], crashes: tuple[Crash, ...]
) -> None:
    """A topic, a Delta table, files and a database have each record once."""
    run = kind(run_directory, servers.broker, servers.postgres, seed=6)
    outcome = run.run(crashes, least=600)

    assert outcome.is_exact, outcome
    assert outcome.sent > 600, outcome
    in_topic = run.count_in_topic()
    assert run.count_elsewhere() == {"table": in_topic, "files": in_topic, "rows": in_topic}


#: Behind the decision the server dies, so the next one finishes it; a client's death stops no query.
BY_DAY = (At(Step.DECISION, "after", Victim.JVM, 2), Shot(Victim.DRIVER), Shot(Victim.WORKER))


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize(
    ("crashes", "least"),
    [
        pytest.param(BY_DAY, 3_000, id="some"),
        pytest.param(EVERY_POINT, LEAST, id="all", marks=pytest.mark.nightly),
    ],
)
def test_kills_at_the_door_through_spark_connect(
    run_directory: Path, broker: LocalBroker, crashes: tuple[Crash, ...], least: int
) -> None:
    outcome = ConnectDoorRun(run_directory, broker, seed=5).run(crashes, least=least)

    assert outcome.is_exact, outcome
    assert outcome.sent > least, outcome
