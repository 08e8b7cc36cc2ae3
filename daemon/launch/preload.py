"""What a zygote imports before it forks ranks: torch, and with ckptless.run what that needs besides.

Nothing that a script has not asked for: torch's exit, for one, depends on what was imported (a process group
that dies with the interpreter may wait for ever for a thread that wants the GIL).
"""

import re
from collections.abc import Sequence
from pathlib import Path

ALWAYS = ("torch",)
# torch._dynamo is what the first DDP or optimizer of a process would import, for a second.
FOR_RUN = ("torch._dynamo", "ckptless.pytorch_hooks")
# Of a script, so much is looked at.
READ_NBYTES = 1 << 20


def preloads(argv: Sequence[str], cwd: Path, given: Sequence[str], *, module: bool) -> tuple[str, ...]:
    """Modules to import, with the user's own; what `ckptless.run` needs where the script names ckptless."""
    return (*ALWAYS, *(FOR_RUN if names_ckptless(argv[0], cwd, module=module) else ()), *given)


def names_ckptless(target: str, cwd: Path, *, module: bool) -> bool:
    """Whether the script names ckptless, and so may use `ckptless.run`."""
    return any(_names_ckptless(path) for path in _sources(target, cwd, module=module))


def _sources(target: str, cwd: Path, *, module: bool) -> tuple[Path, ...]:
    """Where the program may be. Elsewhere no module is looked for: that would import its parents."""
    if not module:
        return (Path(target), Path(target) / "__main__.py")
    path = cwd.joinpath(*target.split("."))
    return (path.with_name(f"{path.name}.py"), path / "__main__.py")


def _names_ckptless(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return re.search(rb"\bckptless\b", file.read(READ_NBYTES)) is not None
    except OSError:
        return False
