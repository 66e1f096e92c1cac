"""Rules of Delta tables: how a stream fits a table, how to restore one at a rewind.

Pure functions of values; schemas are Spark's JSON. Delta has the last word, but problems that are found here
are found before a checkpoint is decided, and can be explained. A committable carries the settings with which
it was staged, so changed settings of a sink do not change the meaning of decided data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flinkish_spark.connectors.write_modes import (
    Append,
    OverwritePartitions,
    Upsert,
    WriteMode,
    list_stored_names,
)
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, Lineage
from flinkish_spark.protocol.timeline import Mark, find_token

Json = Mapping[str, Any]

#: Begins the note of a commit that holds a checkpoint.
_NOTE = "flinkish-commit "
#: Operations that change no rows, so that restoring an older version loses nothing of them.
_HARMLESS = frozenset({"OPTIMIZE", "VACUUM START", "VACUUM END"})


class DeltaTableError(Exception):
    """Delta refused a write; the message is Delta's own, without the stack."""


class DeltaRuleError(DeltaTableError):
    """A row breaks a rule of the table; the message names both."""


class DeltaConflict(Exception):
    """Another writer was faster; the same call may be repeated."""


class NotAsFiles(Exception):
    """Staged files cannot be added to the table as it is now; their rows may still fit."""


def app_id(job: JobUuid, uid: str) -> str:
    return f"{_prefix(job)}{uid}"


def note_of(job: JobUuid, lineage: Lineage) -> str:
    """Return the note of a restore, by which the same rewind finds it after a crash."""
    return f"flinkish-rewind {job} {lineage}"


def checkpoint_note(app: str, mark: Mark) -> str:
    return " ".join([f"{_NOTE}{app}", str(mark.checkpoint), *([mark.token] if mark.token else [])])


def mark_in(note: str, app: str) -> Mark | None:
    """Return the checkpoint of a sink that a commit holds; None if it is not a commit of that sink."""
    found = _parse_note(note)
    if found is None or found[0] != app:
        return None
    return Mark(CheckpointId(found[1]), find_token(note.split(" ")))


def _parse_note(note: str) -> tuple[str, int] | None:
    if not note.startswith(_NOTE):
        return None
    # After the checkpoint come the timeline's token, and maybe a word that tells attempts apart.
    app, checkpoint, *_ = [*note.removeprefix(_NOTE).split(" "), ""]
    return (app, int(checkpoint)) if checkpoint.isdecimal() else None


@dataclass(frozen=True, slots=True)
class TableCommit:
    version: int
    operation: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class NothingToRestore:
    """The table holds nothing newer than the target, or this rewind has restored it."""


@dataclass(frozen=True, slots=True)
class RestoreVersion:
    #: None for no rows: the job's first commit, after the target, created the table.
    version: int | None


@dataclass(frozen=True, slots=True)
class NoRestore:
    why: str


RestorePlan = NothingToRestore | RestoreVersion | NoRestore


def plan_restore(
    history: Iterable[TableCommit], job: JobUuid, target: CheckpointId, lineage: Lineage
) -> RestorePlan:
    """Return how the table is restored to its state at checkpoint `target` of `job`."""
    first = stranger = blocking = oldest = None
    for commit in history:
        oldest = commit
        app, checkpoint = _parse_note(commit.note) or ("", None)
        if not app.startswith(_prefix(job)):
            checkpoint = None
        if commit.note == note_of(job, lineage):
            return NothingToRestore()
        if checkpoint is not None and checkpoint <= int(target):
            break
        if checkpoint is not None:
            first, blocking = commit, stranger
        elif commit.operation not in _HARMLESS and not commit.note.startswith(f"flinkish-rewind {job} "):
            stranger = commit
    if first is None or oldest is None:
        return NothingToRestore()
    if blocking is not None:
        return NoRestore(
            f"version {blocking.version} ({blocking.operation}) was committed by somebody else after "
            f"checkpoint {target}, and restoring the table would undo that, too"
        )
    if first.version == 0:
        return RestoreVersion(None)
    if oldest is first:
        return NoRestore(f"its history does not go back to checkpoint {target} any more")
    return RestoreVersion(first.version - 1)


