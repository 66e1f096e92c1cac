"""The examples of docs/windows.md and of the window modules do what they say."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from flinkish_spark.windows import assigners, functions, spec, time_window

PAGE = Path(__file__).resolve().parents[2] / "docs" / "windows.md"
FLAGS = doctest.NORMALIZE_WHITESPACE


def test_the_examples_on_the_page_do_what_they_say() -> None:
    blocks = re.findall(r"^```pycon\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 12
    example = doctest.DocTestParser().get_doctest("".join(blocks), {}, PAGE.name, str(PAGE), 0)
    said: list[str] = []
    assert doctest.DocTestRunner(optionflags=FLAGS).run(example, out=said.append).failed == 0, "".join(said)


@pytest.mark.parametrize("module", [assigners, functions, spec, time_window])
def test_the_examples_in_the_modules_do_what_they_say(module) -> None:
    assert doctest.testmod(module, optionflags=FLAGS, extraglobs=vars(module)).failed == 0
