"""A harness for windows that forgets everything but its snapshot after every step."""

from __future__ import annotations

from flinkish_spark.operators.windowing import window_operator
from tests.support.operator_harness import OperatorHarness
from tests.support.windows_support import INPUT, TINY


class Restoring:
    """A harness that is restored after every step; everything else is that of the last."""

    def __init__(self, spec, computation, input_type=INPUT, key=lambda e: e[0], result_type=None):
        self._make = lambda **given: OperatorHarness(
            window_operator(spec, computation, input_type, result_type),
            key=key,
            key_type="STRING",
            max_parallelism=2,
            policy=TINY,
            **given,
        )
        self._last = self._make()

    def __getattr__(self, name):
        return getattr(self._last, name)

    def push(self, *elements):
        """Push (number, time) of the key a."""
        self._last.push_all([(("a", number), time_ms) for number, time_ms in elements])
        return self._done()

    def watermark(self, time_ms):
        self._last.watermark(time_ms)
        return self._done()

    def processing_time(self, time_ms):
        self._last.processing_time(time_ms)
        return self._done()

    def _done(self):
        output = self._last.take()
        self._last = self._make(restore=self._last.snapshot(), bases=self._last.bases)
        return output