def _prefix(job: JobUuid) -> str:
    return f"flinkish-{job}-"


class SchemaEvolution(Choice):
    """Changes that a stream may make to the schema of its table.

    Columns are only ever added and widened: no mode drops a column or changes its type otherwise.
    """

    #: None: a stream with another schema is refused before the job starts.
    NONE = "NONE"
    #: New columns and new fields of structs; added by the commit of the checkpoint that brings them.
    ADD_COLUMNS = "ADD_COLUMNS"
    #: Also wider types, in tables with ``delta.enableTypeWidening``.
    WIDEN_TYPES = "WIDEN_TYPES"


def list_stored_fields(mode: WriteMode, fields: Sequence[Json]) -> list[Json]:
    kept = list_stored_names(mode, [str(one["name"]) for one in fields])
    return [one for one in fields if one["name"] in kept]


_INVARIANT = "delta.invariants"
_GENERATED = "delta.generationExpression"
_IDENTITY = "delta.identity.start"
_EXPLICIT_IDENTITY = "delta.identity.allowExplicitInsert"
_DEFAULT = "CURRENT_DEFAULT"
_CHARS = "__CHAR_VARCHAR_TYPE_STRING"
_COLLATIONS = "__COLLATIONS"
_PHYSICAL = "delta.columnMapping.physicalName"
_MAPPING = "delta.columnMapping.mode"
#: From narrow to wide: each holds all values of those before it.
_WHOLE_NUMBERS = ("byte", "short", "integer", "long")
_DECIMAL = re.compile(r"decimal\((\d+),\s*(-?\d+)\)")


@dataclass(frozen=True, slots=True)
class TableInfo:
    #: Fields of the schema, as Spark's JSON. Read by public interfaces, they lack Delta's own metadata.
    fields: tuple[Json, ...]
    partition_by: tuple[str, ...]
    properties: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: Features that its writers must know, by the protocol's names.
    features: frozenset[str] = frozenset()
    id: str = ""

    @classmethod
    def from_log(cls, metadata: Json, features: frozenset[str] = frozenset()) -> TableInfo:
        inner = metadata["metaData"]
        return cls(
            tuple(json.loads(inner["schemaString"])["fields"]),
            tuple(inner.get("partitionColumns", [])),
            dict(inner.get("configuration") or {}),
            features,
            str(inner.get("id", "")),
        )

    @property
    def checks(self) -> dict[str, str]:
        """CHECK constraints and invariants: name to SQL condition."""
        start = "delta.constraints."
        given = {n.removeprefix(start): sql for n, sql in self.properties.items() if n.startswith(start)}
        found = {path: f.get("metadata", {}).get(_INVARIANT) for path, f in _fields_in(self.fields)}
        return given | {
            f"{_INVARIANT} of {'.'.join(path)}": _condition_in(text) for path, text in found.items() if text
        }

    @property
    def not_null(self) -> dict[str, list[str]]:
        """Columns and fields of structs that may not be null: dotted name to path."""
        return {".".join(path): list(path) for path, f in _fields_in(self.fields) if not f["nullable"]}

    @property
    def generated(self) -> dict[str, str]:
        found = {str(f["name"]): f.get("metadata", {}).get(_GENERATED) for f in self.fields}
        return {name: expression for name, expression in found.items() if expression}

    @property
    def lengths(self) -> dict[str, str]:
        """Columns with a CHAR or VARCHAR in them, at any depth: name to type."""
        found = {str(f["name"]): str(f.get("metadata", {}).get(_CHARS, "")) for f in self.fields}
        return {name: kind for name, kind in found.items() if kind}

    @property
    def padded(self) -> tuple[str, ...]:
        return tuple(name for name, kind in self.lengths.items() if kind.startswith("char"))

    def is_collated(self, name: str) -> bool:
        found = next((f for f in self.fields if str(f["name"]).lower() == name.lower()), None)
        return found is not None and bool(found.get("metadata", {}).get(_COLLATIONS))

    def has_column(self, name: str) -> bool:
        # Spark ignores case.
        return any(str(f["name"]).lower() == name.lower() for f in self.fields)

    def physical_name(self, name: str) -> str:
        """Return the name of a column in the log and in files."""
        return next((physical_name(one) for one in self.fields if one["name"] == name), name)

    @property
    def mapping(self) -> str:
        """The table's column mapping mode: "name", "id" or "none"."""
        return self.properties.get(_MAPPING, "none")

    @property
    def is_append_only(self) -> bool:
        return self.properties.get("delta.appendOnly", "false").lower() == "true"

    @property
    def widens(self) -> bool:
        return self.properties.get("delta.enableTypeWidening", "false").lower() == "true"

    def rules(self) -> dict[str, Any]:
        """Return the rules that staged rows are checked by, as JSON values."""
        return {kind: getattr(self, kind) for kind in ("checks", "not_null", "generated", "lengths")}


