"""`ckptless-run --rehearse`: a script for a few steps on this machine, with faults and without, compared."""

import asyncio
import os
import secrets
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
from ckptless.daemon.transport.tasks import end_all
from ckptless.rehearsal import LOST, VARIABLE, VERSION, Fault, Line, Rehearsal, fault_file, lines_file

STEPS = 8
POLL_S = 0.02
FAULTS = "faults"
# By its folder, how each run is called.
_RUNS = {"first": "without faults", "second": "without faults, the second time,", FAULTS: "with faults"}
# What a rehearsal has of its own.
_ITS_OWN = ("rehearse", "rehearse_steps", "local", "tee", "state_dir")


def rehearse(
    script: str, arguments: tuple[str, ...], said: Mapping[str, object], env: Mapping[str, str]
) -> int:
    """Run the script three times, and tell what is not the same after a fault; return the exit code.

    Raises UsageError.
    """
    steps = int(str(said.get("rehearse_steps") or STEPS))
    folder = (
        said.get("state_dir") or Path(tempfile.gettempdir()) / f"ckptless-rehearsal-{secrets.token_hex(4)}"
    )
    home = Path(str(folder)).absolute()
    options = {"nodes": "2", "spares": 1, **{name: one for name, one in said.items() if name not in _ITS_OWN}}
    faults: tuple[Fault, ...] = ()
    found: list[rehearsed.Run] = []
    for name, told in _RUNS.items():
        directory = home / name
        its_own = {"local": True, "tee": "none", "state_dir": directory / "state"}
        run = local_run(script, arguments, {**options, **its_own}, env)
        ranks = _check(run)
        _make(directory)
        if name == FAULTS:
            faults = (Fault(steps // 3 + 1, ranks - 1, "process"), Fault(2 * steps // 3 + 1, 0, "node"))
        code = asyncio.run(_play(run, Rehearsal(VERSION, str(directory), steps, faults)))
        if code:
            click.echo(f"rehearsal: the run {told} has ended with {code}; its logs are in {run.state_dir}")
            return code
        found.append({rank: _read(directory, rank) for rank in range(ranks)})
    spared = [one for number, one in enumerate(faults) if not fault_file(home / FAULTS, number).exists()]
    compared = rehearsed.compare(found[0], found[1], found[2], spared)
    struck = [one for one in faults if one not in spared]
    return _tell(compared, struck, home, keep="state_dir" in said)


def _tell(found: rehearsed.Found, faults: Sequence[Fault], home: Path, *, keep: bool) -> int:
    """Say what was found; return the exit code."""
    for line in rehearsed.sentences(found, faults):
        click.echo(f"rehearsal: {line}")
    if found.good and not keep:
        shutil.rmtree(home)
    else:
        click.echo(f"rehearsal: all that was written is in {home}")
    return 0 if found.good else 1


def _make(directory: Path) -> None:
    """Make a run's folder, for nobody else. Raises UsageError."""
    try:
        directory.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise UsageError(
            f"a rehearsal makes {directory} ({error.strerror}): name another --state-dir"
        ) from error


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
        await end_all([losing])


async def _lose(run: LocalRun, mark: Path) -> None:
    """End the node whose rank asks for it."""
    # no deadline: the run's own end
    while not mark.exists():  # noqa: ASYNC110  # another process makes it
        await asyncio.sleep(POLL_S)
    run.lose_agent(int(mark.read_text()))


def _read(directory: Path, rank: int) -> Sequence[Line]:
    """Return what a rank's processes have written, one after the other."""
    decode = msgspec.json.Decoder(Line).decode
    processes = []
    for path in directory.glob(lines_file(directory, rank, "*").name):
        lines = [decode(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        processes.append(lines)
    processes.sort(key=lambda lines: lines[0].generation if lines else 0)
    return [line for lines in processes for line in lines]
