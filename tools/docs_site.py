"""Hooks of MkDocs: what `make docs` makes beside the pages in docs/.

The reference from the public names, messages of errors, notebooks as pages, `llms.txt`. What links lead to
outside of docs/ becomes a page of the site, or plain text. Nothing of it runs a job, and nothing is loaded.
"""

from __future__ import annotations

import ast
import json
import logging
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.house import index as module_index

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "flinkish_spark"
LOG = logging.getLogger("mkdocs.plugins.docs_site")

# ----------------------------------------------------------------------------------------------------------
# The reference: public names, by what they are for.


#: Page, its title, and the modules whose public names it has; the first page that fits a name has it.
API = (
    ("environment", "Environment and streams", ("datastream",)),
    (
        "jobs",
        "Running jobs",
        ("job", "checkpoint", "contracts.hooks", "protocol.job_graph", "protocol.job_status", "latency"),
    ),
    ("metrics", "Metrics and lineage", ("core.metric_group", "reporters")),
    ("settings", "Settings", ("core.config", "core.distributed_cache", "core.accumulators", "bridge")),
    (
        "functions",
        "Functions",
        ("functions.keyed", "functions.stream", "functions.aggregates", "core.elements"),
    ),
    ("batches", "Functions over batches", ("operators",)),
    ("async", "Calls to systems outside", ("async_io",)),
    ("state", "State", ("state",)),
    ("time", "Event time", ("functions.watermark_strategy",)),
    ("windows", "Windows", ("windows",)),
    ("joins", "Joins", ("joins",)),
    ("patterns", "Patterns", ("cep",)),
    ("kafka", "Kafka", ("connectors.kafka",)),
    ("delta", "Delta", ("connectors.delta", "connectors.write_modes")),
    ("iceberg", "Iceberg", ("connectors.iceberg",)),
    ("files", "Files", ("connectors.files",)),
    ("databases", "Databases", ("connectors.jdbc",)),
    ("own-connectors", "Other sources and sinks", ("connectors", "contracts", "protocol.records")),
    (
        "formats",
        "Formats and changelogs",
        ("connectors.formats", "connectors.plain_formats", "core.formats", "core.changelogs"),
    ),
    (
        "savepoints",
        "Savepoints and state from outside",
        ("savepoints", "protocol.savepoints", "protocol.restore"),
    ),
    ("testing", "Testing", ("testing",)),
    ("statistics", "Checkpoints in figures", ("protocol",)),
    ("errors", "Errors", ("core.errors",)),
)
#: Public packages; those with a stub list their names in it, the others in `__all__`.
FACES = ("", "sources", "sinks", "windows", "cep", "testing", "state_processor", "joins")


def public_names() -> dict[str, tuple[str, str]]:
    """Return each public name with the module that defines it, and the package that users import it from."""
    found: dict[str, tuple[str, str]] = {}
    for face in FACES:
        for name, module in _listed(face):
            found.setdefault(name, (module, ".".join(["flinkish_spark", *([face] if face else [])])))
    for name in _defined(PACKAGE / "core" / "errors.py"):
        found.setdefault(name, ("core.errors", "flinkish_spark.core.errors"))
    return found


def _listed(face: str) -> Iterator[tuple[str, str]]:
    folder = PACKAGE / face
    file = next(
        one
        for one in (
            folder / "__init__.pyi",
            folder.with_suffix(".pyi"),
            folder / "__init__.py",
            folder.with_suffix(".py"),
        )
        if one.exists()
    )
    tree = ast.parse(file.read_text(encoding="utf-8"))
    wanted = None if file.suffix == ".pyi" else _all_of(tree)
    package = face.split(".") if face and file.stem == "__init__" else []
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        if node.level:
            above = package[: len(package) - node.level + 1]
            module = ".".join([*above, node.module])
        elif node.module.startswith("flinkish_spark."):
            module = node.module.removeprefix("flinkish_spark.")
        else:
            continue
        yield from ((alias.name, module) for alias in node.names if wanted is None or alias.name in wanted)


def _all_of(tree: ast.Module) -> set[str]:
    values = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return {name for value in values for name in ast.literal_eval(value)}


