"""The keyed operator: what applyInPandasWithState calls, once per key group and micro-batch.

Spark's group is one key group (or the barrier of one partition); the state of all its keys is one
state value. Inside, a plain loop calls the user's function. This object is pickled into the
query's plan, so it holds values only; what needs a worker is made at the first call of a task.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.streaming.state import GroupState

from flinkish_spark.functions import KeyedProcessFunction
from flinkish_spark.protocol.alignment import ExpectedChannels, expected_of
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.ddl import parse_ddl
from flinkish_spark.runtime.row_codec import OutputError, RowReader, RowWriter
from flinkish_spark.runtime.state_codec import StateCodecError, StateLayout, decode_states, encode_states
from flinkish_spark.runtime.worker_gc import freeze_modules
from flinkish_spark.state import KeyScope, ValueState, ValueStateDescriptor

#: Opens the message of an error that a user's function caused; the supervisor looks for it.
USER_FUNCTION_MARKER = "[FLINKISH_USER_FUNCTION]"
#: The same for state that cannot be read or written.
STATE_MARKER = "[FLINKISH_STATE]"


class OperatorFailed(RuntimeError):
    """Crosses the process boundary as text; its message starts with a marker."""


@dataclass(frozen=True)
class Origins:
    """Tells where a record came from, for error messages.

    `topics` is empty where the input is not Kafka; a channel is then a number only.
    """

    topics: tuple[str, ...] = ()

    def describe(self, channel: int, sequence: int) -> dict[str, Any]:
        """Return topic, partition and offset, or channel and sequence."""
        if self.topics:
            return {
                "topic": self.topics[channel >> 32],
                "partition": channel & 0xFFFFFFFF,
                "offset": sequence,
            }
        return {"channel": channel, "sequence": sequence}


@dataclass(frozen=True)
class KeyedOperatorSpec:
    """Everything that one keyed operator needs in a worker.

    Parameters
    ----------
    uid
        The operator's stable name.
    function
        The user's function, already proven to be serialisable.
    input_schema, output_schema
        The stream's own fields.
    key_fields
        Transport columns of the key, and their types.
    input_columns, mask_columns
        Transport columns of the fields and of the null masks.
    upstream_channels
        Whose barriers must arrive, each once, before this operator passes one on.
    group_of_route
        Key group by the route that carries its records.
    barrier_routes
        Partition by the route that carries its barrier.
    state_column
        Transport column of state that the lineage began with; None where it began with nothing.
    """

    uid: str
    function: KeyedProcessFunction
    input_schema: T.StructType
    output_schema: T.StructType
    key_columns: tuple[str, ...]
    key_types: tuple[T.DataType, ...]
    input_columns: tuple[str, ...]
    mask_columns: tuple[str, ...]
    upstream_channels: ExpectedChannels
    group_of_route: dict[int, int]
    barrier_routes: dict[int, int]
    origins: Origins
    state_column: str | None = None


class _OpenedFunction:
    """The user's function in a worker, with its declared states; one per task."""

    def __init__(self, spec: KeyedOperatorSpec) -> None:
        self.spec = spec
        # PySpark appends an empty frame to every batch, and pandas warns of it each time.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"pyspark\.sql\.pandas")
        self.scope = KeyScope()
        self.states: dict[str, ValueState[Any]] = {}
        self.layouts: list[StateLayout] = []
        self.reader = RowReader(
            spec.input_schema, spec.input_columns, spec.key_columns, spec.key_types, spec.mask_columns
        )
        arrow_types = [to_arrow_type(f.dataType, timezone="UTC") for f in spec.output_schema]
        self.writer = RowWriter(spec.output_schema, arrow_types)
        spec.function.open(self)

    def get_state(self, descriptor: ValueStateDescriptor) -> ValueState[Any]:
        """Implement RuntimeContext: create the state once, empty."""
        if descriptor.name in self.states:
            return self.states[descriptor.name]
        self.layouts.append(
            StateLayout(
                descriptor.name,
                tuple(to_arrow_type(t, timezone="UTC") for t in self.spec.key_types),
                tuple(_arrow_types_of(descriptor.value_type)),
            )
        )
        state: ValueState[Any] = ValueState(self.scope)
        self.states[descriptor.name] = state
        return state

    def get_current_key(self) -> Any:
        """Implement Context."""
        return self.scope.key

    def load(self, stored: bytes | None) -> None:
        """Make a key group's stored state the current one."""
        entries = decode_states(self.spec.uid, self.layouts, stored) if stored else {}
        for name, state in self.states.items():
            state._load(entries.get(name, {}))
        self.scope.is_dirty = False

    def dump(self) -> bytes:
        """Return the current key group's state."""
        return encode_states(
            self.spec.uid, self.layouts, {name: s._dump() for name, s in self.states.items()}
        )


def _arrow_types_of(ddl: str) -> list[pa.DataType]:
    parsed = parse_ddl(ddl)
    fields = [f.dataType for f in parsed] if isinstance(parsed, T.StructType) else [parsed]
    return [to_arrow_type(t, timezone="UTC") for t in fields]


