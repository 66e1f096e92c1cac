"""The versions of other packages: what is declared, what `make` installs of it, what is said about both."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from flinkish_spark.core.extras import _REQUIREMENTS, how_to_install
from tools import matrix

NO_RESULT = "it ended without a result (**1 failed**, 0 passed)"
ROOT = Path(__file__).resolve().parents[3]


def setup() -> configparser.ConfigParser:
    found = configparser.ConfigParser()
    found.read(ROOT / "setup.cfg")
    return found


def requirements(text: str) -> dict[str, Requirement]:
    lines = [line.strip() for line in text.splitlines()]
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    names = [one.name for one in found]
    assert len(names) == len(set(names)), f"named twice: {names}"
    return {one.name: one for one in found}


def test_what_make_installs_is_exact_and_within_the_ranges() -> None:
    extras = setup()["options.extras_require"]
    ranges = requirements(setup()["options"]["install_requires"])
    pinned, tools = requirements(extras["pinned"]), requirements(extras["test"])
    for name, one in {**pinned, **tools}.items():
        (exact,) = one.specifier
        assert exact.operator == "==", f"{name} is not exact"
        if name in ranges:
            assert Version(exact.version) in ranges[name].specifier
    assert {"pyspark", "kafka-python", "pandas", "pyarrow"} <= pinned.keys()


def test_ranges_end_before_what_nobody_has_tried() -> None:
    ranges = requirements(setup()["options"]["install_requires"])
    for name in ("pyspark", "kafka-python", "pandas"):
        assert {one.operator for one in ranges[name].specifier} == {">=", "<"}, name


def test_messages_name_the_libraries_of_an_extra_as_pip_is_told_them() -> None:
    extras = setup()["options.extras_require"]
    for extra, told in _REQUIREMENTS.items():
        assert list(told) == [str(line.strip()) for line in extras[extra].splitlines() if is_named(line)], (
            extra
        )
    not_for_users = {"delta", "pinned", "docs", "notebooks", "test"}
    assert extras.keys() - _REQUIREMENTS.keys() == not_for_users
    installed = "pip install 'protobuf>=6.31,<8' 'grpcio-tools>=1.74,<2' 'googleapis-common-protos>=1.70,<2'"
    assert how_to_install("protobuf") == f"{installed} 'ptars>=0.0.25,<0.0.26'"


def is_named(line: str) -> bool:
    return bool(line.strip()) and not line.strip().startswith("#")


def test_classifiers_begin_where_the_package_does() -> None:
    lines = setup()["metadata"]["classifiers"].splitlines()
    said = [line.rpartition(" ")[2] for line in lines if "3." in line]
    assert said == ["3.11", "3.12", "3.13", "3.14"]
    assert setup()["options"]["python_requires"] == f">={said[0]}"


# -- the table of what was tried -------------------------------------------------------------------
def test_the_table_is_that_of_what_ran() -> None:
    text = matrix.PAGE.read_text(encoding="utf-8")
    said = text.partition(matrix.BEGIN)[2].partition(matrix.END)[0]
    assert said == matrix.table(matrix.results()), "run `python tools/matrix.py --table`"


def test_a_row_that_has_other_versions_by_now_has_not_run() -> None:
    of_now = {row.name: row.versions() for row in matrix.ROWS}
    assert all(of_now.get(name) == one["versions"] for name, one in matrix.results().items())


def test_rows_are_within_the_ranges_and_the_first_is_what_make_installs() -> None:
    ranges = requirements(setup()["options"]["install_requires"])
    for row in matrix.ROWS:
        exact = {one.name: one.specifier for one in map(Requirement, row.packages())}
        is_within = {name: Version(one.version) in ranges[name].specifier for name, (one,) in exact.items()}
        # What pip brings by default runs all that README shows; the newest is tried all the same.
        beyond = {"pyspark", "pandas"} if row.is_beyond else set()
        assert {name for name, within in is_within.items() if not within} == beyond, row.name
    assert [row.name for row in matrix.ROWS if row.is_beyond] == ["newest"]
    pinned = requirements(setup()["options.extras_require"]["pinned"])
    assert all(
        str(pinned[one.name].specifier) == str(one.specifier)
        for one in map(Requirement, matrix.ROWS[0].packages())
    )


@pytest.mark.parametrize(
    ("text", "found", "said"),
    [
        ("....\n12 passed in 9.05s", {"passed": 12, "failed": 0, "skipped": 0}, "12 passed"),
        (
            "1 failed, 2 passed, 3 skipped, 4 deselected, 1 error in 71.12s (0:01:11)",
            {"passed": 2, "failed": 2, "skipped": 3},
            "**2 failed**, 2 passed, 3 skipped",
        ),
        ("Killed", {"passed": 0, "failed": 1, "says": "it ended without a result"}, NO_RESULT),
    ],
)
def test_what_came_of_a_lane_is_read_from_its_last_line(
    text: str, found: dict[str, object], said: str
) -> None:
    assert matrix.counted(text) == found
    assert matrix.cell(found) == said


def test_a_lane_that_nobody_has_run_is_not_said_to_work() -> None:
    row = matrix.ROWS[1]
    (line,) = [one for one in matrix.table({}).splitlines() if f"| {row.pandas} | {row.kafka_python}" in one]
    assert line.endswith("not run | not run | not run | not run | not run |")


def test_every_file_of_a_lane_is_there() -> None:
    """One was moved, and its lane ended without a result on each version."""
    named = {one.partition("::")[0] for tests in (*matrix.LANES.values(), matrix.NO_DELTA) for one in tests}
    files = {one for one in named if one.startswith("tests/")}
    assert files and not [one for one in files if not (matrix.ROOT / one).exists()]
