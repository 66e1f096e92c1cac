"""The examples of docs/latency-markers.md and of the modules behind it; its job runs in tests/integration."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

from flinkish_spark import latency

PAGE = Path(__file__).resolve().parents[3] / "docs" / "latency-markers.md"


def test_the_examples_of_the_page_run() -> None:
    blocks = re.findall(r"^```pycon\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    test = doctest.DocTestParser().get_doctest("".join(blocks), {}, PAGE.name, str(PAGE), 0)
    assert doctest.DocTestRunner().run(test).failed == 0


def test_every_public_name_is_documented() -> None:
    assert all(getattr(latency, name).__doc__ for name in latency.__all__)
