"""What a source reads and a sink writes, by the names that OpenLineage gives to data sets."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*):/+([^/?#]*)([^?#]*)(?:[?#].*)?")
#: Names by which Hadoop knows S3.
_S3 = {"s3a": "s3", "s3n": "s3"}


@dataclass(frozen=True, slots=True)
class Dataset:
    """Data outside the job: a topic, a table, a folder."""

    #: The system that has it, such as ``kafka://broker:9092``. Holds no credentials.
    namespace: str
    #: What the system calls it.
    name: str

    @classmethod
    def of_path(cls, path: str) -> Dataset:
        """Return the data set at a path or a URL; user and password in it are left out."""
        found = _URL.fullmatch(path)
        if found is None:
            return cls("file", path.removeprefix("file:") or "/")
        scheme, host, name = found.groups()
        if scheme.lower() == "file":
            return cls("file", f"/{(host + name).strip('/')}")
        user, at, server = host.rpartition("@")
        # In Azure what stands before it is the container.
        shown = server if ":" in user else f"{user}{at}{server}"
        return cls(f"{_S3.get(scheme.lower(), scheme.lower())}://{shown}", name.strip("/") or "/")

    @classmethod
    def of_topics(cls, servers: str, topics: Iterable[str]) -> tuple[Dataset, ...]:
        """Return the data sets that are topics, at the first of the bootstrap servers."""
        first = servers.split(",")[0].strip()
        return tuple(cls(f"kafka://{first}", topic) for topic in topics)
