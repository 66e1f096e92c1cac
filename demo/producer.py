"""A thread that writes orders to Kafka at a steady rate."""

from __future__ import annotations

import threading
import time
from itertools import islice
from typing import Any

from kafka import KafkaProducer

from demo.orders import Order, generate

_TICK_S = 0.02


class OrderProducer(threading.Thread):
    """Produces `count` orders, or orders until :meth:`stop` if `count` is None.

    Idempotent, acks=all: what it says was sent is in the topic once, in order.
    """

    def __init__(self, servers: str, topic: str, *, seed: int, rate: float, count: int | None = None) -> None:
        super().__init__(name="producer", daemon=True)
        self._servers, self._topic = servers, topic
        self._orders = islice(generate(seed), count)
        self._rate = rate
        self._is_stopping = threading.Event()
        self._refusals: list[BaseException] = []
        self.sent = 0
        self.failure: BaseException | None = None

    def stop(self) -> None:
        """Send no more orders; `join` waits until those sent are acknowledged."""
        self._is_stopping.set()

    def run(self) -> None:
        try:
            self._produce()
        except BaseException as error:
            self.failure = error

    def _produce(self) -> None:
        producer = KafkaProducer(**self._settings())
        try:
            started = time.monotonic()
            while not self._is_stopping.wait(_TICK_S):
                due = int((time.monotonic() - started) * self._rate) - self.sent
                orders = list(islice(self._orders, max(due, 0)))
                for order in orders:
                    self._send(producer, order).add_errback(self._refusals.append)
                    self.sent += 1
                if len(orders) < due:
                    break
            producer.flush()
        finally:
            producer.close()
        # flush() does not raise for a record that was refused.
        if self._refusals:
            raise self._refusals[0]

    def _settings(self) -> dict[str, Any]:
        return {"bootstrap_servers": self._servers, "linger_ms": 20, "batch_size": 64 * 1024}

    def _send(self, producer: KafkaProducer, order: Order) -> Any:
        return producer.send(self._topic, key=order.key, value=order.value)
