"""The stored state of one key group: loaded for some keys, changed by an operator, stored again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from flinkish_spark.core.elements import Progress, TimeDomain, Timer
from flinkish_spark.state import codec
from flinkish_spark.state.base_files import Bases
from flinkish_spark.state.columnar import DUE, ColumnarState, DueTable, due_clock
from flinkish_spark.state.evolution import StateMismatch, evolve
from flinkish_spark.state.keyed_states import KeyedStates, to_undeclared_error
from flinkish_spark.state.layered import Array, KeyIndex, LayeredTable, note_changes_in_place
from flinkish_spark.state.timers import StoredTimers, TimerQueue, Timers

_NONE: Array = np.empty(0, dtype=np.int64)

#: Prefixes of section names: timers by clock, states by name.
TIMERS = "timers/"
STATE_SECTION = "state/"


@dataclass(frozen=True)
class BasePolicy:
    """When a key group's entries move into a base."""

    #: A smaller value has no base.
    smallest_bytes: int = 128 * 1024
    #: The delta is merged into a new base when it exceeds this share of the base's rows, or of its bytes.
    delta_share: float = 0.125
    #: A delta that is smaller in both is not merged.
    smallest_delta_rows: int = 1024
    smallest_delta_bytes: int = 1024 * 1024


#: Never writes a base.
NO_BASE = BasePolicy(smallest_bytes=1 << 62)


class NoBases(Bases):
    """The bases of values that have none."""


@dataclass(frozen=True)
class GroupLayout:
    """The tables in the key groups of an operator, known once it is open."""

    uid: str
    states: Mapping[str, codec.TableLayout]
    timers: Mapping[TimeDomain, codec.TableLayout]
    dropped: frozenset[str] = frozenset()

    @classmethod
    def of(cls, states: KeyedStates, key_types: Sequence[T.DataType]) -> GroupLayout:
        states.seal()
        form = {True: codec.SlotForm.KEY_AND_WINDOW, False: codec.SlotForm.KEY}
        return cls(
            states.uid,
            {
                name: codec.layout_of(
                    descriptor,
                    key_types,
                    form[name in states.namespaced],
                    name in states.named,
                    states.due.get(name),
                )
                for name, descriptor in states.descriptors.items()
            },
            {domain: codec.timer_layout(domain, key_types) for domain in TimeDomain},
            frozenset(states.dropped),
        )

    @property
    def sections(self) -> dict[str, codec.TableLayout]:
        states = {STATE_SECTION + name: layout for name, layout in self.states.items()}
        return states | {TIMERS + domain.value: layout for domain, layout in self.timers.items()}


