"""Analysis of Spark's plans: their sources and operators, and the effect of a DataFrame function on rows."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.core.changelogs import ROW_KIND, RowKind
from flinkish_spark.core.foreign_errors import is_gateway_gone
from flinkish_spark.core.validation import unusable
from flinkish_spark.protocol.plan_layout import (
    Chain,
    NativeOperator,
    OperatorInstance,
    PlanLayout,
    Scan,
    ScannedInput,
    ScanRole,
)
from flinkish_spark.types.expressions import (
    COMPARED,
    DATE_LETTERS,
    Call,
    Choice,
    ColumnReference,
    Constant,
    Expression,
    FieldOf,
    FormattedDay,
    Remainder,
    UnixTime,
)

# Spark's logs have no names. Our names are stored as aliases of frames, which stay in the analysed plan.


_PREFIX = "flinkish"
#: Separates a chain from the name of an input; not allowed in uids.
_OF = "="
_RECORDS = f"{_PREFIX}:source"
_SOURCES = ("StreamingRelationV2", "StreamingRelation", "StreamingExecutionRelation")
_STATEFUL = "FlatMapGroupsInPandasWithState"
#: Spark's names of the output modes of a job's query.
APPEND, UPDATE = "append", "update"


def name_chain(frame: DataFrame, chain: Chain) -> DataFrame:
    """Mark `frame` as the end of a chain; later expressions cannot use older aliases of columns."""
    return frame.alias(f"{_PREFIX}:chain:{chain.name}")


def name_scan(
    frame: DataFrame, role: ScanRole, uid: str = "", inputs: Sequence[tuple[str, str]] = ()
) -> DataFrame:
    parts = [_PREFIX, role.value, uid]
    if inputs:
        parts.append(",".join(dict.fromkeys(chain for chain, _ in inputs)))
    if any(name != uid for _, name in inputs):
        parts += [f"{chain}{_OF}{name}" for chain, name in inputs]
    return frame.alias(":".join(parts))


def name_records(frame: DataFrame, made_of: Mapping[str, Sequence[str]]) -> DataFrame:
    """Mark `frame` as the records of a source.

    For a column that a worker has computed in the source's pass, `made_of` has the names of its inputs.
    """
    return frame.alias(f"{_RECORDS}{json.dumps(made_of)}" if made_of else _RECORDS)


def name_operators(frame: DataFrame, uids: Sequence[str]) -> DataFrame:
    """Mark the keyed operators directly below `frame`, which share tasks, with their uids."""
    return frame.alias(f"{_PREFIX}:operator:{','.join(uids)}")


def layout_of(frame: DataFrame) -> PlanLayout:
    """Return the sources and operators of one of our plans, in Spark's order."""
    scans: list[Scan] = []
    inputs: list[ScannedInput] = []
    operators: list[tuple[OperatorInstance, ...]] = []
    natives: list[NativeOperator] = []
    _collect(frame._jdf.queryExecution().analyzed(), {}, scans, inputs, operators, natives)
    shared = tuple(tuple(one.chain for one in together) for together in operators if len(together) > 1)
    instances = tuple(one for together in operators for one in together)
    return PlanLayout(tuple(scans), instances, shared, tuple(inputs), tuple(natives))


def _collect(
    node: Any,
    names: dict[str, str],
    scans: list[Scan],
    inputs: list[ScannedInput],
    operators: list[tuple[OperatorInstance, ...]],
    natives: list[NativeOperator],
) -> None:
    """Walk the plan in Spark's numbering order: top down, from left to right."""
    kind = node.getClass().getSimpleName()
    # Below the name of a scan everything is the user's.
    native = _native_state(node) if "scan" in names else ""
    if native:
        _, uid, *chains = names["scan"].split(":")
        chain = chains[0] if chains else names["chain"]
        natives.append(NativeOperator(len(operators) + len(natives), uid, chain, native))
    elif kind == "SubqueryAlias":
        parts = node.alias().split(":")
        if parts[0] == _PREFIX and not node.alias().startswith(_RECORDS):
            what = parts[1] if parts[1] in ("chain", "operator") else "scan"
            names = {**names, what: ":".join(parts[1:]) if what == "scan" else parts[2]}
    elif kind == _STATEFUL:
        uids, chain = names["operator"].split(","), names["chain"]
        operators.append(tuple(OperatorInstance(uid, chain if len(uids) == 1 else uid) for uid in uids))
    elif kind in _SOURCES:
        role, uid, *chains = names["scan"].split(":")
        inputs += [ScannedInput(len(scans), *one.split(_OF)) for one in chains[1:]]
        scans.append(Scan(ScanRole(role), uid, chains[0] if chains else names["chain"]))
    children = node.children()
    for index in range(children.size()):
        _collect(children.apply(index), names, scans, inputs, operators, natives)


