"""The folder with the `sitecustomize` that Spark's Python processes run first."""

from pathlib import Path

FOLDER = Path(__file__).parent
