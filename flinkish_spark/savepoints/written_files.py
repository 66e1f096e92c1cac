"""State files that tasks write, and their reports to the driver."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import types as T

from flinkish_spark.core.errors import EnvironmentFault
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.savepoints import StateFile, check_groups, state_path
from flinkish_spark.state.savepoint_files import StateFileWriter, new_state_file

#: The report of a task about the file that it has written, as JSON.
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
    """Write the values of key groups into one file, if there are any, and yield a row of REPORT.

    The report includes `facts`: `states`, and perhaps `due`, which may grow while values are written.
    """
    task = TaskContext.get()
    # Each attempt has its own file name; no report names the file of a lost attempt.
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
    """Parse rows of REPORT; refuse key groups that an operator with `groups` of them cannot have."""
    reports = sorted((json.loads(row["report"]) for row in rows), key=lambda one: str(one["file"]["name"]))
    try:
        check_groups(uid, groups, [group for one in reports for group in one["groups"] if group >= 0])
    except ValueError as error:
        raise EnvironmentFault(
            f"the state of '{uid}' was not written correctly",
            why=str(error),
            what_to_do="keep the checkpoint or savepoint that it was read from, and report this",
        ) from None
    files, states, due = list[StateFile](), dict[str, str](), list[DueTimers]()
    for report in reports:
        one = report["file"]
        files.append(StateFile(uid, chain, one["name"], one["rows"], one["bytes"], one["sha256"]))
        states.update(report["states"])
        due += map(tuple, report.get("due", ()))
    return WrittenFiles(tuple(files), states, tuple(due))