#: Plan nodes for which Spark keeps state, with the users' words for them.
_NATIVE = {
    "Aggregate": "an aggregate (groupBy, agg)",
    "Deduplicate": "dropDuplicates() or distinct()",
    "DeduplicateWithinWatermark": "dropDuplicatesWithinWatermark()",
    "Distinct": "SELECT DISTINCT",
    "FlatMapGroupsInPandasWithState": "applyInPandasWithState()",
    "FlatMapGroupsWithState": "mapGroupsWithState()",
    "GlobalLimit": "limit()",
    "TransformWithState": "transformWithState()",
    "TransformWithStateInPySpark": "transformWithState()",
}
#: Those whose rows depend on the query's output mode.
AGGREGATES = frozenset({_NATIVE["Aggregate"], _NATIVE["Distinct"]})


#: Plan nodes of which Spark refuses some, or all, in a streaming query.
_CHECKED = frozenset({"Except", "Intersect", "Join", "Offset", "Sort", "Window"})


def _native_state(node: Any) -> str:
    """Return what a plan node keeps state of Spark's own for; empty if it keeps none."""
    kind = _kind(node)
    if kind == "Join" and all(child.isStreaming() for child in _each(node.children())):
        return "a join of two streams"
    return _NATIVE.get(kind, "") if node.isStreaming() else ""


@dataclass(frozen=True)
class NativeParts:
    """Parts of a user's DataFrame that are more to Spark than a function of rows."""

    #: What Spark keeps state for, from the root of the plan down.
    states: tuple[str, ...]
    has_watermark: bool
    #: Kinds of plan nodes that Spark does not run on every stream.
    checked: frozenset[str]


def check_output_mode(output_mode: str) -> None:
    if output_mode not in (APPEND, UPDATE):
        raise unusable(
            "output_mode",
            output_mode,
            wanted=f"'{APPEND}' or '{UPDATE}'",
            what_to_do=f"use '{UPDATE}' and a sink that upserts in place of 'complete'",
        )


def add_row_kind(frame: DataFrame, output_mode: str) -> DataFrame:
    """Return the frame; in update mode each row has its kind, since it replaces an earlier one."""
    if output_mode == APPEND:
        return frame
    return frame.withColumn(ROW_KIND, F.lit(RowKind.UPDATE_AFTER.value))


def native_parts(frame: DataFrame) -> NativeParts:
    nodes, states, kinds = [frame._jdf.queryExecution().analyzed()], list[str](), set[str]()
    while nodes:
        node = nodes.pop(0)
        states += filter(None, [_native_state(node)])
        kind = _kind(node)
        # A sort within a task is none over the stream.
        if node.isStreaming() and (kind != "Sort" or getattr(node, "global")()):
            kinds.add(kind)
        nodes = [*_each(node.children()), *nodes]
    return NativeParts(tuple(states), "EventTimeWatermark" in kinds, frozenset(kinds & _CHECKED))


def why_not_streamed(frame: DataFrame, parts: NativeParts, output_mode: str) -> str:
    """Return why Spark refuses a DataFrame with these parts as a streaming query; empty if it takes it."""
    if not (parts.states or parts.has_watermark or parts.checked):
        # Spark also refuses what does no harm in a job, such as a sample or a sort within tasks.
        return ""
    jvm: Any = frame.sparkSession._jvm
    checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    modes = jvm.org.apache.spark.sql.streaming.OutputMode
    mode = modes.Update() if output_mode == UPDATE else modes.Append()
    plan = frame._jdf.queryExecution().analyzed()
    try:
        checker.checkForStreaming(plan, mode)
        checker.checkStreamingQueryGlobalWatermarkLimit(plan, mode)
    except AnalysisException as error:
        # The lines after the first show the whole plan.
        return str(error).partition("\n")[0]
    return ""


