"""docs/behaviours.md is honest: what it names is there and names the number; no line says nothing."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.syntax import walk

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "behaviours.md").read_text(encoding="utf-8")
#: The list has gaps.
NUMBERS = """
    1-15 17 18 20-24 26-33 36-42 44-52 54-66 68-72 74-78 80-97 99-102 104-106 108-110 112 113 115-119
    121-125 127-133 135-139 141-146 148-152 152b 153 155 156 158-162 164-168
"""
#: What a line may begin with, and whether tests follow.
STANDINGS = {
    "tested": True,
    "in part (": True,
    "in our own way (": True,
    "does not apply": False,
    "not built yet": False,
}
_ROW = re.compile(r"^\| (\d+b?) \| (.+?) \| (.+) \|$", re.MULTILINE)
_TEST = re.compile(r"`(tests/[^`]+\.py::\w+)`")
_NAMED = re.compile(r"[Bb]ehaviours?\s+((?:\d+b?(?:\s*(?:,|and|to|-)\s*)?)+)")
_RANGE = re.compile(r"(\d+)\s*(?:to|-)\s*(\d+)")


def numbers_in(text: str) -> set[str]:
    """Return the numbers that a text names: "Behaviours 2, 7 to 9 and 152b"."""
    found: set[str] = set()
    for match in _NAMED.finditer(text):
        found |= {
            str(n) for first, last in _RANGE.findall(match[1]) for n in range(int(first), int(last) + 1)
        }
        found |= set(re.findall(r"\d+b?", match[1]))
    return found


@cache
def naming_tests() -> dict[str, list[str]]:
    """Return for each number the tests whose docstring or comments name it, in the order of their files."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        lines = path.read_text(encoding="utf-8").split("\n")
        functions = [node for node in walk(path) if isinstance(node, ast.FunctionDef)]
        for node in sorted(functions, key=lambda function: function.lineno):
            if node.name.startswith("test_"):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                comments = [line.partition("#")[2] for line in lines[first - 1 : node.end_lineno]]
                text = " ".join([ast.get_docstring(node) or "", *comments])
                for number in sorted(numbers_in(text)):
                    found.setdefault(number, []).append(f"{path.relative_to(ROOT)}::{node.name}")
    return found


def rows() -> list[tuple[str, str]]:
    """Return the number and where it stands of each line of the table."""
    return [(match[1], match[3]) for match in _ROW.finditer(PAGE)]


def test_the_page_has_every_number_of_the_list_once() -> None:
    wanted: list[str] = []
    for part in NUMBERS.split():
        first, _, last = part.partition("-")
        wanted += [str(n) for n in range(int(first), int(last) + 1)] if last else [part]
    assert [number for number, _ in rows()] == wanted


def test_no_test_names_a_number_that_the_page_has_not() -> None:
    assert sorted(naming_tests().keys() - {number for number, _ in rows()}) == []


@pytest.mark.parametrize(("number", "standing"), rows(), ids=[number for number, _ in rows()])
def test_a_line_names_tests_that_name_it_or_says_why_not(number: str, standing: str) -> None:
    (has_tests,) = [has_tests for word, has_tests in STANDINGS.items() if standing.startswith(word)]
    named = _TEST.findall(standing)
    assert [test for test in named if test not in naming_tests().get(number, [])] == []
    assert bool(named) is has_tests
    if not has_tests:
        assert naming_tests().get(number, []) == []
        assert re.search(r": \S+|, issue \d|not built yet$", standing), "a reason"


def test_numbers_are_read_as_people_write_them() -> None:
    assert numbers_in("Behaviour 7.") == {"7"}
    assert numbers_in("behaviours 1, 3 to 5 and 152b: text with 9") == {"1", "3", "4", "5", "152b"}
    assert numbers_in("Behaviours 96\n97, see 98") == {"96"}
    assert numbers_in("nothing about 12") == set()
