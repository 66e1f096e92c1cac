"""`flinkish ui`: serves the web page and REST API of job directories, whether their jobs run or not."""

from __future__ import annotations

from typing import Any

import click

from flinkish_spark.cli.client import complain, say, store_option, store_options
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.job_dir import job_place
from flinkish_spark.core.store_spec import StoreSpec

#: Flink's default port.
_PORT = 8_081
_LONGEST_TOKEN = 1_000


@click.command()
@click.argument("directories", metavar="DIR...", nargs=-1, required=True)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=_PORT,
    show_default=True,
    help="The port; 0 for one that is free.",
)
@click.option(
    "--token-file",
    type=click.File("r", encoding="utf-8"),
    metavar="FILE",
    help="Holds the token for changes; without it there is a new one at each start.",
)
@click.option("--name", "names", multiple=True, metavar="HOST", help="A further name of this server.")
@click.option("--read-only", is_flag=True, help="Show jobs, and change nothing.")
@click.option(
    "--savepoint-dir", default="", metavar="DIR", help="Where savepoints go if a request does not say."
)
@store_option
def ui(
    directories: tuple[str, ...],
    host: str,
    port: int,
    token_file: Any,
    names: tuple[str, ...],
    read_only: bool,
    savepoint_dir: str,
) -> None:
    """Show jobs on a web page, and serve Flink's REST clients, until Ctrl-C.

    DIR is a job directory, or a folder of job directories. With the token in the printed link the page can
    trigger checkpoints and savepoints, and stop, cancel and rewind running jobs.
    """
    # Imported here, since it needs the packages of an extra.
    from flinkish_spark.core.config import UiConfig
    from flinkish_spark.rest.server import UiServer

    places = [_place(directory) for directory in directories]
    token = None if token_file is None else token_file.read(_LONGEST_TOKEN).strip()
    server = UiServer(places, UiConfig(host, port, token, names, not read_only, savepoint_dir))
    say(f"jobs are shown at {server.url if read_only or token else server.link}")
    try:
        server.join()
    except KeyboardInterrupt:
        complain("the page is closed; the jobs continue")
    finally:
        server.stop()


def _place(directory: str) -> StoreSpec:
    try:
        if "://" in directory.removeprefix("file://"):
            return job_place(directory, store_options())
        return StoreSpec(str(click.Path(exists=True, file_okay=False, resolve_path=True)(directory)))
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
