"""Projections and filters of a DataFrame function, run in the pass that reads a source's records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from flinkish_spark.transport import columns as C
from flinkish_spark.types.arrow_types import arrow_schema
from flinkish_spark.types.expressions import Expression
from flinkish_spark.types.schemas import PREFIX


@dataclass(frozen=True)
class SelectColumns:
    """Computes and filters like Spark; control rows pass through. For mapInArrow, once per task."""

    #: New columns, or a filter condition.
    steps: tuple[Mapping[str, Expression] | Expression, ...]
    #: Output columns: control columns, then the fields.
    columns: T.StructType
    #: By field, the name of its column after all steps.
    outputs: tuple[str, ...]
    #: Whether a dropped record leaves a row with only its time; see `worker/time.py`.
    keeps_times: bool

    def find_inputs(self) -> dict[str, frozenset[str]]:
        known: dict[str, frozenset[str]] = {}
        for step in self.steps:
            if isinstance(step, Mapping):
                known |= {
                    name: frozenset[str]().union(*(known.get(used, {used}) for used in value.names()))
                    for name, value in step.items()
                }
        fields = (one.name for one in self.columns if not one.name.startswith(PREFIX))
        return {
            name: known.get(own, frozenset({own})) for name, own in zip(fields, self.outputs, strict=True)
        }

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema = arrow_schema(self.columns)
        control = [name for name in schema.names if name.startswith(PREFIX)]
        for batch in batches:
            rows = self._compute(dict(zip(batch.schema.names, batch.columns, strict=True)))
            arrays = [rows[name] for name in (*control, *self.outputs)]
            if self.keeps_times and rows[C.SEQUENCE].null_count:
                is_kept = rows[C.SEQUENCE].is_valid()
                fields = [_only_where(is_kept, one) for one in arrays[len(control) :]]
                arrays = [*arrays[: len(control)], *fields]
            made = [
                one if one.type == own.type else one.cast(own.type)
                for one, own in zip(arrays, schema, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(made, names=schema.names)

    def _compute(self, rows: dict[str, pa.Array]) -> dict[str, pa.Array]:
        for step in self.steps:
            if isinstance(step, Mapping):
                count = len(next(iter(rows.values())))
                found = ((name, value.evaluate(rows)) for name, value in step.items())
                rows = rows | {n: pa.repeat(v, count) if isinstance(v, pa.Scalar) else v for n, v in found}
                continue
            kept = step.evaluate(rows)
            is_kept = pa.repeat(kept, len(next(iter(rows.values())))) if isinstance(kept, pa.Scalar) else kept
            is_kept = is_kept.fill_null(False)
            if C.KIND in rows:
                is_kept = pc.or_(is_kept, pc.not_equal(rows[C.KIND], int(C.Kind.RECORD)))
            if is_kept.true_count == len(is_kept):
                continue
            if self.keeps_times:
                rows = rows | {C.SEQUENCE: _only_where(is_kept, rows[C.SEQUENCE])}
            else:
                rows = {name: column.filter(is_kept) for name, column in rows.items()}
        return rows


def _only_where(is_kept: pa.Array, column: pa.Array) -> pa.Array:
    return pc.if_else(is_kept, column, pa.scalar(None, column.type))
