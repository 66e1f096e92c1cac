"""Nexmark's queries as scripts in SQL: two runs that catch up, every result as DuckDB finds it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import deltalake
import pandas as pd
import pytest
from pyspark.sql import SparkSession

from bench.nexmark import generator, sql, truth
from flinkish_spark import CaughtUp, CheckpointConfig, StreamExecutionEnvironment, add_sql_script

MODEL = generator.Model(events=40_000, active=300)
#: What DuckDB is asked, for queries that the bench does not measure.
SQL = {
    "q1": 'SELECT auction, bidder, (0.908 * price)::DECIMAL(23, 3), "dateTime", extra FROM bids',
    "q2": "SELECT auction, price FROM bids WHERE auction % 123 = 0",
    "q3": """
        SELECT p.name, p.city, p.state, a.id FROM auctions a JOIN persons p ON a.seller = p.id
        WHERE a.category = 10 AND p.state IN ('OR', 'ID', 'CA')
    """,
    "q9": """
        SELECT a.id, b.* FROM auctions a JOIN bids b
          ON a.id = b.auction AND b."dateTime" BETWEEN a."dateTime" AND a.expires
        QUALIFY row_number() OVER (PARTITION BY a.id ORDER BY b.price DESC, b."dateTime") = 1
    """,
    "q13": """
        SELECT auction, bidder, price, "dateTime", 'value ' || auction % 100 FROM bids
        WHERE auction % 100 < 50
    """,
    "q14": """
        SELECT auction, bidder, (0.908 * price)::DECIMAL(23, 3), 'nightTime',
               length(extra) - length(replace(extra, 'c', ''))
        FROM bids WHERE 0.908 * price > 1000000 AND 0.908 * price < 50000000
    """,
    "q19": """
        SELECT auction, row_number() OVER w AS rank, price, "dateTime" FROM bids
        WINDOW w AS (PARTITION BY auction ORDER BY price DESC, "dateTime") QUALIFY rank <= 10
    """,
    "q21": """
        SELECT auction, bidder, price, channel,
               CASE lower(channel) WHEN 'apple' THEN '0' WHEN 'google' THEN '1' WHEN 'facebook' THEN '2'
                    WHEN 'baidu' THEN '3' END AS channel_id
        FROM bids WHERE channel_id IS NOT NULL
    """,
    "q22": """
        SELECT auction, bidder, price, channel, split_part(url, '/', 4), split_part(url, '/', 5),
               nullif(split_part(url, '/', 6), '') FROM bids
    """,
}


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session without any JAR of ours."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    folder = tmp_path_factory.mktemp("spark")
    settings = {
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    builder = SparkSession.builder.master("local[2]").config(map=settings)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


def write(folder: Path, number: int, frames: dict[str, pd.DataFrame]) -> None:
    """Write a part of the input, the half with this number of each kind."""
    for kind, frame in frames.items():
        (folder / kind).mkdir(exist_ok=True)
        half = len(frame) // 2
        part = frame.iloc[:half] if number == 0 else frame.iloc[half:]
        part.to_json(folder / kind / f".{number}", orient="records", lines=True)
        (folder / kind / f".{number}").rename(folder / kind / f"{number}.json")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", [sql.APPENDS, sql.UPDATES], ids=["append", "update"])
def test_results_are_those_of_duckdb(spark, tmp_path: Path, names: tuple[str, ...]) -> None:
    parts = [*generator.events(MODEL)]
    frames = {
        kind: pd.concat([getattr(part, kind) for part in parts]) for kind in ("persons", "auctions", "bids")
    }
    side = [(key, f"value {key}") for key in range(50)]
    spark.createDataFrame(side, "key LONG, value STRING").createOrReplaceTempView("side")
    script = sql.make_script(str(tmp_path), names)
    for number in range(2):
        write(tmp_path, number, frames)
        env = StreamExecutionEnvironment(
            spark, "nexmark", str(tmp_path / "job"), checkpoint=CheckpointConfig(interval_ms="5 seconds")
        )
        add_sql_script(env, script).execute(until=CaughtUp(), live_line=False)
    judge = truth.Truth(**frames)
    for name in names:
        found = deltalake.DeltaTable(str(tmp_path / name)).to_pandas()
        if name not in SQL:
            # Spark's watermark is that of the stream that is furthest behind: persons come every 50 ms.
            judge.judge(name, found, closes=False, late_ms=generator.EPOCH).or_raise(name)
            continue
        judge._engine.register("written", found)
        for one, other in (("written", f"({SQL[name]})"), (f"({SQL[name]})", "written")):
            differing = judge._asked(f"SELECT * FROM {one} EXCEPT ALL SELECT * FROM {other}")
            assert not differing, (name, len(differing), differing[:3])
        assert len(found), name