def _defined(file: Path) -> list[str]:
    """Return the public classes of a module, in their order."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"]


def api_pages() -> dict[str, str]:
    """Return the pages of the reference, by their path, as text for mkdocstrings."""
    on_page: dict[str, list[tuple[str, str, str]]] = {}
    for name, (module, face) in public_names().items():
        # The longest prefix wins, so that one page may have a part of what another has.
        fitting = [
            (len(prefix), page)
            for page, _, prefixes in API
            for prefix in prefixes
            if f"{module}.".startswith(f"{prefix}.")
        ]
        # A part that no page names yet is shown all the same.
        page = max(fitting)[1] if fitting else "jobs"
        on_page.setdefault(page, []).append((face, name, module))
    pages = {}
    for page, title, _ in API:
        names = on_page.get(page, [])
        faces = sorted({face for face, _, _ in names})
        text = [f"# {title}", "", f"Import from {' or '.join(f'`{face}`' for face in faces)}.", ""]
        for _, name, module in sorted(names, key=lambda one: one[1].lower()):
            text += [f"::: flinkish_spark.{module}.{name}", ""]
        pages[f"api/{page}.md"] = "\n".join(text)
    return pages


# ----------------------------------------------------------------------------------------------------------
# Errors: the classes, and what they say, out of the code.


@cache
def _trees() -> dict[Path, ast.Module]:
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(PACKAGE.rglob("*.py"))}


@cache
def error_classes() -> dict[str, tuple[str, str, bool, Path]]:
    """Return each error of the package: base, docstring, whether a restart may help, file."""
    classes: dict[str, tuple[list[str], ast.ClassDef, Path]] = {}
    for file, tree in _trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name] = ([ast.unparse(base).split(".")[-1] for base in node.bases], node, file)

    def line(name: str) -> list[str]:
        if name not in classes:
            return []
        # A class may have the name of its base in a library.
        above = [found for base in classes[name][0] if base != name for found in line(base)]
        return [name, *above]

    found: dict[str, tuple[str, str, bool, Path]] = {}
    for name, (bases, node, file) in classes.items():
        ancestors = line(name)
        if "FlinkishError" not in ancestors or name.startswith("_"):
            continue
        said = [
            bool(ast.literal_eval(one.value))
            for ancestor in ancestors
            for one in classes[ancestor][1].body
            if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "restartable"
        ]
        text = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
        found[name] = (bases[0] if bases else "", text, said[0] if said else False, file)
    return found


@cache
def usual_advice(name: str) -> str:
    """Return what to do about an error of this class that does not say it itself."""
    base, _, _, file = error_classes()[name]
    for node in ast.walk(_trees()[file]):
        if isinstance(node, ast.ClassDef) and node.name == name:
            for one in node.body:
                if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "usual_advice":
                    return str(ast.literal_eval(one.value))
    return usual_advice(base) if base in error_classes() else ""


def error_calls() -> Iterator[tuple[Path, str, ast.Call, bool]]:
    """Yield each call in the package that makes an error of ours, and whether it is `from_os_error`."""
    classes = error_classes()
    for file, tree in _trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                *before, name = ast.unparse(node.func).split(".")
                from_os_error = name == "from_os_error"
                name = before[-1] if from_os_error else name
                if name in classes and node.args:
                    yield file, name, node, from_os_error


def error_table() -> str:
    """Return the table of docs/errors.md: the public classes of core/errors.py."""
    classes = error_classes()
    rows = ["| error | is a | what it means | may a restart help? |", "|---|---|---|---|"]
    for name in _defined(PACKAGE / "core" / "errors.py"):
        base, text, may_help, _ = classes[name]
        rows.append(f"| `{name}` | `{base}` | {_cell(text)} | {'yes' if may_help else 'no'} |")
    return "\n".join(rows)


def error_messages() -> str:
    """Return what each error says: what happened, why, what to do; parts that vary are in braces."""
    classes = error_classes()
    found: dict[str, set[tuple[str, str, str]]] = {}
    for _, name, node, from_os_error in error_calls():
        given = {one.arg: _said(one.value) for one in node.keywords}
        what = _said(node.args[-1] if from_os_error else node.args[0])
        if re.search(r"[a-z]{3,} [a-z]", what):
            advice = given.get("what_to_do", "") or usual_advice(name)
            found.setdefault(name, set()).add((what, given.get("why", ""), advice))
    text = []
    for name in sorted(found):
        text += [
            f"### {name}",
            "",
            classes[name][1],
            "",
            "| what happened | why | what to do |",
            "|---|---|---|",
        ]
        text += [f"| {' | '.join(_cell(part) or '' for part in row)} |" for row in sorted(found[name])]
        text.append("")
    return "\n".join(text)


#: What becomes of the job, in short; `Sort` says it in full.
_THEN = {
    "RECORD": "restarted once, then the job ends",
    "OUTAGE": "restarted, as the strategy says",
    "TRANSIENT": "restarted, but not for ever at the same micro-batch",
}


def foreign_errors() -> str:
    """Return what errors of Spark, Delta, Kafka and Java mean for a job, by the names they have."""
    from flinkish_spark.protocol.errors import RULES

    text = ["| error | what it means | what to do | the job |", "|---|---|---|---|"]
    for rule in RULES:
        named = [*(f"{one}..." if one.endswith("_") else one for one in rule.conditions), *rule.classes]
        named += [f"SQLSTATE {one}..." for one in rule.sqlstates]
        if named:
            then = _THEN.get(rule.category.value, "ends")
            shown = ", ".join(f"`{one}`" for one in named)
            text.append(f"| {shown} | {_cell(rule.why)} | {_cell(rule.what_to_do)} | {then} |")
    return "\n".join(text)


def _said(node: ast.expr) -> str:
    """Return the text of an expression; what is known only when it runs is named in braces."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_said(part) for part in parts)
        case ast.FormattedValue(value=value):
            return "{" + re.sub(r"\W+", " ", ast.unparse(value).split(".")[-1]).strip()[:24] + "}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _said(left) + _said(right)
        case ast.IfExp(body=body, orelse=other):
            return f"{_said(body)} / {_said(other)}"
        case _:
            return "{" + re.sub(r"\W+", " ", ast.unparse(node).split(".")[-1]).strip()[:24] + "}"


