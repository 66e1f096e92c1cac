"""transform() behind keyed operators, in running jobs: in front of sinks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from flinkish_spark import JobStatus, KeyedProcessFunction, MemorySink, ValueStateDescriptor
from tests.support import environment, running
from tests.two_ways import ODD, ORDERS, ROWS, TOTALS

pytestmark = pytest.mark.timeout(300)


class Noted(KeyedProcessFunction):
    """Running totals; odd amounts go to a side output, and a file says of which amounts it was called."""

    def __init__(self, calls: Path) -> None:
        self.calls = calls

    def open(self, context: Any) -> None:
        self.total = context.get_state(ValueStateDescriptor("total", "LONG", default=0))

    def process_element(self, order: Any, ctx: Any) -> Iterator[Any]:
        with self.calls.open("a") as calls:
            calls.write(f"{order.amount}\n")
        self.total.update(self.total.value() + order.amount)
        if order.amount % 2:
            ctx.output(ODD, (order.user, order.amount))
        yield order.user, self.total.value()


def calls_in(file: Path) -> list[int]:
    return sorted(map(int, file.read_text().split()))


def test_operators_run_once_in_front_of_a_sink_behind_a_transform(spark: Any, tmp_path: Path) -> None:
    """Records and control rows are read apart there; that must not run the operators twice."""
    env = environment(spark, tmp_path / "job")

    def doubled(frame: DataFrame) -> DataFrame:
        return frame.withColumn("double", F.col("total") * 2).where("double > 3")

    orders = env.from_collection(ROWS, ORDERS, uid="orders")
    totals = orders.key_by("user").process(Noted(tmp_path / "calls"), output=TOTALS, uid="totals")
    sink = MemorySink(f"{tmp_path}/out")
    totals.transform(doubled).sink_to(sink, uid="out")
    with running(env) as client:
        assert client.wait(timeout_ms=100_000), f"the job did not end; {client.progress}"
        assert client.status is JobStatus.FINISHED
    found = {"ann": [3, 11, 13], "ben": [4, 13], "cid": [31], "dan": [20]}
    wanted = [(user, total, 2 * total) for user, totals in found.items() for total in totals]
    assert Counter(map(tuple, sink.rows())) == Counter(wanted)
    assert calls_in(tmp_path / "calls") == sorted(row[1] for row in ROWS)
