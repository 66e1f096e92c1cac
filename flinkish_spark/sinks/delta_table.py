"""What a Delta table is, as far as a sink needs to know, and what would have to change in it for a stream.

Pure: schemas are Spark's JSON, and every question is answered from values. Delta has the last word; what
is found here is found before a checkpoint is decided, and can be explained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flinkish_spark.sinks.delta_modes import SchemaEvolution

Json = Mapping[str, Any]

_CHECK = "delta.constraints."
_GENERATED = "delta.generationExpression"
_IDENTITY = "delta.identity.start"
_EXPLICIT_IDENTITY = "delta.identity.allowExplicitInsert"
_DEFAULT = "CURRENT_DEFAULT"
_CHARS = "__CHAR_VARCHAR_TYPE_STRING"
_COLLATIONS = "__COLLATIONS"
_LENGTH = re.compile(r"(?:var)?char\((\d+)\)")
_PHYSICAL = "delta.columnMapping.physicalName"
_WIDENING = "delta.enableTypeWidening"
#: From left to right each holds everything that those before it hold.
_WHOLE_NUMBERS = ("byte", "short", "integer", "long")
_DECIMAL = re.compile(r"decimal\((\d+),\s*(-?\d+)\)")


@dataclass(frozen=True, slots=True)
class TableInfo:
    """One version of a table.

    Parameters
    ----------
    fields
        Of the schema, as Spark's JSON. Read through public interfaces they lack Delta's own metadata.
    partition_by, properties
        As the table has them.
    """

    fields: tuple[Json, ...]
    partition_by: tuple[str, ...]
    properties: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_log(cls, metadata: Json) -> TableInfo:
        """Read a metaData action of Delta's log."""
        inner = metadata["metaData"]
        return cls(
            tuple(json.loads(inner["schemaString"])["fields"]),
            tuple(inner.get("partitionColumns", [])),
            dict(inner.get("configuration", {})),
        )

    @property
    def checks(self) -> dict[str, str]:
        """CHECK constraints: name to SQL condition."""
        return {
            name.removeprefix(_CHECK): condition
            for name, condition in self.properties.items()
            if name.startswith(_CHECK)
        }

    @property
    def not_null(self) -> tuple[str, ...]:
        """Columns that may not be null."""
        return tuple(str(f["name"]) for f in self.fields if not f["nullable"])

    @property
    def generated(self) -> dict[str, str]:
        """Generated columns: name to expression."""
        found = {str(f["name"]): f.get("metadata", {}).get(_GENERATED) for f in self.fields}
        return {name: expression for name, expression in found.items() if expression}

    @property
    def lengths(self) -> dict[str, int]:
        """CHAR and VARCHAR columns: name to the most characters."""
        found = {
            str(f["name"]): _LENGTH.fullmatch(f.get("metadata", {}).get(_CHARS, "")) for f in self.fields
        }
        return {name: int(match[1]) for name, match in found.items() if match is not None}

    @property
    def padded(self) -> tuple[str, ...]:
        """CHAR columns."""
        kinds = ((str(f["name"]), str(f.get("metadata", {}).get(_CHARS, ""))) for f in self.fields)
        return tuple(name for name, kind in kinds if kind.startswith("char"))

    def is_collated(self, name: str) -> bool:
        """Whether a column has a collation of its own, under which different texts may be equal."""
        found = next((f for f in self.fields if str(f["name"]).lower() == name.lower()), None)
        return found is not None and bool(found.get("metadata", {}).get(_COLLATIONS))

    def has_column(self, name: str) -> bool:
        """Whether there is a column of that name; Spark does not look at case."""
        return any(str(f["name"]).lower() == name.lower() for f in self.fields)

    @property
    def has_identity(self) -> bool:
        """Whether Delta numbers rows."""
        return any(_IDENTITY in f.get("metadata", {}) for f in self.fields)

    @property
    def is_append_only(self) -> bool:
        """Whether rows may never be changed or deleted."""
        return self.properties.get("delta.appendOnly", "false").lower() == "true"

    @property
    def widens(self) -> bool:
        """Whether types may become wider."""
        return self.properties.get(_WIDENING, "false").lower() == "true"

    def rules(self) -> dict[str, Any]:
        """Return what rows are checked against when they are staged, as JSON values."""
        return {
            "checks": self.checks,
            "not_null": sorted(self.not_null),
            "generated": self.generated,
            "lengths": self.lengths,
        }


