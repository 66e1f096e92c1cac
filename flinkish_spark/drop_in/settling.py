"""The way out when the rows of a decided micro-batch are lost for good."""

from __future__ import annotations

from pathlib import Path

from flinkish_spark.drop_in.epoch_dir import EpochDir
from flinkish_spark.errors import ConfigError
from flinkish_spark.protocol.ids import BatchId


def settle(checkpoint_location: str, batch: int) -> None:
    """Declare a micro-batch done whose lost rows you have written, or given up, yourself.

    Called by a person while the query is stopped, after it ended with CommittableLostError. The
    query goes on behind that micro-batch; what the repetition of it stages is aborted.

    Parameters
    ----------
    checkpoint_location
        Of the query; the sink's files are in its folder ``flinkish-kafka``.
    batch
        Spark's id of the micro-batch, as the error says.

    Raises
    ------
    ConfigError
        The sink has decided no such micro-batch, or it is confirmed already.

    Examples
    --------
    >>> settle("/data/checkpoints/totals", 17)  # doctest: +SKIP
    """
    directory = EpochDir(Path(checkpoint_location))
    wanted = BatchId(batch)
    if wanted not in {found.batch for found in directory.decided_batches()}:
        raise ConfigError(
            f"micro-batch {batch} was not decided by the sink in {checkpoint_location}",
            what_to_do="take the number from the error, and the path from the query",
        )
    if wanted in directory.confirmed():
        raise ConfigError(f"micro-batch {batch} is confirmed already; there is nothing to settle")
    directory.create_receipt(wanted, {"settled_by_hand": True})
