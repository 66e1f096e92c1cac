"""Public test tools: a real local broker, open or secured, certificates, and crash points."""

from flinkish_spark.testing.broker import LocalBroker
from flinkish_spark.testing.crashing import KillAt
from flinkish_spark.testing.secure_broker import SecureBroker
from flinkish_spark.testing.tls import LocalCertificates, make_certificates

__all__ = ["KillAt", "LocalBroker", "LocalCertificates", "SecureBroker", "make_certificates"]
