"""The site: its navigation has every page, what is made has every name, and Flink's names are answered."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tools import docs_site, flink_names

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without making the objects that it names."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def nav_paths(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [path for one in (nav.values() if isinstance(nav, dict) else nav) for path in nav_paths(one)]


def test_the_navigation_has_every_page_once() -> None:
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)["nav"]
    paths = [path for path in nav_paths(nav) if path.endswith(".md")]
    assert len(paths) == len(set(paths))
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    # The section of the guarantees has whatever is in their folder.
    assert set(paths) == {page for page in pages if not page.startswith("guarantees/")}


def test_the_page_of_guarantees_has_every_one_of_them() -> None:
    listed = docs_site.guarantees()
    assert sorted([*listed, "index.md"]) == sorted(page.name for page in (DOCS / "guarantees").iterdir())


@pytest.mark.parametrize(
    "page", sorted(one.name for one in (DOCS / "guarantees").iterdir() if one.name != "index.md")
)
def test_a_guarantee_says_what_it_does_not_promise_and_which_test_shows_it(page: str) -> None:
    """That the tests exist is looked at in test_docs.py, for every page."""
    text = (DOCS / "guarantees" / page).read_text(encoding="utf-8")
    for part in ("**Promise.**", "**You do.**", "**Not promised.**", "**Shown by**"):
        assert part in text, part
    tested = (DOCS / "what-is-tested.md").read_text(encoding="utf-8")
    row = rf"^\| \[[^\]]+\]\(guarantees/{re.escape(page)}\) \| `tests/[^`]+\.py::test_\w+` \|"
    assert re.search(row, tested, re.MULTILINE)


def test_the_reference_has_every_public_name_once() -> None:
    pages = docs_site.api_pages()
    shown = re.findall(r"^::: flinkish_spark\.(\S+)$", "\n".join(pages.values()), re.MULTILINE)
    assert len(shown) == len(set(shown)) > 200
    assert {one.rpartition(".")[2] for one in shown} == set(docs_site.public_names())
    assert set(pages) == {f"api/{page}.md" for page, _, _ in docs_site.API}
    assert all(":::" in text for text in pages.values())


def test_the_catalogue_of_errors_has_what_happened_why_and_what_to_do() -> None:
    text = docs_site.error_messages()
    # Of jars/__init__.py, with the parts that vary in braces.
    assert "### JarMissing" in text and "### ConfigError" in text
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| what")]
    assert len(rows) > 300
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 4 for line in rows)


def test_errors_of_others_say_what_becomes_of_the_job() -> None:
    rows = docs_site.foreign_errors().splitlines()[2:]
    assert len(rows) > 15 and all(len(re.findall(r"(?<!\\)\|", row)) == 5 for row in rows)
    (memory,) = [row for row in rows if "`OutOfMemoryError`" in row]
    assert "memory ran out" in memory and "not for ever" in memory


def test_every_name_of_flink_has_an_answer() -> None:
    rows = list(flink_names.rows())
    assert len(rows) > 400
    assert [(owner, member) for _, owner, member, there in rows if not there] == []
    assert [
        name for name in flink_names.instead() if not name.endswith(".*") and not _is_of_flink(name)
    ] == []


def _is_of_flink(name: str) -> bool:
    owner, _, member = name.partition(".")
    classes = {
        one: members
        for chapter in flink_names.names()["chapters"].values()
        for one, members in chapter.items()
    }
    return owner in classes and (not member or member in classes[owner])


def test_what_is_said_to_be_here_is_here() -> None:
    named = {
        name
        for text in flink_names.instead().values()
        for name in re.findall(r"`([A-Z][A-Za-z]+(?:\.[A-Za-z_]+)?)(?=[`(])", text)
        if not name.startswith("ResourceProfile")
    }
    assert len(named) > 60
    assert [name for name in sorted(named) if flink_names.ours(name) is None] == []


@pytest.mark.parametrize(("section", "search"), [("How to", None), ("For developers", {"boost": 0.1})])
def test_the_search_puts_pages_of_users_first(section: str, search: dict[str, float] | None) -> None:
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)["nav"]
    assert section in {title for part in nav for title in part}
    file = SimpleNamespace(src_uri="decisions.md")
    page = SimpleNamespace(meta={}, file=file, ancestors=[SimpleNamespace(title=section)])
    docs_site.on_page_markdown("text", page, None, None)
    assert page.meta.get("search") == search