def find_scanned(frame: DataFrame) -> list[str]:
    """Return the name of each streaming source in a plan, as `name_scan` has set it; empty without one."""
    found: list[str] = []
    nodes = [(frame._jdf.queryExecution().analyzed(), "")]
    while nodes:
        node, name = nodes.pop(0)
        if _kind(node) == "SubqueryAlias":
            parts = node.alias().split(":")
            is_scan = parts[0] == _PREFIX and parts[1] == ScanRole.RECORDS.value and len(parts) > 2
            name = parts[2] if is_scan else name
        if _kind(node) in _SOURCES:
            found.append(name)
        nodes += [(child, name) for child in _each(node.children())]
    return found


#: Prefix of our column names.
_OWN_COLUMNS = "_fs"
_ROLES = frozenset(role.value for role in ScanRole)


def origins_of(frame: DataFrame) -> Mapping[str, frozenset[tuple[str, str]]]:
    """Return, for each column of a frame, the uids and columns of the scans that it is computed from.

    Columns computed by Python functions or from state have none. Makes many calls into the JVM.
    """
    plan = frame._jdf.queryExecution().analyzed()
    known = _origins(plan, "")
    return {one.name(): known.get(one.exprId().id(), frozenset()) for one in _each(plan.output())}


def _origins(node: Any, scan: str) -> dict[int, frozenset[tuple[str, str]]]:
    """Return the origins of attributes in and below a node, by their ids."""
    kind, children = _kind(node), list(_each(node.children()))
    if kind == "SubqueryAlias":
        prefix, _, named = node.alias().partition(":")
        role, _, rest = named.partition(":")
        if prefix == _PREFIX and role in _ROLES:
            scan = rest.split(":")[0] if role == ScanRole.RECORDS.value else ""
    below = [_origins(child, scan) for child in children]
    known = {number: found for one in below for number, found in one.items()}
    is_read_by_worker = kind == "SubqueryAlias" and node.alias().startswith(_RECORDS)
    if (kind in _SOURCES or is_read_by_worker) and scan:
        made_of = json.loads(node.alias().removeprefix(_RECORDS) or "{}") if is_read_by_worker else {}
        columns = [one for one in _each(node.output()) if not one.name().startswith(_OWN_COLUMNS)]
        for one in columns:
            names = made_of.get(one.name(), [one.name()])
            known[one.exprId().id()] = frozenset((scan, name) for name in names)
    elif kind == "Project":
        for one in _each(node.projectList()):
            if _kind(one) == "Alias":
                used = [known.get(each.exprId().id(), frozenset()) for each in _find_attributes(one.child())]
                known[one.exprId().id()] = frozenset().union(*used)
    elif kind == "Union":
        outputs = [list(_each(child.output())) for child in children]
        for place, one in enumerate(_each(node.output())):
            ids = [output[place].exprId().id() for output in outputs]
            each = (found.get(number, frozenset()) for number, found in zip(ids, below, strict=True))
            known[one.exprId().id()] = frozenset().union(*each)
    return known


def _find_attributes(expression: Any) -> Iterator[Any]:
    if _kind(expression) == "AttributeReference":
        yield expression
        return
    for child in _each(expression.children()):
        yield from _find_attributes(child)


# A user's DataFrame function returns only a frame, but Spark's analysed plan has a node for each of its
# steps. If all of them are projections and filters, this code returns them as columns and conditions by name,
# which can be applied to any frame with the same columns.


_EXPRESSIONS = "org.apache.spark.sql.catalyst.expressions"
_ATTRIBUTE = f"{_EXPRESSIONS}.AttributeReference"
_OF_PYTHON = "a function in Python"
#: Expressions that read more than a row's own columns, with the users' words for them.
_NOT_OF_A_ROW = {
    f"{_EXPRESSIONS}.PythonFuncExpression": _OF_PYTHON,
    f"{_EXPRESSIONS}.PlanExpression": "a subquery",
    f"{_EXPRESSIONS}.Generator": "a function that makes several rows",
    f"{_EXPRESSIONS}.WindowExpression": "a window",
    f"{_EXPRESSIONS}.aggregate.AggregateFunction": "an aggregate",
}
#: Plan nodes that read more than one row, or change the number of rows, with the users' words for them.
_CALLS = {
    "Aggregate": "an aggregate (groupBy, agg)",
    "CollectMetrics": "observe()",
    "Deduplicate": "distinct() or dropDuplicates()",
    "Distinct": "distinct()",
    "EventTimeWatermark": "withWatermark()",
    "Except": "a difference (subtract, exceptAll)",
    "Expand": "unpivot(), or a cube or rollup",
    "Generate": "explode(), or another function that makes several rows",
    "GlobalLimit": "limit()",
    "Intersect": "an intersection",
    "Join": "a join",
    "LocalLimit": "limit()",
    "MapInArrow": "mapInArrow()",
    "MapInPandas": "mapInPandas()",
    "Offset": "offset()",
    "Repartition": "repartition() or coalesce()",
    "RepartitionByExpression": "repartition()",
    "ResolvedHint": "a hint",
    "Sample": "sample()",
    "Sort": "orderBy(), sort() or sortWithinPartitions()",
    "Union": "a union",
    "Window": "a window",
}