def _fields_in(fields: Sequence[Json], at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Json]]:
    """Yield fields and the fields of nested structs, with their paths: Delta has rules for these only."""
    for one in fields:
        path = (*at, str(one["name"]))
        yield path, one
        if isinstance(one["type"], dict) and one["type"]["type"] == "struct":
            yield from _fields_in(one["type"]["fields"], path)


def _condition_in(invariant: str) -> str:
    """Return the SQL in an invariant; the whole text if it has an unknown form, so that it is refused."""
    try:
        return str(json.loads(invariant)["expression"]["expression"])
    except (ValueError, TypeError, KeyError):
        return invariant


@dataclass(frozen=True, slots=True)
class Fit:
    #: Sentences without full stop; empty if the rows can be written.
    problems: tuple[str, ...] = ()
    #: Columns (dotted for fields of structs) that writing would add or widen.
    changes: tuple[str, ...] = ()


def fit(table: TableInfo, stream: Sequence[Json], evolution: SchemaEvolution) -> Fit:
    found = list(_compare_fields(table.fields, stream, "", table.widens))
    # Problems that no evolution allows come first.
    found.sort(key=lambda one: one[0] != "PROBLEM")
    allowed = {
        SchemaEvolution.NONE: (),
        SchemaEvolution.ADD_COLUMNS: ("NEW",),
        SchemaEvolution.WIDEN_TYPES: ("NEW", "WIDER"),
    }[evolution]
    problems = [text for kind, _, text in found if kind not in allowed]
    problems += _missing(table, {str(f["name"]).lower() for f in stream})
    return Fit(tuple(problems), tuple(name for kind, name, _ in found if kind in allowed))


def why_unfit(table: TableInfo, mode: WriteMode, stream: Sequence[Json], evolution: SchemaEvolution) -> str:
    if problems := fit(table, list_stored_fields(mode, stream), evolution).problems:
        return problems[0]
    if isinstance(mode, Upsert) and (missing := [key for key in mode.keys if not table.has_column(key)]):
        return f"the table has no column {missing[0]}, which is a key"
    if isinstance(mode, OverwritePartitions) and not table.partition_by:
        return "it has no partitions, and would be overwritten as a whole"
    if table.is_append_only and not isinstance(mode, Append):
        return "the table became append-only"
    return ""


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
            continue
        for path, one in _fields_in([column]):
            if not one["nullable"]:
                yield f"the stream lacks the column {'.'.join(path)}, which is NOT NULL"


Finding = tuple[str, str, str]


