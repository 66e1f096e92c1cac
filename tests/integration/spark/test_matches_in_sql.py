"""MATCH_RECOGNIZE in FROM: in scripts, in views and in sql(), and refusals with line and column."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from flinkish_spark import CaughtUp, FileFormat, FileSink
from flinkish_spark.core.errors import FlinkishError, GraphError, PatternError
from flinkish_spark.sources import FileSource, JsonLines
from flinkish_spark.sql.script import add_sql_script
from tests.support.jobs import environment, read_delta

FIELDS = "symbol STRING, price LONG, at TIMESTAMP"
#: A price that falls, and rises again.
VALLEY = """WATERMARK at DELAY OF INTERVAL 1 SECOND MATCH_RECOGNIZE (
    PARTITION BY symbol ORDER BY at
    MEASURES A.price AS top, LAST(B.price) AS bottom, C.at AS until
    ONE ROW PER MATCH AFTER MATCH SKIP PAST LAST ROW
    PATTERN (A B+ C) WITHIN INTERVAL '1' HOUR
    DEFINE B AS B.price < PREV(B.price), C AS C.price > PREV(C.price) -- not the end: )
)"""
SCRIPT = f"""
CREATE TABLE quotes ({FIELDS}) USING files OPTIONS (path '{{folder}}/quotes', format 'json');
CREATE TEMPORARY VIEW valid AS SELECT * FROM quotes WHERE price > 0;

CREATE TABLE deep (name STRING, depth LONG) USING delta OPTIONS (path '{{folder}}/deep');
INSERT INTO deep
SELECT upper(name), top - bottom
FROM valid {VALLEY} AS found JOIN names ON names.symbol = found.symbol
WHERE top - bottom > 5;

