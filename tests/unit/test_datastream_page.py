"""The examples of docs/datastream.md, run as they stand; they declare streams and start nothing."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

from tests.unit.test_stream_settings import environment

PAGE = Path(__file__).resolve().parents[2] / "docs" / "datastream.md"


def test_the_examples_of_the_page_run() -> None:
    blocks = re.findall(r"^```pycon\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    # One after the other in one interpreter, as a reader would type them.
    given = {"env": environment()}
    test = doctest.DocTestParser().get_doctest("".join(blocks), given, PAGE.name, str(PAGE), 0)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    assert runner.run(test, out=said.append).failed == 0, "".join(said)
