"""Docstrings: contracts on what users may call, one description on everything else; few banners."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.syntax import walk

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "flinkish_spark"
FILES = sorted(PACKAGE.rglob("*.py"))
FACES = ("", ".cep", ".functions", ".joins", ".latency", ".sinks", ".sources", ".state", ".state_processor")
_SECTION = re.compile(
    r"^ *(Parameters|Returns|Yields|Raises|Examples|Attributes|Notes|Warns)\n *-{3,}$", re.M
)
_BANNER = re.compile(r"^ *#(?: -- .*)? -{5,}$", re.M)
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def exported(*, with_bases: bool = True) -> frozenset[tuple[str, str]]:
    """Return module and qualified name of public names and their members, with those of their bases."""
    found = set()
    for face in (*FACES, ".testing", ".windows"):
        module = importlib.import_module(f"flinkish_spark{face}")
        for name in getattr(module, "__all__", None) or [one for one in dir(module) if one[0] != "_"]:
            public = getattr(module, name)
            for one in inspect.getmro(public) if inspect.isclass(public) and with_bases else (public,):
                if (getattr(one, "__module__", None) or "").startswith("flinkish_spark"):
                    home, own = one.__module__, getattr(one, "__qualname__", name)
                    members = [each for each in vars(one) if each[0] != "_"] if inspect.isclass(one) else []
                    found |= {(home, own), *((home, f"{own}.{member}") for member in members)}
    return frozenset(found)


def definitions(file: Path) -> Iterator[tuple[str, _Definition]]:
    """Yield classes and functions of a file with their qualified names."""

    def below(node: ast.AST, front: str) -> Iterator[tuple[str, _Definition]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{front}{child.name}", child
                yield from below(child, f"{front}{child.name}.")
            else:
                yield from below(child, front)

    yield from below(next(iter(walk(file))), "")


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_only_what_users_see_has_sections() -> None:
    guilty = [
        f"{module_of(file)}.{name}"
        for file in FILES
        for name, node in definitions(file)
        if (module_of(file), name) not in exported() and _SECTION.search(ast.get_docstring(node) or "")
    ]
    assert guilty == []


def test_what_users_see_is_described() -> None:
    """As ruff's D101 to D103 would say it, which know a public name by its underscore only."""
    silent = []
    for module, name in sorted(exported(with_bases=False)):
        one: object = importlib.import_module(module)
        for part in name.split("."):
            one = inspect.getattr_static(one, part, None)
        one = getattr(one, "__func__", one)
        is_function = inspect.isfunction(one) and one.__qualname__ == name
        # A function that is a field's default belongs to who made it.
        is_described = inspect.isclass(one) or isinstance(one, property) or is_function
        if is_described and not inspect.getdoc(one):
            silent.append(f"{module}.{name}")
    assert silent == []


def test_a_file_has_two_banners_at_most() -> None:
    banners = {module_of(file): len(_BANNER.findall(file.read_text(encoding="utf-8"))) for file in FILES}
    assert {module: count for module, count in banners.items() if count > 2} == {}
