"""A trial of a table's store: commits of two must not overwrite each other."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from contextlib import suppress

from flinkish_spark.connectors.delta.files import TableFiles
from flinkish_spark.connectors.delta.sink_settings import plain_url
from flinkish_spark.connectors.delta.staging import FOLDER
from flinkish_spark.core.errors import EnvironmentFault, StoreError
from flinkish_spark.core.object_store import ObjectStore
from flinkish_spark.core.store import AnswerLost
from flinkish_spark.core.store_spec import StoreSpec

#: Below the table's folder of ours, for a moment.
_PROBES = f"{FOLDER}/.probes"
#: How often a store is tried whose answers are lost.
_TRIES = 5
#: Options of delta-rs that are none of a store.
_OF_DELTA_RS = re.compile(
    r"(aws_)?s3_(locking_provider|allow_unsafe_rename|pool_idle_timeout_seconds)"
    r"|(aws_)?s3_get_internal_server_error_retries|aws_force_credential_load"
    r"|.*dynamo.*|max_retries|retry_timeout|backoff_config\..*|object_store_concurrency_limit",
    re.IGNORECASE,
)


def check_creates(path: str, options: Mapping[str, str], whose: str) -> None:
    """Refuse a table whose store writes an object that may only be made, though it is there.

    A commit is such an object: two that come at the same moment would both be answered, and one be gone. A
    disk and HDFS need no trial: a file that is there is never made again.
    """
    url = plain_url(path)
    if TableFiles.of(path, {}).root is not None or url.lower().startswith("hdfs:"):
        return
    plain = {name: text for name, text in options.items() if not _OF_DELTA_RS.fullmatch(name)}
    store = StoreSpec.parse(url, plain).open_bucket()
    assert isinstance(store, ObjectStore)
    if not _refuses_second(store, path):
        raise EnvironmentFault(
            f"the store of the Delta table {path} cannot be committed to by {whose}",
            why="it writes an object anew that may only be made if it is not there (If-None-Match: *), so "
            "that commits of two would overwrite each other",
            what_to_do="use a store, or a version of its server, that refuses such a write",
        )


def _refuses_second(store: ObjectStore, path: str) -> bool:
    lost = ""
    for _ in range(_TRIES):
        key = f"{_PROBES}/{uuid.uuid4().hex}"
        try:
            # Nobody else knows the key.
            if store.put_new(key, b"", uuid.uuid4().hex):
                return not store.put_new(key, b"", uuid.uuid4().hex)
            lost = "it says that a key is taken which nobody else knows"
        except AnswerLost as error:
            lost = str(error)
        finally:
            with suppress(StoreError):
                store.delete(key)
    raise StoreError(
        f"the store of the Delta table {path} cannot be tried",
        why=lost,
        what_to_do="see to the store, and start the job again",
    )