def _cell(text: str) -> str:
    """Return text that stays in its cell, and is no markup."""
    text = re.sub(r":(?:class|func|meth|mod|data|attr):`~?([^`]+)`", r"`\1`", text)
    plain = text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("\n", " ")
    return re.sub(r"(?<!`)_(?![^`]*`)", "\\_", plain).strip()


# ----------------------------------------------------------------------------------------------------------
# Notebooks, and the files at the top of the repository.


def notebook_page(file: Path) -> str:
    """Return a notebook as Markdown, with its picture as the only output."""
    text = []
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"]).strip()
        text += [source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```", ""]
        if "picture" in cell["metadata"].get("tags", ()):
            text += [f"![What the cell above draws](../docs/notebooks/{file.stem}.png)", ""]
    text.append(f"*This is `notebooks/{file.name}` of the repository: run it there.*")
    return "\n".join(text)


#: Files at the top that are pages here.
PROJECT = {
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
}
MADE: dict[str, str] = {}


def made_pages() -> dict[str, str]:
    """Return all pages that are made when the site is built, by their path."""
    notebooks = {
        f"notebooks/{file.stem}.md": notebook_page(file)
        for file in sorted((ROOT / "notebooks").glob("*.ipynb"))
    }
    project = {place: (ROOT / name).read_text(encoding="utf-8") for name, place in PROJECT.items()}
    return {**api_pages(), **notebooks, **project}


# ----------------------------------------------------------------------------------------------------------
# What MkDocs calls.


def on_config(config: Any) -> Any:
    """Put what is made, and the pages of guarantees, into the navigation."""
    MADE.update(made_pages())
    sections: dict[str, list[Any]] = {
        "NOTEBOOKS": [path for path in MADE if path.startswith("notebooks/")],
        "API": [{title: f"api/{page}.md"} for page, title, _ in API],
        "PROJECT": list(PROJECT.values()),
        "GUARANTEES": ["guarantees/index.md", *(f"guarantees/{page}" for page in guarantees())],
    }
    config.nav = _filled(config.nav, sections)
    return config


def guarantees() -> list[str]:
    """Return the pages of guarantees, in the order of their table."""
    table = (ROOT / "docs" / "guarantees" / "index.md").read_text(encoding="utf-8")
    return re.findall(r"^\| \[[^\]]+\]\(([a-z-]+\.md)\)", table, re.MULTILINE)


def _filled(nav: Any, sections: dict[str, list[Any]]) -> Any:
    if isinstance(nav, list):
        # A section between pages becomes its pages.
        filled = [_filled(one, sections) for one in nav]
        return [page for one in filled for page in (one if isinstance(one, list) else [one])]
    if isinstance(nav, dict):
        return {name: _filled(value, sections) for name, value in nav.items()}
    return sections.get(nav, nav)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made."""
    from mkdocs.structure.files import File

    for path, text in MADE.items():
        files.append(File.generated(config, path, content=text))
    return files


_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


#: In the search, a page of developers comes after those of users.
_DEVELOPERS, _BOOST = "For developers", 0.1


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let fences name one language, and links lead to what is on the site."""
    if page.ancestors and page.ancestors[-1].title == _DEVELOPERS:
        page.meta.setdefault("search", {"boost": _BOOST})
    if page.file.src_uri == "errors.md":
        markdown = markdown.replace("<!-- messages -->", error_messages())
        markdown = markdown.replace("<!-- foreign -->", foreign_errors())
    if page.file.src_uri == "architecture.md":
        markdown = markdown.replace("<!-- index -->", module_index())
    parts = _FENCE.split(markdown)
    return "".join(
        re.sub(r"^```pycon spark", "```pycon", part) if at % 2 else _LINK.sub(lambda m: _link(m, page), part)
        for at, part in enumerate(parts)
    )


def _link(match: re.Match[str], page: Any) -> str:
    mark, label, target, anchor = match[1], match[2], match[3], match[4] or ""
    if "://" in target or target.startswith("mailto:"):
        return match[0]
    # Where the text lies in the repository, from where its links are meant.
    own = {place: name for name, place in PROJECT.items()}
    uri = page.file.src_uri
    place = own.get(uri, uri if uri.startswith("notebooks/") else f"docs/{uri}")
    file = (ROOT / place).parent.joinpath(target).resolve()
    if not file.is_relative_to(ROOT):
        return match[0]
    path = file.relative_to(ROOT).as_posix()
    if path.startswith("notebooks/") and path.endswith(".ipynb"):
        path = f"docs/{path.removesuffix('.ipynb')}.md"
    path = f"docs/{PROJECT[path]}" if path in PROJECT else path
    path = "docs/index.md" if path == "README.md" else path
    if not path.startswith("docs/"):
        # A file of the repository: its name is what helps.
        return label if label.startswith("`") else f"{label} (`{path}`)"
    depth = uri.count("/")
    return f"{mark}[{label}]({'../' * depth}{path.removeprefix('docs/')}{anchor})"


_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc|obj):<code>(~?)([\w.]+)</code>")


