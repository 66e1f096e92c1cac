"""Data sets that sources read and sinks write, with their OpenLineage names."""

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

    #: The system that stores it, such as ``kafka://broker:9092``, without credentials.
    namespace: str
    #: Its name in that system.
    name: str

    @classmethod
    def from_path(cls, path: str) -> Dataset:
        """Return the data set at a path or URL, without user and password."""
        found = _URL.fullmatch(path)
        if found is None:
            return cls("file", path.removeprefix("file:") or "/")
        scheme, host, name = found.groups()
        if scheme.lower() == "file":
            return cls("file", f"/{(host + name).strip('/')}")
        user, at, server = host.rpartition("@")
        # In Azure the part before the @ is the container.
        shown = server if ":" in user else f"{user}{at}{server}"
        return cls(f"{_S3.get(scheme.lower(), scheme.lower())}://{shown}", name.strip("/") or "/")

    @classmethod
    def from_topics(cls, servers: str, topics: Iterable[str]) -> tuple[Dataset, ...]:
        first = servers.split(",")[0].strip()
        return tuple(cls(f"kafka://{first}", topic) for topic in topics)
