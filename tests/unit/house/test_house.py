"""Rules of the house that no linter knows. A rule that hurts is changed here, in the open."""

from __future__ import annotations

import ast
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from flinkish_spark import jars
from flinkish_spark.core.errors import EnvironmentFault
from flinkish_spark.jars import JarMissing, find_pinned, find_pinned_jars, ivy_settings, spark_minors
from tests.support.syntax import walk

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "flinkish_spark"
FILES = sorted(PACKAGE.rglob("*.py"))


def names(files: list[Path]) -> set[str]:
    return {str(file.relative_to(ROOT)) for file in files}


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """Return what the rules look at of a file's syntax; files are parsed once for all of them."""
    kept = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Name, ast.Call, ast.ClassDef)
    return tuple(node for node in walk(file) if isinstance(node, kept))


def imports(file: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports, at its top or inside a function."""
    package = file.relative_to(ROOT).parts[:-1]
    for node in nodes(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def identifiers(file: Path) -> set[str]:
    """Return names and attributes used in code; comments and docstrings do not count."""
    return {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in nodes(file)
        if isinstance(node, ast.Attribute | ast.Name)
    }


def calls(file: Path) -> Iterator[str]:
    """Yield the dotted names that a file calls."""
    for node in nodes(file):
        if isinstance(node, ast.Call) and (name := dotted(node.func)):
            yield name


def dotted(node: ast.expr) -> str:
    """Return the text of a name with dots; empty for any other expression."""
    if isinstance(node, ast.Attribute):
        return f"{front}.{node.attr}" if (front := dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def test_only_the_bridge_talks_to_the_jvm() -> None:
    jvm = {"_jvm", "_jdf", "_jsparkSession", "_jsc", "_gateway", "_jrdd", "_jsqs", "_jwrite"}
    allowed = {*(PACKAGE / "bridge").glob("*.py")}
    guilty = [
        file
        for file in FILES
        if file not in allowed
        and (identifiers(file) & jvm or any(name.split(".")[0] == "py4j" for name in imports(file)))
    ]
    assert not names(guilty)


def test_the_protocol_imports_only_the_standard_library_and_itself() -> None:
    allowed = sys.stdlib_module_names
    guilty = {
        (str(file.relative_to(ROOT)), name)
        for file in FILES
        if file.is_relative_to(PACKAGE / "protocol")
        for name in imports(file)
        if name.split(".")[0] not in allowed and not name.startswith("flinkish_spark.protocol")
    }
    assert not guilty


def test_the_protocol_has_no_clock_no_chance_and_no_files() -> None:
    impure = {"time", "random", "secrets", "os", "io", "pathlib", "socket", "threading", "subprocess"}
    guilty = {
        (str(file.relative_to(ROOT)), name)
        for file in FILES
        if file.is_relative_to(PACKAGE / "protocol")
        for name in imports(file)
        if name.split(".")[0] in impure
    }
    assert not guilty


def test_reading_a_checkpoint_runs_no_code() -> None:
    """Pickle may be written (to see whether a function can travel), never read but for an option."""
    readers = {"pickle.loads", "pickle.load", "cloudpickle.loads", "cloudpickle.load", "eval", "exec"}
    guilty = [file for file in FILES if readers & set(calls(file)) or "pickle.loads" in file.read_text()]
    # Whoever starts a query gives its sinks, as a user's function: no checkpoint holds this option.
    assert names(guilty) == {"flinkish_spark/foreach_batch/sinks_format.py"}


def test_no_enum_has_an_empty_tuple_as_value() -> None:
    """Python 3.11.0 to 3.11.3, so that of Debian 12, makes another object of it."""
    guilty = []
    for file in FILES:
        for node in nodes(file):
            if isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases):
                values = [one.value for one in node.body if isinstance(one, ast.Assign)]
                guilty += [node.name for value in values if ast.unparse(value) == "()"]
    assert not guilty


def test_wall_clock_time_is_read_in_one_file() -> None:
    wall = {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now", "datetime.utcnow"}
    # The doctor compares the clocks of hosts, on which this package may be missing.
    allowed = {"flinkish_spark/core/clock.py", "flinkish_spark/job/doctor.py"}
    assert names([file for file in FILES if wall & set(calls(file))]) <= allowed


def test_ivy_takes_bare_exactly_what_is_pinned() -> None:
    modules = ElementTree.parse(ivy_settings()).getroot().iterfind("modules/module")
    bare = {(module.attrib["organisation"], module.attrib["name"]) for module in modules}
    listed = {coordinate for minor in spark_minors() for coordinate in find_pinned("spark", minor)}
    assert bare == {tuple(coordinate.split(":")[:2]) for coordinate in listed}


def test_pinned_coordinates_are_complete_and_have_one_version_each() -> None:
    for coordinates in (*(find_pinned("spark", minor) for minor in spark_minors()), find_pinned("broker")):
        assert all(coordinate.count(":") == 2 for coordinate in coordinates)
        artifacts = [coordinate.rsplit(":", 1)[0] for coordinate in coordinates]
        assert len(artifacts) == len(set(artifacts)) > 0


def test_a_missing_jar_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jars, "running_minor", lambda: "4.2")
    with pytest.raises(JarMissing, match=r"delta-storage-4\.4\.0\.jar.*To do: run `flinkish jars") as caught:
        find_pinned_jars(tmp_path)
    assert isinstance(caught.value, EnvironmentFault)


def test_no_file_names_a_place_on_one_machine() -> None:
    """What works for one person only: home directories and registry hosts."""
    marks = ["/home/", "/Users/", "/root/", "repo1." + "maven.org", "pypi." + "org"]
    files = [ROOT / name for name in ("setup.cfg", "pyproject.toml", "Makefile", "MANIFEST.in")]
    files += [*FILES, *(ROOT / "tools").glob("*.*"), *(ROOT / ".ci").iterdir()]
    assert not {(file.name, mark) for file in files for mark in marks if mark in file.read_text()}


def test_every_file_of_tests_has_one_that_is_not_left_to_the_night() -> None:
    """`make test` tries everything at least once; what is nightly is a further case of something.

    Of what, `nightly(by_day="tests/...")` says where no test of the same file is run by day.
    """

    def nightly(test: ast.FunctionDef) -> list[ast.expr]:
        return [mark for mark in test.decorator_list if ast.unparse(mark).startswith("pytest.mark.nightly")]

    def tests(file: Path) -> list[ast.FunctionDef]:
        return [
            node for node in walk(file) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]

    def by_day(file: Path) -> Iterator[Path]:
        for mark in (mark for test in tests(file) for mark in nightly(test)):
            if isinstance(mark, ast.Call):
                yield from (ROOT / ast.literal_eval(given.value) for given in mark.keywords)

    def is_run(file: Path) -> bool:
        return not all(map(nightly, tests(file)))

    kinds = [ROOT / "tests" / kind for kind in ("integration/spark", "integration/broker", "crash")]
    left_out = [file for kind in kinds for file in kind.glob("test_*.py") if not is_run(file)]
    assert [file.name for file in left_out if not any(map(is_run, by_day(file)))] == []


def imports_at_the_top(file: Path) -> Iterator[str]:
    """Yield the dotted names that importing a file imports; ours are absolute."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules_of_extras(*extras: str) -> set[str]:
    """Return the modules that pip installs for extras of ours, with all that their packages need in turn."""
    found: set[str] = set()
    asked = [Requirement(f"flinkish-spark[{','.join(extras)}]")]
    while asked:
        one = asked.pop()
        name = canonicalize_name(one.name)
        wanted = {f"{name}[{extra}]" for extra in one.extras} | {name}
        if wanted <= found:
            continue
        found |= wanted
        try:
            needs = [Requirement(text) for text in metadata.requires(name) or ()]
        except metadata.PackageNotFoundError:
            continue
        scopes = [{"extra": extra} for extra in ("", *one.extras)]
        asked += [need for need in needs if not need.marker or any(map(need.marker.evaluate, scopes))]
    owners = metadata.packages_distributions()
    return {
        module for module, names in owners.items() if any(canonicalize_name(name) in found for name in names)
    }


def test_tests_import_nothing_that_a_fresh_machine_has_not() -> None:
    """The bench has packages of its own; a test that imports one passes where somebody has run the bench."""
    installed = modules_of_extras("test", "pinned", "notebooks") | sys.stdlib_module_names
    ours = {"bench", "demo", "flinkish_spark", "tests", "tools"}
    pending, seen = list((ROOT / "tests").rglob("*.py")), set[Path]()
    missing: set[tuple[str, str]] = set()
    while pending:
        file = pending.pop()
        if file in seen:
            continue
        seen.add(file)
        for name in imports_at_the_top(file):
            top = name.split(".")[0]
            if top not in ours:
                missing |= {(str(file.relative_to(ROOT)), name)} if top not in installed else set()
            elif top != "flinkish_spark":
                owner = ROOT.joinpath(*name.split("."))
                paths = [owner.with_suffix(".py"), owner.parent.with_suffix(".py")]
                pending += [path for path in paths if path.is_file()]
    assert missing == set()


def test_the_page_of_ten_minutes_names_twelve_short_files() -> None:
    page = (ROOT / "docs" / "ten-minutes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \| `([^`]+)` \| (\d+) \|", page, re.MULTILINE)
    lines = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name, _ in rows}
    assert len(lines) == 12
    assert max(lines.values()) <= 500
    assert all(abs(lines[name] - int(said)) <= 20 for name, said in rows)
