"""Which operator computes windows element by element."""

from __future__ import annotations

from flinkish_spark.core.errors import ConfigError
from flinkish_spark.operators.merging_windows import MergingWindowOperator
from flinkish_spark.operators.windowing import PlainResults, RetractedResults, WindowOperator, WindowResults
from flinkish_spark.types.rows import ElementType
from flinkish_spark.windows.assigners import MergingWindowAssigner
from flinkish_spark.windows.spec import ReduceWindow, WindowComputation, WindowSpec


def window_operator(
    spec: WindowSpec,
    computation: WindowComputation,
    input_type: str | ElementType,
    result_type: str | None = None,
) -> WindowOperator:
    if isinstance(input_type, str):
        input_type = ElementType(input_type)
    results = _results(spec, computation, input_type, result_type)
    if isinstance(spec.assigner, MergingWindowAssigner):
        return MergingWindowOperator(spec, computation, input_type, results)
    return WindowOperator(spec, computation, input_type, results)


def _results(
    spec: WindowSpec, computation: WindowComputation, input_type: ElementType, result_type: str | None
) -> WindowResults:
    if spec.retraction_field is None:
        return PlainResults()
    if result_type is not None:
        return RetractedResults(ElementType(result_type))
    if isinstance(computation, ReduceWindow) and computation.then is None:
        return RetractedResults(input_type)
    raise ConfigError(
        "windows with retractions keep their results, and the fields of these are not known",
        what_to_do="say them: result_type='user STRING, total LONG'",
    )
