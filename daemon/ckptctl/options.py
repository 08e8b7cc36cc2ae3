"""What every command may be asked: which state directory, which job, tables or JSON."""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate

import click

from ckptless.daemon.ledger.paths import shown_state_dir


@dataclass(frozen=True)
class Asked:
    """The options common to all commands; what is None was not given."""

    given_state_dir: Path | None = None
    job: str | None = None
    as_json: bool = False

    @property
    def state_dir(self) -> Path:
        """Where to read: as given, as the environment says, or the default; UsageError if there is none."""
        # Not click's envvar: behind the command it would outrank what was given before the command.
        told = os.environ.get("CKPTLESS_STATE_DIR")
        return self.given_state_dir or (Path(told) if told else shown_state_dir())

    @property
    def chosen_state_dir(self) -> bool:
        """Whether somebody has said where to look."""
        return self.given_state_dir is not None or bool(os.environ.get("CKPTLESS_STATE_DIR"))

    def with_more(self, state_dir: Path | None, job: str | None, as_json: bool) -> "Asked":
        """The same, but for what was given once more behind the command's name."""
        return Asked(state_dir or self.given_state_dir, job or self.job, as_json or self.as_json)


def common(command: Callable[Concatenate[Asked, ...], None]) -> Callable[..., None]:
    """Give a command (or the group) the common options: its first argument is what they say in the end."""

    def with_options(*, state_dir: Path | None, job: str | None, as_json: bool, **own: Any) -> None:
        context = click.get_current_context()
        asked = (context.find_object(Asked) or Asked()).with_more(state_dir, job, as_json)
        context.obj = asked
        command(asked, **own)

    functools.update_wrapper(with_options, command)
    return _STATE_DIR(_JOB(_JSON(with_options)))


_STATE_DIR = click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where the ledgers are: DIR/ledger.db, or DIR/*/ledger.db of a local run."
    " Default: $CKPTLESS_STATE_DIR, else ckptless/latest in your state folder, the newest local run.",
)
_JOB = click.option("-j", "--job", metavar="JOB", help="The job's id. Default: the newest job.")
_JSON = click.option("--json", "as_json", is_flag=True, help="JSON to stdout, for scripts.")
