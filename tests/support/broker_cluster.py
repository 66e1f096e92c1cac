"""Three brokers in one cluster, as processes on loopback: replication 3, and each of them yours to kill."""

from __future__ import annotations

import threading
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from flinkish_spark.testing.broker import LocalBroker

_NODES = 3
_START_MS = 180_000


class _Node(LocalBroker):
    """One broker; the first start of each waits for a second one, since a quorum is two."""

    def __init__(self, directory: Path, jars_dir: str | Path, cluster_id: str) -> None:
        super().__init__(directory, jars_dir=jars_dir, start_timeout_ms=_START_MS)
        self._cluster_id = cluster_id

    def join(self, number: int, nodes: Sequence[_Node]) -> None:
        """Be told of the others; before the first start."""
        voters = ",".join(f"{n}@127.0.0.1:{node._controller_port}" for n, node in enumerate(nodes, start=1))
        properties: Mapping[str, str] = {
            "node.id": str(number),
            "controller.quorum.voters": voters,
            "offsets.topic.replication.factor": str(_NODES),
            "transaction.state.log.replication.factor": str(_NODES),
            "transaction.state.log.min.isr": "2",
            "min.insync.replicas": "2",
            "unclean.leader.election.enable": "false",
        }
        self._extra.update(properties)

    def _format(self) -> None:
        arguments = [
            "--ignore-formatted",
            f"--cluster-id={self._cluster_id}",
            "-c",
            str(self._properties_file),
        ]
        if self._java("kafka.tools.StorageTool", "format", *arguments).wait() != 0:
            raise self._did_not_start("formatting its storage failed")


class BrokerCluster:
    """Three brokers with a quorum of controllers among themselves.

    Attributes
    ----------
    nodes
        In the order of their ids, from 1.
    """

    def __init__(self, directory: Path, jars_dir: str | Path) -> None:
        cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        names = [f"node-{number}" for number in range(1, _NODES + 1)]
        for name in names:
            (directory / name).mkdir(parents=True)
        self.nodes = [_Node(directory / name, jars_dir, cluster_id) for name in names]
        for number, node in enumerate(self.nodes, start=1):
            node.join(number, self.nodes)

    @property
    def bootstrap_servers(self) -> str:
        """All of them: any may be down."""
        return ",".join(node.bootstrap_servers for node in self.nodes)

    def __enter__(self) -> Self:
        errors: list[BaseException] = []

        def start(node: _Node) -> None:
            try:
                node.start()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=start, args=(node,)) for node in self.nodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            self.kill()
            raise errors[0]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill all of them."""
        for node in self.nodes:
            node.kill()
