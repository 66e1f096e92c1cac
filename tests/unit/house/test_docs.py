"""The documents say what is there: the generated table, links, paths, names of tests, the notebooks."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest

from flinkish_spark.cli.app import app
from tests.support.types_at_limits import types_table
from tools import flink_names
from tools.docs_site import error_table
from tools.tables import (
    configuration_table,
    failure_reason_table,
    job_status_table,
    metrics_table,
    recovery_table,
    task_state_table,
    transition_table,
)

#: Document, marker around the table, and what prints it.
GENERATED = [
    ("docs/protocol.md", "transition-table", transition_table),
    ("docs/protocol.md", "failure-reasons", failure_reason_table),
    ("docs/protocol.md", "recovery-table", recovery_table),
    ("docs/protocol.md", "job-status", job_status_table),
    ("docs/protocol.md", "task-state", task_state_table),
    ("docs/field-reports.md", "types", types_table),
    ("docs/metrics.md", "metrics", metrics_table),
    ("docs/configuration.md", "configuration", configuration_table),
    ("docs/errors.md", "errors", error_table),
    ("docs/migrate/flink-datastream.md", "flink-names", flink_names.table),
]
ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PICTURES = ROOT / "docs" / "notebooks"
_MOST_OF_A_PICTURE = 60_000
#: Pictures drawn by hand, and the most bytes of one.
DRAWN = [*sorted((ROOT / "docs").glob("*.svg")), *sorted((ROOT / "docs" / "pictures").iterdir())]
_MOST_OF_A_DRAWING = 12_000
#: A path in backticks is checked if it begins with one of these.
FOLDERS = {".ci", "bench", "demo", "docs", "flinkish_spark", "jvm-shim", "notebooks", "tests", "tools"}
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_PATH = re.compile(r"`([A-Za-z0-9_.-]+/[A-Za-z0-9_./-]*)(?:::([A-Za-z0-9_]+))?`")


def text_of(document: Path) -> str:
    """Return the document without its code blocks."""
    return _CODE_BLOCK.sub("", document.read_text(encoding="utf-8"))


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+)$", text_of(document), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def names(documents: list[Path]) -> list[str]:
    return [str(document.relative_to(ROOT)) for document in documents]


@pytest.mark.parametrize(("document", "marker", "table"), GENERATED, ids=[one[1] for one in GENERATED])
def test_tables_are_the_code_s(document: str, marker: str, table: Callable[[], str]) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    _, _, rest = text.partition(f"<!-- {marker} -->\n")
    found, _, _ = rest.partition(f"\n<!-- /{marker} -->")
    assert found == table()


@pytest.mark.parametrize("document", DOCUMENTS, ids=names(DOCUMENTS))
def test_relative_links_lead_somewhere(document: Path) -> None:
    broken = []
    for link in _LINK.findall(text_of(document)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=names(DOCUMENTS))
def test_no_type_is_taken_for_a_tag(document: Path) -> None:
    """MAP<STRING, LONG> outside of code is shown as MAP."""
    text = re.sub(r"`[^`\n]*`", "", text_of(document))
    assert re.findall(r"\w<[A-Za-z][^\n]{0,20}", text) == []


@pytest.mark.parametrize("picture", DRAWN, ids=names(DRAWN))
def test_a_drawing_has_a_title_and_a_page_and_loads_nothing(picture: Path) -> None:
    text = picture.read_text(encoding="utf-8")
    elements = {element.tag.rpartition("}")[2]: element for element in ElementTree.fromstring(text).iter()}
    assert elements["title"].text and ("desc" in elements or picture.parent.name != "pictures")
    assert not {"script", "foreignObject", "image", "a"} & elements.keys()
    assert not re.findall(r"""\bon\w+=|@import|href=["'](?!#)|url\((?!#)""", text)
    assert len(text.encode()) <= _MOST_OF_A_DRAWING
    shown = rf"!\[[^\]]{{20,}}\]\(\S*{re.escape(picture.name)}\)"
    assert any(re.search(shown, text_of(document)) for document in DOCUMENTS)


def test_decisions_name_what_is_there() -> None:
    """By name and not by path: files may move."""
    definition = re.compile(r"^ *(?:async )?(?:def|class) (\w+)|^(\w+)(?::.+)? = ", re.MULTILINE)
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "flinkish_spark").rglob("*.py")]
    defined = {name for source in sources for pair in definition.findall(source) for name in pair}
    text = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
    places = re.findall(r"^\*\*Where\.\*\*(.+)$", text, re.MULTILINE)
    named = {name for place in places for name in re.findall(r"`(\w+)`", place)}
    assert len(named) > 40 and not named - defined
    assert "`flinkish_spark/" not in re.sub(r"`flinkish_spark/(jars|audit|connectors|testing)/", "", text)


