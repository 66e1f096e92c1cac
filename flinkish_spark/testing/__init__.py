"""Public test tools: a real local broker, open or secured, certificates, crash points, leftovers."""

from flinkish_spark.testing.broker import LocalBroker
from flinkish_spark.testing.crashing import KillAt
from flinkish_spark.testing.open_transactions import still_open
from flinkish_spark.testing.secure_broker import SecureBroker
from flinkish_spark.testing.tls import LocalCertificates, make_certificates

__all__ = [
    "KillAt",
    "LocalBroker",
    "LocalCertificates",
    "SecureBroker",
    "make_certificates",
    "still_open",
]
