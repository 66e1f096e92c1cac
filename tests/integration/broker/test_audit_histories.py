"""`flinkish audit` against each kind of broken history that Jepsen's Kafka workload knows, and a right one.

There a history is what clients sent and polled. Here the job is the client: what it polled are the origins of
its output's rows, what it sent is the output's log, and a transaction is a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.broker.test_audit import ZEROS, Audited, Row

History = Callable[[list[Row]], list[Row]]


@pytest.fixture
def audited(broker: Any, topic: Any, tmp_path: Path) -> Iterator[Audited]:
    """Two partitions, three micro-batches of two checkpoints; every record has a key of its own."""
    made = Audited(tmp_path / "job", broker.bootstrap_servers, topic(partitions=2), topic(partitions=2))
    made.send_input(2, 9)
    # Behind them a record that nobody may see, and the marker that says so.
    made.send_aborted(0)
    made.decide(1, (6, 6), {"0/0": 6, "0/1": 6})
    made.decide(2, (11, 9), {"0/2": 6})
    yield made
    made.producer.close()


def right() -> list[Row]:
    """What the job writes, in order."""
    return [
        Row(partition, offset, f"0/{offset // 3}", key=f"{partition}-{offset}", to=partition)
        for batch in range(3)
        for partition in (0, 1)
        for offset in range(3 * batch, 3 * batch + 3)
    ]


def _without(partition: int, *offsets: int) -> History:
    return lambda rows: [r for r in rows if r.partition != partition or r.offset not in offsets]


def _swapped(partition: int, one: int, other: int, key: str = "") -> History:
    """Exchange two records of a partition, with all that they say; of one key, if that is given."""

    def history(rows: list[Row]) -> list[Row]:
        found = {(r.partition, r.offset): at for at, r in enumerate(rows)}
        first, second = found[partition, one], found[partition, other]
        changed = list(rows)
        changed[first], changed[second] = rows[second], rows[first]
        if key:
            for at in (first, second):
                changed[at] = replace(changed[at], key=key)
        return changed

    return history


def _g0(rows: list[Row]) -> list[Row]:
    """The second checkpoint's records come first in one partition, and last in the other."""
    ours = [r for r in rows if r.partition == 0]
    return [r for r in ours if r.batch == "0/2"] + [r for r in rows if r not in ours or r.batch != "0/2"]


def _g1c(rows: list[Row]) -> list[Row]:
    """Each of two checkpoints shows a record that the other one has read."""
    of = {(0, 5): "0/2", (0, 6): "0/1"}
    changed = [replace(r, batch=of.get((r.partition, r.offset), r.batch)) for r in rows]
    return sorted(changed, key=lambda r: (r.batch, r.partition, r.offset))


def _undecided(rows: list[Row]) -> list[Row]:
    return [*rows, Row(0, 11, "0/3", key="late", to=0)]


#: What is wrong, the history, and what has to be found at least.
BROKEN: dict[str, tuple[History, tuple[str, ...]]] = {
    "g0": (_g0, ("reordered",)),
    "g1a: aborted read": (_undecided, ("partial_checkpoints",)),
    "g1a: poll of an aborted record": (
        lambda rows: [replace(r, offset=9) if (r.partition, r.offset) == (0, 8) else r for r in rows],
        ("unexpected", "lost"),
    ),
    "g1c": (_g1c, ("partial_checkpoints",)),
    "lost write": (_without(0, 4), ("lost", "partial_checkpoints")),
    "duplicate": (lambda rows: [*rows, replace(rows[-1])], ("duplicated", "partial_checkpoints")),
    "unseen": (lambda rows: [r for r in rows if r.batch != "0/2"], ("lost", "partial_checkpoints")),
    "inconsistent offsets": (
        lambda rows: [replace(r, offset=4) if (r.partition, r.offset) == (0, 3) else r for r in rows],
        ("lost", "duplicated"),
    ),
    "precommitted read": (_undecided, ("partial_checkpoints",)),
    "poll that skips, within": (_without(1, 4), ("lost",)),
    "polls that skip, across": (_without(1, 5, 6), ("lost",)),
    "poll that is not monotonic, within": (_swapped(0, 3, 5, "k"), ("reordered",)),
    "polls that are not monotonic, across": (_swapped(0, 5, 6), ("reordered",)),
    "polls that overlap": (
        lambda rows: [*rows, replace(rows[0], batch="0/2")],
        ("duplicated", "partial_checkpoints"),
    ),
    "send that skips, within": (_without(0, 7), ("lost",)),
    "sends that skip, across": (_without(0, 2, 3), ("lost",)),
    "send that is not monotonic, within": (_swapped(1, 6, 8, "k"), ("reordered",)),
    "sends that are not monotonic, across": (_swapped(1, 2, 3), ("reordered",)),
}


def test_a_right_history_is_called_right(audited: Audited) -> None:
    audited.send(*right())
    assert audited.audit()["zeros"] == ZEROS


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_history_is_found(audited: Audited, name: str) -> None:
    history, wanted = BROKEN[name]
    if "aborted" in name:
        audited.on_disk.abort(3, "it expired")
    audited.send(*history(right()))
    found = audited.audit(status=1)
    assert all(found["zeros"][kind] for kind in wanted), found["zeros"]
    assert found["examples"] or found["zeros"]["reordered"]
