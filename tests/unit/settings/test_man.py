"""The manual pages: well formed, and with every command and option that there is."""

import os
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ckptless.daemon.ckptctl.config_command import config
from ckptless.daemon.ckptctl.main import ckptctl
from ckptless.daemon.ckptlessd.main import command as ckptlessd
from ckptless.daemon.launch.main import command as ckptless_run
from ckptless.doctor.__main__ import command as ckptless_doctor

MAN = Path(__file__).parents[3] / "docs" / "man"
PAGES = ["ckptctl.1", "ckptless-doctor.1", "ckptless-run.1", "ckptless.yaml.5", "ckptlessd.8"]


@pytest.mark.parametrize("name", PAGES)
def test_mandoc_finds_no_fault(name: str) -> None:
    if shutil.which("mandoc") is None:
        reason = "mandoc is not installed (Debian: mandoc)"
        if os.environ.get("CKPTLESS_REQUIRE_SLURM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    done = subprocess.run(
        ["mandoc", "-T", "lint", str(MAN / name)], capture_output=True, text=True, timeout=60, check=False
    )
    # What else is installed on this machine is no fault of the page's.
    faults = [line for line in done.stdout.splitlines() if "referenced manual not found" not in line]
    assert faults == []


def test_what_is_made_of_the_table_of_options_is_up_to_date() -> None:
    """Pages, the shipped settings and the plugin's header; else: make options."""
    for path, text in runpy.run_path(str(MAN.parent / "options.py"))["texts"]().items():
        assert path.read_text() == text, path


@pytest.mark.parametrize("name", PAGES)
def test_our_pages_that_it_refers_to_are_there(name: str) -> None:
    for title, section in re.findall(r"(?m)^\.Xr (ckpt\S+) (\d)", (MAN / name).read_text()):
        assert (MAN / f"{title}.{section}").exists(), (title, section)


def commands(command: click.Command, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command below a group, with its words."""
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from commands(below, f"{path} {name}".strip())
    else:
        yield path, command


def options(command: click.Command) -> list[str]:
    shown = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
    return [name for option in shown for name in option.opts]


def said(page: str, option: str) -> bool:
    """Whether a page marks an option up, as in `.Fl -json` or `.Fl j , -job`."""
    return re.search(rf"(?m)(?:\bFl|[,|]) {re.escape(option.removeprefix('-'))}(?![\w-])", page) is not None


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("ckptless-run.1", ckptless_run),
        ("ckptless-doctor.1", ckptless_doctor),
        ("ckptlessd.8", ckptlessd),
        ("ckptctl.1", ckptctl),
    ],
)
def test_every_option_is_in_the_manual(name: str, command: click.Command) -> None:
    page = (MAN / name).read_text()
    every = options(command)
    if command is ckptctl:
        every += [option for _, below in [*commands(ckptctl), *commands(config)] for option in options(below)]
    assert every
    assert [option for option in every if not said(page, option)] == []


def test_every_command_is_in_the_manual() -> None:
    page = (MAN / "ckptctl.1").read_text()
    for path, _ in [*commands(ckptctl), *commands(config, "config")]:
        assert re.search(rf"(?m)^\.It Ic {path}( |$)", page), path