CREATE TEMPORARY VIEW valleys AS SELECT symbol, bottom, until FROM quotes {VALLEY};
CREATE TABLE bottoms (symbol STRING, bottom LONG) USING delta OPTIONS (path '{{folder}}/bottoms');
INSERT INTO bottoms SELECT symbol, bottom FROM valleys;
INSERT INTO bottoms (bottom, symbol) SELECT price, 'cheap' FROM quotes WHERE price < 5 AND price > 0;
CREATE TABLE times (until TIMESTAMP) USING delta OPTIONS (path '{{folder}}/times');
INSERT INTO times SELECT until FROM valleys WHERE symbol = 'x'
"""


def put(folder: Path, name: str, *rows: tuple[str, int, int]) -> None:
    folder.mkdir(exist_ok=True)
    lines = [
        json.dumps({"symbol": symbol, "price": price, "at": f"2026-01-01T00:00:{second:02}Z"})
        for symbol, price, second in rows
    ]
    (folder / f".{name}").write_text("\n".join(lines))
    (folder / f".{name}").rename(folder / name)


def rows(folder: Path, *names: str) -> Counter:
    return Counter(tuple(row[name] for name in names) for row in read_delta(folder))


def test_a_script_finds_matches_that_begin_in_one_run_and_end_in_the_next(spark, job_dir, tmp_path) -> None:
    spark.createDataFrame([("x", "ex"), ("y", "why")], "symbol STRING, name STRING").createOrReplaceTempView(
        "names"
    )

    def run() -> None:
        env = environment(spark, job_dir)
        add_sql_script(env, SCRIPT.format(folder=tmp_path)).execute(until=CaughtUp())

    try:
        # Out of order by less than the delay.
        put(
            tmp_path / "quotes", "0.json", ("x", 70, 1), ("x", 90, 0), ("y", 10, 1), ("x", 60, 2), ("z", 3, 3)
        )
        run()
        put(
            tmp_path / "quotes", "1.json", ("y", 9, 4), ("x", -1, 5), ("x", 65, 6), ("y", 11, 7), ("z", 9, 30)
        )
        run()
    finally:
        spark.catalog.dropTempView("names")
    # Of valid quotes: x 90, 70, 60, 65; y 10, 9, 11, whose depth is 1. With all: x 90, 70, 60, -1, 65.
    assert rows(tmp_path / "deep", "name", "depth") == Counter([("EX", 30)])
    assert rows(tmp_path / "bottoms", "symbol", "bottom") == Counter([("x", -1), ("y", 9), ("cheap", 3)])
    assert [row["until"].isoformat()[:19] for row in read_delta(tmp_path / "times")] == [
        "2026-01-01T00:00:06"
    ]


def test_a_query_of_an_environment_finds_matches(spark, job_dir, tmp_path) -> None:
    put(tmp_path / "quotes", "0.json", ("x", 9, 0), ("x", 7, 1), ("x", 8, 2), ("y", 1, 30))
    env = environment(spark, job_dir)
    quotes = env.from_source(FileSource(str(tmp_path / "quotes"), JsonLines(), FIELDS), uid="quotes")
    env.create_temporary_view("Quotes", quotes)
    valleys = env.sql(f"select * from `quotes` {VALLEY.lower()} as t where t.top > 1", uid="valleys")
    valleys.sink_to(FileSink(str(tmp_path / "out"), FileFormat.JSON), uid="files")
    env.execute(until=CaughtUp())
    (row,) = spark.read.json(f"{tmp_path}/out").collect()
    assert (row["symbol"], row["top"], row["bottom"]) == ("x", 9, 7)


HEAD = f"""CREATE TABLE quotes ({FIELDS}) USING files OPTIONS (path '{{folder}}/in', format 'json');
CREATE TABLE copies USING delta OPTIONS (path '{{folder}}/out');
"""
TWO = f"SELECT a.top FROM quotes {VALLEY} AS a, quotes {VALLEY} AS b"
REFUSED: dict[str, tuple[str, type[FlinkishError], str, str]] = {
    "a table that there is not": (
        f"INSERT INTO copies SELECT * FROM price {VALLEY}",
        GraphError,
        "line 3, column 80 cannot run",
        "'price' is no table",
    ),
    "a view of matches": (
        f"CREATE TEMPORARY VIEW v AS SELECT *, until AS at FROM quotes {VALLEY};"
        f"INSERT INTO copies SELECT * FROM v {VALLEY}",
        GraphError,
        "line 9, ",
        "no view of such tables",
    ),
    "two in a query": (f"INSERT INTO copies {TWO}", GraphError, "line 9, column", "has another one"),
    "a stream beside it": (
        f"INSERT INTO copies SELECT top FROM quotes {VALLEY} AS a JOIN quotes AS b ON a.symbol = b.symbol",
        GraphError,
        "line 3, column",
        "also reads the stream 'quotes'",
    ),
    "an output mode": (
        "CREATE TABLE t USING delta OPTIONS (path '/out', keys 'symbol', outputMode 'update');"
        f"INSERT INTO t SELECT * FROM quotes {VALLEY}",
        GraphError,
        "Matches do not change",
        "leave the output mode 'update' out",
    ),
    "an aggregate": (
        f"INSERT INTO copies SELECT max(top) AS top FROM quotes {VALLEY}",
        GraphError,
        "'copies-query-1' does more than look at single matches",
        "an aggregate (groupBy, agg)",
    ),
    "an order": (
        f"INSERT INTO copies SELECT top FROM quotes {VALLEY} ORDER BY top",
        GraphError,
        "'copies-query-1' does more than look at single matches",
        "orting",
    ),
    "a column that there is not": (
        f"INSERT INTO copies SELECT tip FROM quotes {VALLEY} AS t",
        GraphError,
        "Spark refuses the query 'copies-query-1'",
        "`tip` cannot be resolved",
    ),
    "a field that there is not": (
        f"INSERT INTO copies SELECT * FROM quotes {VALLEY.replace('LAST(B.price)', 'LAST(B.prize)')}",
        PatternError,
        "on line 5, column",
        "prize",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_query_that_cannot_look_for_matches_is_refused(spark, job_dir, tmp_path, case: str) -> None:
    script, error, *says = REFUSED[case]
    (tmp_path / "in").mkdir()
    with pytest.raises(error) as refused:
        add_sql_script(environment(spark, job_dir), HEAD.format(folder=tmp_path) + script).execute()
    for one in says:
        assert one in str(refused.value)


def test_sql_refuses_matches_in_a_view_that_there_is_not(spark, job_dir) -> None:
    with pytest.raises(GraphError, match="no view 'quotes'"):
        environment(spark, job_dir).sql(f"SELECT * FROM quotes {VALLEY}", uid="valleys")
