"""The examples of docs/testing.md do what they say."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

from flinkish_spark.testing import program_harness

PAGE = Path(__file__).resolve().parents[2] / "docs" / "testing.md"
FLAGS = doctest.NORMALIZE_WHITESPACE


def test_the_examples_on_the_page_do_what_they_say() -> None:
    blocks = re.findall(r"^```pycon\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    example = doctest.DocTestParser().get_doctest("".join(blocks), {}, PAGE.name, str(PAGE), 0)
    said: list[str] = []
    assert doctest.DocTestRunner(optionflags=FLAGS).run(example, out=said.append).failed == 0, "".join(said)


def test_the_examples_of_the_harness_do_what_they_say() -> None:
    found = doctest.testmod(program_harness, optionflags=FLAGS)
    assert found.attempted >= 9 and found.failed == 0
