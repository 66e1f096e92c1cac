"""Where a job of the sweep finds and leaves everything; shared by the job and whoever looks at it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flinkish_spark.core.store_spec import StoreSpec

PARTITIONS = 2
#: Where the process under test finds the options of its JVM.
JVM_VARIABLE = "FLINKISH_SWEEP_JVM"


@dataclass(frozen=True)
class Database:
    """A database of a server's that is one job's alone; the server ends with the sweep."""

    url: str
    user: str
    password: str = field(repr=False)


@dataclass(frozen=True)
class Place:
    """One job.

    Parameters
    ----------
    sink
        Name of the sink under test, and of the job.
    directory
        Everything of this job that is a file lies below it.
    proxy_port, upstream_port
        Where the job reaches Kafka, and the broker's listener behind that.
    broker
        Where everybody else reaches Kafka.
    database
        Of a sink that needs a server.
    prefix
        Begins the names of its topics, where others may be on the same broker.
    bucket
        The job directory as text of a `StoreSpec`; empty for a folder below `directory`.
    store
        Where a Delta table is, as text of a `StoreSpec`; empty for `output`.
    """

    sink: str
    directory: Path
    proxy_port: int
    upstream_port: int
    broker: str
    database: Database | None = None
    prefix: str = ""
    bucket: str = ""
    store: str = ""

    @property
    def servers(self) -> str:
        return f"127.0.0.1:{self.proxy_port}"

    @property
    def job_dir(self) -> StoreSpec:
        return StoreSpec.from_text(self.bucket or str(self.directory / "job"))

    @property
    def output(self) -> Path:
        """Where a sink that writes files writes them."""
        return self.directory / "output"

    @property
    def table(self) -> StoreSpec:
        """Where a Delta sink's table is."""
        return StoreSpec.from_text(self.store or str(self.output))

    @property
    def group(self) -> str:
        return f"{self.sink}-group"

    @property
    def source_topic(self) -> str:
        return f"{self.prefix}{self.sink}-in"

    @property
    def output_topic(self) -> str:
        return f"{self.prefix}{self.sink}-out"


@dataclass(frozen=True)
class Fleet:
    """All jobs of one process.

    Parameters
    ----------
    base
        The jobs' directories lie in it.
    control
        A Unix socket that the process connects to.
    """

    base: Path
    scratch: Path
    control: Path
    places: tuple[Place, ...]

    def only(self, sinks: Sequence[str]) -> Fleet:
        chosen = tuple(place for place in self.places if place.sink in sinks)
        return Fleet(self.base, self.scratch, self.control, chosen)

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Fleet:
        value = json.loads(text)
        places = tuple(map(place_from_json, value["places"]))
        paths = (Path(value[name]) for name in ("base", "scratch", "control"))
        return cls(*paths, places)


def place_from_json(value: dict[str, Any]) -> Place:
    database = value["database"]
    return Place(
        **{
            **value,
            "directory": Path(value["directory"]),
            "database": None if database is None else Database(**database),
        }
    )
