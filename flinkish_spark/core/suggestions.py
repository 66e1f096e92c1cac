"""Suggest the word that a misspelt one was meant to be; in an import, too."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from flinkish_spark.protocol.choices import closest

__all__ = ["MisspeltNames", "closest", "describe_choices", "describe_raised", "find_misspelt_names"]

#: The packages that users import names from.
_FACES = (
    *("", ".sources", ".sinks", ".windows", ".cep", ".joins", ".state", ".state_processor", ".testing"),
    *(".latency", ".core.errors"),
)
_ROOT = __name__.partition(".")[0]


def describe_choices(names: Sequence[str], wanted: str) -> str:
    near = closest(wanted, names)
    return f"they have {', '.join(names)}" + (f". {near}" if near else "")


def describe_raised(error: BaseException) -> str:
    """Return an exception's class and text; for a misspelt attribute also the closest name."""
    text = f"{type(error).__name__}: {error}"
    if not isinstance(error, AttributeError) or not error.name or "Did you mean" in text:
        return text
    near = closest(error.name, (one for one in dir(error.obj) if not one.startswith("_")))
    return f"{text}. {near}" if near else text


class MisspeltNames:
    """An import finder after all others: suggests the closest public name for a failed import."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> None:
        """Raise ImportError with a suggestion if the name is like a public one; find nothing otherwise."""
        package, _, name = fullname.rpartition(".")
        if package not in [f"{_ROOT}{one}" for one in _FACES] or name.startswith("_"):
            return
        import importlib

        modules = [importlib.import_module(f"{_ROOT}{one}") for one in _FACES]
        listed = {one.__name__: getattr(one, "__all__", dir(one)) for one in modules}
        others = [face for face, names in listed.items() if name in names]
        submodules = [one[1:] for one in _FACES if package == _ROOT and one]
        if others:
            meant = f"It is in {others[0]}. To do: write `from {others[0]} import {name}`."
        elif near := closest(name, [*listed[package], *submodules]):
            meant = f"{near} To do: correct the name; dir({package}) lists all."
        else:
            return
        raise ImportError(f"{package} has no {name}. {meant}", name=fullname)


def find_misspelt_names() -> None:
    """Let failed imports suggest the closest public name."""
    sys.meta_path.append(MisspeltNames())
