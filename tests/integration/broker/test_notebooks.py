"""The notebooks of `flinkish course` run, in a kernel as a user's; their cells assert what they show.

What was executed is in build/notebooks/ then, with its outputs, and so is the picture of each.
"""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from PIL import Image

from tests.support.cli_rig import flinkish
from tests.support.services import BUILD, ROOT, scratch

pytestmark = pytest.mark.timeout(600)
#: A notebook should take two minutes; beside two other processes on a slow machine a cell has needed them.
_CELL_TIMEOUT_S = 400
EXECUTED = BUILD / "notebooks"
#: It makes a cluster of its own, where it finds no session. By day test_run.py has one.
BY_NIGHT = ("11_on_a_cluster",)
COURSE = [
    pytest.param(file.name, id=file.stem, marks=pytest.mark.nightly if file.stem in BY_NIGHT else ())
    for file in sorted((ROOT / "notebooks").glob("*.ipynb"))
]


def _scope(fixture_name: str, config: pytest.Config) -> str:
    return "function" if config.getoption("--nightly") else "module"


@pytest.fixture(scope="module")
def lessons() -> Iterator[Path]:
    """A folder as a user has it; nothing of a checkout is beside it."""
    with scratch("test-course-") as folder:
        assert flinkish("course", folder).exit_code == 0
        yield folder


@pytest.fixture(scope=_scope)
def kernel(broker) -> Iterator[AsyncKernelManager]:
    """By day one for all, so that Spark is started once; by night each has its own, as a user's has."""
    # Jupyter, IPython and matplotlib would keep something in the user's home, and the notebooks in /tmp.
    homes = ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR", "TMPDIR")
    with scratch("test-kernel-") as folder, pytest.MonkeyPatch.context() as patch:
        for name in homes:
            patch.setenv(name, str(folder))
        patch.setenv("FLINKISH_BOOTSTRAP_SERVERS", broker.bootstrap_servers)
        manager = AsyncKernelManager()
        yield manager
        if manager.has_kernel:
            # Its JVM, and what else it has started, end with it.
            run_sync(manager.shutdown_kernel)(now=True)


def executed(file: Path, kernel: AsyncKernelManager) -> nbformat.NotebookNode:
    """Execute a notebook in its folder, keep it, and return it."""
    book = nbformat.read(file, as_version=4)
    # A kernel that has executed another one has its names.
    book.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
    place = {"metadata": {"path": str(file.parent)}}
    client = NotebookClient(book, km=kernel, timeout=_CELL_TIMEOUT_S, resources=place)
    try:
        client.execute()
    except CellExecutionError as error:
        pytest.fail(f"{file.name}\n{error}", pytrace=False)
    finally:
        if client.kc is not None:
            client.kc.stop_channels()
        del book.cells[0]
        EXECUTED.mkdir(parents=True, exist_ok=True)
        nbformat.write(book, EXECUTED / file.name)
    return book


def picture_of(book: nbformat.NotebookNode) -> Image.Image:
    """Return the one picture of a notebook, an output of the cell that is marked; small, in few colours."""
    (cell,) = [cell for cell in book.cells if "picture" in cell.metadata.get("tags", ())]
    shown = [output.data for cell in book.cells for output in cell.get("outputs", ()) if "data" in output]
    (found,) = [data["image/png"] for data in shown if "image/png" in data]
    assert found in [output.data.get("image/png") for output in cell.outputs if "data" in output]
    return Image.open(io.BytesIO(base64.b64decode(found))).convert("RGB").quantize(64)


@pytest.mark.parametrize("name", COURSE)
def test_a_notebook_runs_from_top_to_bottom(name, lessons, kernel, capsys):
    file, began = lessons / name, time.monotonic()
    book = executed(file, kernel)
    picture_of(book).save(EXECUTED / f"{file.stem}.png", optimize=True)
    with capsys.disabled():
        print(f"\n{file.name}: {time.monotonic() - began:.0f} s")


@pytest.mark.nightly
def test_the_notebook_of_a_new_project_runs(tmp_path, kernel):
    assert flinkish("new", tmp_path / "orders").exit_code == 0
    book = executed(tmp_path / "orders" / "job.ipynb", kernel)
    assert "text/html" in book.cells[-1].outputs[0].data
