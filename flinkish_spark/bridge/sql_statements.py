"""Statements of Spark's SQL, as Spark's own parser reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
    #: They may have a password.
    options: Mapping[str, str] = field(repr=False)
    partition_by: tuple[str, ...]

    @property
    def named(self) -> str:
        return f"the table '{self.name}' of line {self.line}"


@dataclass(frozen=True)
class CreateView:
    line: int
    name: str
    query: str


@dataclass(frozen=True)
class InsertInto:
    line: int
    table: str
    columns: tuple[str, ...]
    query: str


Statement = CreateTable | CreateView | InsertInto

#: What lies between two words of a statement; in comments and quoted texts a semicolon ends nothing.
_TOKENS = re.compile(
    r"(?P<blank>\s+|--[^\n]*)|(?P<comment>/\*)|(?P<end>;)"
    r"|(?<!\w)[rR](?:'[^']*'|\"[^\"]*\")|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|`(?:[^`]|``)*`|.",
    re.DOTALL,
)
_BRACKETS = re.compile(r"/\*|\*/")
#: Words with which a query may begin.
_QUERY = re.compile(r"\b(?:WITH|SELECT|FROM|VALUES|TABLE)\b|\(", re.IGNORECASE)
#: A table or view in the text of a parsed plan.
_UNRESOLVED = re.compile(r"'UnresolvedRelation \[([^\],]+)\]")
#: The names that a WITH gives.
_WITH = re.compile(r"'?(?:UnresolvedWith|CTE) \[([^\]]*)\]")


def find_relations(spark: SparkSession, text: str) -> frozenset[str]:
    """Return the names of tables and views that a query reads, in lower case; refuse a wrong text."""
    plan = str(_parse(spark, text, 1).toString())
    own = {name.strip().lower() for names in _WITH.findall(plan) for name in names.split(",")}
    return frozenset(name.lower() for name in _UNRESOLVED.findall(plan)) - own


def parse_script(spark: SparkSession, script: str) -> list[Statement]:
    return [_read(spark, text, line) for text, line in _split(script)]


def _split(script: str) -> Iterator[tuple[str, int]]:
    begin, at = None, 0
    while at < len(script):
        found = _TOKENS.match(script, at)
        assert found is not None
        if found["end"] and begin is not None:
            yield script[begin:at], script.count("\n", 0, begin) + 1
            begin = None
        elif begin is None and not (found["blank"] or found["comment"] or found["end"]):
            begin = at
        at = _find_end_of_comment(script, at) if found["comment"] else found.end()
    if begin is not None:
        yield script[begin:], script.count("\n", 0, begin) + 1


def _find_end_of_comment(script: str, begin: int) -> int:
    """Return the place behind a comment, which may have comments in it."""
    depth = 0
    for found in _BRACKETS.finditer(script, begin):
        depth += 1 if found[0] == "/*" else -1
        if depth == 0:
            return found.end()
    return len(script)


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
        case "CreateViewCommand" if _is_plain_view(plan):
            return CreateView(line, str(plan.name().table()), str(plan.originalText().get()))
        case "InsertIntoStatement" if _is_plain_insert(plan):
            named = plan.userSpecifiedCols()
            columns = tuple(str(named.apply(at)) for at in range(named.size()))
            table = plan.table().multipartIdentifier().mkString(".")
            return InsertInto(line, str(table), columns, _cut_query(spark, text, plan.query(), line))
    raise GraphError(
        f"the statement that begins on line {line} cannot be part of a job",
        why="a script has CREATE TABLE ... USING, CREATE TEMPORARY VIEW ... AS and INSERT INTO",
        what_to_do="leave it out, or run it with Spark before the job",
    )


def _is_plain_view(plan: Any) -> bool:
    return str(plan.viewType().toString()) == "LocalTempView" and plan.userSpecifiedColumns().isEmpty()


def _is_plain_insert(plan: Any) -> bool:
    is_more = plan.overwrite() or plan.byName() or plan.ifPartitionNotExists() or plan.withSchemaEvolution()
    return not is_more and plan.partitionSpec().isEmpty()


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
    for column in columns:
        _check_column(column, name)
    fields = [T.StructField(str(one.name()), _to_type(one)) for one in columns]
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
    if not spec.properties().isEmpty() or any(one not in T.StructType(fields).names for one in by):
        raise GraphError(
            f"the table '{name}' of line {line} has TBLPROPERTIES, CLUSTER BY or partitions by no column",
            why="nothing would come of them",
            what_to_do="leave them out, and name columns of the table in PARTITIONED BY",
        )
    options = {str(pair._1()).lower(): str(pair._2().toString()) for pair in pairs}
    if not spec.location().isEmpty():
        # Spark takes the option of that name for the table's location.
        options["path"] = str(spec.location().get())
    return CreateTable(line, name, T.StructType(fields), str(spec.provider().get()).lower(), options, by)


def _check_column(column: Any, table: str) -> None:
    """Refuse what a job would not keep to."""
    more = {
        "NOT NULL": not column.nullable(),
        "DEFAULT": column.defaultValue().isDefined(),
        "GENERATED": column.generationExpression().isDefined() or column.identityColumnSpec().isDefined(),
        "VARCHAR or CHAR": "char(" in str(column.dataType().json()),
    }
    for what in [what for what, is_so in more.items() if is_so]:
        raise GraphError(
            f"the column '{column.name()}' of the table '{table}' is {what}",
            what_to_do="leave it out, and filter or fill in the query",
        )


def _to_type(column: Any) -> T.DataType:
    found: T.DataType = T._parse_datatype_json_string(column.dataType().json())
    return found
