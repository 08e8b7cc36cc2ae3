"""The modules that ranks load: whether this torch will do, and what a zygote imports before it forks.

That is nothing that a script has not asked for: torch's exit, for one, depends on what was imported (a
process group that dies with the interpreter may wait for ever for a thread that wants the GIL).
"""

import contextlib
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ckptless import __version__
from ckptless.daemon.agent.ranks.processes import ADAPTERS
from ckptless.daemon.protocol.errors import UsageError
from ckptless.torch_versions import NEWEST, OLDEST, is_tested, shown

logger = logging.getLogger(__name__)

ALWAYS = ("torch",)
# torch._dynamo is what the first DDP or optimizer of a process would import, for a second.
FOR_RUN = ("torch._dynamo", "ckptless.pytorch_hooks")
# The last of all: it looks through what is there by then.
LOOKS = "ckptless.pytorch_hooks.torch_private.imported"
# How a script imports one of the adapters; its framework takes seconds to import.
_ADAPTER = re.compile(rb"^[ \t]*(?:import|from)[ \t]+ckptless(?:\.|[ \t]+import[ \t]+)(\w+)", re.MULTILINE)
# What has to come before such an import, and would come after it.
_BEFOREHAND = re.compile(
    rb"environ(?:\[[^]\n]*\]\s*=[^=]|\.(?:setdefault|update|pop)|\s*\|=)|\bputenv\b|\bsys\.path\b"
)
# Of a script, so much is looked at.
READ_NBYTES = 1 << 20
# Its own deadline is less, but torch is loaded first, and be it over a network.
DEADLINE_S = 300.0
SELF_TEST = "ckptless.pytorch_hooks.self_test"


def preloads(argv: Sequence[str], cwd: Path, given: Sequence[str], *, module: bool) -> tuple[str, ...]:
    """Modules to import, with the user's own; what `ckptless.run` needs where the script names ckptless."""
    if not names_ckptless(argv[0], cwd, module=module):
        return (*ALWAYS, *given)
    if module and argv[0] in ADAPTERS:
        return (*ALWAYS, *FOR_RUN, argv[0], *given, LOOKS)
    sources = _sources(argv[0], cwd, module=module)
    # What Python puts first on its path.
    adapters = {n for path in sources for n in _adapters(path, cwd if module else path.resolve().parent)}
    return (*ALWAYS, *FOR_RUN, *sorted(adapters), *given, LOOKS)


def names_ckptless(target: str, cwd: Path, *, module: bool) -> bool:
    """Whether the script names ckptless, or is its own, and so may use `ckptless.run`."""
    if module and target in ADAPTERS:
        return True
    return any(re.search(rb"\bckptless\b", _text(path)) for path in _sources(target, cwd, module=module))


def _adapters(path: Path, first: Path) -> list[str]:
    """Return the adapters that the script imports, where it would get the same ones beforehand.

    It would not where it sets variables or the search path before, nor where something in the `first` folder
    of that path has the name of the framework.
    """
    text = _text(path)
    if _BEFOREHAND.search(text):
        return []
    named = {match.group(1).decode() for match in _ADAPTER.finditer(text)}
    find = importlib.machinery.PathFinder.find_spec
    free = [name for name in named if find(name, [str(first)]) is None]
    return [f"ckptless.{name}" for name in free if f"ckptless.{name}" in ADAPTERS]


def _sources(target: str, cwd: Path, *, module: bool) -> tuple[Path, ...]:
    """Return where the program may be. Elsewhere no module is looked for: that would import its parents."""
    if not module:
        return (Path(target), Path(target) / "__main__.py")
    path = cwd.joinpath(*target.split("."))
    return (path.with_name(f"{path.name}.py"), path / "__main__.py")


def _text(path: Path) -> bytes:
    """Return what there is of it to look at."""
    try:
        with path.open("rb") as file:
            return file.read(READ_NBYTES)
    except OSError:
        return b""


# ------------------------------------------------------------------------- whether torch will do


def check_torch() -> None:
    """Raise UsageError where the ranks, which run with this same Python, could not import torch."""
    if importlib.util.find_spec("torch") is None:
        raise UsageError(
            f"torch is not installed for {sys.executable}, which the ranks run with: "
            "install ckptless into the environment that has torch, or torch into this one"
        )


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
    """Return what is wrong with the torch of this environment, "" for nothing; takes some seconds."""
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
    """Return the file that stands for this ckptless with this torch: another installation has another one."""
    spec = importlib.util.find_spec("torch")
    origin = Path(spec.origin if spec is not None and spec.origin is not None else "/")
    told = f"{version} {origin} {origin.stat().st_mtime_ns} {__version__}"
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "ckptless" / f"torch-{hashlib.blake2b(told.encode(), digest_size=8).hexdigest()}"
