"""The options of every command: which job, where to read or ask, tables or JSON."""

import contextlib
import functools
import io
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate

import click

from ckptless.daemon.ledger.paths import default_state_dir
from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.protocol.requests import MAX_NAME


@dataclass(frozen=True)
class Asked:
    """The options common to all commands; what is None was not given."""

    given_state_dir: Path | None = None
    job: str | None = None
    as_json: bool = False
    socket: str | None = None

    @property
    def state_dir(self) -> Path:
        """The directory to read: as given, by the environment, or the default; UsageError if none."""
        # Not click's envvar: behind the command it would outrank what was given before the command.
        told = os.environ.get("CKPTLESS_STATE_DIR")
        return self.given_state_dir or (Path(told) if told else default_state_dir())

    @property
    def chosen_state_dir(self) -> bool:
        """Whether somebody has said where to look."""
        return self.given_state_dir is not None or bool(os.environ.get("CKPTLESS_STATE_DIR"))

    @property
    def named(self) -> str:
        """The job, where a command cannot do without one. Raises UsageError."""
        if not self.job:
            raise UsageError("JOB is missing: name a run, or the number of a Slurm job")
        return self.job

    def with_more(
        self, state_dir: Path | None, job: str | None, as_json: bool, socket: str | None
    ) -> "Asked":
        """The same, but for what was given once more behind the command's name."""
        return Asked(
            state_dir or self.given_state_dir, job or self.job, as_json or self.as_json, socket or self.socket
        )


def common(command: Callable[Concatenate[Asked, ...], None]) -> Callable[..., None]:
    """Give a command (or the group) the common options: its first argument is what they say in the end."""

    def with_options(
        *, state_dir: Path | None, job: str | None, as_json: bool, socket: str | None, **own: Any
    ) -> None:
        context = click.get_current_context()
        first = own.pop("first_job", None)
        asked = (context.find_object(Asked) or Asked()).with_more(state_dir, job, as_json, socket)
        if first is not None and asked.job not in (None, first):
            raise UsageError(f"--job {asked.job} and the job {first} are two: give one")
        asked = asked.with_more(None, first, False, None)
        if asked.job is not None and not (0 < len(asked.job) <= MAX_NAME and asked.job.isprintable()):
            raise UsageError("JOB is a name: give it")
        context.obj = asked
        command(asked, **own)

    functools.update_wrapper(with_options, command)
    return _STATE_DIR(_SOCKET(_JOB(with_json(with_options))))


def of_job(command: Callable[Concatenate[Asked, ...], None]) -> Callable[..., None]:
    """The same, with JOB as the first argument, which may be left out: the newest job."""
    argument = click.argument("first_job", metavar="[JOB]", required=False)
    return argument(common(command))


def for_job(command: Callable[Concatenate[Asked, ...], None]) -> Callable[..., None]:
    """The same for what is done to a job, which has to be named."""
    argument = click.argument("first_job", metavar="JOB")
    return argument(common(command))


class _Page(io.StringIO):
    """The output of a command in one look, laid out as for the terminal, if there is one."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        """Whether it is to be read at a terminal."""
        return self._terminal


def watched(command: Callable[Concatenate[Asked, ...], None]) -> Callable[..., None]:
    """Give a command --watch: what it shows is shown again and again, until Ctrl-C."""

    def again(asked: Asked, *, watch_s: float | None, **own: Any) -> None:
        if watch_s is None:
            command(asked, **own)
            return
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                page = _Page(sys.stdout.isatty())
                try:
                    with contextlib.redirect_stdout(page):
                        command(asked, **own)
                finally:
                    # Some end with an exit code once they have shown why.
                    click.clear()
                    click.echo(page.getvalue(), nl=False)
                time.sleep(watch_s)

    functools.update_wrapper(again, command)
    return click.option(
        "--watch",
        "watch_s",
        type=click.FloatRange(0.2, 3600),
        metavar="SECONDS",
        help="Show it again every so many seconds, until Ctrl-C.",
    )(again)


def at_a_terminal() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin.isatty()


def confirm(question: str) -> None:
    """Ask at the terminal. Raises UsageError where there is none, and click.Abort for a no."""
    if not at_a_terminal():
        raise UsageError("nobody can be asked here: say --yes")
    click.confirm(question, abort=True, err=True)


def wants_json(context: click.Context, *, as_json: bool) -> bool:
    """Whether JSON is asked for, before the command's name or behind it; of commands that need no job."""
    asked = context.find_object(Asked)
    return as_json or (asked is not None and asked.as_json)


_STATE_DIR = click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where the ledgers of a local run are. Default: $CKPTLESS_STATE_DIR, else ckptless/latest in your"
    " state folder, the newest local run, and the daemon of this node.",
)
_SOCKET = click.option(
    "--socket",
    metavar="PATH",
    help="Ask this daemon. Default: that of this node, daemon.socket of the settings.",
)
_JOB = click.option("-j", "--job", metavar="JOB", help="The same as the argument JOB.")
with_json = click.option("--json", "as_json", is_flag=True, help="JSON to stdout, for scripts.")


def as_png(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add --png: draw what a command shows, in place of showing it."""
    return click.option(
        "--png",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help=f"Draw the {what} as bars to FILE instead (needs ckptless[plot]).",
    )