@pytest.mark.parametrize("document", DOCUMENTS, ids=names(DOCUMENTS))
def test_paths_and_tests_that_are_named_exist(document: Path) -> None:
    missing = []
    for path, function in _PATH.findall(text_of(document)):
        if path.split("/")[0] not in FOLDERS:
            continue
        target = ROOT / path
        if not target.exists():
            missing.append(path)
        elif function and f"def {function}(" not in target.read_text(encoding="utf-8"):
            missing.append(f"{path}::{function}")
    assert not missing


def test_every_document_is_reached_from_the_readme() -> None:
    """By links, and by those of the pages that they lead to: a checkout has no navigation."""
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        document = ahead.pop()
        if document in reached or document.suffix != ".md" or not document.is_file():
            continue
        reached.add(document)
        links = [link.partition("#")[0] for link in _LINK.findall(text_of(document)) if "://" not in link]
        ahead += [(document.parent / link).resolve() for link in links if link]
    assert not names([document for document in DOCUMENTS if document not in reached])


def python_blocks() -> list[tuple[str, str]]:
    """Return the Python code blocks of all documents, with the document and the line where each begins."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for match in _PYTHON_BLOCK.finditer(text):
            line = text.count("\n", 0, match.start(1)) + 1
            found.append((f"{document.relative_to(ROOT)}:{line}", match.group(1)))
    return found


@pytest.mark.parametrize(("place", "code"), python_blocks(), ids=[place for place, _ in python_blocks()])
def test_python_in_the_documents_compiles_and_imports_what_is_there(place: str, code: str) -> None:
    compile(code, place, "exec")
    for node in ast.walk(ast.parse(code)):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in modules:
            if name.split(".")[0] == "flinkish_spark":
                importlib.import_module(name)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flinkish_spark":
            module = importlib.import_module(node.module)
            assert not [one.name for one in node.names if not hasattr(module, one.name)]


def test_the_documents_have_python_in_them() -> None:
    """Else the check above would check nothing."""
    assert {place.partition(":")[0] for place, _ in python_blocks()} >= {"README.md", "docs/chained-jobs.md"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=names(DOCUMENTS))
def test_commands_of_ours_and_their_options_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8").replace("\\\n", " ")
    for words in re.findall(r"(?:`|^|/)flinkish ([a-z][^`\n#]*)", text, re.MULTILINE):
        said, command, options = words.split(), app, {"--help"}
        while isinstance(command, click.Group) and said:
            assert said[0] in command.commands, f"flinkish {words}"
            command = command.commands[said.pop(0)]
        options |= {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
        wanted = set(re.findall(r"(?<![\w/.-])--?[A-Za-z][\w-]*", words))
        assert not wanted - options, words


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=names(NOTEBOOKS))
def test_notebooks_are_clean(notebook: Path) -> None:
    """Valid Python, no stored output, and nothing in them that the package should own."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    assert content["nbformat"] == 4
    for cell in content["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert not cell["outputs"] and cell["execution_count"] is None
        assert len(cell["source"]) <= 25
        ast.parse("".join(cell["source"]))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=names(NOTEBOOKS))
def test_links_of_notebooks_lead_somewhere(notebook: Path) -> None:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    places = [link.partition("#") for link in _LINK.findall(text) if "://" not in link]
    assert places
    for path, _, anchor in places:
        target = notebook.parent / path
        assert target.exists() and (not anchor or anchor in anchors(target)), path
    missing = [path for path, _ in _PATH.findall(text) if not (ROOT / path).exists() and "build" not in path]
    assert not missing


def test_each_notebook_is_a_part_of_the_course_and_has_a_picture() -> None:
    course = (ROOT / "docs" / "course.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \[.*\]\(\.\./(notebooks/.*)\) \|", course, re.MULTILINE) == names(NOTEBOOKS)
    assert [picture.stem for picture in sorted(PICTURES.iterdir())] == [one.stem for one in NOTEBOOKS]
    assert all(picture.stat().st_size < _MOST_OF_A_PICTURE for picture in PICTURES.iterdir())
    for notebook in NOTEBOOKS:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        assert len([cell for cell in cells if "picture" in cell["metadata"].get("tags", ())]) == 1, notebook
