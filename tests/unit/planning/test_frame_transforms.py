"""What is said of a DataFrame function that fails; frames themselves are Spark's business."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import AnalysisException

from flinkish_spark.core.errors import ConfigError, GraphError, UserFunctionError
from flinkish_spark.planning.transforms import apply_transform

RECORDS: Any = SimpleNamespace(columns=["user", "amount", "_fs_channel"])


def wrongly(error: Exception) -> Any:
    def only_big(records: Any) -> Any:
        raise error

    return only_big


def test_what_a_function_raises_is_told_with_its_name() -> None:
    with pytest.raises(
        UserFunctionError, match=r"only_big' of transform\(\) failed: KeyError: 'x'"
    ) as raised:
        apply_transform(RECORDS, wrongly(KeyError("x")))
    assert isinstance(raised.value.__cause__, KeyError)


def test_what_spark_refuses_is_told_with_the_fields_that_there_are() -> None:
    refused = AnalysisException("[UNRESOLVED_COLUMN] `amuont` cannot be resolved.\n'Filter ('amuont > 1)")
    says = r"only_big' of transform\(\) does\. .*amuont.* cannot be resolved\. .*have user, amount\.$"
    with pytest.raises(GraphError, match=says):
        apply_transform(RECORDS, wrongly(refused))


def test_what_is_no_frame_is_refused() -> None:
    with pytest.raises(GraphError, match=r"of transform\(\) returned a NoneType"):
        apply_transform(RECORDS, lambda records: None)


def test_errors_of_ours_are_left_as_they_are() -> None:
    with pytest.raises(ConfigError, match="mine"):
        apply_transform(RECORDS, wrongly(ConfigError("mine")))