@dataclass(frozen=True)
class NotRowByRow:
    #: The user's word for it.
    what: str


@dataclass(frozen=True)
class ComputedColumn:
    name: str
    value: Column
    #: The same over Arrow columns; None where that may be another value.
    in_arrow: Expression | None


@dataclass(frozen=True)
class Projection:
    """Columns that are computed together and added to the existing ones."""

    columns: tuple[ComputedColumn, ...]


@dataclass(frozen=True)
class RowFilter:
    condition: Column
    #: The same over Arrow columns; None where that may be another value.
    in_arrow: Expression | None


@dataclass(frozen=True)
class RowPlan:
    #: The steps in order. Their columns are unresolved: they name columns of the frame, or of earlier steps.
    steps: tuple[Projection | RowFilter, ...]
    #: The column of each output field, in order.
    outputs: tuple[str, ...]


def row_plan(given: DataFrame, made: DataFrame, names: tuple[str, ...], prefix: str) -> RowPlan | NotRowByRow:
    """Return the row-wise steps that made `made` from `given`."""
    if getattr(given, "_jdf", None) is None:
        return NotRowByRow("something that is not known: the session has no JVM of its own")
    try:
        beginning, end = (frame._jdf.queryExecution().analyzed() for frame in (given, made))
        ids = [one.exprId().id() for one in _each(beginning.output())]
        reading = _PlanReader(given.sparkSession, dict(zip(ids, names, strict=True)), prefix)
        return reading.of(end, beginning)
    except _NoSuchPlan as error:
        return NotRowByRow(error.what)
    except (Py4JError, TypeError) as error:
        if is_gateway_gone(error):
            raise
        # Another version of Spark may have other plan nodes or methods. A missing class is a package to py4j,
        # which cannot be called.
        return NotRowByRow("something that is not known: this version of Spark has other plans")


def calls_python(given: DataFrame, value: Column) -> bool:
    """Return True if a column calls a Python function, which Spark does for all rows, under any condition."""
    names = tuple(f"c{at}" for at in range(len(given.columns)))
    return row_plan(given, given.select(value.alias("value")), names, "made") == NotRowByRow(_OF_PYTHON)


