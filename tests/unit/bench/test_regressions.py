"""What is slower than before is found, by its name, and nothing else is."""

from __future__ import annotations

import doctest
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import in_process, micro, regressions
from bench.regressions import Rounds, slower

PLACE = Path("any")


def test_its_examples_do_what_they_say() -> None:
    found = doctest.testmod(regressions)
    assert found.attempted and not found.failed


def measuring(monkeypatch: pytest.MonkeyPatch, *attempts: dict[str, Rounds]) -> list[Sequence[str]]:
    """Let measurements say in turn what is given; return what was asked for."""
    asked: list[Sequence[str]] = []
    left = iter(attempts)

    def measured(here: Path, base: Path, names: Sequence[str], rounds: int) -> Iterator[tuple[str, Rounds]]:
        asked.append(names)
        found = next(left)
        return iter([(name, found[name]) for name in names])

    monkeypatch.setattr(regressions, "measured", measured)
    return asked


def test_only_what_is_slower_each_time_fails(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    fine, slow = Rounds([11.0, 30.0], [10.0, 10.0]), Rounds([14.0, 14.0], [10.0, 11.0])
    first = {"a": fine, "b": slow, "c": slow}
    asked = measuring(monkeypatch, first, {"b": slow, "c": fine}, {"b": slow})
    assert slower(PLACE, PLACE, ["a", "b", "c"], 2) == ["b"]
    assert asked == [["a", "b", "c"], ["b", "c"], ["b"]]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("SLOWER")] == ["b"]


def test_a_machine_that_was_busy_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fine = Rounds([14.0], [10.0]), Rounds([10.0], [10.0])
    measuring(monkeypatch, {"a": slow}, {"a": slow}, {"a": fine})
    assert slower(PLACE, PLACE, ["a"], 1) == []


@pytest.mark.parametrize("name", micro.PIECES)
def test_each_piece_can_be_done_again_and_again(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(micro, "_EVENTS", 1_000)
    monkeypatch.setattr(micro, "_RECORDS", 1_000)
    monkeypatch.setattr(in_process, "GROUPS", 4)
    work = micro.PIECES[name].prepare()
    work()
    assert micro.cpu_ms(work) > 0


#: Behind the module: every second call is made for nothing, half as much again in all.
_SLOWER = """
_encode_batches, _calls = encode_batches, []


def encode_batches(*columns, **settings):
    _calls.append(0)
    if len(_calls) % 2:
        list(_encode_batches(*columns, **settings))
    return _encode_batches(*columns, **settings)
"""


@pytest.mark.nightly
def test_a_slower_copy_is_found(tmp_path: Path) -> None:
    """In real processes, over copies of this tree."""
    here, base = tmp_path / "here", tmp_path / "base"
    for tree in (here, base):
        tree.mkdir()
        for name in ("flinkish_spark", "tests", "demo", "bench"):
            (tree / name).symlink_to(regressions.ROOT / name)
    (here / "flinkish_spark").unlink()
    shutil.copytree(regressions.ROOT / "flinkish_spark", here / "flinkish_spark")
    with (here / "flinkish_spark/connectors/kafka/client/batches.py").open("a") as file:
        file.write(_SLOWER)
    assert slower(here, base, ["batch encode"], 3) == ["batch encode"]
