"""What a newcomer gets wrong, with the last line that each prints; some need Spark, see its tests."""

from __future__ import annotations

import os
import socket
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import (
    CheckpointConfig,
    DeltaSink,
    EnvironmentSecret,
    Json,
    KafkaSink,
    OnBadRecord,
)
from flinkish_spark.checkpoint.ownership import JobLock
from flinkish_spark.connectors.plain_formats import parse_fields
from flinkish_spark.core.job_dir import JobDir, job_place
from flinkish_spark.core.store import LocalStore
from flinkish_spark.datastream.data_stream import DataStream
from flinkish_spark.testing import ProgramHarness
from flinkish_spark.windows import TumblingEventTimeWindows

ORDER = "user STRING, amount LONG"
OF_OURS = "flinkish_spark.core.errors."


def run(program: Callable[[Any], Any], *elements: Any) -> None:
    harness = ProgramHarness(program, ORDER)
    for one in elements:
        harness.push(one)


def mapped(function: Callable[[Any], Any]) -> Callable[[DataStream], Any]:
    return lambda orders: orders.map(function, output=ORDER, name="double")


async def double_later(order: Any) -> Any:
    return order.user, order.amount * 2


LOCK = threading.Lock()
WRONG: Any = None

MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a misspelt import": (
        lambda: exec("from flinkish_spark import KafkaSorce", {}),
        "ImportError: flinkish_spark has no KafkaSorce. Did you mean 'KafkaSource'? To do: correct the "
        "name; "
        "dir(flinkish_spark) lists all.",
    ),
    "an import from the wrong package": (
        lambda: exec("from flinkish_spark import TumblingEventTimeWindows", {}),
        "ImportError: flinkish_spark has no TumblingEventTimeWindows. It is in flinkish_spark.windows. "
        "To do: "
        "write `from flinkish_spark.windows import TumblingEventTimeWindows`.",
    ),
    "a misspelt member of an enum": (
        lambda: OnBadRecord.DORP,  # type: ignore[attr-defined]
        "AttributeError: OnBadRecord has no DORP. Did you mean 'DROP'? To do: choose from FAIL, DROP.",
    ),
    "an enum as a text": (
        lambda: Json(ORDER, on_bad_record="drop"),  # type: ignore[arg-type]
        f"{OF_OURS}ConfigError: on_bad_record is 'drop' (str). It must be one of OnBadRecord.FAIL, "
        "OnBadRecord.DROP, or an instance of DeadLetter. Did you mean 'DROP'? To do: give one of "
        "these, without "
        "quotes, or leave it out.",
    ),
    "a misspelt parameter of a sink": (
        lambda: KafkaSink("b:9092", "out", delivry=WRONG),  # type: ignore[call-arg]
        "TypeError: KafkaSink has no parameter 'delivry'. Did you mean 'delivery'? To do: correct the name.",
    ),
    "a checkpoint interval of 0": (
        lambda: CheckpointConfig(interval_ms=0),
        f"{OF_OURS}ConfigError: interval_ms is 0 (int). It must be a whole number from 1 to 31536000000 "
        "(milliseconds). To do: give CheckpointConfig such a value, or leave it out for its default.",
    ),
    "a misspelt unit of time": (
        lambda: TumblingEventTimeWindows("10 secnds"),
        f"{OF_OURS}ConfigError: size_ms is '10 secnds' (str). It must be a whole number of milliseconds, a "
        'timedelta, or a text like "10 seconds", "5 min" or "500 ms". Did you mean \'seconds\'? To do: '
        "give "
        'milliseconds, or a length of time as text: "10 seconds".',
    ),
    "a wrong field name in key_by": (
        lambda: run(lambda orders: orders.key_by("usr").sum("amount", uid="totals")),
        f"{OF_OURS}GraphError: operator 'totals' is keyed by 'usr', which its records do not have. They "
        "have "
        "user, amount. Did you mean 'user'? To do: name one of them; an expression, or a field of a "
        "STRUCT, is "
        'a Column: key_by(F.expr("amount % 2")), key_by(F.col("address.city")).',
    ),
    "a wrong field name in an aggregate": (
        lambda: run(lambda orders: orders.key_by("user").sum("amuont", uid="totals")),
        f"{OF_OURS}ConfigError: there is no field 'amuont' for SUM. They have user, amount. Did you mean "
        "'amount'? To do: name one of these.",
    ),
    "a duplicate uid": (
        lambda: run(
            lambda orders: orders.key_by("user").sum("amount", uid="t").key_by("user").sum("amount", uid="t")
        ),
        f"{OF_OURS}GraphError: the uid 't' is used twice. State, transactions and table commits are found "
        "again "
        "by uid after a restart. To do: give every source, operator and sink a uid of its own.",
    ),
    "a uid that is no name": (
        lambda: run(lambda orders: orders.key_by("user").sum("amount", uid="my totals")),
        f"{OF_OURS}GraphError: uid 'my totals' is not usable: use 1 to 128 letters, digits, '_', '-' or "
        "'.', "
        "starting with a letter or digit and without '..'. To do: give such a uid.",
    ),
    "a wrong type in a schema": (
        lambda: parse_fields("user STRNG, amount LONG"),
        f"{OF_OURS}SchemaError: the JSON schema cannot be read. Unknown type 'strng' in 'user STRNG, "
        "amount "
        "LONG'. Did you mean 'STRING'? To do: write names with types of Spark, as in \"user STRING, amount "
        'LONG".',
    ),
    "a tuple of the wrong length": (
        lambda: run(mapped(lambda order: (order.user,)), ("ann", 1)),
        f"{OF_OURS}UserFunctionError: operator 'double': the function emitted 1 fields, but 2 are declared: "
        "user, "
        "amount. To do: correct the function or the record; the job goes on from the last checkpoint.",
    ),
    "no output type": (
        lambda: run(lambda orders: orders.map(lambda order: order)),
        f"{OF_OURS}SchemaError: the output of 'map' is not known. <lambda>(): there is no hint for what it "
        'returns. To do: say output="user STRING, total LONG", or let the hint for what <lambda>() '
        "returns be "
        "`-> Total`, with a dataclass or a NamedTuple `Total`.",
    ),
    "a function that is async": (
        lambda: run(mapped(double_later)),
        f"{OF_OURS}ConfigError: the function of map() would never run. It is async, and nobody awaits "
        "it. To do: define it with `def`; a function that awaits a system outside is an AsyncFunction, for "
        "AsyncDataStream.",
    ),
    "a function that cannot be sent": (
        lambda: run(mapped(lambda order: (LOCK, order)[1]), ("ann", 1)),
        f"{OF_OURS}UserFunctionError: the function of 'double' cannot be sent to the workers. TypeError: "
        "cannot "
        "pickle '_thread.lock' object. To do: make sessions, locks and connections in open(), not "
        "outside of it.",
    ),
    "a sink that is none": (
        lambda: run(lambda orders: orders.sink_to("out", uid="out")),  # type: ignore[arg-type]
        f"{OF_OURS}ConfigError: sink is 'out' (str). It must be an instance of Sink. To do: give a "
        "KafkaSink(...) or a DeltaSink(...).",
    ),
    "a relative path of a table": (
        lambda: DeltaSink("orders"),
        f"{OF_OURS}ConfigError: the Delta path 'orders' is relative. To do: give an absolute path or a URI.",
    ),
    "a relative job_dir": (
        lambda: job_place("jobs/orders"),
        f"{OF_OURS}ConfigError: the job_dir 'jobs/orders' cannot be used. It must be an absolute path on "
        "a file "
        "system that driver and executors share, or a folder in a bucket; half of the code runs in other "
        'processes. To do: give an absolute path, or a URL like "s3://bucket/jobs/orders".',
    ),
    "a secret that is not set": (
        lambda: EnvironmentSecret("NO_SUCH_SECRET").read(),
        "flinkish_spark.core.errors.EnvironmentFault: the environment variable NO_SUCH_SECRET is not set. It "
        "should hold a secret. To do: set it where the driver starts.",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_last_line_says_what_why_and_what_to_do(mistake: str) -> None:
    make, says = MISTAKES[mistake]
    with pytest.raises(Exception) as failed:
        make()
    assert last_line(failed.value) == says


def test_the_job_dir_of_a_job_that_runs(tmp_path: Path) -> None:
    owner = JobLock(tmp_path / "owner.lock")
    owner.acquire()
    with pytest.raises(Exception) as failed:
        JobLock(tmp_path / "owner.lock").acquire()
    owner.release()
    assert last_line(failed.value) == (
        f"{OF_OURS}OwnedElsewhereError: the job directory {tmp_path} is owned by process {os.getpid()} on "
        f"{socket.gethostname()} (this one), which is alive. Two jobs on one job directory would stage and "
        "commit against each other. To do: stop the job that runs here first."
    )


def test_the_job_dir_of_another_job(tmp_path: Path) -> None:
    JobDir(LocalStore(tmp_path)).read_or_create_job({"job": "orders"})
    with pytest.raises(Exception) as failed:
        JobDir(LocalStore(tmp_path)).read_or_create_job({"job": "payments"})
    assert last_line(failed.value) == (
        f"{OF_OURS}JobDirError: this job directory was written with job = 'orders', and this job has "
        "'payments'. It must stay the same for the life of a job directory. To do: use job = 'orders' "
        "again, "
        "or a new job_dir."
    )


def last_line(error: BaseException) -> str:
    return traceback.format_exception(error)[-1].strip()
