"""Settings that a job borrows of a session while its query starts; a session is played by a dictionary."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from flinkish_spark.bridge import settings as session_settings
from flinkish_spark.bridge.settings import REQUIRED_CONF, SHUFFLE_PARTITIONS, SessionSettings, query_conf
from flinkish_spark.connectors.kafka import data_source
from flinkish_spark.core.errors import UnavailableError
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job.spark_engine import start_query
from flinkish_spark.planning.partitioning import shuffle_partitions

ADAPTIVE = "spark.sql.adaptive.enabled"


class Conf(dict):  # type: ignore[type-arg]
    """RuntimeConfig, as far as it is asked; refuses the names in `refused`."""

    refused: tuple[str, ...] = ()

    def set(self, name: str, value: str) -> None:
        if name in self.refused:
            raise OSError(name)
        self[name] = value

    def unset(self, name: str) -> None:
        self.pop(name, None)

    @property
    def getAll(self) -> dict[str, str]:
        return dict(self)


class Session:
    """A session without a JVM; two of them may be the same for Spark."""

    def __init__(self, conf: Conf, identity: object = None) -> None:
        self.conf, self._jsparkSession = conf, identity or self


def session(**settings: str) -> Any:
    return Session(Conf(settings))


# -- one query starts at a time ---------------------------------------------------------------------
def test_two_starts_are_never_interleaved_and_each_sees_its_own_number() -> None:
    spark = session()
    before = dict(spark.conf)
    inside: list[str] = []
    met: list[tuple[str, str, list[str]]] = []
    at_once = threading.Barrier(8)

    def start(number: int) -> None:
        at_once.wait()
        for _ in range(20):
            with query_conf(spark, number):
                inside.append(str(number))
                met.append((str(number), spark.conf[SHUFFLE_PARTITIONS], list(inside)))
                inside.remove(str(number))

    threads = [threading.Thread(target=start, args=(number,)) for number in range(1, 9)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(met) == 160
    assert all(mine == found and there == [mine] for mine, found, there in met)
    assert spark.conf == before == {}


def test_what_was_set_is_set_again_and_what_was_not_is_unset_also_after_an_error() -> None:
    spark = session(**{ADAPTIVE: "true", SHUFFLE_PARTITIONS: "9"})
    with pytest.raises(ZeroDivisionError), query_conf(spark, 4):
        assert (spark.conf[ADAPTIVE], spark.conf[SHUFFLE_PARTITIONS]) == ("false", "4")
        assert spark.conf["spark.sql.streaming.minBatchesToRetain"] == "200"
        raise ZeroDivisionError
    assert spark.conf == {ADAPTIVE: "true", SHUFFLE_PARTITIONS: "9"}


@pytest.mark.parametrize("refused", [*REQUIRED_CONF, SHUFFLE_PARTITIONS])
def test_a_setting_that_spark_refuses_leaves_nothing_of_the_others(refused: str) -> None:
    spark = session(**{ADAPTIVE: "true"})
    spark.conf.refused = (refused,)
    with pytest.raises(OSError, match=refused), query_conf(spark, 4):
        pytest.fail("it is not borrowed")
    assert spark.conf == {ADAPTIVE: "true"}
    spark.conf.refused = ()
    with query_conf(spark, 4):
        pass
    assert spark.conf == {ADAPTIVE: "true"}


def test_one_setting_that_cannot_be_given_back_keeps_no_other() -> None:
    spark = session(**{ADAPTIVE: "true", SHUFFLE_PARTITIONS: "9"})
    with pytest.raises(OSError, match=ADAPTIVE), query_conf(spark, 4):
        spark.conf.refused = (ADAPTIVE,)
    assert spark.conf == {ADAPTIVE: "false", SHUFFLE_PARTITIONS: "9"}


def test_what_the_user_sets_or_unsets_meanwhile_stays() -> None:
    spark = session(**{ADAPTIVE: "true", SHUFFLE_PARTITIONS: "9"})
    with query_conf(spark, 4):
        spark.conf.set(SHUFFLE_PARTITIONS, "33")
        spark.conf.unset(ADAPTIVE)
    assert spark.conf == {SHUFFLE_PARTITIONS: "33"}


def test_one_thread_may_borrow_within_a_loan() -> None:
    spark, other = session(**{SHUFFLE_PARTITIONS: "9"}), session()
    with query_conf(spark, 4), query_conf(spark, 5), query_conf(other, 6):
        assert (spark.conf[SHUFFLE_PARTITIONS], other.conf[SHUFFLE_PARTITIONS]) == ("5", "6")
        assert (shuffle_partitions(spark), shuffle_partitions(other)) == (9, 200)
    assert (spark.conf, other.conf) == ({SHUFFLE_PARTITIONS: "9"}, {})


# -- who asks meanwhile -----------------------------------------------------------------------------
def test_who_asks_meanwhile_is_told_what_the_user_has_set_and_waits_for_nothing() -> None:
    """A listener that Spark calls in the middle of a start may begin another job: it must not wait for it."""
    spark = session(**{SHUFFLE_PARTITIONS: "9", "spark.app.name": "orders"})
    again: Any = Session(spark.conf, spark)
    other: Any = session(**{SHUFFLE_PARTITIONS: "4"})
    settings, told = session_settings.SETTINGS, []

    def ask() -> None:
        told.append([shuffle_partitions(one) for one in (spark, again, other)])
        told.append(settings.all(spark))
        told.append(settings.get(spark, "spark.app.name"))

    with query_conf(spark, 4):
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(20)
    everything = {SHUFFLE_PARTITIONS: "9", "spark.app.name": "orders"}
    assert told == [[9, 9, 4], everything, "orders"]
    with query_conf(spark, 4):
        spark.conf.set(SHUFFLE_PARTITIONS, "33")
        assert shuffle_partitions(spark) == 33, "the user has changed it just now"


def test_the_names_of_secret_options_are_added_once_by_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    spark = session(**{data_source._REDACTION: "mine"})
    spark.dataSource = type("Sources", (), {"register": lambda self, kind: None})()
    threads = [threading.Thread(target=data_source.register, args=(spark,)) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert spark.conf[data_source._REDACTION] == f"mine|{data_source._SECRETS}"


# -- starting ---------------------------------------------------------------------------------------
class Query:
    def __init__(self, name: str) -> None:
        self.name, self.is_stopped = name, False

    def stop(self) -> None:
        self.is_stopped = True


class Writer:
    """DataStreamWriter: its start() copies the session's settings, and lets somebody do something."""

    def __init__(self, spark: Any, meanwhile: Any) -> None:
        self.spark, self.meanwhile, self.name = spark, meanwhile, ""

    def __getattr__(self, _: str) -> Any:
        return lambda *args, **named: self

    def queryName(self, name: str) -> Writer:
        self.name = name
        return self

    def start(self) -> Query:
        started = Query(self.name)
        self.spark.copied = dict(self.spark.conf)
        self.spark.streams.active.append(started)
        self.meanwhile()
        return started