class GroupState:
    """The state of one key group in one micro-batch."""

    def __init__(self, layout: GroupLayout, value: bytes | memoryview | None, bases: Bases) -> None:
        self._layout, self._bases = layout, bases
        delta = {} if value is None else codec.unpack_frame(value)
        owner = codec.read_owner(delta)
        delta.pop(codec.OWNER, None)
        if owner.get("uid", layout.uid) != layout.uid:
            raise StateMismatch(f"the state belongs to operator {owner['uid']!r}, not to {layout.uid!r}")
        self.base = codec.base_of(owner)
        #: Files of former bases, and the micro-batch after which no state names them any more.
        self._former: list[tuple[str, int]] = [(str(f), int(n)) for f, n in owner.get("former", ())]
        base: codec.Frame = {} if self.base is None else bases.read(self.base)
        sections = layout.sections
        known = sections.keys() | {codec.OWNER} | {STATE_SECTION + name for name in layout.dropped}
        unknown = sorted((delta.keys() | base.keys()) - known)
        if unknown:
            raise StateMismatch(
                f"the stored {unknown[0].partition('/')[2]!r} is no longer declared by the function; "
                "declare it, or give it up with context.drop_state(...); if no version of the function had "
                "that state, what is stored is damaged"
            )
        self._tables = {
            name: LayeredTable(
                table,
                _read(table, name, base.get(name), codec.read_trusted_table),
                _read(table, name, delta.get(name), codec.read_entries),
            )
            for name, table in sections.items()
        }
        self.timers = StoredTimers(
            {domain: self._tables[TIMERS + domain.value] for domain in TimeDomain},
            {domain: owner.get("registered", {}).get(domain.value, 0) for domain in TimeDomain},
        )
        self._hash_of: dict[Any, int] = {}
        #: By state and slot, due time and place of the loaded entries.
        self._first_timers: dict[str, dict[Any, tuple[int, int | None]]] = {}
        given_up = [name for name in sorted(layout.dropped) if STATE_SECTION + name in {*delta, *base}]
        #: Entries of dropped states, for the last time: they are not stored again.
        self.given_up = {
            name: merge_layers(name, base.get(STATE_SECTION + name), delta.get(STATE_SECTION + name))
            for name in given_up
        }
        #: Whether the base has to be rewritten. A dropped state in it would come back if a state of its name
        #: is declared later.
        self._is_base_over = not base.keys().isdisjoint(STATE_SECTION + name for name in layout.dropped)

    def clean_up(self, now_ms: int) -> None:
        """Drop states in which all entries have expired; called before :meth:`load`."""
        for table in self._tables.values():
            expired_at_ms = table.expired_at_ms
            if expired_at_ms is not None and expired_at_ms <= now_ms:
                self._is_base_over |= table.base is not None
                table.forget_all()

    def load(
        self,
        states: KeyedStates,
        timers: Timers,
        hash_of: Mapping[Any, int],
        progress: Progress,
        also: Array = _NONE,
    ) -> None:
        """Load the entries of keys that have elements, and of keys with due timers."""
        due = [self.timers.due(domain, limit_ms) for domain, limit_ms in progress.limits_ms.items()]
        due += [self.due_table(name).due(progress.limits_ms[clock]) for name, clock in states.due.items()]
        more = np.concatenate([*due, also])
        self.load_keys(
            states, timers, hash_of, progress.processing_time_ms, more=more, knows_all=not len(also)
        )

    def load_keys(
        self,
        states: KeyedStates,
        timers: Timers,
        hash_of: Mapping[Any, int],
        now_ms: int,
        only: Mapping[str, Array] = MappingProxyType({}),
        timers_of: Array | None = None,
        *,
        more: Array = _NONE,
        knows_all: bool = True,
    ) -> None:
        """Load the entries of keys that have elements, and of keys with `more` hashes.

        Unlike :meth:`load` it adds no keys with due timers. Columns are written after :meth:`store`.
        """
        own = np.fromiter(hash_of.values(), dtype=np.int64, count=len(hash_of))
        hashes = np.unique(np.concatenate([own, more]))
        for table in states.tables.values():
            table.clear()
        timers.queues = self.timers.select(hashes if timers_of is None else timers_of)
        self._hash_of = {**hash_of, **self.timers.hash_of}
        layouts = self._layout.states
        for name, table in states.tables.items():
            found = self._tables[STATE_SECTION + name].select(only.get(name, hashes))
            if not knows_all or layouts[name].expires or name in states.due:
                # Keys with the same hash may have been loaded, too, and some of their entries may have
                # expired.
                self._hash_of.update(
                    (slot[0] if name in states.namespaced else slot, row.hash) for slot, row in found.items()
                )
            if name in states.due:
                found = self._register_entry_timers(name, found, timers.queues[states.due[name]])
            table.load(found, now_ms)

    def _register_entry_timers(
        self, state: str, found: Mapping[Any, codec.Row], queue: TimerQueue
    ) -> dict[Any, codec.Row]:
        """Register the timers that are stored in entries; return the entries without them."""
        timers, entries = list[tuple[Timer, int | None]](), dict[Any, codec.Row]()
        known = self._first_timers[state] = dict[Any, tuple[int, int | None]]()
        for slot, row in found.items():
            time_ms, place, value = row.value
            entries[slot] = row._replace(value=value)
            if time_ms is not None:
                known[slot] = time_ms, place
                timers.append((Timer(time_ms, *slot), place))
        queue.add_of_entries(timers)
        return entries

    def store(self, states: KeyedStates, timers: Timers) -> bool:
        """Take over the changes that an operator made since :meth:`load`; return whether there are any."""
        with_entries = {domain: set[Timer]() for domain in TimeDomain}
        for name, table in states.tables.items():
            has_window = self._layout.states[name].form is codec.SlotForm.KEY_AND_WINDOW
            if table.lent:
                stored, now_ms = self._tables[STATE_SECTION + name], states.scope.now_ms
                note_changes_in_place(table, stored, self._hash_of, now_ms)
            stored, entries, hash_of = self._tables[STATE_SECTION + name], table.entries, self._hash_of
            there = [slot for slot in table.changed if slot in entries]
            values = [entries[slot] for slot in there]
            if name in states.due:
                clock = states.due[name]
                first = timers.queues[clock].first_of_entries(entries)
                with_entries[clock].update(Timer(time_ms, *slot) for slot, (time_ms, _) in first.items())
                known = self._first_timers[name]
                there += [
                    slot
                    for slot in entries
                    if slot not in table.changed and first.get(slot) != known.get(slot)
                ]
                values = [(*first.get(slot, (None, 0)), entries[slot]) for slot in there]
            hashes = [hash_of[slot[0]] for slot in there] if has_window else [hash_of[slot] for slot in there]
            touches = map(table.touch_of, there) if self._layout.states[name].expires else None
            rows = codec.rows_by_slot(there, values, hashes, touches)
            gone = [slot for slot in table.changed if slot not in entries]
            for slot in stored.in_base.keys() & gone:
                rows[slot] = codec.Row(slot, None, hash_of[slot[0] if has_window else slot], alive=False)
            stored.replace(rows, gone)
        self.timers.replace(timers.queues, self._hash_of, with_entries)
        return self.is_changed

    def forget_timers(self) -> None:
        """Drop all timers of an earlier program; the present one stores its timers in entries."""
        for domain in TimeDomain:
            table = self._tables[TIMERS + domain.value]
            if len(table):
                self._is_base_over |= table.base is not None
                table.forget_all()

    def columns(self, state: str, index: KeyIndex, now_ms: int) -> ColumnarState:
        if state not in self._layout.states:
            raise to_undeclared_error(self._layout.uid, state)
        return ColumnarState(self._tables[STATE_SECTION + state], index, now_ms)

    def due_table(self, state: str) -> DueTable:
        return DueTable(self._tables[STATE_SECTION + state])

    def hashes_of(self, state: str) -> Array:
        return np.concatenate(
            [one.column(0).to_numpy() for one in self._tables[STATE_SECTION + state].layers]
        )

    def keys_of(self, state: str, hashes: Array) -> pa.RecordBatch:
        """Return hash and key columns of a state's entries; keys may be repeated, or removed already."""
        table = self._tables[STATE_SECTION + state]
        columns = list(range(1 + len(table.layout.keys)))
        own = [one.take(pa.array(codec.find_places(one, hashes))).select(columns) for one in table.layers]
        return pa.concat_batches(own)

    @property
    def is_changed(self) -> bool:
        return bool(self.given_up) or any(table.is_changed for table in self._tables.values())

    def living(self) -> Iterable[tuple[str, pa.RecordBatch]]:
        return ((name, self._tables[STATE_SECTION + name].merge()) for name in self._layout.states)

    def next_due_ms(self, domain: TimeDomain) -> int | None:
        times = self.timers.living(domain)[0]
        found = [int(times.min())] if len(times) else []
        for name, table in self._layout.states.items():
            if due_clock(table) is domain and (due_ms := self.due_table(name).next_due_ms()) is not None:
                found.append(due_ms)
        return min(found, default=None)

    def next_call_ms(self, domain: TimeDomain) -> int | None:
        """Return when a clock has to call the key group, for a timer or a cleaning; None for never."""
        times = [self.next_due_ms(domain)]
        if domain is TimeDomain.PROCESSING_TIME:
            times += [table.clean_up_at_ms for table in self._tables.values()]
        return min((time_ms for time_ms in times if time_ms is not None), default=None)

    def timer_count(self) -> int:
        """Return the number of timers; an entry with a due time counts as one."""
        count = sum(len(self.timers.living(domain)[0]) for domain in TimeDomain)
        due = [name for name, table in self._layout.states.items() if table.is_due]
        entries = (self._tables[STATE_SECTION + name].merge() for name in due)
        return count + sum(int(one.num_rows - one.column(DUE).null_count) for one in entries)

    def dump(self, group: int, policy: BasePolicy, now_ms: int) -> bytes:
        """Return the value to store, without expired entries; write a new base if the policy says so."""
        # No state to which the job may go back names these files, even if this micro-batch fails, so they can
        # be deleted now.
        retained, former = self._bases.retained_batch, []
        for file, batch in self._former:
            if retained is None or batch > retained:
                former.append((file, batch))
            else:
                self._bases.delete(file)
        self._former = former
        for table in self._tables.values():
            table.forget_expired(now_ms)
        value = self._frame({name: table.delta for name, table in self._tables.items()}, self.base)
        grown = len(value) > policy.smallest_bytes
        if self.base is not None:
            expired = sum(table.count_expired_in_base(now_ms) for table in self._tables.values())
            is_expired = expired > max(policy.smallest_delta_rows, self._base_rows / 2)
            grown = self._is_base_over or is_expired or self._is_delta_full(policy, len(value))
        if not grown:
            return value
        merged = {name: _merge_unexpired(name, table, now_ms) for name, table in self._tables.items()}
        if self.base is not None:
            self._former.append((self.base.file, self._bases.batch))
        whole = self._frame(merged, None)
        if len(whole) <= policy.smallest_bytes:  # Enough has expired that it fits into the value again.
            return whole
        return self._frame({}, self._bases.write(group, whole))

    def add_group(self, other: GroupState) -> None:
        """Add all entries of another key group, which has none of the same keys."""
        registered = self.timers.registered
        for name, table in self._tables.items():
            rows = other._tables[name].merge()
            if name.startswith(TIMERS):
                rows = _shift_places(rows, "value_0", registered[TimeDomain(name.removeprefix(TIMERS))])
            elif table.layout.is_due and (clock := due_clock(table.layout)) is not None:
                rows = _shift_places(rows, "value_1", registered[clock])
            table.put_rows(rows, _NONE)
        for domain, count in other.timers.registered.items():
            registered[domain] += count

    def dump_whole(self) -> bytes:
        self._former = []
        return self._frame({name: table.merge() for name, table in self._tables.items()}, None)

    def timer_rows(self, domain: TimeDomain) -> Iterable[codec.Row]:
        """Return all timers of a clock; the value is the place of registration, and that in the base."""
        return self._tables[TIMERS + domain.value].rows()

    def rows(self, state: str) -> Iterable[codec.Row]:
        return self._tables[STATE_SECTION + state].rows()

    def _is_delta_full(self, policy: BasePolicy, delta_bytes: int) -> bool:
        upper = sum(table.delta.num_rows for table in self._tables.values())
        if upper > max(policy.smallest_delta_rows, policy.delta_share * self._base_rows):
            return True
        # A row may have hundreds of megabytes: in the delta, Spark would store it again at every change in
        # its bundle.
        if delta_bytes <= policy.smallest_delta_bytes:
            return False
        base_bytes = sum(0 if table.base is None else table.base.nbytes for table in self._tables.values())
        return delta_bytes > policy.delta_share * base_bytes

    @property
    def _base_rows(self) -> int:
        return sum(0 if table.base is None else table.base.num_rows for table in self._tables.values())

    def _frame(self, batches: Mapping[str, pa.RecordBatch], base: codec.BaseRef | None) -> bytes:
        registered = {domain.value: count for domain, count in self.timers.registered.items() if count}
        owner = encode_owner(self._layout.uid, registered, base, self._former)
        sections: dict[str, bytes | memoryview] = {codec.OWNER: owner}
        sections.update({name: codec.table_bytes(batch) for name, batch in batches.items() if batch.num_rows})
        return codec.pack_frame(sections)


