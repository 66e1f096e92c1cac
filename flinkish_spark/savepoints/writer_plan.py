"""The plan of a new savepoint: its chains, its timers, and the changes to each operator."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.core.clock import wall_ms
from flinkish_spark.core.elements import TimeDomain
from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.core.validation import raise_config_errors
from flinkish_spark.protocol.event_time import TimerReport, Valve
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage, check_name
from flinkish_spark.protocol.plan_layout import Chain, Position
from flinkish_spark.protocol.savepoints import OperatorState, SavedChain, SavepointMetadata, StateFile
from flinkish_spark.protocol.timer_index import Agenda
from flinkish_spark.protocol.watermarks import EventTime, OperatorTime
from flinkish_spark.savepoints.bootstrap import KeyedRows, KeyedStateBootstrapFunction
from flinkish_spark.savepoints.entries import (
    CLOCK,
    EACH_TOUCHED_AT,
    TIME_MS,
    TIMES,
    file_values,
    value_columns,
)
from flinkish_spark.savepoints.files import BootstrapError, SavepointDir
from flinkish_spark.savepoints.group_edits import Edit, EditedPartition, EditedState, EditedTimers
from flinkish_spark.savepoints.written_files import DueTimers
from flinkish_spark.state.codec import HASH, TOUCHED, Expiry, SlotForm, TableLayout, timer_layout
from flinkish_spark.state.evolution import flatten_types, read_value_types
from flinkish_spark.state.group_values import PREFIXES, read_tables
from flinkish_spark.state.key_group import STATE_SECTION
from flinkish_spark.state.operator_state import BROADCAST_KIND
from flinkish_spark.types.arrow_types import arrow_type
from flinkish_spark.types.ddl import quote_name
from flinkish_spark.types.rows import arrow_schema

# A savepoint is restored by uid, but the state of an operator belongs to a chain, and operators in one chain
# of a job must have had the same source positions.
Chains = tuple[SavedChain, ...]


def add_operator(chains: Chains, uid: str, beside: str | None) -> tuple[Chains, str]:
    """Return the chains with one more operator, and the name of its chain.

    The operator gets the source positions of that chain, so it can be restored into a chain with any operator
    at the same positions. In a savepoint without chains it has no positions, and the sources of a job begin
    where they say themselves.
    """
    if not chains:
        return (SavedChain(Chain((), (uid,), (uid,)), {}),), uid
    names = [one.chain.name for one in chains]
    if beside is None:
        if any(_find_positions(one) != _find_positions(chains[0]) for one in chains):
            raise BootstrapError(
                f"it is not clear which source positions the new operator '{uid}' has",
                why="the chains of the savepoint have different positions",
                what_to_do=f"name the chain whose positions it has: beside={' or '.join(map(repr, names))}",
            )
        beside = names[0]
    if beside not in names:
        raise BootstrapError(
            f"the savepoint has no chain '{beside}'", what_to_do=f"choose: {', '.join(names)}"
        )
    changed = [
        _replace_operators(one, (*one.chain.operators, uid)) if one.chain.name == beside else one
        for one in chains
    ]
    return tuple(changed), beside


def drop_operator(chains: Chains, uid: str) -> Chains:
    """Return the chains without an operator; a chain with sources stays, since it has their positions."""
    changed = [
        _replace_operators(one, tuple(other for other in one.chain.operators if other != uid))
        for one in chains
    ]
    return tuple(one for one in changed if one.chain.operators or one.chain.inputs)


def rename_operator(chains: Chains, old: str, new: str) -> tuple[Chains, Mapping[str, str]]:
    """Return the chains with another uid for an operator, and the chains' new names by their old ones."""

    def rename(uids: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(new if uid == old else uid for uid in uids)

    changed, names = [], {}
    for one in chains:
        operators, consumers = rename(one.chain.operators), rename(one.chain.consumers)
        changed.append(replace(one, chain=replace(one.chain, operators=operators, consumers=consumers)))
        names[one.chain.name] = changed[-1].chain.name
    return tuple(changed), names


def _find_positions(one: SavedChain) -> dict[str, Position]:
    """Return the positions of all inputs of a chain; None for one that Spark had not read yet."""
    return {name: one.positions.get(name) for name in one.chain.inputs}


def _replace_operators(one: SavedChain, operators: tuple[str, ...]) -> SavedChain:
    sinks = tuple(sorted(one.readers))
    # The name stays as long as there are operators, because their state files refer to it.
    consumers = one.chain.consumers if operators else sinks or one.chain.consumers
    return replace(one, chain=replace(one.chain, operators=operators, consumers=consumers), sinks=sinks)


# -- timers -----------------------------------------------------------------------------------------
def drop_times(times: EventTime | None, uid: str, operators: Collection[str]) -> EventTime | None:
    if times is None:
        return None
    groups = {
        place: timers
        for place, timers in times.agenda.groups.items()
        if find_operator_uid(place[0], operators) != uid
    }
    others = {name: one for name, one in times.operators.items() if name != uid}
    levels = {name: one for name, one in times.levels.items() if name != uid}
    return replace(times, agenda=Agenda(groups), operators=others, levels=levels)


def rename_times(
    times: EventTime | None, old: str, new: str, operators: Collection[str], names: Mapping[str, str]
) -> EventTime | None:
    if times is None:
        return None

    def instance_now(name: str) -> str:
        uid = find_operator_uid(name, operators)
        chain = name.removeprefix(f"{uid}.") if name != uid else ""
        now = new if uid == old else uid
        return f"{now}.{names.get(chain, chain)}" if chain else now

    def operator_now(one: OperatorTime) -> OperatorTime:
        return replace(
            one,
            inputs=frozenset(_rename(uid, names) for uid in one.inputs),
            instances=frozenset(map(instance_now, one.instances)),
            valve=_rename_valve(one.valve, names),
        )

    return replace(
        times,
        agenda=Agenda(
            {(instance_now(name), group): timers for (name, group), timers in times.agenda.groups.items()}
        ),
        assigners={_rename(uid, names): one for uid, one in times.assigners.items()},
        valve=_rename_valve(times.valve, names),
        operators={(new if uid == old else uid): operator_now(one) for uid, one in times.operators.items()},
        levels={(new if uid == old else uid): one for uid, one in times.levels.items()},
    )


def replace_due_timers(
    times: EventTime | None, uid: str, chain: str, chains: Collection[str], due: Iterable[DueTimers]
) -> EventTime | None:
    own = f"{uid}.{chain}"
    known = {own} if len(chains) > 1 else {uid, own}
    reports = [
        TimerReport(own if len(chains) > 1 else uid, group, event_ms, processing_ms)
        for group, event_ms, processing_ms in due
        if (event_ms, processing_ms) != (None, None)
    ]
    if times is None and not reports:
        return None
    before = times or EventTime()
    others = {place: one for place, one in before.agenda.groups.items() if place[0] not in known}
    return replace(before, agenda=Agenda(others).update(reports))


def find_operator_uid(name: str, operators: Collection[str]) -> str:
    fitting = [uid for uid in operators if name == uid or name.startswith(f"{uid}.")]
    return max(fitting, key=len, default=name)


def _rename_valve(valve: Valve[str], names: Mapping[str, str]) -> Valve[str]:
    return replace(valve, channels={_rename(uid, names): one for uid, one in valve.channels.items()})


def _rename(assigner: str, names: Mapping[str, str]) -> str:
    old = max((old for old in names if assigner.endswith(f".{old}")), key=len, default=None)
    return assigner if old is None else assigner.removesuffix(old) + names[old]


_WINDOW = (TIMES["from"], TIMES["to"])
_TOUCHED = TIMES[TOUCHED]
_NO_FIELDS: Mapping[str, str] = {}
_ADVICE = "give the columns that the reader returns, with their types there"


@dataclass(frozen=True)
class EditRows:
    #: Columns in the order of `edit`; for keyed state, after the key's hash.
    frame: DataFrame
    edit: Edit


def partition_rows(frame: DataFrame, uid: str, name: str, kind: str) -> EditRows:
    """Return the rows for a state without keys, after the checks that need no read of the rows."""
    _refuse_streaming(frame)
    names = ("key", "value") if kind == BROADCAST_KIND else ("item",)
    if set(frame.columns) != set(names):
        raise SchemaError(
            f"the {kind} '{name}' of '{uid}' cannot have the columns {', '.join(frame.columns)}",
            what_to_do=f"give the columns that the reader returns: {' and '.join(names)}",
        )
    ordered = frame.select(*names)
    return EditRows(ordered, EditedPartition(PREFIXES[kind] + name, arrow_schema(ordered.schema), kind))


def _refuse_streaming(frame: DataFrame) -> None:
    if frame.isStreaming:
        raise ConfigError("state and timers cannot be of a streaming DataFrame", what_to_do="use spark.read")


def state_rows(
    frame: DataFrame, uid: str, name: str, key_types: Sequence[str], stored: pa.Schema | None
) -> EditRows:
    """Return the rows for a state, after the checks that need no read of the rows."""
    _refuse_streaming(frame)
    fields = {} if stored is None else fields_by_column(stored)
    layout, columns = state_columns(frame.schema, uid, name, key_types, fields)
    own, before = (
        [] if one is None else sorted(TIMES[field.name] for field in one if field.name in TIMES)
        for one in (layout.schema, stored)
    )
    if stored is not None and own != before:
        has, given = (", ".join(names) or "no times" for names in (before, own))
        raise SchemaError(
            f"the state '{name}' of '{uid}' has {has}, and the DataFrame has {given}",
            what_to_do=_ADVICE,
        )
    if len(layout.values) == 1:
        # A null means that the key has no value.
        frame = frame.where(F.col(quote_name(columns[-1].name)).isNotNull())
    selected, schema = _add_hash(frame, columns, len(key_types))
    return EditRows(selected, EditedState(STATE_SECTION + name, schema, layout.schema))


def timer_rows(frame: DataFrame, uid: str, key_types: Sequence[str]) -> EditRows:
    """Return the timers for an operator, after the checks that need no read of the rows."""
    _refuse_streaming(frame)
    for window in _WINDOW:
        if window not in frame.columns:
            frame = frame.withColumn(window, F.lit(None).cast("timestamp"))
    columns = timer_fields(frame.schema, uid, key_types)
    kinds = [one.dataType for one in columns[: len(key_types)]]
    selected, schema = _add_hash(frame, columns, len(key_types))
    layouts = {domain: timer_layout(domain, kinds) for domain in TimeDomain}
    return EditRows(selected, EditedTimers(schema, layouts))


def timer_fields(schema: T.StructType, uid: str, key_types: Sequence[str]) -> list[T.StructField]:
    what, windows = f"the timers of '{uid}'", dict.fromkeys(_WINDOW, "timestamp")
    wanted = {**_name_key_columns(key_types), CLOCK: "string", TIME_MS: "bigint", **windows}
    _check_types(schema, wanted, what)
    strange = sorted(set(schema.names) - wanted.keys())
    if strange:
        raise SchemaError(f"{what} have no column '{strange[0]}'", what_to_do=_ADVICE)
    return [schema[name] for name in wanted]


def _add_hash(frame: DataFrame, columns: Sequence[T.StructField], keys: int) -> tuple[DataFrame, pa.Schema]:
    """Return the columns after a hash of the first `keys` ones, and their schema in a block."""
    named = [F.col(quote_name(one.name)) for one in columns]
    selected = frame.select(
        F.xxhash64(*named[:keys]).alias(HASH), *(one.alias(f"c{number}") for number, one in enumerate(named))
    )
    fields = [T.StructField(f"c{number}", one.dataType) for number, one in enumerate(columns)]
    return selected, arrow_schema([T.StructField(HASH, T.LongType()), *fields])


def _name_key_columns(key_types: Sequence[str]) -> dict[str, str]:
    if len(key_types) == 1:
        return {"key": key_types[0]}
    return {f"key_{number}": kind for number, kind in enumerate(key_types)}


def _check_types(schema: T.StructType, wanted: Mapping[str, str], what: str) -> None:
    given = {field.name: field.dataType.simpleString() for field in schema}
    for name, kind in wanted.items():
        if given.get(name) != kind:
            found = given.get(name, "missing")
            raise SchemaError(f"'{name}' of {what} is a {kind}, and here {found}", what_to_do=_ADVICE)


def state_columns(
    schema: T.StructType,
    uid: str,
    name: str,
    key_types: Sequence[str],
    fields: Mapping[str, str] = _NO_FIELDS,
) -> tuple[TableLayout, list[T.StructField]]:
    """Return the stored layout of a state with these columns, and the columns in stored order."""
    what = f"the state '{name}' of '{uid}'"
    keys, given = _name_key_columns(key_types), {field.name: field for field in schema}
    ours = given.keys() - set(fields)
    has_window = [window in ours for window in _WINDOW]
    if any(has_window) and not all(has_window):
        raise SchemaError(f"{what} has one of {' and '.join(_WINDOW)}", what_to_do="give both, or none")
    times = [time for time in (*_WINDOW, _TOUCHED) if time in ours]
    _check_types(schema, keys | dict.fromkeys(times, "timestamp"), what)
    values = [field for field in schema if field.name not in (*keys, *times)]
    expiry = Expiry.WHOLE if _TOUCHED in times else Expiry.NOTHING
    if EACH_TOUCHED_AT in ours and len(values) == 2:
        values = [field for field in values if field.name != EACH_TOUCHED_AT]
        _check_types(schema, {EACH_TOUCHED_AT: "array<timestamp>"}, what)
        if _TOUCHED not in given or not isinstance(values[0].dataType, T.ArrayType | T.MapType):
            raise SchemaError(
                f"{what} has the column {EACH_TOUCHED_AT}",
                why=f"only lists and maps with a time to live have it, together with {_TOUCHED}",
                what_to_do=_ADVICE,
            )
        times.append(EACH_TOUCHED_AT)
        expiry = Expiry.ELEMENTS
    if not values or (len(values) == 1 and values[0].name != "value"):
        raise SchemaError(
            f"{what} has {'no value' if not values else f'the only value {values[0].name!r}'}",
            what_to_do="call a single value 'value'; several columns are the fields of one",
        )
    layout = TableLayout(
        name,
        tuple(arrow_type(given[key].dataType) for key in keys),
        tuple(arrow_type(field.dataType) for field in values),
        SlotForm.KEY_AND_WINDOW if all(has_window) else SlotForm.KEY,
        expiry,
        None,
        tuple(fields.get(field.name, field.name) for field in values) if len(values) > 1 else (),
    )
    return layout, [*(given[one] for one in (*keys, *times)), *values]


def fields_by_column(stored: pa.Schema) -> dict[str, str]:
    fields = flatten_types(read_value_types(stored))
    return {column: field for field, column in value_columns(stored, fields).items()}


def find_stored_columns(
    place: SavepointDir | None, files: Sequence[StateFile], name: str
) -> pa.Schema | None:
    """Return the stored columns of a state in the first key group that has it; None if none has."""
    for file in files:
        assert place is not None
        for _, value in file_values(place.place, file):
            table = read_tables(value).get(STATE_SECTION + name)
            if table is not None:
                return table.schema
    return None


@dataclass(frozen=True)
class OperatorBootstrap:
    #: Name of the chain in which the operator is.
    chain: str
    rows: KeyedRows
    function: KeyedStateBootstrapFunction


@dataclass(frozen=True)
class PlannedOperator:
    #: Its `states` are those that are stored already.
    state: OperatorState
    #: State files of the old savepoint, by the present name of their chain.
    origin: Mapping[str, tuple[StateFile, ...]] = field(default_factory=dict)
    #: Replaced states, by chain.
    edits: Mapping[str, tuple[EditRows, ...]] = field(default_factory=dict)
    #: For a new operator, which has no origin and only edits of states without keys.
    bootstrap: OperatorBootstrap | None = None

    def add_edit(self, chain: str, rows: EditRows) -> PlannedOperator:
        others = tuple(one for one in self.edits.get(chain, ()) if one.edit.section != rows.edit.section)
        return replace(self, edits={**self.edits, chain: (*others, rows)})

    def rename_chains(self, names: Mapping[str, str]) -> PlannedOperator:
        bootstrap = self.bootstrap
        if bootstrap is not None:
            bootstrap = replace(bootstrap, chain=names.get(bootstrap.chain, bootstrap.chain))
        origin = {names.get(chain, chain): files for chain, files in self.origin.items()}
        edits = {names.get(chain, chain): rows for chain, rows in self.edits.items()}
        return replace(self, origin=origin, edits=edits, bootstrap=bootstrap)


@dataclass(frozen=True)
class WrittenOperator:
    #: With all of its states.
    state: OperatorState
    files: tuple[StateFile, ...]
    #: Key groups with their next timers by both clocks, by chain, for chains with new timers.
    due: Mapping[str, tuple[DueTimers, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class WriterPlan:
    """An immutable plan, which refers to the files of the savepoint that it starts from."""

    #: The metadata that are taken over unchanged.
    metadata: SavepointMetadata
    #: The savepoint that the new one starts as a copy of; None for an empty one.
    origin: SavepointDir | None
    operators: Mapping[str, PlannedOperator]
    #: Chains and event time of the new savepoint, without the new timers.
    chains: Chains
    times: EventTime | None
    #: Number of key groups of added operators.
    max_parallelism: int

    @classmethod
    def create_empty(cls, job: str, shuffle_partitions: int, max_parallelism: int) -> WriterPlan:
        """Return the plan of an empty savepoint, of checkpoint 0, which no job has."""
        metadata = SavepointMetadata(
            savepoint=uuid.uuid4().hex,
            job=job,
            job_uuid=JobUuid(uuid.uuid4().hex),
            checkpoint=CheckpointId(0),
            lineage=Lineage(0),
            batch=BatchId(0),
            decided_at_ms=wall_ms(),
            shuffle_partitions=shuffle_partitions,
            operators={},
            sources={},
            chains=(),
        )
        return cls(metadata, None, {}, (), None, max_parallelism)

    @classmethod
    def from_savepoint(cls, place: SavepointDir, max_parallelism: int) -> WriterPlan:
        metadata = place.metadata()
        place.check_files(metadata.files)
        operators = {}
        for uid, state in metadata.operators.items():
            origin: dict[str, tuple[StateFile, ...]] = {}
            for file in metadata.files:
                if file.operator == uid:
                    origin[file.chain] = (*origin.get(file.chain, ()), file)
            operators[uid] = PlannedOperator(state, origin)
        return cls(metadata, place, operators, metadata.chains, metadata.times, max_parallelism)

    def check_new(self, uid: str) -> None:
        with raise_config_errors("give the operator's uid in the job"):
            check_name(uid, "uid")
        if uid in self.operators:
            raise BootstrapError(
                f"there is an operator '{uid}' already",
                what_to_do="use remove_operator() first, or replace_state() to replace one of its states",
            )

    def find_operator(self, uid: str) -> PlannedOperator:
        found = self.operators.get(uid)
        if found is None:
            known = ", ".join(self.operators) or "none"
            raise BootstrapError(f"the savepoint has no operator '{uid}'", what_to_do=f"choose from: {known}")
        return found

    def find_keyed_operator(self, uid: str) -> PlannedOperator:
        """Return an operator with stored keyed state; refuse other operators."""
        planned = self.find_operator(uid)
        if not planned.state.key_types:
            raise BootstrapError(
                f"the operator '{uid}' has no keys, and so no keyed state",
                what_to_do="use replace_broadcast_state() or replace_list_state()",
            )
        if planned.bootstrap is not None:
            raise BootstrapError(
                f"the operator '{uid}' is new in this writer",
                what_to_do="let that function fill the state; or write the savepoint, and edit that one",
            )
        return planned

    def chain_of(self, uid: str, chain: str | None) -> str:
        """Return the name of the chain with an operator's state; refuse a missing or ambiguous one."""
        having = [one.chain.name for one in self.chains if uid in one.chain.operators]
        known = sorted(self.find_operator(uid).origin) or having
        if chain is None and len(known) == 1:
            return known[0]
        if chain is None or chain not in known:
            several = f"operator '{uid}' has state in {len(known)} chains"
            raise BootstrapError(
                several if chain is None else f"there is no chain '{chain}' of '{uid}'",
                what_to_do=f"say which: chain={' or '.join(map(repr, known))}",
            )
        return chain
