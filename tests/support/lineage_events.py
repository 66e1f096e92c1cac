"""OpenLineage's published schemas, and events that are held against them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker
from openlineage.client.serde import Serde
from openlineage.client.transport import Config, Transport
from referencing import Registry, Resource

_FOLDER = Path(__file__).parent / "open_lineage"


class Events(Transport):
    """Keeps events as they would be sent, each held against the schemas."""

    kind, config_class = "events", Config

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def emit(self, event: Any) -> None:
        """Keep one."""
        found = json.loads(Serde.to_json(event))
        check_event(found)
        self.sent.append(found)


def check_event(event: dict[str, Any]) -> None:
    """Raise ValidationError if an event, or a facet in it, does not fit the schema that it names."""
    _check(event, event["schemaURL"])
    for facet in _facets(event):
        _check(facet, facet["_schemaURL"])


def _check(value: Any, url: str) -> None:
    validator = Draft202012Validator({"$ref": url}, registry=_schemas(), format_checker=FormatChecker())
    validator.validate(value)


def _facets(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "_schemaURL" in value:
            yield value
        for one in value.values():
            yield from _facets(one)
    elif isinstance(value, list):
        for one in value:
            yield from _facets(one)


@cache
def _schemas() -> Registry[Any]:
    read = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(_FOLDER.glob("*.json"))]
    return Registry().with_resources((one["$id"], Resource.from_contents(one)) for one in read)
