"""The model of docs/scale.md says what is measured, at small sizes; and the page says what the model says."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from bench import scale
from bench.scale import MODEL, Size, measured, predicted

PAGE = Path(__file__).parents[3] / "docs" / "scale.md"


def test_its_examples_do_what_they_say() -> None:
    found = doctest.testmod(scale)
    assert found.attempted and not found.failed


@pytest.mark.parametrize(
    "size",
    [
        Size(sinks=3, tasks=4, partitions=50, batches=3),
        Size(sinks=20),
        Size(tasks=100, batches=2),
        Size(partitions=2_000),
    ],
    ids=str,
)
def test_what_is_predicted_is_measured(size: Size) -> None:
    wanted, found = predicted(size), measured(size, rounds=1)
    for name in ("writes", "deletes", "reads"):
        assert found[name] == wanted[name], name
    for name in (name for name in MODEL if name.endswith("bytes")):
        tolerance = 0.5 if "memory" in name else 0.05
        assert found[name] == pytest.approx(wanted[name], rel=tolerance, abs=100), name


def test_the_page_has_the_model() -> None:
    rows = re.findall(r"^\| ([a-zA-Z, ]+) \|((?: [\d.,]+ \|){6})$", PAGE.read_text(), re.MULTILINE)
    said = {name: tuple(map(float, re.findall(r"[\d.]+", cells.replace(",", "")))) for name, cells in rows}
    assert said == {name: tuple(map(float, terms)) for name, terms in MODEL.items()}
