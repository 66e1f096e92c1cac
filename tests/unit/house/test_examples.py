"""Examples in docstrings do what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
MODULES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted((ROOT / "flinkish_spark").rglob("*.py"))
    if ">>> " in file.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", MODULES, ids=lambda one: one.partition(".")[2])
def test_examples_do_what_they_say(module: str) -> None:
    """Names of the module are known in them, as to who reads them beside the code."""
    there = importlib.import_module(module)
    found = doctest.testmod(there, optionflags=FLAGS, extraglobs=vars(there))
    assert found.failed == 0
