"""Core and its wings: the modules of each wing, and the contract of import-linter that holds them apart.

`setup.cfg` has the list, in the section of the contract.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from configparser import ConfigParser
from pathlib import Path
from typing import cast

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "flinkish_spark"
CORE = "core"
#: The public names, and the module that gives wings to core; they may import everything.
FACADE = "facade"


class Wings:
    """The part of the house that each module is in."""

    def __init__(self, facade: str, wings: str) -> None:
        self._facade = frozenset(facade.split())
        parts = (line.partition(":") for line in wings.strip().splitlines())
        self.modules: Mapping[str, tuple[str, ...]] = {
            name.strip(): tuple(f"{PACKAGE}.{module}" for module in modules.split())
            for name, _, modules in parts
        }

    @classmethod
    def read(cls) -> Wings:
        setup = ConfigParser(interpolation=None)
        setup.read(ROOT / "setup.cfg", encoding="utf-8")
        contract = setup["importlinter:contract:wings"]
        return cls(contract["facade"], contract["wings"])

    def find(self, module: str) -> str:
        """Return the wing of a module, CORE or FACADE."""
        if module in self._facade:
            return FACADE
        owners = (wing for wing, own in self.modules.items() if f"{module}.".startswith(_prefixes(own)))
        return next(owners, CORE)


def _prefixes(modules: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{module}." for module in modules)


class WingsContract(Contract):
    """Core imports no wing, and no wing another one, but for what is listed."""

    facade = fields.SetField(subfield=fields.StringField())
    wings = fields.ListField(subfield=fields.StringField())
    #: Between wings, as ``ops -> kafka_door``, or of one module by another.
    allowed = fields.SetField(subfield=fields.StringField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        found = Wings("\n".join(_values(self.facade)), "\n".join(_values(self.wings)))
        wrong = sorted(_find_wrong(graph, found, frozenset(_values(self.allowed))))
        return ContractCheck(kept=not wrong, metadata={"wrong": wrong})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, imported, arrow in check.metadata["wrong"]:
            output.print_error(f"{importer} imports {imported} ({arrow})", bold=False)


def _values(field: object) -> Iterable[str]:
    """Return the values that import-linter has put in the place of a field."""
    return cast("Iterable[str]", field or ())


def _find_wrong(graph: ImportGraph, wings: Wings, allowed: frozenset[str]) -> Iterator[tuple[str, str, str]]:
    unknown = [one for own in wings.modules.values() for one in own if one not in graph.modules]
    if unknown:
        raise ValueError(f"no modules: {', '.join(unknown)}")
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            one, other = wings.find(importer), wings.find(imported)
            arrow = f"{one} -> {other}"
            is_allowed = not allowed.isdisjoint({arrow, f"{importer} -> {imported}"})
            if other in wings.modules and one not in (other, FACADE) and not is_allowed:
                yield importer, imported, arrow