def _compare_fields(
    table: Sequence[Json], stream: Sequence[Json], at: str, widens: bool, *, is_checked: bool = True
) -> Iterator[Finding]:
    have = {str(f["name"]).lower(): f for f in table}
    for one in stream:
        name = f"{at}{one['name']}"
        known = have.pop(str(one["name"]).lower(), None)
        if known is None:
            yield "NEW", name, f"the table has no column {name}"
            continue
        yield from _compare(known["type"], one["type"], name, widens, is_top=not at, is_checked=is_checked)
        if not is_checked:
            yield from _compare_nulls(known["nullable"], one["nullable"], name)
    for name in (str(one["name"]) for one in have.values() if at and not one["nullable"]):
        yield "PROBLEM", f"{at}{name}", f"the stream lacks the field {at}{name}, which is NOT NULL"


def _compare(
    table: Any, stream: Any, name: str, widens: bool, *, is_top: bool, is_checked: bool
) -> Iterator[Finding]:
    if isinstance(table, str) and isinstance(stream, str):
        if table == stream or (is_top and is_wider(stream, table)):
            return
        if is_wider(table, stream) and widens:
            yield "WIDER", name, f"the column {name} is {table} and the stream's is {stream}"
        else:
            why = ", and the table does not have delta.enableTypeWidening" if is_wider(table, stream) else ""
            text = f"the column {name} is {table} in the table and {stream} in the stream{why}"
            yield "PROBLEM", name, text
    elif isinstance(table, dict) and isinstance(stream, dict) and table["type"] == stream["type"]:
        if table["type"] == "struct":
            fields = table["fields"], stream["fields"]
            yield from _compare_fields(*fields, f"{name}.", widens, is_checked=is_checked)
        for part in ("elementType", "keyType", "valueType"):
            if part in table:
                inner = f"{name}.{part}"
                yield from _compare(table[part], stream[part], inner, widens, is_top=False, is_checked=False)
        for part in ("containsNull", "valueContainsNull"):
            yield from _compare_nulls(table.get(part, True), stream.get(part, True), name)
    else:
        yield "PROBLEM", name, f"the column {name} has another type in the table than in the stream"


def _compare_nulls(table: bool, stream: bool, name: str) -> Iterator[Finding]:
    """Find nulls that a table forbids and Delta does not check: readers would take them for values."""
    if stream and not table:
        why = "can hold nulls in the stream and not in the table, and Delta does not check that there"
        yield "PROBLEM", name, f"the column {name} {why}"


def is_wider(narrow: str, wide: str) -> bool:
    """Return whether Delta widens `narrow` to `wide` by itself when a wider value is written."""
    if narrow in _WHOLE_NUMBERS and wide in _WHOLE_NUMBERS:
        return _WHOLE_NUMBERS.index(narrow) < _WHOLE_NUMBERS.index(wide)
    if (narrow, wide) in (("float", "double"), ("date", "timestamp_ntz")):
        return True
    one, other = _DECIMAL.fullmatch(narrow), _DECIMAL.fullmatch(wide)
    if one is None or other is None or narrow == wide:
        return False
    digits, scale = int(other[1]) - int(one[1]), int(other[2]) - int(one[2])
    return scale >= 0 and digits >= scale


#: Writer features that delta-rs supports, by the protocol's names; a test tries each feature of Delta's.
FEATURES_OF_DELTA_RS = frozenset(
    {
        *("appendOnly", "changeDataFeed", "checkConstraints", "columnMapping", "deletionVectors"),
        *("generatedColumns", "invariants", "timestampNtz", "v2Checkpoint", "variantType"),
        "variantType-preview",
    }
)


#: In the JSON of a type within a column.
_NEVER_NULL = re.compile(r'"(nullable|containsNull|valueContainsNull)": false')


