"""`ckptctl config`: check the cluster's configuration file, and show what is in force and why."""

from pathlib import Path

import click

from ckptless.daemon.ckptctl.shared import render
from ckptless.daemon.ckptctl.shared.options import wants_json, with_json
from ckptless.daemon.settings.site import DEFAULT_FILE, as_yaml, load_settings, shown

_FILE = click.argument("file", required=False, type=click.Path(path_type=Path))


@click.group()
def config() -> None:
    """Check the cluster's configuration, or show what is in force.

    FILE is /etc/ckptless/ckptless.yaml where it is not given; where that is missing too, the defaults hold.

    \b
    Examples:
        ckptctl config check                  before it is copied to all nodes
        ckptctl config show                   every value, and where it is from
    """


@config.command()
@_FILE
@with_json
@click.pass_context
def check(context: click.Context, file: Path | None, as_json: bool) -> None:
    """Say whether FILE is good: exit code 0, or 2 and what is wrong in it.

    \b
    Example:
        ckptctl config check ./ckptless.yaml && install -m 644 ckptless.yaml /etc/ckptless/
    """
    settings = load_settings(file)
    if wants_json(context, as_json=as_json):
        render.show_json(file=None if settings.file is None else str(settings.file), good=True)
    elif settings.file is None:
        click.echo(f"There is no {DEFAULT_FILE}: the defaults hold.")
    else:
        click.echo(f"{settings.file} is good.")


@config.command()
@_FILE
@with_json
@click.pass_context
def show(context: click.Context, file: Path | None, as_json: bool) -> None:
    """Show every value in force, and whether it is from the file, derived, or a default.

    What it prints is a good file itself.

    \b
    Example:
        ckptctl config show --json | jq -r '.settings[] | select(.source == "file").key'
    """
    settings = load_settings(file)
    if wants_json(context, as_json=as_json):
        render.show_json(file=None if settings.file is None else str(settings.file), settings=shown(settings))
    else:
        click.echo(as_yaml(settings), nl=False)
