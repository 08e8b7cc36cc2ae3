"""A torch that nobody has tested is tried before there are ranks, once in an environment."""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

from ckptless import __version__
from ckptless.daemon.api.errors import UsageError
from ckptless.torch_versions import NEWEST, OLDEST, is_tested, shown

logger = logging.getLogger(__name__)

# Its own deadline is less, but torch is loaded first, and be it over a network.
DEADLINE_S = 300.0
SELF_TEST = "ckptless.pytorch_hooks.torch_private.self_test"


def try_untested() -> None:
    """Raise UsageError where recovery in place does not work with the torch of this environment.

    One of the releases that were tested is not tried, nor one that was good once, as it is installed now.
    """
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    if is_tested(version):
        return
    good = _good_file(version)
    if good.exists():
        return
    logger.info("torch %s is not one that ckptless was tested with: it is tried, which is done once", version)
    wrong = self_test()
    if wrong:
        raise UsageError(
            f"{wrong}; recovery in place needs it: take torch {shown(OLDEST)} to {shown(NEWEST)}, or --tier 1"
        )
    with contextlib.suppress(OSError):  # then it is tried the next time, too
        good.parent.mkdir(parents=True, exist_ok=True)
        good.write_text(f"torch {version} does what ckptless {__version__} needs\n")


def self_test() -> str:
    """What is wrong with the torch of this environment, "" for nothing; some seconds."""
    command = [sys.executable, "-m", SELF_TEST]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"the self-test of this torch was not done after {DEADLINE_S:g} s"
    if done.returncode == 0:
        return ""
    said = (done.stdout.strip() or done.stderr.strip()).splitlines()
    return said[-1].rstrip(".") if said else f"the self-test of this torch ended with {done.returncode}"


def _good_file(version: str) -> Path:
    """What stands for this ckptless with this torch, as it is installed: another one has another file."""
    spec = importlib.util.find_spec("torch")
    origin = Path(spec.origin if spec is not None and spec.origin is not None else "/")
    told = f"{version} {origin} {origin.stat().st_mtime_ns} {__version__}"
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "ckptless" / f"torch-{hashlib.blake2b(told.encode(), digest_size=8).hexdigest()}"