def startable(meanwhile: Any = lambda: None) -> tuple[Any, Any]:
    spark = session()
    spark.streams = type("Streams", (), {"active": []})
    frame = type("Frame", (), {"writeStream": Writer(spark, meanwhile)})
    return spark, type("Job", (), {"frame": frame, "deferred": None, "output_mode": "append"})


def start(spark: Any, job: Any, location: str) -> Any:
    settings: Any = {"name": "orders", "trigger": {}, "shuffle_partitions": 4, "job_dir": StoreSpec("/a")}
    return start_query(spark, job, lambda frame, batch: None, checkpoint_location=location, **settings)


def test_a_query_starts_under_what_it_needs_and_its_name_is_free() -> None:
    spark, job = startable()
    names = [start(spark, job, location).name for location in ("/a/spark/1", "/b/spark/7")]
    assert names == ["orders", "orders (/b/spark/7)"]
    assert (spark.copied[ADAPTIVE], spark.copied[SHUFFLE_PARTITIONS]) == ("false", "4")
    assert spark.conf == {}


def test_a_query_that_may_have_started_under_another_setting_is_stopped() -> None:
    spark, job = startable(lambda: spark.conf.set(ADAPTIVE, "true"))
    with pytest.raises(
        UnavailableError, match=f"the setting {ADAPTIVE} of the session was changed"
    ) as changed:
        start(spark, job, "/a/spark/1")
    assert changed.value.restartable
    assert [one.is_stopped for one in spark.streams.active] == [True]
    assert spark.conf == {ADAPTIVE: "true"}


# -- forks ------------------------------------------------------------------------------------------
def test_a_child_that_is_forked_in_the_middle_of_a_start_does_not_wait_for_it() -> None:
    settings = SessionSettings()
    assert settings.get(session(), ADAPTIVE) is None
    spark, holds, done = session(), threading.Event(), threading.Event()

    def hold() -> None:
        with query_conf(spark, 4), session_settings.SETTINGS._look:
            holds.set()
            done.wait(60)

    holding = threading.Thread(target=hold)
    holding.start()
    holds.wait(20)
    child = os.fork()
    if child == 0:
        # A thread that never comes back would keep the child for ever: an alarm ends it.
        import signal

        signal.alarm(20)
        own = session()
        with query_conf(own, 4):
            os._exit(7 if own.conf[SHUFFLE_PARTITIONS] == "4" and shuffle_partitions(own) == 200 else 1)
    done.set()
    holding.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