class _NoSuchPlan(Exception):
    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class _PlanReader:
    def __init__(self, session: Any, known: dict[int, str], prefix: str) -> None:
        self._session, self._known = session, known
        jvm = session._jvm
        # Cached, since py4j asks the JVM for each part of such a name.
        self._attributes = jvm.org.apache.spark.sql.catalyst.analysis.UnresolvedAttribute
        self._is_attribute = jvm.java.lang.Class.forName(_ATTRIBUTE).isInstance
        self._to_seq = jvm.org.apache.spark.api.python.PythonUtils.toSeq
        self._to_column = jvm.org.apache.spark.sql.classic.ExpressionUtils.column
        self._names = (f"{prefix}{number}" for number in itertools.count())
        self._kinds = {jvm.java.lang.Class.forName(name): what for name, what in _NOT_OF_A_ROW.items()}

    def of(self, plan: Any, beginning: Any) -> RowPlan:
        """Return the steps of a plan, from its first node up."""
        steps: list[Projection | RowFilter] = []
        for kind, node in reversed(list(_nodes(plan, beginning))):
            if kind == "Project":
                columns = self._add_projection(node)
                if columns:
                    steps.append(Projection(columns))
            elif kind == "Filter":
                condition = node.condition()
                steps.append(RowFilter(self._column(condition), self._try_arrow(condition)))
        return RowPlan(tuple(steps), tuple(self._name_of(one) for one in _each(plan.output())))

    def _add_projection(self, node: Any) -> tuple[ComputedColumn, ...]:
        """Record the names of columns, and return the new columns."""
        found = []
        for one in _each(node.projectList()):
            if one.exprId().id() in self._known:
                continue
            if _kind(one) != "Alias":
                raise _NoSuchPlan("a column of another DataFrame")
            child, own = one.child(), one.exprId().id()
            if _kind(child) == "AttributeReference":
                self._known[own] = self._name_of(child)
            else:
                value, in_arrow = self._column(child), self._try_arrow(child)
                self._known[own] = next(self._names)
                found.append(ComputedColumn(self._known[own], value, in_arrow))
        return tuple(found)

    def _column(self, expression: Any) -> Column:
        from pyspark.sql.classic.column import Column as ClassicColumn

        return ClassicColumn(self._to_column(self._unresolve(expression)))

    def _unresolve(self, expression: Any) -> Any:
        if expression.foldable():
            return expression
        if self._is_attribute(expression):
            return self._attributes.quoted(self._name_of(expression))
        for kind, what in self._kinds.items():
            if kind.isInstance(expression):
                raise _NoSuchPlan(what)
        children = list(_each(expression.children()))
        if not expression.deterministic() and all(child.deterministic() for child in children):
            raise _NoSuchPlan(f"{expression.prettyName()}(), which is another value each time")
        if not children:
            return expression
        changed = [self._unresolve(child) for child in children]
        return expression.withNewChildren(self._to_seq(changed))

    def _try_arrow(self, expression: Any) -> Expression | None:
        """Translate an expression to one over Arrow columns; None if no equal one exists."""
        try:
            return self._to_arrow(expression)
        except NotImplementedError:
            return None
        except Py4JError as error:
            if is_gateway_gone(error):
                raise
            # Another version of Spark may have other parts of expressions.
            return None

    def _to_arrow(self, expression: Any) -> Expression:
        if self._is_attribute(expression):
            return ColumnReference(self._name_of(expression))
        kind, children = _kind(expression), list(_each(expression.children()))
        if kind in ("Literal", "Cast"):
            return _constant(expression)
        if kind == "GetStructField":
            return FieldOf(self._to_arrow(children[0]), expression.ordinal())
        if kind == "Between":
            return self._to_arrow(expression.replacement())
        if kind in ("CaseWhen", "If"):
            return self._choice(expression, children)
        if kind == "Remainder":
            return self._remainder(children)
        if kind == "DateFormatClass":
            return self._format_date(expression, children)
        if kind in _MICROS_OF_UNITS and _type_of(children[0]) == T.TimestampType():
            return UnixTime(self._to_arrow(children[0]), _MICROS_OF_UNITS[kind])
        function = _CALLS_OF_ARROW.get(kind)
        if function is None or (kind in _COMPARISONS and not _compares_alike(kind, children[0])):
            raise NotImplementedError
        if function == "coalesce" and len({one.dataType().json() for one in children}) > 1:
            # Spark takes values that differ in what may be null within them, and Arrow does not.
            raise NotImplementedError
        return Call(function, tuple(map(self._to_arrow, children)))

    def _choice(self, expression: Any, children: Sequence[Any]) -> Expression:
        """Translate CASE WHEN; `children` are conditions and values in turn, and perhaps the ELSE value."""
        known, parts = _type_of(expression), [self._to_arrow(one) for one in children]
        pairs = list(zip(parts[::2], parts[1::2], strict=False))
        values = [*children[1::2], *children[2 * len(pairs) :]]
        # Spark takes values that differ in what may be null within them, and Arrow does not.
        if not isinstance(known, (*COMPARED, T.StringType)) or any(_type_of(one) != known for one in values):
            raise NotImplementedError
        return Choice(tuple(pairs), parts[-1] if len(parts) % 2 else Constant(None, known))

    def _remainder(self, children: Sequence[Any]) -> Expression:
        number, divisor = map(self._to_arrow, children)
        kinds = [_type_of(one) for one in children]
        is_whole = kinds[0] == kinds[1] and isinstance(kinds[0], T.IntegerType | T.LongType)
        if not is_whole or not isinstance(divisor, Constant) or divisor.value in (None, 0, -1):
            raise NotImplementedError
        return Remainder(number, divisor)

    def _format_date(self, expression: Any, children: Sequence[Any]) -> Expression:
        time, pattern = children
        zone = expression.timeZoneId()
        is_utc = zone.isDefined() and zone.get() in _UTC
        if not is_utc or _kind(pattern) != "Literal" or _type_of(time) != T.TimestampType():
            raise NotImplementedError
        text = str(pattern.value())
        parts = tuple(found.group() for found in _PARTS_OF_DAY.finditer(text))
        if not text or "".join(parts) != text or any(parts.count(one) > 1 for one in DATE_LETTERS):
            raise NotImplementedError
        # Java's legacy formatter has another calendar.
        policy = str(self._session.conf.get("spark.sql.legacy.timeParserPolicy"))
        if policy.strip().upper() not in ("CORRECTED", "EXCEPTION"):
            raise NotImplementedError
        return FormattedDay(self._to_arrow(time), parts)

    def _name_of(self, attribute: Any) -> str:
        name = self._known.get(attribute.exprId().id())
        if name is None:
            raise _NoSuchPlan("a column of another DataFrame")
        return name


