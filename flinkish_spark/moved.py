"""Modules that documents named and that have moved: found under their old names for one version.

Importing one warns (DeprecationWarning) and gives the module where its content is now. What is public is what
`flinkish_spark` and its public sub-packages give by name; that has not moved.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
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
    "testing.broadcast_harness": "testing.operator_harness",
    "testing.fold_harness": "testing.operator_harness",
    "watermark_strategy": "functions.watermark_strategy",
}
_PACKAGE = f"{__package__}."


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
        import warnings

        new = _PACKAGE + MOVED[spec.name.removeprefix(_PACKAGE)]
        # At the import: the frames of importlib are left out of the count.
        warnings.warn(
            f"{spec.name} has moved to {new}; the old name goes with the next version",
            DeprecationWarning,
            stacklevel=2,
        )
        # The module itself would take the old name's spec: what is asked for gets a look at it.
        face = types.ModuleType(spec.name, f"Moved to `{new}`.")
        face.__dict__.update(
            {name: value for name, value in vars(importlib.import_module(new)).items() if name[:2] != "__"}
        )
        return face

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: it is filled."""


def find_moved_modules() -> None:
    """Let old names be found, behind everything that is there."""
    sys.meta_path.append(_MovedModules())
