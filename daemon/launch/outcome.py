"""How a job ended, as its daemons wrote it down."""

from pathlib import Path

import msgspec

from ckptless.daemon.api.messages import Outcome
from ckptless.daemon.service import OUTCOME_FILE


class _OutcomeFile(msgspec.Struct):
    job: str
    state: str
    exit_code: int
    reason: str


def outcome_path(state_dir: Path) -> Path:
    """Where a daemon with this state directory writes the outcome."""
    return state_dir / OUTCOME_FILE


def read_outcome(state_dir: Path, job: str) -> Outcome | None:
    """The outcome of `job` in one node's state directory; None before it ended (or for another job)."""
    try:
        data = outcome_path(state_dir).read_bytes()
    except FileNotFoundError:
        return None
    found = msgspec.json.decode(data, type=_OutcomeFile)
    if found.job != job:
        return None
    fields = {"state": found.state, "exit_code": found.exit_code, "reason": found.reason}
    return msgspec.convert(fields, Outcome)
