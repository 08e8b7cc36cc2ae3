"""`ckptless-run --rehearse`: a script for a few steps on this machine, with faults and without, compared."""

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import msgspec

from ckptless.daemon.launch import rehearsed
from ckptless.daemon.launch.local import LocalRun
from ckptless.daemon.launch.options import local_run
from ckptless.daemon.protocol.errors import UsageError
from ckptless.rehearsal import LOST, VARIABLE, VERSION, Fault, Line, Rehearsal, lines_file

logger = logging.getLogger(__name__)

STEPS = 8
POLL_S = 0.02
# What a rehearsal has of its own.
_ITS_OWN = ("rehearse", "rehearse_steps", "local", "tee", "state_dir")


def rehearse(
    script: str, arguments: tuple[str, ...], said: Mapping[str, object], env: Mapping[str, str]
) -> int:
    """Run the script three times, and tell what is not the same after a fault; return the exit code.

    Raises UsageError.
    """
    steps = int(str(said.get("rehearse_steps") or STEPS))
    home = Path(str(said["state_dir"])).absolute() if "state_dir" in said else None
    home = home or Path(tempfile.mkdtemp(prefix="ckptless-rehearsal-"))
    options = {name: value for name, value in said.items() if name not in _ITS_OWN}
    options |= {
        "local": True,
        "tee": "none",
        "nodes": said.get("nodes", "2"),
        "spares": said.get("spares", 1),
    }
    faults: tuple[Fault, ...] = ()
    runs: list[rehearsed.Run] = []
    for name in ("first", "second", "faults"):
        directory = home / name
        directory.mkdir(parents=True)
        run = local_run(script, arguments, {**options, "state_dir": directory / "state"}, env)
        ranks = _check(run)
        if name == "faults":
            faults = (Fault(steps // 3 + 1, ranks - 1, "process"), Fault(2 * steps // 3 + 1, 0, "node"))
        plan = Rehearsal(VERSION, str(directory), steps, faults)
        code = asyncio.run(_play(run, plan))
        if code:
            click.echo(
                f"rehearsal: the run {_TOLD[name]} has ended with {code}; its logs are in {run.state_dir}"
            )
            return code
        runs.append({rank: _read(lines_file(directory, rank)) for rank in range(ranks)})
    found = rehearsed.compare(*runs)
    for line in rehearsed.sentences(found, faults):
        click.echo(f"rehearsal: {line}")
    if found.good and "state_dir" not in said:
        shutil.rmtree(home)
    else:
        click.echo(f"rehearsal: all that was written is in {home}")
    return 0 if found.good else 1


_TOLD = {"first": "without faults", "second": "without faults, the second time,", "faults": "with faults"}


def _check(run: LocalRun) -> int:
    """Return the number of ranks. Raises UsageError for what cannot be rehearsed."""
    if run.spec.nodes < 2 or run.spec.spares < 1 or run.spec.sizes or not run.spec.recovers:
        raise UsageError(
            "a rehearsal loses a node: it takes two nodes or more, a spare, and no other numbers of nodes "
            "(--nodes 2 --spares 1; they are made on this machine)"
        )
    return run.spec.world_size


async def _play(run: LocalRun, plan: Rehearsal) -> int:
    os.environ[VARIABLE] = msgspec.json.encode(plan).decode()
    losing = asyncio.create_task(_lose(run, Path(plan.directory) / LOST))
    try:
        return await run.run()
    finally:
        del os.environ[VARIABLE]
        losing.cancel()
        await asyncio.gather(losing, return_exceptions=True)


async def _lose(run: LocalRun, mark: Path) -> None:
    """End the node whose rank asks for it."""
    # no deadline: the run's own end
    while not mark.exists():  # noqa: ASYNC110  # another process makes it
        await asyncio.sleep(POLL_S)
    run.lose(int(mark.read_text()))


def _read(path: Path) -> Sequence[Line]:
    """Return what a rank has written; of a process that was killed the last line may lack its end."""
    decode = msgspec.json.Decoder(Line).decode
    found = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                found.append(decode(line))
    return found
