"""`flinkish course`: the notebooks in a folder of a user, which name nothing of a checkout."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.support.cli_rig import flinkish

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_the_course_is_written_and_says_how_it_is_opened(tmp_path: Path) -> None:
    folder = tmp_path / "my lessons"
    result = flinkish("course", folder)
    assert result.exit_code == 0
    assert {path.name for path in folder.iterdir()} == {*(one.name for one in NOTEBOOKS), "course.py"}
    assert "'jupyterlab" in result.stdout and f"cd '{folder}' && jupyter lab 01_" in result.stdout
    assert flinkish("course", folder).exit_code == 0, "what is there is the same"


def test_what_is_written_names_nothing_of_a_checkout_but_pages(tmp_path: Path) -> None:
    flinkish("course", tmp_path)
    for written in sorted(tmp_path.glob("*.ipynb")):
        cells = json.loads(written.read_text(encoding="utf-8"))["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells)
        assert not re.search(r"\.\./|\bbuild\b|\btests/|make setup|ROOT", text), written.name
        links = re.findall(r"\]\(([^)]*)\)", "\n".join(re.findall(r"\[[^\]\n]+\]\([^)\s]*\)", text)))
        assert all((tmp_path / link).is_file() for link in links if link.endswith(".ipynb")), written.name
        pages = re.findall(r"\((docs/[^)\s]*)\)", text)
        assert all((ROOT / page).is_file() for page in pages), written.name


def test_a_file_that_somebody_has_changed_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "08_testing_without_spark.ipynb").write_text("mine")
    (tmp_path / "other.txt").write_text("mine")
    result = flinkish("course", tmp_path)
    assert result.exit_code == 2 and "has another 08_testing_without_spark.ipynb" in result.stderr
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "08_testing_without_spark.ipynb": "mine",
        "other.txt": "mine",
    }
    (tmp_path / "file").write_text("mine")
    assert flinkish("course", tmp_path / "file").exit_code == 2
