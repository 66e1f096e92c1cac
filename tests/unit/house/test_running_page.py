"""The examples of docs/running.md do what they say."""

from __future__ import annotations

import doctest
from pathlib import Path

import click

from flinkish_spark.cli.run import run
from tests.support.pages import DOCS, check_page


def test_the_examples_on_the_page_do_what_they_say(tmp_path: Path) -> None:
    (tmp_path / "rates.txt").write_text("USD 0.9\n")
    given = {"rates": str(tmp_path / "rates.txt")}
    check_page("running.md", at_least=2, flags=doctest.NORMALIZE_WHITESPACE, given=given)


def test_the_page_names_each_option() -> None:
    text = (DOCS / "running.md").read_text(encoding="utf-8")
    options = [name for one in run.params if isinstance(one, click.Option) for name in one.opts]
    assert len(options) >= 8 and not [name for name in options if name not in text]
