"""This Python environment as an archive for YARN: what `venv-pack` makes, without pyspark."""

from __future__ import annotations

import importlib.metadata
import io
import re
import sys
import tarfile
from pathlib import Path, PurePath

from tests.support.buckets import ROOT

#: Spark brings its own; and what no job imports.
_LEFT_OUT = frozenset({"pyspark"})
_USELESS = frozenset({"__pycache__", "include", "tests"})


def _needed(names: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """Return distributions by name, with all that they require here."""
    found: dict[str, importlib.metadata.Distribution] = {}
    while names:
        name = re.split(r"[^A-Za-z0-9._-]", names.pop())[0].lower().replace("_", "-")
        if name in found or name in _LEFT_OUT:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        needs = found[name].requires or ()
        names += [one for one in needs if "extra ==" not in one or "crc32c" in one]
    return found


def pack(archive: Path) -> None:
    """Write the environment of this process, and this checkout's package, as a ``.tar.gz``."""
    packages = PurePath("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        base = Path(sys._base_executable).resolve()  # type: ignore[attr-defined]
        link = tarfile.TarInfo("bin/python")
        link.type, link.linkname = tarfile.SYMTYPE, str(base)
        tar.addfile(link)
        text = f"home = {base.parent}\ninclude-system-site-packages = false\n".encode()
        settings = tarfile.TarInfo("pyvenv.cfg")
        settings.size = len(text)
        tar.addfile(settings, io.BytesIO(text))
        for distribution in _needed(["flinkish-spark", "hdfs-native"]).values():
            for file in distribution.files or ():
                if not _USELESS & set(file.parts) and ".." not in file.parts:
                    tar.add(str(file.locate()), str(packages / file))
        for file in sorted((ROOT / "flinkish_spark").rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                tar.add(file, str(packages / file.relative_to(ROOT)))