#: Microseconds of the unit, by class of Spark's expression.
_MICROS_OF_UNITS = {"UnixMicros": 1, "UnixMillis": 1_000, "UnixSeconds": 1_000_000}
_UTC = frozenset({"UTC", "Etc/UTC", "Z", "GMT"})
#: The parts of a date format that Arrow expressions support.
_PARTS_OF_DAY = re.compile(rf"(?<![A-Za-z])(?:{'|'.join(DATE_LETTERS)})(?![A-Za-z])|[-/. :_]+")
_EQUAL = "EqualTo"
_COMPARISONS: Mapping[str, str] = {
    _EQUAL: "equal",
    "GreaterThan": "greater",
    "GreaterThanOrEqual": "greater_equal",
    "LessThan": "less",
    "LessThanOrEqual": "less_equal",
}
#: The equivalent Arrow function by class of Spark's expression.
_CALLS_OF_ARROW: Mapping[str, str] = {
    **_COMPARISONS,
    "And": "and_kleene",
    "Coalesce": "coalesce",
    "IsNotNull": "is_valid",
    "IsNull": "is_null",
    "Not": "invert",
    "Or": "or_kleene",
}


def _type_of(expression: Any) -> T.DataType:
    kind: T.DataType = T._parse_datatype_json_string(expression.dataType().json())
    return kind


def _compares_alike(kind: str, value: Any) -> bool:
    known = _type_of(value)
    return isinstance(known, COMPARED) or (kind == _EQUAL and known == T.StringType())


def _constant(expression: Any) -> Constant:
    kind, literal = _type_of(expression), expression
    if _kind(expression) == "Cast":
        literal = expression.child()
        is_wider = kind == T.LongType() and _type_of(literal) == T.IntegerType()
        if _kind(literal) != "Literal" or not (is_wider or literal.value() is None):
            raise NotImplementedError
    value = literal.value()
    if value is None and isinstance(kind, (*COMPARED, T.StringType)):
        return Constant(value, kind)
    if isinstance(kind, T.BooleanType | T.IntegerType | T.LongType) and isinstance(value, int):
        return Constant(value, kind)
    if kind == T.StringType() and value is not None:
        return Constant(value if isinstance(value, str) else str(value.toString()), kind)
    raise NotImplementedError


def _nodes(plan: Any, beginning: Any) -> Iterator[tuple[str, Any]]:
    """Yield the nodes of a plan from its root to its first node, with their class names."""
    while not plan.equals(beginning):
        kind, children = _kind(plan), plan.children()
        if kind not in ("Project", "Filter", "SubqueryAlias", "View"):
            raise _NoSuchPlan(_CALLS.get(kind, kind) if children.size() else "another DataFrame")
        yield kind, plan
        plan = children.apply(0)


def _each(found: Any) -> Iterator[Any]:
    for index in range(found.size()):
        yield found.apply(index)


def _kind(found: Any) -> str:
    return str(found.getClass().getSimpleName())


class Selection:
    """Columns to select from any DataFrame that has them."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = tuple(columns)
        self._handed_over: Any = None

    def of(self, frame: DataFrame) -> DataFrame:
        own = getattr(frame, "_jdf", None)
        if own is None:
            return frame.select(*self._columns)
        if self._handed_over is None:
            self._handed_over = frame._jcols(*self._columns)  # type: ignore[operator]
        return DataFrame(own.select(self._handed_over), frame.sparkSession)