_CODE_IN_TABLE = re.compile(r"(?<=<td>).*?(?=</td>)", re.DOTALL)
_LONG_CODE = re.compile(r"<code>([^<]{25,})</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Show names in docstrings as names; roles are Sphinx's. Let long code in tables break at its signs."""
    html = _ROLE.sub(lambda m: f"<code>{m[2].split('.')[-1] if m[1] else m[2]}</code>", html)

    def breaking(code: re.Match[str]) -> str:
        return "<code>" + re.sub(r"([/._=(,]|::)", r"\1<wbr>", code[1]) + "</code>"

    return _CODE_IN_TABLE.sub(lambda cell: _LONG_CODE.sub(breaking, cell[0]), html)


_OUTSIDE = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"(?:https?:)?//[^\"]*\"")


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Say what would be loaded from elsewhere, or not be seen; strict builds fail by it."""
    for found in _OUTSIDE.findall(output):
        if 'rel="canonical"' not in found:
            LOG.warning("%s loads something from elsewhere: %s", page.file.src_uri, found)
    # A type that was written outside of code: MAP<STRING, LONG> is shown as MAP.
    for found in re.findall(r"<[A-Z]\w+", output):
        LOG.warning("%s has text that is taken for a tag: %s", page.file.src_uri, found)
    return output


PAGES: dict[str, tuple[str, str]] = {}


def on_page_context(context: Any, page: Any, **_: Any) -> Any:
    """Remember what `llms.txt` says of each page."""
    PAGES[page.file.src_uri] = (page.title or "", page.markdown or "")
    return context


def on_post_build(config: Any) -> None:
    """Write `llms.txt`, the pages with a line each, and `llms-full.txt`, what users need in one file."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for section in config.nav:
        for title, pages in section.items():
            lines += [f"## {title}", ""]
            for path in _paths(pages):
                name, text = PAGES.get(path, ("", ""))
                lines.append(f"- [{name}]({path.removesuffix('.md')}.html): {first_sentence(text)}")
            lines.append("")
    site = Path(config.site_dir)
    (site / "llms.txt").write_text("\n".join(lines), encoding="utf-8")
    users = [path for section in config.nav[:5] for pages in section.values() for path in _paths(pages)]
    full = [PAGES[path][1] for path in users if path in PAGES]
    (site / "llms-full.txt").write_text("\n\n---\n\n".join(full), encoding="utf-8")


def _paths(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for one in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _paths(one)


def first_sentence(markdown: str) -> str:
    """Return the first sentence behind a page's title, without markup."""
    for block in re.split(r"\n\s*\n", _FENCE.sub("", markdown)):
        if block.strip() and not re.match(r"\s*(#|\||<|>|-|!|\d|:::)", block):
            plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(block.split()))
            return re.split(r"(?<=\.) ", plain)[0].replace("**", "")
    return ""
