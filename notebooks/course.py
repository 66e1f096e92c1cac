"""What the notebooks here share: a small Spark, a folder of their own, and how pictures look."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
from pyspark.sql import SparkSession

#: What is right, what is not, what is in between, and all else: told apart without red and green.
RIGHT, WRONG, LATE, OTHER = "#1f77b4", "#d62728", "#ff9f1c", "#9aa5ad"

plt.rcParams.update(
    {
        **{"figure.figsize": (8.4, 3.6), "figure.dpi": 110, "figure.constrained_layout.use": True},
        **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True},
        **{"axes.titlelocation": "left", "axes.titlesize": 11, "grid.color": "#e4e7e9", "font.size": 10},
        **{"legend.frameon": False},
    }
)


def start(name: str) -> tuple[SparkSession, Path]:
    """Return a session, and a new folder for what the notebook writes."""
    # Workers must be this interpreter, and nobody else on the network needs this Spark.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    folder = _new_folder(name)
    builder = SparkSession.builder.master("local[2]").appName("course").config(map=_SMALL)
    if SparkSession.getActiveSession() is None:
        builder = builder.config("spark.local.dir", str(folder / "spark"))
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark, folder


#: What only keeps Spark small.
_SMALL = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    # These jobs end before generated code has paid for its compilation.
    "spark.sql.codegen.wholeStage": "false",
}


def _new_folder(name: str) -> Path:
    """Return a temporary folder of this process, and remove those of processes that have ended."""
    folders = Path(tempfile.gettempdir(), f"flinkish-course-{os.getuid()}")
    folders.mkdir(mode=0o700, parents=True, exist_ok=True)
    for old in folders.iterdir():
        try:
            os.kill(int(old.name.partition("-")[0]), 0)
        except ProcessLookupError:
            shutil.rmtree(old, ignore_errors=True)
        except PermissionError:
            pass  # somebody else's process has the number now
    return Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-{name}-", dir=folders))