class KeyedOperator:
    """Callable for applyInPandasWithState; see the module's head."""

    def __init__(self, spec: KeyedOperatorSpec) -> None:
        self.spec = spec
        self._opened: _OpenedFunction | None = None
        self._has_nans = any(isinstance(f.dataType, T.FloatType | T.DoubleType) for f in spec.output_schema)

    def __call__(
        self, key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState
    ) -> Iterator[pd.DataFrame]:
        """Process one group: a key group's records, or one partition's barrier."""
        route = int(key[0])
        partition = self.spec.barrier_routes.get(route)
        parts = list(frames)
        frame = parts[0] if len(parts) == 1 else pd.concat(parts, ignore_index=True)
        if partition is not None:
            yield from self._barrier(frame, partition)
            return
        if self._opened is None:
            self._opened = _OpenedFunction(self.spec)
            freeze_modules()
        yield from self._records(self._opened, self.spec.group_of_route[route], frame, state)

    def _barrier(self, frame: pd.DataFrame, partition: int) -> Iterator[pd.DataFrame]:
        """Pass the barrier on if every upstream channel's came exactly once; else hold it back.

        A barrier held back is missing at the sinks, which declines the checkpoint there.
        """
        channels = frame[C.CHANNEL].to_numpy(dtype=np.int64).tolist()
        checkpoints = set(frame[C.SEQUENCE].to_numpy(dtype=np.int64).tolist())
        expected = expected_of(channels, self.spec.upstream_channels)
        if len(checkpoints) != 1 or sorted(channels) != sorted(expected):
            return
        out = {name: [None] for name in self.spec.output_schema.names}
        control = {
            C.KIND: [int(C.Kind.BARRIER)],
            C.CHANNEL: [partition],
            C.SEQUENCE: list(checkpoints),
        }
        yield pd.DataFrame({**control, **({C.NANS: [0]} if self._has_nans else {}), **out})

    def _records(
        self, opened: _OpenedFunction, group: int, frame: pd.DataFrame, state: GroupState
    ) -> Iterator[pd.DataFrame]:
        sequence = frame[C.SEQUENCE].to_numpy(dtype=np.int64)
        channel = frame[C.CHANNEL].to_numpy(dtype=np.int64)
        # The shuffle mixes channels and keeps no order: restore the canonical one.
        frame = frame.take(np.lexsort((sequence, channel)))
        try:
            if self.spec.state_column is not None:
                frame = self._install(opened, group, frame, state, self.spec.state_column)
            if frame.empty:
                return
            opened.load(state.get[0] if state.exists else None)
            rows = self._process(opened, frame)
            columns, nans = self._write(opened, rows)
            if opened.scope.is_dirty:
                state.update((opened.dump(),))
        except StateCodecError as error:
            raise OperatorFailed(f"{STATE_MARKER} operator '{self.spec.uid}': {error}") from error
        if rows:
            count = len(rows)
            control = {
                C.KIND: np.full(count, int(C.Kind.RECORD), dtype=np.int32),
                C.CHANNEL: np.full(count, group, dtype=np.int64),
                C.SEQUENCE: np.arange(count, dtype=np.int64),
            }
            yield pd.DataFrame({**control, **({C.NANS: nans} if self._has_nans else {}), **columns})

    @staticmethod
    def _install(
        opened: _OpenedFunction, group: int, frame: pd.DataFrame, state: GroupState, column: str
    ) -> pd.DataFrame:
        """Make the state that came with the first micro-batch the key group's; return the records.

        It comes before the records, by its channel. A micro-batch that is run again begins without
        state again, so this happens once per lineage and key group.
        """
        seeds = frame[frame[C.CHANNEL] == C.STATE_CHANNEL]
        if seeds.empty:
            return frame
        if len(seeds) > 1 or state.exists:
            raise StateCodecError(f"key group {group} got its state twice")
        if int(seeds[C.SEQUENCE].iloc[0]) != group:
            raise StateCodecError(f"key group {group} got the state of {seeds[C.SEQUENCE].iloc[0]}")
        value = bytes(seeds[column].iloc[0])
        # Decoded here although no record may need it: a declaration that does not fit is an error of
        # the restore, not of some record next week.
        opened.load(value)
        state.update((value,))
        return frame.iloc[len(seeds) :]

    def _process(self, opened: _OpenedFunction, frame: pd.DataFrame) -> list[Any]:
        keys, records = opened.reader.read(frame)
        scope, process = opened.scope, self.spec.function.process_element
        emitted: list[Any] = []
        at = -1
        try:
            for key, record in zip(keys, records, strict=True):
                at += 1
                scope.key = key
                result = process(record, opened)
                if result is not None:
                    emitted.extend(result)
        except Exception as error:
            raise self._blame(frame, at, error) from error
        return emitted

    def _write(self, opened: _OpenedFunction, rows: list[Any]) -> tuple[dict[str, Any], Any]:
        try:
            return opened.writer.write(rows)
        except OutputError as error:
            facts = {"uid": self.spec.uid, "error": f"the function {error}"}
            raise OperatorFailed(f"{USER_FUNCTION_MARKER} {json.dumps(facts)}") from error

    def _blame(self, frame: pd.DataFrame, at: int, error: Exception) -> OperatorFailed:
        row = frame.iloc[max(at, 0)]
        origin = self.spec.origins.describe(int(row[C.CHANNEL]), int(row[C.SEQUENCE]))
        facts = {"uid": self.spec.uid, **origin, "error": f"{type(error).__name__}: {error}"}
        return OperatorFailed(f"{USER_FUNCTION_MARKER} {json.dumps(facts)}")
