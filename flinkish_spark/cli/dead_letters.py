"""`flinkish replay-dead-letters`: writes dead letters back to their original topics, exactly once."""

from __future__ import annotations

from typing import Any

import click

from flinkish_spark.cli.client import brokers_options, connection_of, json_option, print_json, print_line
from flinkish_spark.core.errors import ConfigError


@click.command("replay-dead-letters")
@click.argument("letters")
@brokers_options
@click.option("--where", multiple=True, metavar="NAME=VALUE", help="A header that a letter must have.")
@click.option("--to", "target", default="", metavar="TOPIC", help="One topic for all, in place of their own.")
@click.option("--group", default="", help="Who remembers what was put back; one for each topic of letters.")
@click.option("--dry-run", is_flag=True, help="Count, and put nothing back.")
@json_option
def replay_dead_letters(
    letters: str,
    servers: str,
    config: Any,
    where: tuple[str, ...],
    target: str,
    group: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write the letters of a dead-letter topic back to their original topics, exactly once.

    A letter is written with the key, value, headers and timestamp of its record, without the headers about
    its refusal. Letters that the filter does not match stay for another run, and so do incomplete records.
    The command may be interrupted and repeated.
    """
    from flinkish_spark.connectors.kafka.letter_replay import LetterFilter, LetterReplay

    try:
        wanted = LetterFilter.of(where)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None
    replay = LetterReplay(
        connection_of(servers, config),
        letters,
        group or f"flinkish-letters-{letters}",
        wanted,
        target,
    )
    counts = replay.run(dry=dry_run)
    if as_json:
        print_json({"topic": letters, "dry_run": dry_run, **counts.to_json()})
        return
    verb = "would be put back" if dry_run else "were put back"
    for topic, count in sorted(counts.put_back.items()):
        print_line(f"{count} letters {verb} into {topic}")
    if not counts.put_back:
        print_line(f"no letters {verb}")
    if left := counts.not_chosen + counts.not_whole:
        print_line(f"{left} were skipped: {counts.not_chosen} not chosen, {counts.not_whole} incomplete")
