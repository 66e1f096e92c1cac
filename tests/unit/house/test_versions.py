"""The versions of other packages: what is declared, what `make` installs of it, what is said about both."""

from __future__ import annotations

import configparser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

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


def test_classifiers_begin_where_the_package_does() -> None:
    lines = setup()["metadata"]["classifiers"].splitlines()
    said = [line.rpartition(" ")[2] for line in lines if "3." in line]
    assert said == ["3.11", "3.12", "3.13"]
    assert setup()["options"]["python_requires"] == f">={said[0]}"
