"""What is remembered of letters that are left behind, over runs with any filters that are cut off."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from flinkish_spark.connectors.kafka import letter_replay
from flinkish_spark.connectors.kafka.letter_replay import LetterFilter, LetterReplay, _Letter
from flinkish_spark.core.errors import EnvironmentFault
from tests.support.effort import seeds

PLACE = ("letters", 0)


class Broker:
    """One partition: records, the offsets between them that hold none, a group and what was put back."""

    def __init__(self) -> None:
        self.records: dict[int, str] = {}
        self.begin, self.end, self.done, self.note = 0, 0, 0, ""
        self.put_back: list[int] = []
        self.sent: list[int] = []
        self.dies_in = 99

    def beginning_offsets(self, _: Any) -> dict[Any, int]:
        return {PLACE: self.begin}

    def end_offsets(self, _: Any) -> dict[Any, int]:
        return {PLACE: self.end}

    def committed_offsets(self, *_: Any) -> dict[Any, int]:
        return {PLACE: self.done}

    def find_committed_notes(self, *_: Any) -> dict[Any, str]:
        return {PLACE: self.note}

    def topics(self, names: list[str]) -> dict[str, Any]:
        return {name: SimpleNamespace(partitions=1, keeps_ms=None) for name in names}

    def send(self, _: str, letters: Any) -> None:
        self.sent = [one.offset for one in letters]

    def commit(self, _: str, offsets: dict[Any, int], note: str) -> None:
        self.dies_in -= 1
        if not self.dies_in:
            raise KeyboardInterrupt
        self.put_back += self.sent
        self.sent, self.done, self.note = [], offsets[PLACE], note


def replay(broker: Broker, kind: str, patch: pytest.MonkeyPatch) -> None:
    words = [f"kind={kind}"] if kind else []
    run = LetterReplay(None, "letters", "group", LetterFilter.of(words))  # type: ignore[arg-type]

    def read(wanted: Any) -> Any:
        for offset, its in sorted(broker.records.items()):
            if wanted.start <= offset < wanted.end:
                yield _Letter(offset, None, b"v", [("flinkish-topic", b"orders"), ("kind", its.encode())], 0)

    patch.setattr(run, "_read_letters", read)
    patch.setattr(run, "_to_outgoing", lambda _, letters: letters)
    # What an earlier run has left open is aborted.
    broker.sent = []
    run._replay(broker, broker, PLACE)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", seeds(60))
def test_every_letter_is_put_back_once_by_whichever_filters(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, broker = random.Random(seed), Broker()
    monkeypatch.setattr(letter_replay, "_PORTION", chance.randint(1, 4))
    gone = set[int]()
    for _ in range(12):
        for _ in range(chance.randint(0, 9)):
            if chance.random() < 0.6:
                broker.records[broker.end] = chance.choice("abc")
            broker.end += 1
        if chance.random() < 0.2:
            broker.begin = chance.randint(broker.begin, broker.end)
            gone |= {at for at in broker.records if at < broker.begin}
        lost = [at for at in gone if at in broker.records]
        for at in lost:
            del broker.records[at]
        broker.dies_in = chance.choice([1, 2, 99])
        kind = chance.choice(["a", "b", "none"])
        try:
            replay(broker, kind, monkeypatch)
            due = {at for at, its in broker.records.items() if its == kind}
            assert due <= set(broker.put_back)
        except KeyboardInterrupt:
            pass
    broker.dies_in = 99
    replay(broker, "", monkeypatch)
    assert len(broker.put_back) == len(set(broker.put_back))
    assert set(broker.records) <= set(broker.put_back) and broker.note == "left:"


def test_what_is_left_between_two_that_went_back_is_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker()
    broker.records, broker.end = dict(zip(range(0, 20, 2), "abbbabbbba", strict=True)), 20
    replay(broker, "a", monkeypatch)
    assert (broker.put_back, broker.note) == ([0, 8, 18], "left:2-6,10-16")
    replay(broker, "none", monkeypatch)
    assert broker.note == "left:2-6,10-16"


def test_a_group_that_is_ahead_of_its_topic_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker()
    broker.records, broker.end, broker.done = {0: "a"}, 1, 7
    with pytest.raises(EnvironmentFault, match="up to offset 7, and the partition ends at 1"):
        replay(broker, "", monkeypatch)