@dataclass(frozen=True, slots=True)
class Fit:
    """What a table lacks for a stream.

    Parameters
    ----------
    problems
        Sentences without full stop; empty if the rows can be written.
    changes
        Columns (dotted for fields of structs) that writing would add or widen.
    """

    problems: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()


def fit(table: TableInfo, stream: Sequence[Json], evolution: SchemaEvolution) -> Fit:
    """Return whether a stream's fields can be written, and what that changes in the table.

    Parameters
    ----------
    stream
        Its stored fields, as Spark's JSON.
    """
    found = list(_compare_fields(table.fields, stream, "", table.widens))
    problems = [text for kind, _, text in found if kind == "PROBLEM"]
    changes = [(kind, name, text) for kind, name, text in found if kind != "PROBLEM"]
    allowed = {
        SchemaEvolution.NONE: (),
        SchemaEvolution.ADD_COLUMNS: ("NEW",),
        SchemaEvolution.WIDEN_TYPES: ("NEW", "WIDER"),
    }[evolution]
    problems += [text for kind, _, text in changes if kind not in allowed]
    problems += _missing(table, {str(f["name"]).lower() for f in stream})
    return Fit(tuple(problems), tuple(name for kind, name, _ in changes if kind in allowed))


def _missing(table: TableInfo, given: set[str]) -> Iterator[str]:
    for column in table.fields:
        name, metadata = str(column["name"]), column.get("metadata", {})
        is_given = name.lower() in given
        if is_given and _IDENTITY in metadata and not metadata.get(_EXPLICIT_IDENTITY):
            yield f"the table numbers its column {name} by itself, and the stream has it, too"
        fills_itself = _IDENTITY in metadata or _GENERATED in metadata or _DEFAULT in metadata
        if is_given or fills_itself:
            continue
        if name in table.partition_by:
            yield f"the stream lacks the partition column {name}"
        elif not column["nullable"]:
            yield f"the stream lacks the column {name}, which is NOT NULL"


Finding = tuple[str, str, str]


def _compare_fields(
    table: Sequence[Json], stream: Sequence[Json], at: str, widens: bool
) -> Iterator[Finding]:
    have = {str(f["name"]).lower(): f for f in table}
    for one in stream:
        name = f"{at}{one['name']}"
        known = have.get(str(one["name"]).lower())
        if known is None:
            yield "NEW", name, f"the table has no column {name}"
        else:
            yield from _compare(known["type"], one["type"], name, widens, is_top=not at)


def _compare(table: Any, stream: Any, name: str, widens: bool, *, is_top: bool) -> Iterator[Finding]:
    if isinstance(table, str) and isinstance(stream, str):
        if table == stream or (is_top and is_wider(stream, table)):
            return
        if is_wider(table, stream) and widens:
            yield "WIDER", name, f"the column {name} is {table} and the stream's is {stream}"
        else:
            why = ", and the table does not have delta.enableTypeWidening" if is_wider(table, stream) else ""
            yield (
                "PROBLEM",
                name,
                f"the column {name} is {table} in the table and {stream} in the stream{why}",
            )
    elif isinstance(table, dict) and isinstance(stream, dict) and table["type"] == stream["type"]:
        if table["type"] == "struct":
            yield from _compare_fields(table["fields"], stream["fields"], f"{name}.", widens)
        for part in ("elementType", "keyType", "valueType"):
            if part in table:
                yield from _compare(table[part], stream[part], f"{name}.{part}", widens, is_top=False)
    else:
        yield "PROBLEM", name, f"the column {name} has another type in the table than in the stream"


