"""What a mini cluster takes; a real one runs in tests/integration/spark/test_run.py."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark.core.errors import ConfigError, EnvironmentFault
from flinkish_spark.testing import MiniCluster, mini_cluster


@pytest.mark.parametrize(
    "settings", [{"workers": 0}, {"workers": True}, {"cores": 0}, {"memory_mb": 100}, {"start_timeout_ms": 0}]
)
def test_a_cluster_that_cannot_be_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        MiniCluster(tmp_path, **settings)


def test_a_cluster_that_does_not_run_has_no_master(tmp_path: Path) -> None:
    cluster = MiniCluster(tmp_path / "cluster")
    with pytest.raises(RuntimeError, match="does not run"):
        _ = cluster.master
    cluster.stop()
    assert not (tmp_path / "cluster").exists()


def test_a_process_that_ends_at_once_is_no_cluster_and_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(command: list[str], **settings: Any) -> subprocess.Popen[bytes]:
        # The master ends, the workers would go on.
        is_master = command[-7:-6] == ["org.apache.spark.deploy.master.Master"]
        words = ["sh", "-c", "exit 3"] if is_master else ["sleep", "600"]
        made.append(popen(words, **settings))
        return made[-1]

    monkeypatch.setattr(mini_cluster.subprocess, "Popen", start)
    monkeypatch.setattr(mini_cluster, "watch", lambda pid: popen(["cat"], stdin=subprocess.PIPE))
    cluster = MiniCluster(tmp_path, workers=2)
    with pytest.raises(EnvironmentFault, match="0 of 2 workers came, and a process ended with 3") as raised:
        cluster.start()
    assert str(tmp_path) in str(raised.value) and len(made) == 3
    assert all(one.poll() is not None for one in made)
