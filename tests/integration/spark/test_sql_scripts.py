"""Scripts in SQL as jobs: tables, views, inserts, what Spark casts, and what is refused with its line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from flinkish_spark import CaughtUp
from flinkish_spark.bridge.sql_statements import InsertInto, parse_script
from flinkish_spark.core.errors import GraphError
from flinkish_spark.sql.script import add_sql_script
from tests.support.jobs import environment, read_delta

SCRIPT = """
-- Orders; each file appears at once.
CREATE TABLE orders (id LONG, user STRING, amount DECIMAL(10, 2), ts TIMESTAMP)
USING files OPTIONS (path '{folder}/orders', format 'json');

CREATE TEMPORARY VIEW large AS SELECT * FROM orders WHERE amount > 5 /* not; */ AND user <> ';';

CREATE TABLE copies (id BIGINT, amount DOUBLE, user STRING)
USING delta OPTIONS (path '{folder}/copies');
INSERT INTO copies SELECT id, amount, upper(user) FROM large;
INSERT INTO copies (user, id, amount) WITH small AS (SELECT * FROM orders WHERE amount <= 5)
SELECT user, id, 0 FROM small;

CREATE TABLE totals (user STRING, total DECIMAL(20, 2))
USING delta OPTIONS (path '{folder}/totals', keys 'user', outputMode 'update');
INSERT INTO totals SELECT user, sum(amount) FROM orders GROUP BY user
"""


def put(folder: Path, name: str, *rows: tuple[int, str, str, int]) -> None:
    folder.mkdir(exist_ok=True)
    lines = [
        json.dumps({"id": id_, "user": user, "ts": f"2026-01-01T00:00:{second:02}Z"})[:-1]
        + f', "amount": {amount}}}'
        for id_, user, amount, second in rows
    ]
    (folder / f".{name}").write_text("\n".join(lines))
    (folder / f".{name}").rename(folder / name)


def rows(folder: Path, *names: str) -> Counter:
    return Counter(tuple(row[name] for name in names) for row in read_delta(folder))


def test_a_script_is_one_job_that_goes_on_in_the_next_run(spark, job_dir, tmp_path) -> None:
    def run() -> None:
        env = environment(spark, job_dir)
        add_sql_script(env, SCRIPT.format(folder=tmp_path)).execute(until=CaughtUp())

    put(tmp_path / "orders", "0.json", (1, "ann", "10.25", 1), (2, "ben", "5", 2), (3, ";", "7.5", 3))
    run()
    put(tmp_path / "orders", "1.json", (4, "ann", "0.75", 4))
    run()
    assert rows(tmp_path / "copies", "id", "amount", "user") == Counter(
        [(1, 10.25, "ANN"), (2, 0.0, "ben"), (4, 0.0, "ann")]
    )
    totals = {(row["user"], str(row["total"])) for row in read_delta(tmp_path / "totals")}
    assert totals == {("ann", "11.00"), ("ben", "5.00"), (";", "7.50")}


def test_the_command_runs_a_script_with_functions_of_python(tmp_path) -> None:
    put(tmp_path / "orders", "0.json", (1, "ann", "10.25", 1))
    (tmp_path / "functions.py").write_text(
        "spark.udf.register('twice', lambda text: text + text, 'STRING')\n"
    )
    (tmp_path / "job.sql").write_text(
        f"""
        CREATE TABLE orders (id LONG, user STRING) USING files
            OPTIONS (path '{tmp_path}/orders', format 'json');
        CREATE TABLE lines USING files OPTIONS (path '{tmp_path}/lines', format 'json');
        INSERT INTO lines SELECT id, twice(user) AS both FROM orders;
        """
    )
    words = ["sql", "-t", "local[2]", "--job-dir", str(tmp_path / "job"), "--until-caught-up"]
    words += ["--py", str(tmp_path / "functions.py"), str(tmp_path / "job.sql")]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    ran = subprocess.run(
        [sys.executable, "-m", "flinkish_spark.cli", *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    written = [path for path in (tmp_path / "lines").iterdir() if path.name[0] not in "._"]
    assert [json.loads(line) for path in written for line in path.read_text().splitlines()] == [
        {"id": 1, "both": "annann"}
    ]


DRIVER = "org.apache.derby.iapi.jdbc.AutoloadedDriver"


def test_a_table_of_a_database_is_joined_as_it_is_in_each_run(spark, job_dir, tmp_path) -> None:
    url = "jdbc:derby:memory:sql-scripts;create=true"
    script = f"""
        CREATE TABLE orders (id LONG, user STRING) USING files
            OPTIONS (path '{tmp_path}/orders', format 'json');
        CREATE TABLE towns USING jdbc OPTIONS (url '{url}', dbtable 'towns', driver '{DRIVER}');
        CREATE TABLE lines USING delta OPTIONS (path '{tmp_path}/lines');
        INSERT INTO lines SELECT id, town FROM orders JOIN towns ON user = name
    """

    def run(*towns: tuple[str, str]) -> None:
        frame = spark.createDataFrame(towns, "name STRING, town STRING").write.mode("overwrite")
        frame.option("driver", DRIVER).jdbc(url, "towns")
        add_sql_script(environment(spark, job_dir), script).execute(until=CaughtUp())

    put(tmp_path / "orders", "0.json", (1, "ann", "1", 1), (2, "ben", "1", 2))
    run(("ann", "Aarau"))
    put(tmp_path / "orders", "1.json", (3, "ann", "1", 3), (4, "ben", "1", 4))
    run(("ann", "Arth"), ("ben", "Bern"))
    assert rows(tmp_path / "lines", "id", "town") == Counter([(1, "Aarau"), (3, "Arth"), (4, "Bern")])


def test_a_database_without_a_driver_is_refused(spark, job_dir, tmp_path) -> None:
    (tmp_path / "in").mkdir()
    script = (ORDERS + COPIES).replace("'/", f"'{tmp_path}/") + (
        "CREATE TABLE t USING jdbc OPTIONS (url 'jdbc:nobody://h/x', dbtable 't', password 'geheim');"
        "INSERT INTO copies SELECT orders.id FROM orders JOIN t ON orders.id = t.id"
    )
    with pytest.raises(GraphError, match="cannot read the table 't' of line 3") as refused:
        add_sql_script(environment(spark, job_dir), script).execute()
    assert "No suitable driver" in str(refused.value) and "geheim" not in str(refused.value)


def test_a_query_is_cut_from_its_insert(spark) -> None:
    texts = [
        "INSERT INTO t SELECT 1",
        "INSERT INTO TABLE t (`from (select`, b) WITH a AS (SELECT 1 AS x) SELECT x, 'select ;' FROM a",
        "insert into t from a select b",
        "INSERT INTO t /* SELECT 2 */ VALUES (1)",
        "INSERT INTO t (a) (SELECT 1)",
        r"""INSERT INTO t SELECT r'\', '\';', concat("r';")""",
    ]
    found = parse_script(spark, "/* ; /* ; */ INSERT ; -- */" + ";\n".join(texts) + ";; -- ;")
    assert [one.query for one in found if isinstance(one, InsertInto)] == [
        "SELECT 1",
        "WITH a AS (SELECT 1 AS x) SELECT x, 'select ;' FROM a",
        "from a select b",
        "VALUES (1)",
        "(SELECT 1)",
        r"""SELECT r'\', '\';', concat("r';")""",
    ]
    assert [one.line for one in found] == [1, 2, 3, 4, 5, 6]


ORDERS = "CREATE TABLE orders (id LONG) USING files OPTIONS (path '/in', format 'json');\n"
COPIES = "CREATE TABLE copies (id LONG) USING delta OPTIONS (path '/out');\n"
REFUSED = {
    "no SQL": (f"{ORDERS}\n\nSELEKT 2", "begins on line 4"),
    "another statement": ("SELECT 1", "line 1 cannot be part of a job"),
    "a view that stays": ("CREATE VIEW v AS SELECT 1", "cannot be part of a job"),
    "an overwrite": (f"{ORDERS}{COPIES}INSERT OVERWRITE copies SELECT id FROM orders", "line 3 cannot"),
    "no insert": (ORDERS, "inserts into no table"),
    "a table without USING": ("CREATE TABLE t (a INT)", "has no USING"),
    "a table that is not there": (f"{ORDERS}INSERT INTO copies SELECT id FROM orders", "which there is not"),
    "no stream": (f"{COPIES}INSERT INTO copies SELECT 1", "line 2 reads no table of the script"),
    "a name twice": (f"{ORDERS}{ORDERS}", "a view or table 'orders' already"),
    "an unknown provider": (
        f"CREATE TABLE t (id LONG) USING iceberg;{COPIES}INSERT INTO copies SELECT id FROM t",
        "is USING iceberg. Tables that are read are of kafka, files, delta",
    ),
    "jdbc alone": (
        f"CREATE TABLE t USING jdbc OPTIONS (url 'jdbc:x:', dbtable 't');{COPIES}"
        "INSERT INTO copies SELECT id FROM t",
        "line 2 reads no table of the script that is a stream",
    ),
    "columns of a table of jdbc": (
        f"{ORDERS}CREATE TABLE t (id LONG) USING jdbc OPTIONS (url 'jdbc:x:', dbtable 't');{COPIES}"
        "INSERT INTO copies SELECT orders.id FROM orders JOIN t ON orders.id = t.id",
        "the table 't' of line 2 has columns",
    ),
    "a missing option": (
        f"CREATE TABLE t (id LONG) USING files;{COPIES}INSERT INTO copies SELECT id FROM t",
        "no option 'path'",
    ),
    "an unknown option": (
        f"CREATE TABLE t (id LONG) USING files OPTIONS (path '/in', fromat 'json');{COPIES}"
        "INSERT INTO copies SELECT id FROM t",
        "the option 'fromat'",
    ),
    "a wrong value": (
        f"CREATE TABLE t (id LONG) USING files OPTIONS (path '/in', format 'xml');{COPIES}"
        "INSERT INTO copies SELECT id FROM t",
        "format 'xml'. To do: use one of json",
    ),
    "NOT NULL of a source": (
        f"CREATE TABLE t (id LONG NOT NULL) USING files OPTIONS (path '/in');{COPIES}"
        "INSERT INTO copies SELECT id FROM t",
        "'id' of the table 't' is NOT NULL",
    ),
    "a default": ("CREATE TABLE t (id LONG DEFAULT 7) USING delta", "is DEFAULT"),
    "a length": ("CREATE TABLE t (id VARCHAR(7)) USING delta", "is VARCHAR"),
    "properties": ("CREATE TABLE t (id LONG) USING delta TBLPROPERTIES ('a' = 'b')", "TBLPROPERTIES"),
    "a transform as a partition": (
        "CREATE TABLE t (id LONG) USING delta PARTITIONED BY (bucket(4, id))",
        "partitions by no column",
    ),
    "an insert by name": (
        f"{ORDERS}{COPIES}INSERT INTO copies BY NAME SELECT id FROM orders",
        "line 3 cannot",
    ),
    "columns of a view": ("CREATE TEMPORARY VIEW v (a) AS SELECT 1", "cannot be part of a job"),
    "a number that is none": (
        "CREATE TABLE t (id LONG) USING kafka OPTIONS (kafka.bootstrap.servers 'h:1', topic 't', "
        f"maxOffsetsPerTrigger 'many');{COPIES}INSERT INTO copies SELECT id FROM t",
        "give a whole number",
    ),
    "columns of a text": (
        "CREATE TABLE t (line STRING) USING kafka OPTIONS (kafka.bootstrap.servers 'h:1', topic 't', "
        f"format 'string');{COPIES}INSERT INTO copies SELECT line FROM t",
        "As a source it has value",
    ),
    "changed rows without keys": (
        f"{ORDERS}CREATE TABLE t USING delta OPTIONS (path '/out', outputMode 'update');"
        "INSERT INTO t SELECT id FROM orders",
        "'update' and no keys",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_a_job_is_refused(spark, job_dir, case: str) -> None:
    script, says = REFUSED[case]
    with pytest.raises(GraphError) as refused:
        add_sql_script(environment(spark, job_dir), script)
    assert says in str(refused.value)


def test_no_error_shows_a_password(spark, job_dir) -> None:
    """A script may have one, though a reference to one is better."""
    tables = [
        "CREATE TABLE t USING jdbc OPTIONS (url 'jdbc:sqlite:/x', dbtable 't', password 'geheim' oops)",
        "CREATE TABLE t USING jdbc OPTIONS (url 'jdbc:what:/x', dbtable 't', password 'geheim')",
        "CREATE TABLE t USING jdbc OPTIONS (url 'jdbc:sqlite:/x', dbtable 't', passwort 'geheim')",
        "CREATE TABLE t USING delta OPTIONS (path '/x', password 'geheim')",
    ]
    for table in tables:
        with pytest.raises(GraphError) as refused:
            add_sql_script(
                environment(spark, job_dir), f"{ORDERS}{table}; INSERT INTO t SELECT * FROM orders"
            )
        assert "geheim" not in str(refused.value)


MISFITS = {
    "a column that is not there": ("(ids) SELECT id FROM orders", "'copies' has no column 'ids'"),
    "a column twice": ("(id, ID) SELECT id, id FROM orders", "A column comes twice"),
    "more columns": ("SELECT id, id AS other FROM orders", "selects 2 columns for 1"),
    "a value that would lose something": ("SELECT CAST(id AS STRING) FROM orders", "id"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_columns_that_do_not_fit_a_table_are_refused_at_the_start(
    spark, job_dir, tmp_path, case: str
) -> None:
    query, says = MISFITS[case]
    (tmp_path / "in").mkdir()
    script = (ORDERS + COPIES).replace("'/", f"'{tmp_path}/") + f"INSERT INTO copies {query}"
    with pytest.raises(GraphError) as refused:
        add_sql_script(environment(spark, job_dir), script).execute()
    assert says in str(refused.value)
