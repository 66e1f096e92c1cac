"""Which transactional id a task attempt takes, so that two attempts that live never share one."""

from __future__ import annotations

from flinkish_spark.errors import EnvironmentFault
from flinkish_spark.kafka.answers import Code
from flinkish_spark.kafka.options import KafkaConnection
from flinkish_spark.kafka.wire_pool import WIRES, WirePool

#: Spark's attempt numbers begin anew with every attempt of a stage; each of those has so many ids.
_ATTEMPTS_PER_STAGE_ATTEMPT = 16
#: The JVM writer takes the same numbers, by the stage attempt that it can see.
MAX_ATTEMPT_INDEX = 64
_ONGOING = "Ongoing"


def free_transactional_id(
    connection: KafkaConnection, prefix: str, partition: int, attempt: int, *, pool: WirePool = WIRES
) -> str:
    """Return an id ``<prefix>-<partition>-<index>`` under which nothing is open.

    Called by a task before its transaction begins. When executors are lost Spark runs a stage
    again while old tasks of it may still write, and numbers their attempts from 0 again; PySpark does
    not tell which attempt of the stage it is. Taking the id of a task whose result Spark has accepted
    would abort its transaction, so the coordinator is asked first.

    Parameters
    ----------
    prefix
        Leased for the micro-batch; nothing else uses it.
    partition, attempt
        Spark's partition index and attempt number of the task.

    Raises
    ------
    EnvironmentFault
        All ids of the task are in use, or its attempt number is too high.
    BrokerUnavailableError, AuthorizationError
        As for every request.
    """
    indexes = range(attempt, MAX_ATTEMPT_INDEX, _ATTEMPTS_PER_STAGE_ATTEMPT)
    names = [f"{prefix}-{partition}-{index}" for index in indexes]
    if attempt < _ATTEMPTS_PER_STAGE_ATTEMPT:
        with pool.wire(connection) as wire:
            views = wire.describe_transactions(names)
        for name in names:
            view = views.get(name)
            if view is None or view.code != Code.NONE or view.state != _ONGOING:
                return name
    raise EnvironmentFault(
        f"attempt {attempt} of task {partition} has no transactional id left",
        why=f"a task has {_ATTEMPTS_PER_STAGE_ATTEMPT} for each of {len(names)} attempts of its stage",
        what_to_do="lower spark.task.maxFailures, or find out why tasks fail so often",
    )
