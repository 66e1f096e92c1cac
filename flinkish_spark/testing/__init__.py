"""Public test tools: operators step by step, brokers, databases, crash points, sink cases, a simulator.

Names are imported when they are first used: a test that starts a broker needs nothing of the simulator.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flinkish_spark.testing.broadcast_harness import BroadcastHarness
    from flinkish_spark.testing.broker import LocalBroker
    from flinkish_spark.testing.crashing import KillAt
    from flinkish_spark.testing.mariadb import LocalMariaDb, unpack_mariadb
    from flinkish_spark.testing.open_transactions import still_open
    from flinkish_spark.testing.operator_harness import OperatorHarness
    from flinkish_spark.testing.postgres import LocalPostgres, unpack_postgres
    from flinkish_spark.testing.program_harness import ProgramHarness, ProgramSnapshot
    from flinkish_spark.testing.secure_broker import SecureBroker
    from flinkish_spark.testing.simulation.many import simulate_many
    from flinkish_spark.testing.simulation.runs import RunReport, simulate
    from flinkish_spark.testing.simulation.surroundings import simulated_surroundings
    from flinkish_spark.testing.sinks import SINK_CASES, SinkUnderTest, check_sink
    from flinkish_spark.testing.tls import LocalCertificates, make_certificates

#: Module -> the names it gives to the test tools.
_PUBLIC = {
    "broadcast_harness": ("BroadcastHarness",),
    "broker": ("LocalBroker",),
    "crashing": ("KillAt",),
    "mariadb": ("LocalMariaDb", "unpack_mariadb"),
    "open_transactions": ("still_open",),
    "operator_harness": ("OperatorHarness",),
    "postgres": ("LocalPostgres", "unpack_postgres"),
    "program_harness": ("ProgramHarness", "ProgramSnapshot"),
    "secure_broker": ("SecureBroker",),
    "simulation.many": ("simulate_many",),
    "simulation.runs": ("RunReport", "simulate"),
    "simulation.surroundings": ("simulated_surroundings",),
    "sinks": ("SINK_CASES", "SinkUnderTest", "check_sink"),
    "tls": ("LocalCertificates", "make_certificates"),
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = [
    "SINK_CASES",
    "BroadcastHarness",
    "KillAt",
    "LocalBroker",
    "LocalCertificates",
    "LocalMariaDb",
    "LocalPostgres",
    "OperatorHarness",
    "ProgramHarness",
    "ProgramSnapshot",
    "RunReport",
    "SecureBroker",
    "SinkUnderTest",
    "check_sink",
    "make_certificates",
    "simulate",
    "simulate_many",
    "simulated_surroundings",
    "still_open",
    "unpack_mariadb",
    "unpack_postgres",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'flinkish_spark.testing' has no attribute {name!r}")
    value = getattr(import_module(f"flinkish_spark.testing.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
