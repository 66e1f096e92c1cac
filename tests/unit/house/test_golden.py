"""What was stored is read, and gone on from: what of it needs no Spark.

`tests/golden/README.md` says what was written, and by what.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest

from flinkish_spark.checkpoint.pins import PinManifest
from flinkish_spark.protocol.decisions import Decision, Receipt, RestagedEpoch, RewindIntent, TriggerRecord
from flinkish_spark.protocol.envelope import unseal
from flinkish_spark.protocol.lineage import RewindOrder
from flinkish_spark.protocol.records import StagedBatch
from flinkish_spark.protocol.series import Series
from flinkish_spark.protocol.statistics import StatisticsHistory
from flinkish_spark.protocol.timeline import Stretch
from tests.golden import programs
from tests.golden.place import HERE


def _loaded(name: str) -> dict[str, Any]:
    with gzip.open(HERE / name) as file:
        found: dict[str, Any] = json.load(file)
    return found


PROGRAMS, RECORDS = _loaded("programs.json.gz"), _loaded("records.json.gz")
#: What reads records of each kind, and writes them again.
READERS: dict[str, Any] = {
    "decision": Decision,
    "pin": PinManifest,
    "receipt": Receipt,
    "restaged": RestagedEpoch,
    "rewind": RewindIntent,
    "rewind-order": RewindOrder,
    "series": Series,
    "staged": StagedBatch,
    "statistics": StatisticsHistory,
    "stretch": Stretch,
    "trigger": TriggerRecord,
}
#: Nobody takes these apart.
FOR_PEOPLE = {"owner", "refused-order", "spark-log"}


@pytest.mark.parametrize("kind", RECORDS)
def test_records_in_every_shape_say_what_they_said(kind: str) -> None:
    for text in RECORDS[kind]:
        body = unseal(kind, text.encode())
        written = body if kind in FOR_PEOPLE else READERS[kind].from_json(body).to_json()
        assert written == body


def test_all_programs_are_kept() -> None:
    assert list(PROGRAMS) == list(programs.PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_goes_on_with_the_state_that_was_stored(name: str) -> None:
    stored = PROGRAMS[name]
    restored = programs.harness(programs.PROGRAMS[name], programs.from_json(stored["state"]))
    assert programs.run(restored, programs.BEHIND) == stored["behind"]


def test_nothing_that_is_stored_names_a_module_of_the_package() -> None:
    """Else a module could never get another name."""
    for name, value in values():
        assert b"flinkish_spark" not in value, name


def values() -> Iterator[tuple[str, bytes]]:
    """Yield all stored values and records, and where they are from."""
    for kind, texts in RECORDS.items():
        yield from ((kind, text.encode()) for text in texts)
    for name, stored in PROGRAMS.items():
        for operator in stored["state"]["operators"].values():
            for text in [*operator["groups"].values(), *operator["partitions"]]:
                if text is not None:
                    yield name, base64.b64decode(text)
