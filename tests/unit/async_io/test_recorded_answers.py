"""Recorded answers: who comes first counts, what was left is taken over once, what goes with a checkpoint."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import types as T

from flinkish_spark.async_io.functions import ToSide
from flinkish_spark.async_io.recorded_answers import (
    Answer,
    AnswerKey,
    AnswerRecording,
    AnswerRetention,
    Outputs,
    Readers,
    RecordedAnswers,
    compute_digest,
)
from flinkish_spark.contracts.calls import Stream
from flinkish_spark.core.elements import OutputTag
from flinkish_spark.core.errors import CorruptObjectError
from flinkish_spark.core.store import LocalStore
from flinkish_spark.operators.process import ElementError
from flinkish_spark.types.ddl import parse_ddl

FOLDER = "answers/asked/orders"
SIDE = OutputTag("letters", "why STRING")


def fields(ddl: str) -> T.StructType:
    kind = parse_ddl(ddl)
    assert isinstance(kind, T.StructType)
    return kind


OUTPUTS = Outputs(("", "letters"), (fields("n LONG, at TIMESTAMP, part DOUBLE"), fields("why STRING")))
AT = datetime.datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=datetime.UTC)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def opened(
    store: LocalStore,
    batch: int = 1,
    lineage: int = 0,
    task: int = 0,
    stream: Stream = Stream.OF_SOURCE,
    readers: Readers = Readers.ONE_WAY,
    outputs: Outputs = OUTPUTS,
) -> RecordedAnswers:
    return RecordedAnswers(store, FOLDER, outputs, stream, readers, (lineage, batch, task))


def asked(sequence: int, value: Any = 1, channel: int = 0, number: int = 0) -> AnswerKey:
    return AnswerKey(channel, sequence, number, compute_digest((value,)))


def answer(n: int) -> Answer:
    return OUTPUTS.group_rows([(n, AT, 0.1), ToSide(SIDE, ("because",)), (n + 1, None, None)])


def put(recorded: RecordedAnswers, *pairs: tuple[AnswerKey, int]) -> list[int]:
    found = recorded.append([(one, answer(n), at) for at, (one, n) in enumerate(pairs)])
    return [int(one[0][0][0]) for one in found]


def test_an_answer_is_read_as_it_was_given_of_all_outputs(store: LocalStore) -> None:
    put(opened(store), (asked(1), 7))
    found = opened(store).find(asked(1))
    assert found == (((7, AT, 0.1), (8, None, None)), (("because",),))
    assert opened(store).find(asked(2)) is None


def test_of_two_attempts_that_which_was_first_counts_for_both(store: LocalStore) -> None:
    one, two = opened(store), opened(store)
    assert put(one, (asked(1), 10), (asked(2), 20)) == [10, 20]
    assert put(two, (asked(2), 99), (asked(3), 30)) == [20, 30]
    assert put(one, (asked(3), 98), (asked(4), 40)) == [30, 40]
    assert [put(opened(store), (asked(n), 97)) for n in (1, 2, 3, 4)] == [[10], [20], [30], [40]]


def test_tasks_on_several_ways_share_a_log_by_channel(store: LocalStore) -> None:
    ways = dict(readers=Readers.SEVERAL_WAYS)
    one, two = opened(store, task=0, **ways), opened(store, task=5, **ways)  # type: ignore[arg-type]
    assert put(one, (asked(1), 10), (asked(1, channel=3), 11)) == [10, 11]
    assert put(two, (asked(1, channel=3), 99), (asked(1), 98)) == [11, 10]
    # The other way may see an element a micro-batch later.
    later = opened(store, batch=2, task=5, **ways)  # type: ignore[arg-type]
    assert later.find_earlier(asked(1)) == answer(10)


def test_an_answer_of_a_lineage_that_was_left_is_found_at_the_same_place(store: LocalStore) -> None:
    put(opened(store, batch=7), (asked(1), 10))
    after = opened(store, batch=3, lineage=1)
    assert after.find(asked(1)) is None
    assert after.find_earlier(asked(1)) == answer(10)
    assert after.find_earlier(asked(1, value="changed")) is None
    # Without a lineage that was left, nobody reads what other micro-batches have.
    assert opened(store, batch=8).find_earlier(asked(1)) is None


def test_behind_an_operator_equal_elements_take_over_one_answer_each(store: LocalStore) -> None:
    behind = dict(stream=Stream.OF_MICRO_BATCH)
    put(opened(store, batch=5, **behind), (asked(1), 10), (asked(2), 20))  # type: ignore[arg-type]
    put(opened(store, batch=6, **behind), (asked(1), 30))  # type: ignore[arg-type]
    first = opened(store, batch=5, lineage=1, **behind)  # type: ignore[arg-type]
    found = first.find_earlier(asked(9))
    assert found == answer(10)
    first.append([(asked(9), found, 0)])
    second = opened(store, batch=6, lineage=1, **behind)  # type: ignore[arg-type]
    assert [second.find_earlier(asked(n)) for n in (1, 2, 3)] == [answer(20), answer(30), None]


def test_a_program_with_other_outputs_asks_again(store: LocalStore) -> None:
    put(opened(store), (asked(1), 10))
    other = Outputs(("",), (fields("n LONG"),))
    changed = opened(store, outputs=other)
    assert changed.find(asked(1)) is None
    changed.append([(asked(1), (((5,),),), 0)])
    assert opened(store, outputs=other).find(asked(1)) == (((5,),),)


def test_a_row_that_does_not_fit_names_its_element(store: LocalStore) -> None:
    wrong = OUTPUTS.group_rows([("text", AT, 0.1)])
    with pytest.raises(ElementError) as failed:
        opened(store).append([(asked(1), answer(1), 4), (asked(2), wrong, 7)])
    assert failed.value.at == 7


def test_a_damaged_object_is_an_error_and_no_missing_answer(store: LocalStore, tmp_path: Path) -> None:
    put(opened(store), (asked(1), 10))
    (path,) = (tmp_path / FOLDER).iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CorruptObjectError, match="cannot be read"):
        opened(store)
    path.rename(path.with_name("something"))
    with pytest.raises(CorruptObjectError, match="no object of answers"):
        opened(store)


def find_unneeded(store: LocalStore, lineage: int, batches: list[int], **settings: Any) -> set[str]:
    recording = AnswerRecording(
        FOLDER, settings.get("stream", Stream.OF_SOURCE), settings.get("readers", Readers.ONE_WAY)
    )
    return names(AnswerRetention(store, recording), lineage, batches)


def names(retention: AnswerRetention, lineage: int, batches: list[int]) -> set[str]:
    return {key.rsplit("/", 1)[1] for key in retention.find_unneeded(lineage, batches)}


def test_answers_go_with_the_checkpoint_of_their_micro_batch(store: LocalStore) -> None:
    for batch in (1, 2, 3):
        put(opened(store, batch=batch), (asked(batch), batch))
    assert find_unneeded(store, 0, [1, 2]) == {"0-1-t0-0", "0-2-t0-0"}
    # On several ways an element may come once more in the next epoch.
    assert find_unneeded(store, 0, [2, 3], readers=Readers.SEVERAL_WAYS) == {"0-1-t0-0"}


def test_what_a_left_lineage_has_goes_when_the_live_one_has_come_past_it(store: LocalStore) -> None:
    put(opened(store, batch=5), (asked(10), 1))
    put(opened(store, batch=6), (asked(20), 1))
    put(opened(store, batch=5, lineage=1), (asked(10), 1), (asked(11), 1))
    assert find_unneeded(store, 1, [5]) == {"0-5-t0-0", "1-5-t0-0"}
    # Behind an operator nobody can tell when that is: the first checkpoint takes all of it.
    assert "0-6-t0-0" in find_unneeded(store, 1, [5], stream=Stream.OF_MICRO_BATCH)


def test_what_the_live_lineage_passes_in_two_checkpoints_goes_with_the_second(store: LocalStore) -> None:
    put(opened(store, batch=5), (asked(10), 1), (asked(10, channel=1), 2))
    retention = AnswerRetention(store, AnswerRecording(FOLDER, Stream.OF_SOURCE, Readers.ONE_WAY))
    put(opened(store, batch=5, lineage=1), (asked(10), 1))
    done = retention.find_unneeded(1, [5])
    assert [key.rsplit("/", 1)[1] for key in done] == ["1-5-t0-0"]
    for key in done:
        store.delete(key)
    put(opened(store, batch=6, lineage=1), (asked(11, channel=1), 2))
    assert names(retention, 1, [6]) == {"0-5-t0-0", "1-6-t0-0"}


def test_what_nobody_comes_past_is_given_up_at_last(store: LocalStore) -> None:
    put(opened(store, batch=5), (asked(10), 1))
    retention = AnswerRetention(store, AnswerRecording(FOLDER, Stream.OF_SOURCE, Readers.ONE_WAY))
    gone = [names(retention, 1, [number]) for number in range(5, 25)]
    assert gone[:-1] == [set()] * 19 and gone[-1] == {"0-5-t0-0"}


def test_outputs_may_be_declared_in_another_order(store: LocalStore) -> None:
    more = OutputTag("more", "n LONG")
    outputs = Outputs(("", "letters", "more"), (*OUTPUTS.fields, fields("n LONG")))
    rows = [(1, AT, 0.1), ToSide(more, (5,)), ToSide(more, (6,)), ToSide(SIDE, ("because",))]
    opened(store, outputs=outputs).append([(asked(1), outputs.group_rows(rows), 0)])
    other = Outputs(("", "more"), (OUTPUTS.fields[0], fields("n LONG")))
    assert opened(store, outputs=other).find(asked(1)) == (((1, AT, 0.1),), ((5,), (6,)))


def test_one_row_that_does_not_fit_costs_no_other_answer(store: LocalStore) -> None:
    wrong = OUTPUTS.group_rows([("text", AT, 0.1)])
    with pytest.raises(ElementError):
        opened(store).append([(asked(1), answer(1), 4), (asked(2), wrong, 7), (asked(3), answer(3), 8)])
    again = opened(store)
    assert again.find(asked(1)) and again.find(asked(3)) and not again.find(asked(2))


def test_what_was_taken_over_twice_is_there_once(store: LocalStore) -> None:
    behind: Any = dict(stream=Stream.OF_MICRO_BATCH)
    put(opened(store, batch=5, **behind), (asked(1), 10))
    put(opened(store, batch=5, lineage=1, **behind), (asked(7), 10))
    third = opened(store, batch=5, lineage=2, **behind)
    assert [third.find_earlier(asked(n)) for n in (1, 2)] == [answer(10), None]


def test_a_repeated_task_counts_what_it_has_taken_over(store: LocalStore) -> None:
    behind: Any = dict(stream=Stream.OF_MICRO_BATCH)
    put(opened(store, batch=5, **behind), (asked(1), 10), (asked(2), 20))
    put(opened(store, batch=5, lineage=1, **behind), (asked(1), 10))
    again = opened(store, batch=5, lineage=1, **behind)
    assert again.find_earlier(asked(2)) == answer(20)


def test_digests_tell_values_apart_that_look_alike() -> None:
    values: list[Any] = [1, 1.0, "1", True, None, b"1", (1,), [1], 0.1 + 0.2, 0.3]
    assert len({compute_digest((one,)) for one in values}) == len(values)
