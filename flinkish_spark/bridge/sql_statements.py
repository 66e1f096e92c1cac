"""Statements of Spark's SQL, as Spark's own parser reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.errors import ParseException
from pyspark.sql import SparkSession
from pyspark.sql import types as T

from flinkish_spark.core.errors import GraphError


@dataclass(frozen=True)
class CreateTable:
    """``CREATE TABLE name (columns) USING provider OPTIONS (...) PARTITIONED BY (...)``."""

    line: int
    name: str
    columns: T.StructType
    provider: str
    options: Mapping[str, str]
    partition_by: tuple[str, ...]


@dataclass(frozen=True)
class CreateView:
    """``CREATE TEMPORARY VIEW name AS query``."""

    line: int
    name: str
    query: str


@dataclass(frozen=True)
class InsertInto:
    """``INSERT INTO table (columns) query``."""

    line: int
    table: str
    columns: tuple[str, ...]
    query: str


Statement = CreateTable | CreateView | InsertInto

#: Comments and quoted texts, in which a semicolon ends nothing; then the semicolon.
_TOKENS = re.compile(
    r"(?P<skipped>--[^\n]*|/\*.*?\*/|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|`(?:[^`]|``)*`)|(?P<end>;)", re.S
)
_COMMENTS = re.compile(r"\s+|--[^\n]*|/\*.*?\*/", re.S)
#: Words with which a query may begin.
_QUERY = re.compile(r"\b(?:WITH|SELECT|FROM|VALUES|TABLE)\b|\(", re.IGNORECASE)
#: A table or view in the text of a parsed plan.
_UNRESOLVED = re.compile(r"'UnresolvedRelation \[([^\],]+)\]")


def find_relations(spark: SparkSession, text: str) -> frozenset[str]:
    """Return the names of tables and views that a query reads, in lower case; refuse a wrong text."""
    return frozenset(name.lower() for name in _UNRESOLVED.findall(str(_parse(spark, text, 1).toString())))


def parse_script(spark: SparkSession, script: str) -> list[Statement]:
    """Return the statements of a script; refuse a text that is none, with its line."""
    return [_read(spark, text, line) for text, line in _split(script)]


def _split(script: str) -> Iterator[tuple[str, int]]:
    """Yield each statement with the line on which it begins."""
    begin = 0
    ends = [found.start() for found in _TOKENS.finditer(script) if found["end"]]
    for end in (*ends, len(script)):
        at = begin
        while (blank := _COMMENTS.match(script, at, end)) is not None:
            at = blank.end()
        if at < end:
            yield script[at:end], script.count("\n", 0, at) + 1
        begin = end + 1


def _parse(spark: SparkSession, text: str, line: int) -> Any:
    try:
        return spark._jsparkSession.sessionState().sqlParser().parsePlan(text)
    except ParseException as error:
        # The lines after the first show the whole statement, which may have a password among its options.
        says = next((one for one in str(error).splitlines() if one.strip()), "")
        raise GraphError(
            f"Spark cannot parse the statement that begins on line {line}",
            why=says,
            what_to_do="correct it",
        ) from None


def _read(spark: SparkSession, text: str, line: int) -> Statement:
    plan = _parse(spark, text, line)
    match plan.getClass().getSimpleName():
        case "CreateTable":
            return _read_table(plan, line)
        case "CreateViewCommand" if str(plan.viewType().toString()) == "LocalTempView":
            return CreateView(line, str(plan.name().table()), str(plan.originalText().get()))
        case "InsertIntoStatement" if not plan.overwrite() and plan.partitionSpec().isEmpty():
            named = plan.userSpecifiedCols()
            columns = tuple(str(named.apply(at)) for at in range(named.size()))
            table = plan.table().multipartIdentifier().mkString(".")
            return InsertInto(line, str(table), columns, _cut_query(spark, text, plan.query(), line))
    raise GraphError(
        f"the statement that begins on line {line} cannot be part of a job",
        why="a script has CREATE TABLE ... USING, CREATE TEMPORARY VIEW ... AS and INSERT INTO",
        what_to_do="leave it out, or run it with Spark before the job",
    )


def _cut_query(spark: SparkSession, text: str, query: Any, line: int) -> str:
    """Return the part of an insert that is its query: the first part that Spark reads as the same."""
    wanted = _describe(query)
    for found in _QUERY.finditer(text):
        try:
            if _describe(_parse(spark, text[found.start() :], line)) == wanted:
                return text[found.start() :]
        except GraphError:
            continue
    raise AssertionError(f"the insert of line {line} has no query")


def _describe(plan: Any) -> str:
    """Return a plan as text, without the numbers that Spark gives to its columns."""
    return re.sub(r"#\d+L?", "", str(plan.toString()))


def _read_table(plan: Any, line: int) -> CreateTable:
    name = str(plan.name().nameParts().mkString("."))
    given, spec = plan.columns(), plan.tableSpec()
    columns = [given.apply(at) for at in range(given.size())]
    fields = [T.StructField(str(one.name()), _to_type(one), bool(one.nullable())) for one in columns]
    if spec.provider().isEmpty():
        raise GraphError(
            f"the table '{name}' of line {line} has no USING",
            why="it says what the table is: kafka, files, delta or jdbc",
            what_to_do="write CREATE TABLE ... USING kafka OPTIONS (...)",
        )
    given = spec.optionExpression().options()
    pairs = [given.apply(at) for at in range(given.size())]
    parted = plan.partitioning()
    by = tuple(str(parted.apply(at).describe()) for at in range(parted.size()))
    options = {str(pair._1()).lower(): str(pair._2().toString()) for pair in pairs}
    if not spec.location().isEmpty():
        # Spark takes the option of that name for the table's location.
        options["path"] = str(spec.location().get())
    return CreateTable(line, name, T.StructType(fields), str(spec.provider().get()).lower(), options, by)


def _to_type(column: Any) -> T.DataType:
    found: T.DataType = T._parse_datatype_json_string(column.dataType().json())
    return found
