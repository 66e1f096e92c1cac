"""What a Kafka sink promises about its records, and which headers of ours they carry."""

from __future__ import annotations

import enum


class DeliveryGuarantee(enum.Enum):
    """What becomes of the records of a Kafka sink when something fails; the values are the JVM writer's."""

    #: Transactions that are committed with the checkpoint: a read_committed reader sees each record once.
    EXACTLY_ONCE = "exactly-once"
    #: Idempotent, acknowledged by all in-sync replicas before the task is done. Visible at once; what is
    #: processed again after a failure is written again.
    AT_LEAST_ONCE = "at-least-once"
    #: As the producer's own settings say (``acks`` may be 0 or 1). A flush at the end of a task is all that
    #: is waited for, so records can be lost as well as written twice.
    NONE = "none"


class RecordHeaders(enum.Enum):
    """Which headers of ours every record of a Kafka sink carries; each costs bytes and time."""

    #: `flinkish-job`, `flinkish-uid`, `flinkish-checkpoint` and `flinkish-batch`.
    FULL = "FULL"
    #: `flinkish-batch` only, by which the others can be looked up.
    BATCH = "BATCH"
    #: None, the default. After a rewind to a checkpoint readers cannot tell dead records from live ones.
    NONE = "NONE"