def why_by_spark(table: TableInfo, mode: WriteMode | None, changes: Sequence[str] = ()) -> str:
    """Return a feature of the table that only Delta's own writer supports; empty if delta-rs can write.

    Without a mode, for a restore of an older version.
    """
    unknown = sorted(table.features - FEATURES_OF_DELTA_RS)
    if unknown:
        return f"the table feature {unknown[0]}"
    if isinstance(mode, Append | OverwritePartitions) and table.mapping == "id":
        return "the table feature columnMapping by id, where files are written"
    if not isinstance(mode, Append | Upsert) and "deletionVectors" in table.features:
        return "the table feature deletionVectors, where files with such a vector are removed"
    decimals = [f for f in table.fields if f["name"] in table.partition_by and "decimal" in f["type"]]
    if isinstance(mode, Upsert) and decimals:
        # delta-rs writes -1.5 as "-1.-5".
        return f"partitions by a DECIMAL, as {decimals[0]['name']} is, where rows are merged"
    strict = [f["name"] for f in table.fields if _NEVER_NULL.search(json.dumps(f["type"]))]
    if isinstance(mode, Upsert) and strict:
        return f"NOT NULL within the column {strict[0]}, where rows are merged"
    if isinstance(mode, Upsert) and table.checks:
        return "the table feature checkConstraints, where rows are merged"
    if isinstance(mode, Upsert) and table.generated:
        return "the table feature generatedColumns, where rows are merged"
    return f"a change of its schema ({changes[0]})" if changes else ""


#: Characters that no column name may have, unless the table maps names.
_NOT_IN_NAMES = frozenset(" ,;{}()\n\t=")
_TYPES = re.compile(
    r"string|long|integer|short|byte|float|double|boolean|binary|date|timestamp|timestamp_ntz|variant|void|"
    r"decimal\(\d+,\d+\)|(var)?char\(\d+\)"
)


def why_no_table(fields: Sequence[Any], partition_by: Sequence[str]) -> str:
    names = [str(one.name) for one in fields]
    if partition_by and {name.lower() for name in names} <= {name.lower() for name in partition_by}:
        return "every column would be a partition column"
    return _why_no_columns([one.jsonValue() for one in fields])


def _why_no_columns(fields: Sequence[Json]) -> str:
    names = [str(one["name"]) for one in fields]
    for at, (name, one) in enumerate(zip(names, fields, strict=True)):
        if name.lower() in map(str.lower, names[:at]):
            return f"it would have two columns {name}"
        if not name or _NOT_IN_NAMES & set(name):
            return f"a column cannot be called {name!r}: spaces and any of ,;{{}}()= are not allowed"
        if why := _why_no_type(one["type"], name):
            return why
        if (one.get("metadata") or {}).get(_COLLATIONS):
            return f"the column {name} has a collation"
    return ""


def _why_no_type(kind: Any, name: str) -> str:
    if isinstance(kind, str):
        return "" if _TYPES.fullmatch(kind) else f"the column {name} is of type {kind}, which Delta has not"
    if kind["type"] == "struct":
        return _why_no_columns(kind["fields"])
    return next((why for one in _types_in(kind) if (why := _why_no_type(one, name))), "")


def _types_in(kind: Json) -> list[Any]:
    fields = kind["fields"] if kind["type"] == "struct" else []
    inner = [kind[part] for part in ("elementType", "keyType", "valueType") if part in kind]
    return [*(one["type"] for one in fields), *inner]


#: Properties of a new table that delta-rs sets as Delta does.
_MADE_BY_DELTA_RS = frozenset(
    f"delta.{name}"
    for name in (
        *("appendOnly", "checkpointInterval", "dataSkippingNumIndexedCols", "deletedFileRetentionDuration"),
        *("enableChangeDataFeed", "enableDeletionVectors", "enableExpiredLogCleanup", "isolationLevel"),
        *("logRetentionDuration", "setTransactionRetentionDuration"),
    )
)