def encode_owner(
    uid: str,
    registered: Mapping[str, int],
    base: codec.BaseRef | None = None,
    former: Sequence[tuple[str, int]] = (),
) -> bytes:
    named = None if base is None else asdict(base)
    return json.dumps({"uid": uid, "base": named, "former": former, "registered": registered}).encode()


def _merge_unexpired(name: str, table: LayeredTable, now_ms: int) -> pa.RecordBatch:
    try:
        return table.drop_expired(table.merge(), now_ms)
    except pa.ArrowInvalid as error:
        if "offset overflow" not in str(error):
            raise
        state = name.removeprefix(STATE_SECTION)
        raise StateMismatch(
            str(codec.too_large(state, "its layers together take more than 2 GiB"))
        ) from error


def _shift_places(rows: pa.RecordBatch, name: str, by: int) -> pa.RecordBatch:
    at = rows.schema.get_field_index(name)
    places = rows.column(at)
    # Places below zero are complements of places.
    moved = pc.if_else(pc.less(places, 0), pc.subtract(places, by), pc.add(places, by))
    return rows.set_column(at, rows.schema.field(at), moved)


def _read(
    layout: codec.TableLayout,
    name: str,
    payload: memoryview | None,
    read: Callable[[str, memoryview], pa.RecordBatch],
) -> pa.RecordBatch | None:
    if payload is None:
        return None
    try:
        return evolve(layout, read(name, payload))
    except (codec.FrameError, StateMismatch):
        raise
    except (pa.ArrowException, ValueError, LookupError) as error:
        raise codec.FrameError(f"the section {name!r} is damaged: {error}") from error


def merge_layers(name: str, lower: memoryview | None, upper: memoryview | None) -> pa.RecordBatch:
    base, delta = (None if payload is None else codec.read_table(name, payload) for payload in (lower, upper))
    newest = delta if delta is not None else base
    assert newest is not None
    layout = infer_layout(newest.schema)
    # The base may have been written with another declaration than the delta.
    base = None if base is None else evolve(layout, base)
    return LayeredTable(layout, base, delta).merge() if delta is not None else newest


def infer_layout(schema: pa.Schema) -> codec.TableLayout:
    values = codec.value_fields(schema)
    form = codec.SlotForm.KEY
    if codec.TIME in schema.names:
        form = codec.SlotForm.TIMER
    elif "from" in schema.names:
        form = codec.SlotForm.KEY_AND_WINDOW
    return codec.TableLayout(
        "",
        tuple(field.type for field in schema if field.name.startswith("key_")),
        tuple(field.type for field in values),
        form,
        codec.find_expiry(schema.names),
        None,
        tuple(map(codec.reader_name, values)),
    )
