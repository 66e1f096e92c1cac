"""Modules that documents named and that have moved, and names that were public: found for one version.

Importing one warns (DeprecationWarning) and gives what is in the new place. What is public is what
`flinkish_spark` and its public sub-packages list; that has not moved.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

#: Old name below the package -> where its content is now.
MOVED = {
    "aggregates": "functions.aggregates",
    "audit.delta_log": "audit.outputs",
    "errors": "core.errors",
    "job_dir": "core.job_dir",
    "kafka": "connectors.kafka.client",
    "operators.elements": "core.elements",
    "operators.list_state": "state.operator_state",
    "operators.vectorized_aggregates": "operators.columnar_aggregates",
    "operators.window_operator": "operators.window_factory",
    "protocol.latencies": "protocol.latency",
    "protocol.operator_time": "protocol.watermarks",
    "protocol.time_facts": "protocol.event_time",
    "session": "bridge.session",
    "store": "core.store",
    "stream_functions": "functions.stream",
    "testing.broadcast_harness": "testing._operator_harness",
    "testing.fold_harness": "testing._operator_harness",
    "testing.operator_harness": "testing._operator_harness",
    "watermark_strategy": "functions.watermark_strategy",
}
#: Name that a sub-package no longer lists -> the module that has it.
MOVED_NAMES = {
    "testing.BroadcastHarness": "testing._operator_harness",
    "testing.OperatorHarness": "testing._operator_harness",
}
#: Module that is internal now -> what is public in place of its content.
INSTEAD = {"testing._operator_harness": "flinkish_spark.testing.ProgramHarness"}
_PACKAGE = f"{__package__}."


def _warn(old: str, place: str) -> None:
    """Warn whoever imports; the frames of importlib are left out of the count."""
    import warnings

    instead = f"; use {INSTEAD[place]}" if place in INSTEAD else ""
    warnings.warn(
        f"{old} has moved to {_PACKAGE}{place}; the old name goes with the next version{instead}",
        DeprecationWarning,
        stacklevel=3,
    )


class _MovedModules:
    """Finds and loads them. Every process imports this file: what it needs to find one, it imports then."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.removeprefix(_PACKAGE) not in MOVED:
            return None
        return ModuleSpec(fullname, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        import importlib
        import types

        place = MOVED[spec.name.removeprefix(_PACKAGE)]
        new = _PACKAGE + place
        _warn(spec.name, place)
        # The module itself would take the old name's spec: what is asked for gets a look at it.
        face = types.ModuleType(spec.name, f"Moved to `{new}`.")
        face.__dict__.update(
            {name: value for name, value in vars(importlib.import_module(new)).items() if name[:2] != "__"}
        )
        return face

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: it is filled."""


def with_moved_names(package: str, listed: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that also gives what the package listed once.

    Parameters
    ----------
    listed
        Its `__getattr__` for what it lists now.
    """

    def attribute(name: str) -> Any:
        full = f"{package}.{name}"
        place = MOVED_NAMES.get(full.removeprefix(_PACKAGE))
        if place is None:
            return listed(name)
        import importlib

        found = getattr(importlib.import_module(_PACKAGE + place), name)
        # Behind the import: what others import may reset which warnings were shown, and `from` asks twice.
        _warn(full, place)
        return found

    return attribute


def find_moved_modules() -> None:
    """Let old names be found, behind everything that is there."""
    sys.meta_path.append(_MovedModules())
