"""Take PySpark from its installed folder and not from `pyspark.zip`, and run the next `sitecustomize`.

Spark puts the archive in front of the module path of its Python processes. An archive holds no compiled
modules, so each process compiles 190 of them: half a second to a second and a half of CPU. The folder that
pip installed has the same modules compiled. Any other archive stays where it is.
"""

import importlib
import os
import sys

_IN_PACKAGE = os.path.join("pyspark", "python", "lib", "pyspark.zip")


def _is_installed(entry: str) -> bool:
    """Return True for the archive within the `pyspark` folder of a later entry of the module path."""
    folder = entry.removesuffix(os.sep + _IN_PACKAGE)
    return (
        folder != entry and folder in sys.path and os.path.exists(os.path.join(folder, "pyspark/__init__.py"))
    )


sys.path[:] = [entry for entry in sys.path if not _is_installed(entry) and entry != os.path.dirname(__file__)]

# Python imports one `sitecustomize`: without this folder the import finds the user's.
_own = sys.modules.pop("sitecustomize", None)
try:
    importlib.import_module("sitecustomize")
except ModuleNotFoundError as error:
    if error.name != "sitecustomize":
        raise
finally:
    if _own is not None:
        sys.modules.setdefault("sitecustomize", _own)