def is_wider(narrow: str, wide: str) -> bool:
    """Whether Delta widens `narrow` to `wide` by itself when a wider value is written.

    Examples
    --------
    >>> is_wider("integer", "long"), is_wider("long", "integer"), is_wider("decimal(4,1)", "decimal(9,3)")
    (True, False, True)
    """
    if narrow in _WHOLE_NUMBERS and wide in _WHOLE_NUMBERS:
        return _WHOLE_NUMBERS.index(narrow) < _WHOLE_NUMBERS.index(wide)
    if (narrow, wide) in (("float", "double"), ("date", "timestamp_ntz")):
        return True
    one, other = _DECIMAL.fullmatch(narrow), _DECIMAL.fullmatch(wide)
    if one is None or other is None or narrow == wide:
        return False
    digits, scale = int(other[1]) - int(one[1]), int(other[2]) - int(one[2])
    return scale >= 0 and digits >= scale


def why_not_as_files(staged: Json, current: Json, fields: Sequence[str]) -> str:
    """Return why staged data files cannot be named in a table as it is now; empty if they can.

    Their rows may still be written to it: as new files.

    Parameters
    ----------
    staged, current
        metaData actions: what the files were written for, and what the table has now.
    fields
        Names of the stream's fields that are stored.
    """
    then, now = TableInfo.from_log(staged), TableInfo.from_log(current)
    if [_physical_name(then, name) for name in then.partition_by] != [
        _physical_name(now, name) for name in now.partition_by
    ]:
        return "the table's partitioning changed since the files were staged"
    have = {_physical(f): _shape(f["type"]) for f in now.fields}
    wanted = {name.lower() for name in fields}
    for one in then.fields:
        is_ours = str(one["name"]).lower() in wanted
        if is_ours and have.get(_physical(one)) != _shape(one["type"]):
            return f"the table's column {one['name']} changed since the files were staged"
    if now.has_identity:
        return "the table numbers its rows since the files were staged"
    return why_stricter(then.rules(), now)


def why_stricter(rules: Json, now: TableInfo) -> str:
    """Return what the table demands of rows that they were not checked against; empty for nothing.

    Parameters
    ----------
    rules
        As :meth:`TableInfo.rules` returned them when the rows were staged.
    """
    for kind, said in (("checks", "constraint"), ("generated", "generated column"), ("lengths", "length of")):
        then = rules.get(kind, {})
        for name, condition in now.rules()[kind].items():
            if then.get(name) != condition:
                return f"the table got the {said} {name} since the rows were staged"
    new = sorted(set(now.not_null) - set(rules.get("not_null", ())))
    return f"the table's column {new[0]} became NOT NULL since the rows were staged" if new else ""


def physical_type(kind: Any) -> Any:
    """Return a type with the names that its fields have in data files."""
    if not isinstance(kind, dict):
        return kind
    changed = {k: physical_type(v) for k, v in kind.items() if k in ("elementType", "keyType", "valueType")}
    if kind["type"] == "struct":
        changed["fields"] = [
            {**f, "name": _physical(f), "type": physical_type(f["type"]), "metadata": {}}
            for f in kind["fields"]
        ]
    return {**kind, **changed}


def _physical(column: Json) -> str:
    return str(column.get("metadata", {}).get(_PHYSICAL, column["name"]))


def physical_name(column: Json) -> str:
    """Return the name that a column has in data files and in partition values."""
    return _physical(column)


def _physical_name(table: TableInfo, name: str) -> str:
    for one in table.fields:
        if one["name"] == name:
            return _physical(one)
    return name


def _shape(kind: Any) -> Any:
    """Return what two types must have in common for one to be read as the other."""
    if not isinstance(kind, dict):
        return kind
    shape = {k: _shape(v) for k, v in kind.items() if k in ("type", "elementType", "keyType", "valueType")}
    if kind["type"] == "struct":
        return {"type": "struct", "fields": [(_physical(f), _shape(f["type"])) for f in kind["fields"]]}
    return shape
