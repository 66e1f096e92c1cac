"""process() without a key, without Spark: outputs, times, errors; and close() of functions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from flinkish_spark import MapFunction, OutputTag
from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.core.micro_batch import MicroBatch
from flinkish_spark.functions.stream import ProcessFunction
from flinkish_spark.planning.transforms import make_filter, make_map, make_process
from flinkish_spark.protocol.event_time import Watermarks
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.columns import Origins
from flinkish_spark.worker.keyed_operator import OperatorError
from tests.unit.planning.test_row_functions import Frame, rows

REFUSED = OutputTag("refused", "text STRING, at LONG")


class Word(NamedTuple):
    text: str
    n: int


class Split(ProcessFunction):
    """Emits the words of a text, and a text without words to a side output."""

    def open(self, context: Any) -> None:
        self.uid = context.uid

    def process_element(self, value: Any, ctx: Any) -> Iterator[Word]:
        if not value.text.strip():
            ctx.output(REFUSED, (self.uid, ctx.timestamp()))
            return
        for word in value.text.split():
            yield Word(word, value.amount)
        # Behind the last row: it counts although nobody asks for another.
        if value.amount == 0:
            ctx.output(REFUSED, (value.text, ctx.timestamp()))


def side(name: str = "split") -> Any:
    from flinkish_spark.types.schemas import output_schema

    made = make_process(Split(), None, name)
    return made.select_side_output("refused", output_schema(REFUSED.output, "refused"))


def timed(*records: tuple[Any, ...]) -> pa.RecordBatch:
    batch = rows(*records)
    times = pa.array([1_000 + at for at in range(batch.num_rows)], pa.int64())
    return pa.RecordBatch.from_arrays([*batch.columns, times], names=[*batch.schema.names, C.TIME])


def test_the_main_output_has_what_is_yielded_with_its_place_and_time() -> None:
    main: Any = make_process(Split(), None, None)
    out = main(Frame(timed(("a b", 0), (" ", 1), ("c", 2))))
    assert [(r["text"], r["n"], r[C.SEQUENCE], r[C.TIME]) for r in out] == [
        ("a", 0, 40, 1_000),
        ("b", 0, 40, 1_000),
        ("c", 2, 42, 1_002),
    ]


def test_a_side_output_has_what_was_sent_to_it() -> None:
    out = side()(Frame(timed(("a b", 0), (" ", 1), ("c", 2))))
    assert out == [
        {"text": "a b", "at": 1_000, C.CHANNEL: 0, C.SEQUENCE: 40, C.TIME: 1_000},
        {"text": "split", "at": 1_001, C.CHANNEL: 0, C.SEQUENCE: 41, C.TIME: 1_001},
    ]


def test_without_timestamps_there_is_none() -> None:
    assert [row["at"] for row in side()(Frame(rows(("", 1))))] == [None]


def test_the_name_may_be_said_later_and_counts_for_every_output() -> None:
    made = side()
    made.settings.name = "words"
    assert [row["text"] for row in made(Frame(rows(("", 1))))] == ["words"]


class Fails(Split):
    def process_element(self, value: Any, ctx: Any) -> Iterator[Word]:
        yield Word(value.text, 1 // value.amount)


@pytest.mark.parametrize("reads", ["main", "refused"])
def test_an_error_names_the_record_whichever_output_is_read(reads: str) -> None:
    made: Any = make_process(Fails(), None, "split")
    if reads == "refused":
        made = made.select_side_output("refused", made.output)
    with pytest.raises(OperatorError) as failed:
        made.replace_origins(Origins(("texts",)))(Frame(rows(("a", 1), ("b", 0), channel=2)))
    facts = json.loads(str(failed.value).split(" ", 1)[1])
    assert [facts[name] for name in ("uid", "topic", "partition", "offset")] == ["split", "texts", 2, 41]
    assert "ZeroDivisionError" in facts["error"]


def test_a_function_of_another_kind_is_refused() -> None:
    class NoHint(ProcessFunction):
        def process_element(self, value, ctx):
            yield value

    for wrong in (5, Split, lambda value, ctx: (), MapFunction):
        with pytest.raises(ConfigError, match=r"function is .* call key_by"):
            make_process(wrong, "text STRING", None)
    with pytest.raises(SchemaError, match="no hint"):
        make_process(NoHint(), None, None)


class Closes(MapFunction):
    closed = 0

    def map(self, value: Any) -> tuple[int]:
        return (1 // value.amount,)

    def close(self) -> None:
        type(self).closed += 1


def test_functions_are_closed_at_the_end_of_a_task_and_if_they_fail() -> None:
    mapped: Any = make_map(Closes(), "n LONG", None)
    mapped(Frame(rows(("a", 1)), rows(("b", 1))))
    assert Closes.closed == 1
    with pytest.raises(OperatorError):
        mapped(Frame(rows(("a", 0))))
    assert Closes.closed == 2


def test_a_number_of_tasks_is_a_redistribution_in_front_of_the_function() -> None:
    from tests.unit.planning.test_partitioning import Recorder

    kept = make_filter(lambda record: True, None)
    frame: Any = Recorder("user", C.CHANNEL, C.SEQUENCE)
    kept.settings.parallelism = 3
    kept(frame)
    asked = [one[0] for one in frame.asked]
    assert asked == ["selectExpr", "repartition", "sortWithinPartitions", "drop", "mapInArrow"]


class Late(ProcessFunction):
    """Emits what is behind the watermark, and when that was."""

    def process_element(self, value: Any, ctx: Any) -> Iterator[Word]:
        if ctx.timestamp() <= ctx.current_watermark():
            yield Word(value.text, ctx.current_processing_time())


def test_watermark_and_processing_time_are_those_of_the_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def here() -> MicroBatch:
        asked.append(1)
        return MicroBatch(Watermarks(900), Watermarks(1_001), 7_000)

    monkeypatch.setattr("flinkish_spark.worker.functions.micro_batch_of_task", here)
    late: Any = make_process(Late(), None, None)
    out = late(Frame(timed(("a", 1), ("b", 1), ("c", 1))))
    assert [(row["text"], row["n"]) for row in out] == [("a", 7_000), ("b", 7_000)]
    assert len(asked) == 1
    make_process(Split(), None, None)(Frame(timed(("a", 1))))  # type: ignore[arg-type]
    assert len(asked) == 1, "nobody asked"
