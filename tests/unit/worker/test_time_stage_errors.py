"""What functions for event times raise in a worker, as it reaches the driver: as text."""

from __future__ import annotations

import traceback

import pyarrow as pa
import pytest

from flinkish_spark import WatermarkGenerator
from flinkish_spark.checkpoint.failures import RepeatableUserError, classify
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.columns import Origins
from flinkish_spark.worker.functions import TimeStage

ROWS = pa.RecordBatch.from_pydict(
    {"amount": [2, 1, 0, 3], C.CHANNEL: [3, 3, 3, 3], C.SEQUENCE: [17, 18, 19, 20], C.TIME: [5, 6, 7, 8]}
)


class Divides(WatermarkGenerator):
    def on_event(self, event, timestamp_ms):
        return 6 // event.amount


class DividesLast(WatermarkGenerator):
    def on_periodic(self):
        return 6 // 0


class NoTime(WatermarkGenerator):
    def on_event(self, event, timestamp_ms):
        return "now"


def no_factory():
    raise KeyError("settings")


def failing(assigner=None, generator=None):
    """Return how the driver understands what a task says."""
    stage = TimeStage(assigner, generator, "orders", Origins(("in",)))
    with pytest.raises(Exception) as raised:
        list(stage(iter([ROWS])))
    text = "".join(traceback.format_exception(raised.value))
    return classify(RuntimeError(f"[PYTHON_EXCEPTION] {text}"))


@pytest.mark.parametrize(
    ("assigner", "generator", "what", "offset", "why"),
    [
        (lambda one, known: 6 // one.amount, None, "the timestamp assigner", 19, "ZeroDivisionError"),
        (lambda one, known: None, None, "the timestamp assigner", 17, "milliseconds, got None"),
        (lambda one, known: 0.5, Divides, "the timestamp assigner", 17, "a whole number"),
        (None, Divides, r"on_event\(\) of the watermark generator", 19, "ZeroDivisionError"),
        (None, NoTime, r"on_event\(\) of the watermark generator", 17, "a whole number"),
        (None, no_factory, "the factory of the watermark generator", 17, "KeyError: 'settings'"),
    ],
)
def test_a_failing_function_is_one_of_the_user_s_with_its_record(
    assigner, generator, what, offset, why
) -> None:
    """A generator's was taken for a task that could not read, and the query was restarted again and again."""
    found = failing(assigner, generator)
    assert isinstance(found, RepeatableUserError) and found.is_placed
    assert found.facts == {"uid": "orders", "topic": "in", "partition": 3, "offset": offset}
    with pytest.raises(RepeatableUserError, match=f"{what} of 'orders' failed on the record at.*{why}"):
        raise found


def test_what_fails_behind_the_last_record_names_the_generator() -> None:
    found = failing(generator=DividesLast)
    assert isinstance(found, RepeatableUserError) and found.facts == {"uid": "orders"}
    says = "on_periodic() of the watermark generator of 'orders' failed. ZeroDivisionError"
    assert str(found).startswith(says)
