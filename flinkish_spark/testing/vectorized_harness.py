"""Runs a vectorised function step by step, without Spark."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import types as T

from flinkish_spark.operators.elements import OutputTag
from flinkish_spark.operators.group_state import BasePolicy
from flinkish_spark.operators.vectorized import VectorizedProcessFunction
from flinkish_spark.runtime.batch_runner import BatchRunner
from flinkish_spark.runtime.group_runners import RowShape
from flinkish_spark.runtime.hinted_types import OutputType, declared_type
from flinkish_spark.testing.columns_harness import ColumnsHarness, input_shape, whole_records
from flinkish_spark.testing.operator_harness import MemoryBases, Snapshot


class VectorizedHarness(ColumnsHarness):
    """A vectorised function with all its key groups.

    Parameters
    ----------
    function
        What is tried.
    input_type, output
        Fields of the elements, and of the rows that it emits, as DDL.
    key
        Name of the field that is the key.
    side_outputs
        Those whose rows are wanted.
    max_parallelism, restore, policy, bases
        As of :class:`~flinkish_spark.testing.OperatorHarness`.

    Examples
    --------
    >>> from flinkish_spark import VectorizedProcessFunction
    >>> class Counts(VectorizedProcessFunction):
    ...     def process_batch(self, batch, ctx):
    ...         columns = [*ctx.index.keys, pa.array(count_by_key(ctx.index))]
    ...         yield pa.RecordBatch.from_arrays(columns, names=["user", "orders"])
    >>> import pyarrow as pa
    >>> from flinkish_spark.operators.vectorized import count_by_key
    >>> run = VectorizedHarness(
    ...     Counts(), "user STRING, amount LONG", "user STRING, orders LONG", key="user", max_parallelism=1
    ... )
    >>> run.push_all([(("ann", 1), None), (("ben", 2), None), (("ann", 3), None)])
    >>> sorted(run.take().rows)
    [('ann', 2), ('ben', 1)]
    """

    def __init__(
        self,
        function: VectorizedProcessFunction,
        input_type: str,
        output: str,
        key: str,
        *,
        side_outputs: Sequence[OutputTag] = (),
        uid: str = "operator",
        max_parallelism: int = 16,
        restore: Snapshot | None = None,
        policy: BasePolicy | None = None,
        bases: MemoryBases | None = None,
    ) -> None:
        schema, *emitted = (
            _fields(ddl) for ddl in (input_type, output, *(tag.output for tag in side_outputs))
        )
        at = schema.names.index(key)
        travels, names = whole_records(schema, at), tuple(tag.name for tag in side_outputs)
        came = input_shape(travels, schema.names)
        shape = RowShape((came,), travels.key_types, tuple(emitted), names, with_times=True)
        super().__init__(
            BatchRunner(function, uid, max_parallelism, shape),
            schema,
            at,
            travels,
            None,
            names,
            max_parallelism=max_parallelism,
            restore=restore,
            policy=policy,
            bases=bases,
        )


def _fields(given: OutputType) -> T.StructType:
    parsed = declared_type(given)
    assert isinstance(parsed, T.StructType)
    return parsed
