"""What is stored stays what it is: drawn values, and the forms in which they were stored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from flinkish_spark.connectors.write_modes import Append, OverwritePartitions, Upsert, mode_from_json
from flinkish_spark.protocol.envelope import seal
from tests.support.stored_values import RECORDS, Drawn, made, plain, record

#: Written by `tests.golden.make`: a line names a class, and has a value and what is stored of it.
GOLDEN = Path(__file__).parents[2] / "golden" / "stored_forms.jsonl"
#: Shown, and never read.
WRITTEN_ONLY = {"SinkShare", "ManifestRecord", "StagedFile", "EndAtLatest", "EndAtTimestamp", "EndAtOffsets"}
#: Not sealed: there the order of the members is part of what is stored, and Spark compares offsets by it.
IN_THEIR_ORDER = {
    "TaskAck",
    "StateFile",
    "ManifestRecord",
    "Wake",
    "TimeOffer",
    "ControlOffset",
    "HeldChannels",
    "KafkaCommittable",
    "SplitPosition",
    "FoundFile",
    "PendingAlignment",
    "Cut",
}


def golden() -> Iterator[Any]:
    counts: dict[str, int] = {}
    for line in GOLDEN.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        number = counts[case["record"]] = counts.get(case["record"], 0) + 1
        yield pytest.param(*case.values(), id=f"{case['record'].split()[1]} {number}")


def stored_form(value: Any) -> Any:
    return value.to_json()


def read_form(name: str, stored: Any, value: Any) -> Any:
    cls = record("flinkish_spark", name)
    if cls in (Append, OverwritePartitions, Upsert):
        return mode_from_json(stored)
    if name == "job.requests OutsideRequest":
        return cls.from_json(value["name"], stored)
    return cls.from_json(stored)


@pytest.mark.parametrize(("name", "stored", "value"), list(golden()))
def test_what_was_stored_is_what_is_stored_now(name: str, stored: str, value: Any) -> None:
    cls = record("flinkish_spark", name)
    meant = made(cls, value)
    again = stored_form(meant)
    assert seal("it", {"value": again}) == seal("it", {"value": json.loads(stored)})
    if cls.__name__ in IN_THEIR_ORDER:
        assert json.dumps(again, ensure_ascii=False) == stored
    if cls.__name__ not in WRITTEN_ONLY:
        assert plain(read_form(name, json.loads(stored), value)) == plain(meant)


DRAWN = Drawn()
READ = [name for name in RECORDS if name.split()[1] not in WRITTEN_ONLY]


@pytest.mark.parametrize("name", READ, ids=[name.split()[1] for name in READ])
def test_whatever_is_stored_is_read_as_it_was(name: str) -> None:
    drawn = DRAWN.of(record("flinkish_spark", name))

    @settings(derandomize=True, deadline=None, max_examples=8, suppress_health_check=list(HealthCheck))
    @given(drawn)
    def of(value: Any) -> None:
        stored = json.loads(json.dumps(stored_form(value)))
        assert plain(read_form(name, stored, {"name": getattr(value, "name", "")})) == plain(value)

    of()
