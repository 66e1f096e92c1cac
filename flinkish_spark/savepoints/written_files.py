"""State files as tasks write them, and what the driver is told of each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import types as T

from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.savepoints import StateFile, check_groups, state_path
from flinkish_spark.savepoints.files import SavepointError
from flinkish_spark.state.savepoint_files import StateFileWriter, new_state_file

#: What a task says about the file that it has written, as JSON.
REPORT = T.StructType([T.StructField("report", T.StringType())])
#: A key group, and when its next timers are due by event time and by processing time.
DueTimers = tuple[int, int | None, int | None]


def write_state_file(
    place: StoreSpec,
    operator: str,
    name: str,
    values: Iterable[tuple[Sequence[int], Sequence[bytes]]],
    facts: Mapping[str, Any],
) -> Iterator[pa.RecordBatch]:
    """Write values by their groups into one file, if there are any, and yield a row of REPORT.

    It says `facts`, too: `states`, and maybe `due`, which may grow as long as values come.
    """
    task = TaskContext.get()
    # An attempt of its own has a name of its own: a lost one leaves a file that nobody names.
    name += "-0" if task is None else f"-{task.partitionId()}-{task.taskAttemptId()}"
    writer: StateFileWriter | None = None
    found: list[int] = []
    for groups, own in values:
        writer = writer or new_state_file(place, state_path(operator, name))
        writer.write(list(groups), list(own))
        found += groups
    if writer is not None:
        size_bytes, sha256 = writer.close()
        file = {"name": name, "rows": writer.rows, "bytes": size_bytes, "sha256": sha256}
        report = {"file": file, "groups": found, **facts}
        yield pa.RecordBatch.from_pydict({"report": [json.dumps(report)]})


class WrittenFiles(NamedTuple):
    files: tuple[StateFile, ...]
    #: The stored types of the states in them.
    states: Mapping[str, str]
    due: tuple[DueTimers, ...]


def read_reports(rows: Iterable[Any], uid: str, chain: str, groups: int) -> WrittenFiles:
    """Return what rows of REPORT say; refuse key groups that an operator with so many cannot have."""
    reports = sorted((json.loads(row["report"]) for row in rows), key=lambda one: str(one["file"]["name"]))
    try:
        check_groups(uid, groups, [group for one in reports for group in one["groups"] if group >= 0])
    except ValueError as error:
        raise SavepointError(
            f"the state of '{uid}' was not written as it has to be",
            why=str(error),
            what_to_do="keep what it was read from, and report this",
        ) from None
    files, states, due = list[StateFile](), dict[str, str](), list[DueTimers]()
    for report in reports:
        one = report["file"]
        files.append(StateFile(uid, chain, one["name"], one["rows"], one["bytes"], one["sha256"]))
        states.update(report["states"])
        due += map(tuple, report.get("due", ()))
    return WrittenFiles(tuple(files), states, tuple(due))
