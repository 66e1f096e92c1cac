"""The libraries that one feature needs and that pip does not bring by default, as `setup.cfg` lists them."""

from __future__ import annotations

#: By extra; a test compares them with `setup.cfg`.
_REQUIREMENTS = {
    "adopt": ("xxhash>=3.4,<5",),
    "avro": ("fastavro>=1.12,<2", "pyruhvro>=0.4,<0.5"),
    "course": (
        "ipykernel>=6.29,<8",
        "jupyterlab>=4.2,<5",
        "matplotlib>=3.8,<4",
        "pyiceberg[pyiceberg-core,sql-sqlite]>=0.12,<0.13",
        "sqlglot>=30,<31",
    ),
    "hdfs": ("hdfs-native>=0.14.7,<0.15",),
    "iceberg": ("pyiceberg[pyiceberg-core,sql-sqlite]>=0.12,<0.13",),
    "json-schema": ("jsonschema>=4.23,<5",),
    "mysql": ("PyMySQL>=1.1,<2",),
    "object-store": ("obstore>=0.12.1,<0.13",),
    "openlineage": ("openlineage-python>=1.40,<2",),
    "opentelemetry": ("opentelemetry-sdk>=1.38,<2", "opentelemetry-exporter-otlp-proto-http>=1.38,<2"),
    "postgresql": ("psycopg[binary]>=3.2,<4",),
    "prometheus": ("prometheus_client>=0.22,<1",),
    "protobuf": (
        "protobuf>=6.31,<8",
        "grpcio-tools>=1.74,<2",
        "googleapis-common-protos>=1.70,<2",
        "ptars>=0.0.25,<0.0.26",
    ),
    "schema-registry": ("confluent-kafka[schemaregistry]>=2.8,<3",),
    "sql": ("sqlglot>=30,<31",),
    "ui": ("starlette>=1,<2", "uvicorn>=0.40,<1", "prometheus_client>=0.22,<1"),
}


def how_to_install(extra: str) -> str:
    """Return the command that installs the libraries of an extra, even if no index has this package."""
    return " ".join(["pip install", *(f"'{one}'" for one in _REQUIREMENTS[extra])])
