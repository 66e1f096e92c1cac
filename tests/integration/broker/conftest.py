"""The shared `broker` and `topic` are in tests/conftest.py; here is a broker that one test may ruin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flinkish_spark.testing.broker import LocalBroker
from tests.support.registry import LocalRegistry
from tests.support.secure_broker import SecureBroker
from tests.support.services import BROKER_JARS, BUILD
from tests.support.tls import LocalCertificates, make_certificates


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[LocalBroker]:
    """A broker for this test alone, to be killed, paused and started again; not started yet."""
    own = LocalBroker(tmp_path / "broker", jars_dir=BROKER_JARS)
    yield own
    own.kill()


@pytest.fixture
def own_registry() -> Iterator[LocalRegistry]:
    """One for this test alone, to be away for a while."""
    why_not = LocalRegistry.why_not(BUILD / "registry")
    if why_not:
        pytest.skip(why_not)
    with LocalRegistry(BUILD / "registry") as own:
        yield own


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> LocalCertificates:
    """For 127.0.0.1 only: as `localhost` the broker is a stranger."""
    return make_certificates(tmp_path_factory.mktemp("certificates"), names=("127.0.0.1",))


@pytest.fixture(scope="module")
def secured(
    request: pytest.FixtureRequest,
    certificates: LocalCertificates,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SecureBroker]:
    """A broker with TLS and logins; the module's USERS are its passwords by name."""
    made = SecureBroker(
        tmp_path_factory.mktemp("secured"),
        jars_dir=BROKER_JARS,
        certificates=certificates,
        users=request.module.USERS,
    )
    with made:
        yield made
