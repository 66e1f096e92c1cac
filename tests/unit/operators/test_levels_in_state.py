"""How many partial matches are open, read from state that comes or goes as a whole."""

from __future__ import annotations

import pyarrow as pa

from flinkish_spark.cep import PatternsFromStream
from flinkish_spark.state.key_group import GroupState, NoBases
from tests.support.operator_harness import MemoryBases
from tests.unit.cep.test_pattern_rules import CONDITIONS, FIELDS, PATTERNS, Show, read, started, tell
from tests.unit.cep.test_patterns_over_micro_batches import PATTERNS as OWN
from tests.unit.cep.test_patterns_over_micro_batches import Subtask


def sum_open_items(subtask: Subtask) -> int | None:
    """Return the level in all key groups."""
    runner = subtask._runner
    return sum(
        runner.sum_open_items(GroupState(runner.layout, value, subtask.bases).living()) or 0
        for value in subtask.snapshot().values.values()
    )


def test_stored_partial_matches_are_counted_as_they_were_opened() -> None:
    subtask = Subtask(OWN["pair"], MemoryBases())
    rows = [((key, number, "a"), number) for number, key in enumerate("xyzx")]
    subtask.micro_batch(rows)
    subtask.watermark(3)
    counts = subtask.take().counts
    assert sum_open_items(subtask) == counts["partial_matches_opened"] == 3
    subtask.micro_batch([(("y", 4, "b"), 4)])
    subtask.watermark(4)
    assert sum_open_items(subtask) == 2


def test_those_of_rules_are_counted_by_rule() -> None:
    harness = started()
    tell(harness, "r", 1, {"pattern": "ab"})
    tell(harness, "other", 1, {"pattern": "ab"})
    read(harness, ("a", 1), ("a", 2))
    function = PatternsFromStream(FIELDS, Show(), PATTERNS, CONDITIONS)
    assert harness.take().counts["partial_matches_opened"] == 4
    entries = harness.entries("open")["k"]
    assert {name: len(one.matches) - 1 for name, one in entries.items()} == {"r": 2, "other": 2}
    match = pa.struct([("state", pa.int32()), ("chain", pa.int32()), ("is_held", pa.bool_())])
    kind = pa.map_(pa.string(), pa.struct([("version", pa.int64()), ("matches", pa.list_(match))]))
    stored = [[(name, {"version": 1, "matches": list(one.matches)})] for name, one in entries.items()]
    rows = pa.RecordBatch.from_arrays([pa.array(stored, kind)], names=["value_0"])
    assert function.count_open_items("open", rows) == 4
    assert function.count_open_items("waiting", rows) is None


def test_an_empty_state_has_none() -> None:
    subtask = Subtask(OWN["pair"], MemoryBases())
    state = GroupState(subtask._runner.layout, None, NoBases())
    assert subtask._runner.sum_open_items(state.living()) == 0
