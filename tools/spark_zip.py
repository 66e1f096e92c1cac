"""Switch `pyspark.zip`, which Spark's Python processes import, to one with compiled modules, or back.

Spark puts the archive in front of all other paths of its Python processes, and an import from an archive
keeps nothing that it compiles: each process spends 0.4 s of CPU on it. Tests start thousands of them. What
is measured for users has the archive as pip has installed it.

    python tools/spark_zip.py compiled
    python tools/spark_zip.py installed
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import zipfile
from importlib._bootstrap_external import _code_to_hash_pyc  # type: ignore[attr-defined]
from pathlib import Path

import pyspark

ARCHIVE = Path(pyspark.__file__).parent / "python" / "lib" / "pyspark.zip"
INSTALLED, COMPILED = ARCHIVE.with_suffix(".installed"), ARCHIVE.with_suffix(".compiled")


def compile_modules(source: Path, target: Path) -> None:
    with zipfile.ZipFile(source) as given, zipfile.ZipFile(target, "w") as made:
        for one in given.infolist():
            text = given.read(one)
            made.writestr(one, text)
            if one.filename.endswith(".py"):
                code = compile(text, one.filename, "exec", dont_inherit=True)
                made.writestr(
                    f"{one.filename}c", _code_to_hash_pyc(code, importlib.util.source_hash(text), False)
                )


def main() -> None:
    wanted = {"installed": INSTALLED, "compiled": COMPILED}[sys.argv[1]]
    # Others may start processes meanwhile: each file is there whole, or not yet.
    aside = ARCHIVE.with_suffix(f".{os.getpid()}")
    if not ARCHIVE.is_symlink():
        compile_modules(ARCHIVE, aside)
        aside.replace(COMPILED)
        shutil.copy2(ARCHIVE, aside)
        aside.replace(INSTALLED)
    aside.symlink_to(wanted.name)
    aside.replace(ARCHIVE)


if __name__ == "__main__":
    main()
