"""What a job leaves open on a broker, once what was ending has ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flinkish_spark.connectors.kafka.client.transactions import OpenTransaction, TransactionClient
    from flinkish_spark.protocol.ids import JobUuid

_ENDING = ("PrepareCommit", "PrepareAbort", "PrepareEpochFence")


def still_open(client: TransactionClient, job: JobUuid, patience_ms: int = 10_000) -> list[OpenTransaction]:
    """Return the open transactions of `job`, waiting for those whose end is decided.

    A broker answers EndTxn when the end is in its log, and writes the markers afterwards: for a
    moment a committed or aborted transaction is still listed. A test that asks in that moment
    would see a leftover where there is none.

    Parameters
    ----------
    client : TransactionClient
        Connected to the broker.
    job : JobUuid
        Whose transactional ids are looked for.
    patience_ms : int
        How long transactions may take to end; one that is still ending then is returned too.

    Raises
    ------
    BrokerUnavailableError
        If not all brokers answered.

    Examples
    --------
    >>> from flinkish_spark.protocol.ids import JobUuid
    >>> class Quiet:
    ...     def list_open_transactions(self, job):
    ...         return []
    >>> still_open(Quiet(), JobUuid("0" * 32))
    []
    """
    deadline = time.monotonic() + patience_ms / 1000
    while True:
        found = client.list_open_transactions(job)
        if all(one.state not in _ENDING for one in found) or time.monotonic() >= deadline:
            return found
        time.sleep(0.02)
