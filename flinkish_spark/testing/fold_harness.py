"""Runs folds of windows over columns step by step, without Spark: with the combiner, as in a job."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import types as T

from flinkish_spark.aggregates import AggregateColumn, ElementChoice
from flinkish_spark.graph.keyed_input import Sent, folding_windows
from flinkish_spark.graph.operator_factories import FoldingWindows
from flinkish_spark.operators.group_state import BasePolicy
from flinkish_spark.operators.vectorized_windows import WindowFold
from flinkish_spark.runtime.ddl import parse_ddl
from flinkish_spark.runtime.group_runners import RowShape
from flinkish_spark.runtime.window_runner import WindowRunner
from flinkish_spark.testing.columns_harness import ColumnsHarness, input_shape, whole_records
from flinkish_spark.testing.operator_harness import MemoryBases, Snapshot
from flinkish_spark.windows.spec import WindowSpec


class FoldHarness(ColumnsHarness):
    """Folds of windows with all their key groups.

    Parameters
    ----------
    spec
        Which windows.
    columns
        The folds, or which elements come out.
    input_type
        Fields of the elements, as DDL.
    key
        Name of the field that is the key.
    max_parallelism, restore, policy, bases
        As of :class:`~flinkish_spark.testing.operator_harness.OperatorHarness`.

    Examples
    --------
    >>> from flinkish_spark.aggregates import AggregateColumn, Fold
    >>> from flinkish_spark.windows import TumblingEventTimeWindows, WindowSpec
    >>> total = AggregateColumn("total", Fold.SUM, "amount")
    >>> spec = WindowSpec(TumblingEventTimeWindows(10))
    >>> run = FoldHarness(spec, [total], "user STRING, amount LONG", key="user")
    >>> run.push_all([(("ann", 1), 3), (("ann", 2), 9)])
    >>> run.watermark(9)
    >>> [(user, total) for user, total, *_ in run.take().rows]
    [('ann', 3)]
    """

    def __init__(
        self,
        spec: WindowSpec,
        columns: Sequence[AggregateColumn] | ElementChoice,
        input_type: str,
        key: str,
        *,
        uid: str = "operator",
        max_parallelism: int = 16,
        restore: Snapshot | None = None,
        policy: BasePolicy | None = None,
        bases: MemoryBases | None = None,
    ) -> None:
        schema = parse_ddl(input_type)
        assert isinstance(schema, T.StructType)
        at = schema.names.index(key)
        whole = whole_records(schema, at)
        computed = columns if isinstance(columns, ElementChoice) else tuple(columns)
        sent = folding_windows(FoldingWindows(spec, computed), uid, schema, [key], whole)
        folded, late = sent.folded, spec.late_output
        assert folded is not None
        assert isinstance(folded.operator, WindowFold)
        side_names = () if late is None else (late.name,)
        shape = RowShape(
            (input_shape(sent.transport, folded.fields),),
            whole.key_types,
            (folded.output, *([] if late is None else [schema])),
            side_names,
            with_times=True,
        )
        self.sent: Sent = sent
        super().__init__(
            WindowRunner(folded.operator, uid, max_parallelism, shape),
            schema,
            at,
            sent.transport,
            folded.combiner,
            side_names,
            max_parallelism=max_parallelism,
            restore=restore,
            policy=policy,
            bases=bases,
        )
