"""`python -m ckptless.doctor`, or `ckptless-doctor`."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from ckptless import __version__
from ckptless.daemon.protocol.errors import CkptlessError, UsageError
from ckptless.doctor.collect import collect
from ckptless.doctor.findings import EXIT_CODES, Finding, find, worst
from ckptless.doctor.pairing import Asked, pairs
from ckptless.doctor.preflight import preflight
from ckptless.torch_versions import Version, parse

MARKS = {"fine": "ok  ", "limited": "!   ", "broken": "BAD "}


def _version(_ctx: click.Context, _option: click.Parameter, value: str | None) -> Version | None:
    try:
        return None if value is None else parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command()
@click.option(
    "--torch", callback=_version, metavar="X.Y", help="Ask about this torch, not the installed one."
)
@click.option("--nccl", callback=_version, metavar="X.Y", help="Ask about this NCCL.")
@click.option(
    "--node",
    is_flag=True,
    help="Try this node instead: memory, a disk, its network, arithmetic on each device that torch sees.",
)
@click.option(
    "--folder",
    "folders",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    multiple=True,
    metavar="DIR",
    help="With --node: a folder whose disk is tried; may be given again.  [default: that of temporary files]",
)
@click.option(
    "--pairs",
    "in_pairs",
    is_flag=True,
    help="Try the network between the nodes of this allocation instead: slow or failing nodes and links.",
)
@click.option(
    "--interface",
    metavar="NAME|NETWORK",
    help="With --pairs: whose addresses are tried.  [default: those of the daemons]",
)
@click.option(
    "--mib",
    type=click.IntRange(1, 1024),
    default=64,
    show_default=True,
    metavar="M",
    help="With --pairs: so many MiB in each direction.",
)
@click.option(
    "--all",
    "every",
    is_flag=True,
    help="With --pairs: every pair, and not log N partners of each of N nodes.",
)
@click.option(
    "--time-limit",
    "limit_s",
    type=click.FloatRange(min=1),
    metavar="SECONDS",
    help="With --node: how long each part may take; one that takes longer is broken.  [default: 20]  "
    "With --pairs: how long all may take.  [default: 60]",
)
@click.option("--json", "as_json", is_flag=True, help="Findings as JSON.")
@click.version_option(__version__, "-V", "--version", message="%(prog)s %(version)s")
def command(as_json: bool, **options: Any) -> None:
    """Tell what this torch, this NCCL and this machine will do under ckptless, and why.

    Exit code: 0 all is fine, 1 it works with limits, 2 something will not work.
    """
    try:
        findings = _findings(**options)
    except CkptlessError as error:
        click.echo(f"ckptless-doctor: error: {error}", err=True)
        sys.exit(EXIT_CODES["broken"])
    if not findings:  # one of many nodes, of which node 0 speaks
        return
    grade = worst(findings)
    if as_json:
        told = {"version": 1, "grade": grade, "findings": [finding.told() for finding in findings]}
        click.echo(json.dumps(told, indent=2))
    else:
        for finding in findings:
            click.echo(_line(finding))
    sys.exit(EXIT_CODES[grade])


def _findings(
    *,
    torch: Version | None,
    nccl: Version | None,
    node: bool,
    in_pairs: bool,
    limit_s: float | None,
    **more: Any,
) -> list[Finding]:
    """Return what was asked for. Raises UsageError, StartError."""
    if node and in_pairs:
        raise UsageError("--node and --pairs are two questions: ask one after the other")
    if in_pairs:
        return pairs(Asked(more["interface"], more["mib"], more["every"], limit_s or 60.0), os.environ)
    if node:
        return preflight(more["folders"] or (Path(tempfile.gettempdir()),), limit_s or 20.0)
    return find(collect(os.environ, torch, nccl))


def _line(finding: Finding) -> str:
    advice = f"\n      -> {finding.advice}" if finding.advice else ""
    return f"{MARKS[finding.grade]}{finding.about}: {finding.text}{advice}"


def main() -> None:
    """Entry point."""
    command(prog_name="ckptless-doctor")


if __name__ == "__main__":
    main()
