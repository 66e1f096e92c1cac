"""The jobs of docs/windows.md, docs/cep.md and docs/joins.md do what they say."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs"
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    "page", ["windows.md", "cep.md", pytest.param("joins.md", marks=pytest.mark.nightly)]
)
def test_the_job_of_the_page_does_what_it_says(spark, tmp_path, page) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```pycon spark\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    # Classes travel to the workers, as those of a program that is run do.
    given = {"__name__": "__main__", "spark": spark, "folder": str(tmp_path)}
    example = doctest.DocTestParser().get_doctest("".join(blocks), given, page, page, 0)
    said: list[str] = []
    assert doctest.DocTestRunner().run(example, out=said.append).failed == 0, "".join(said)
