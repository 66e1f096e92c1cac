"""What is said when the brokers do not allow a sink's transactions to be as long as the job needs."""

from __future__ import annotations

from flinkish_spark.errors import ConfigError

_SETTING = "transaction.max.timeout.ms"


def with_advice(refused: ConfigError, uid: str, needed_ms: int) -> ConfigError:
    """Return a broker's refusal of a sink's transaction timeout, with what helps.

    Parameters
    ----------
    refused
        As :meth:`KafkaAdmin.probe_transactional_id` raised it; returned as it is if it is another one.
    uid
        The sink.
    needed_ms
        Checkpoint interval + restart budget: a shorter timeout than that is refused, too.
    """
    timeout_ms, maximum_ms = refused.facts.get("timeout_ms"), refused.facts.get("maximum_ms")
    if timeout_ms is None:
        return refused
    advice = f"raise {_SETTING} of the brokers to {timeout_ms} or more"
    if not isinstance(maximum_ms, int):
        advice += f", or lower transaction_timeout_ms, to {needed_ms} at the lowest"
    elif maximum_ms >= needed_ms:
        advice += f", or lower transaction_timeout_ms to {maximum_ms}"
    else:
        advice = (
            f"raise {_SETTING} of the brokers to {needed_ms} or more, or lower interval_ms + "
            f"restart_budget_ms to {maximum_ms} or less, and set transaction_timeout_ms in between"
        )
    return ConfigError(
        f"the transaction timeout of sink '{uid}' is {timeout_ms} ms, which the brokers do not allow",
        why=refused.why,
        what_to_do=advice,
        **refused.facts,
    )
