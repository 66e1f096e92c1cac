"""A cluster of three Kafka brokers, as processes on loopback that tests may kill and pause."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypeVar

from kafka import TopicPartition
from kafka.admin import KafkaAdminClient
from kafka.errors import KafkaError, LeaderNotAvailableError, TopicAlreadyExistsError
from kafka.protocol.metadata import CoordinatorType

from flinkish_spark.core.errors import EnvironmentFault
from flinkish_spark.testing.broker import LocalBroker

_NODES = 3
_START_MS = 180_000
_ASK_S = 60.0
_POLL_S = 0.1
_T = TypeVar("_T")


class _Node(LocalBroker):
    """One broker and controller; its first start waits for a second one, since a quorum needs two."""

    def __init__(
        self, number: int, directory: Path, jars_dir: str | Path, features: Mapping[str, int]
    ) -> None:
        super().__init__(directory, jars_dir=jars_dir, start_timeout_ms=_START_MS, features=features)
        self.number = number

    def join(self, nodes: tuple[_Node, ...], properties: Mapping[str, str]) -> None:
        self._cluster_id = nodes[0]._cluster_id
        voters = ",".join(f"{node.number}@127.0.0.1:{node._controller_port}" for node in nodes)
        self._extra.update(
            {
                "node.id": str(self.number),
                "broker.rack": f"rack-{self.number}",
                "replica.selector.class": "org.apache.kafka.common.replica.RackAwareReplicaSelector",
                "controller.quorum.voters": voters,
                "default.replication.factor": str(_NODES),
                "offsets.topic.replication.factor": str(_NODES),
                "transaction.state.log.replication.factor": str(_NODES),
                "transaction.state.log.min.isr": "2",
                "min.insync.replicas": "2",
                "unclean.leader.election.enable": "false",
                # A replica that lags for longer is out of sync: 30 s by default.
                "replica.lag.time.max.ms": "5000",
                **properties,
            }
        )


class BrokerCluster:
    """A cluster of three brokers, which are also its controllers; ends with its `with` block.

    Topics, also internal ones, have three replicas and need two in sync (`min.insync.replicas`): any one
    broker may be lost. Each broker is in its own rack (``rack-1`` to ``rack-3``), and consumers that name a
    rack read there. Not thread-safe.

    Parameters
    ----------
    directory
        Holds one directory per broker, with its data and ``broker.log``; created if missing.
    jars_dir
        The brokers' JARs, as `make jars` leaves them in ``build/broker-jars``.
    extra_properties, features
        As for :class:`LocalBroker`, for each broker.

    Attributes
    ----------
    nodes
        The brokers; ``nodes[0]`` has the id 1. Kill, pause and start them as any :class:`LocalBroker`.

    Examples
    --------
    >>> with BrokerCluster("build/doc-brokers", jars_dir="build/broker-jars") as cluster:  # doctest: +SKIP
    ...     cluster.leader_of("orders", 0).kill()
    ...     cluster.await_leader("orders", 0)
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        jars_dir: str | Path,
        extra_properties: Mapping[str, str] = MappingProxyType({}),
        features: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        folders = [Path(directory).resolve() / f"node-{number}" for number in range(1, _NODES + 1)]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        made = (_Node(number, folder, jars_dir, features) for number, folder in enumerate(folders, start=1))
        self._members = tuple(made)
        self.nodes: tuple[LocalBroker, ...] = self._members
        for node in self._members:
            node.join(self._members, extra_properties)

    @property
    def bootstrap_servers(self) -> str:
        """``host:port`` of all brokers, since any may be down."""
        return ",".join(node.bootstrap_servers for node in self.nodes)

    def start(self) -> Self:
        """Start the brokers that do not run, in parallel; return once each answers.

        Raises
        ------
        EnvironmentFault
            As of :meth:`LocalBroker.start`; none runs then.
        """
        errors: list[BaseException] = []

        def start(node: LocalBroker) -> None:
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

    def kill(self) -> None:
        """Kill all of them."""
        for node in self.nodes:
            node.kill()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def leader_of(self, topic: str, partition: int) -> LocalBroker:
        """Return the broker that leads a partition.

        Raises
        ------
        EnvironmentFault
            From this and all later requests: no broker answered within a minute.
        """

        def find_leader(admin: Any) -> int:
            leader = int(self._describe_partition(admin, topic, partition)["leader_id"])
            if leader < 1:
                raise LeaderNotAvailableError(f"{topic}-{partition}")
            return leader

        return self.nodes[self._ask(f"find the leader of {topic}-{partition}", find_leader) - 1]

    def coordinator_of(self, transactional_id: str) -> LocalBroker:
        """Return the broker that coordinates the transactions of an id."""
        return self._coordinator(CoordinatorType.TRANSACTION, transactional_id)

    def coordinator_of_group(self, group: str) -> LocalBroker:
        """Return the broker that coordinates a consumer group."""
        return self._coordinator(CoordinatorType.GROUP, group)

    def create_topic(
        self, topic: str, partitions: int, configs: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Create a topic with a replica on each broker, and wait for its leaders."""
        options = {"num_partitions": partitions, "replication_factor": _NODES, "configs": dict(configs)}

        def create(admin: Any) -> None:
            with contextlib.suppress(TopicAlreadyExistsError):  # by an earlier attempt whose answer was lost
                admin.create_topics({topic: options}, timeout_ms=30_000)

        self._ask(f"create {topic}", create)
        for partition in range(partitions):
            self.await_leader(topic, partition)

    def move_leader(self, topic: str, partition: int, to: LocalBroker) -> None:
        """Make a broker the leader of a partition; the replicas do not move."""
        place, number = TopicPartition(topic, partition), self.nodes.index(to) + 1
        others = [one for one in range(1, _NODES + 1) if one != number]

        def move_leader(admin: Any) -> bool:
            admin.alter_partition_reassignments({place: [number, *others]})
            admin.elect_leaders(0, {topic: [partition]}, raise_errors=False)
            return bool(self._describe_partition(admin, topic, partition)["leader_id"] == number)

        self._await(f"{topic}-{partition} has moved to broker {number}", move_leader)

    def await_leader(self, topic: str, partition: int) -> None:
        """Wait until the running brokers know a running leader of a partition."""
        running = {node.number for node in self._members if node.is_running}
        self._await(
            f"{topic}-{partition} has a leader",
            lambda admin: self._describe_partition(admin, topic, partition)["leader_id"] in running,
        )

    def await_in_sync(self) -> None:
        """Wait until every replica of every partition is in sync; all brokers run."""

        def all_in_sync(admin: Any) -> bool:
            found = admin.describe_topics()
            rows = [row for topic in found for row in topic["partitions"]]
            return bool(rows) and all(len(row["isr_nodes"]) == len(row["replica_nodes"]) for row in rows)

        self._await("all replicas are in sync", all_in_sync)

    def raise_features(self, levels: Mapping[str, int]) -> None:
        """Finalize features, as after an upgrade: ``{"metadata.version": 25, "transaction.version": 2}``."""

        def update_levels(admin: Any) -> bool:
            answer = admin.update_features(dict(levels))
            return all(said == "OK" for said in answer.values())

        self._await(f"features are {dict(levels)}", update_levels)

    def _coordinator(self, kind: CoordinatorType, key: str) -> LocalBroker:
        def find(admin: Any) -> int:
            # The client's cached answer may be outdated.
            admin._manager.cluster._coordinators.clear()
            found: dict[str, int] = admin._manager.run(admin._find_coordinator_ids, [key], kind)
            return found[key]

        return self.nodes[self._ask(f"find the coordinator of {key}", find) - 1]

    @staticmethod
    def _describe_partition(admin: Any, topic: str, partition: int) -> Any:
        (found,) = admin.describe_topics([topic])
        return next(row for row in found["partitions"] if row["partition_index"] == partition)

    def _await(self, what: str, holds: Callable[[Any], bool]) -> None:
        deadline = time.monotonic() + _ASK_S
        while not self._ask(what, holds):
            if time.monotonic() > deadline:
                raise EnvironmentFault(
                    f"It did not come about within {_ASK_S:g} s that {what}",
                    what_to_do="see the brokers' logs in the cluster's folder",
                )
            time.sleep(_POLL_S)

    def _ask(self, what: str, ask: Callable[[Any], _T]) -> _T:
        """Send a request to the running brokers, with retries, since leaders and controllers move."""
        deadline, last = time.monotonic() + _ASK_S, ""
        while time.monotonic() < deadline:
            servers = [node.bootstrap_servers for node in self.nodes if node.is_running]
            try:
                admin = KafkaAdminClient(
                    bootstrap_servers=servers, bootstrap_timeout_ms=5_000, request_timeout_ms=5_000
                )
                try:
                    return ask(admin)
                finally:
                    admin.close()
            except (KafkaError, OSError, StopIteration, RuntimeError) as failed:
                last = f"{type(failed).__name__}: {failed}"
                time.sleep(_POLL_S)
        raise EnvironmentFault(
            f"The brokers could not {what} within {_ASK_S:g} s",
            why=last,
            what_to_do="see the brokers' logs in the cluster's folder",
        )