def why_not_made(table: TableInfo, mode: WriteMode) -> str:
    """Return a feature of a new table that delta-rs does not support; empty if delta-rs can create it."""
    unknown = sorted(table.properties.keys() - _MADE_BY_DELTA_RS)
    if unknown:
        return f"the property {unknown[0]} of new tables"
    for one in table.fields:
        # delta-rs creates the table without the feature, and cannot read it then.
        if _has_in_map(one["type"], "timestamp_ntz"):
            return f"the table feature timestampNtz of a new table, in a MAP as in the column {one['name']}"
    return why_by_spark(table, mode)


def _has_in_map(kind: Any, wanted: str, *, is_within: bool = False) -> bool:
    if isinstance(kind, str):
        return is_within and kind == wanted
    is_within = is_within or kind["type"] == "map"
    return any(_has_in_map(one, wanted, is_within=is_within) for one in _types_in(kind))


def why_not_as_files(staged: Json, current: Json, fields: Sequence[str]) -> str:
    # Their rows may still be written to it, as new files.
    then, now = TableInfo.from_log(staged), TableInfo.from_log(current)
    folders, others = ([one.physical_name(name) for name in one.partition_by] for one in (then, now))
    if folders != others:
        return "the table's partitioning changed since the files were staged"
    have = {physical_name(f): _shape(f["type"]) for f in now.fields}
    wanted = {name.lower() for name in fields}
    for one in then.fields:
        is_ours = str(one["name"]).lower() in wanted
        if is_ours and have.get(physical_name(one)) != _shape(one["type"]):
            return f"the table's column {one['name']} changed since the files were staged"
    if any(_IDENTITY in one.get("metadata", {}) for one in now.fields):
        return "the table numbers its rows since the files were staged"
    return why_stricter(then.rules(), now)


_RULES = {
    "checks": "the table got the constraint {}",
    "generated": "the table got the generated column {}",
    "lengths": "the table got the length of {}",
    "not_null": "the table's column {} became NOT NULL",
}


def why_stricter(rules: Json, now: TableInfo) -> str:
    for kind, text in _RULES.items():
        then = rules.get(kind, {})
        for name, condition in now.rules()[kind].items():
            if then.get(name) != condition:
                return f"{text.format(name)} since the rows were staged"
    return ""


def physical_name(field: Json) -> str:
    return str(field.get("metadata", {}).get(_PHYSICAL, field["name"]))


def rename_fields(part: Any, name_of: Callable[[Json], Any] = physical_name) -> Any:
    if isinstance(part, list):
        return [rename_fields(one, name_of) for one in part]
    if not isinstance(part, dict):
        return part
    found = {key: rename_fields(value, name_of) for key, value in part.items() if key != "metadata"}
    return found | {"name": name_of(part), "metadata": {}} if "name" in part else found


def _shape(kind: Any, name_of: Callable[[Json], str] = physical_name) -> Any:
    """Return the form of a type that is equal for types which can be read as each other."""
    return nullable_within(rename_fields(kind, name_of))


def nullable_within(part: Any) -> Any:
    """Return a type, as JSON, with all values nullable at any depth, as Spark reads it from files."""
    if isinstance(part, list):
        return [nullable_within(one) for one in part]
    if not isinstance(part, dict):
        return part
    found = {name: nullable_within(one) for name, one in part.items()}
    return found | dict.fromkeys(found.keys() & {"nullable", "containsNull", "valueContainsNull"}, True)


def why_not_merged(table: TableInfo, stream: Sequence[Json]) -> str:
    """Return why delta-rs cannot merge a stream that fits; empty if it can."""

    def plain(field: Json) -> Any:
        return _shape(field["type"], lambda one: str(one["name"]))

    # delta-rs compares names with their case, and converts nothing.
    have = {str(one["name"]): plain(one) for one in table.fields}
    other = [str(one["name"]) for one in stream if have.get(str(one["name"])) != plain(one)]
    return f"a merge of {other[0]}, whose type or whose fields differ from the table's" if other else ""
