"""What recut_script.py has written down of a job that changed its size, and whether it is as it should be."""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from ckptless.daemon.ckptctl.main import ckptctl
from ckptless.daemon.ledger.merge import Snapshot

from .localrun import HERE, Job, wait_until

SCRIPT = HERE / "recut_script.py"
SAMPLES, BATCH = 60, 12
DEADLINE_S = 100.0
# More than any job here makes.
ENDLESS = 1_000_000
# More than two lines.
TAIL_NBYTES = 2048
# Sums in another order. Over very many steps such a difference grows.
CLOSE = 1e-4
CLOSE_STEPS = 300
# The run of one rank is as long as the longest that it was compared with; so it is made once for most.
AT_ONCE = 300


@dataclass(frozen=True)
class Seen:
    """One rank's part of one step: its samples, the loss of all, a digest of the state of all after it."""

    rank: int
    step: int
    samples: list[int]
    loss: float
    digest: str
    generation: int
    pid: int
    at_s: float


@dataclass(frozen=True)
class Cut:
    """One rank's state after it was cut anew, before anything is committed."""

    rank: int
    generation: int
    step: int
    old: int
    new: int
    digest: str


def lines(folder: Path, name: str) -> Iterable[tuple[int, list[Any]]]:
    """A rank, and what it has noted; the last line may be half of one."""
    for path in sorted(folder.glob(f"{name}-*.txt")):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield int(path.stem.split("-")[1]), json.loads(line)


def steps_seen(folder: Path) -> list[Seen]:
    return [Seen(rank, *words) for rank, words in lines(folder, "seen")]


def samples_of(ranks: Iterable[Seen]) -> list[int]:
    return [number for one in ranks for number in one.samples]


def newest(folder: Path) -> int:
    """The newest step that a rank has made; 0: none."""
    return max((one.step for one in last_seen(folder)), default=0)


def last_seen(folder: Path) -> list[Seen]:
    """The last line of every rank that there ever was."""
    found: list[Seen] = []
    for path in folder.glob("seen-*.txt"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_NBYTES))
            whole, _, _ = file.read().decode().rpartition("\n")
        if whole:
            found.append(Seen(int(path.stem.split("-")[1]), *json.loads(whole.rpartition("\n")[2])))
    return found


# ------------------------------------------------------------------------------------- a running job


def elastic(
    home: Path,
    kind: str,
    options: Sequence[object],
    env: Mapping[str, str] | None = None,
    steps: int = ENDLESS,
) -> Job:
    """A job that is called `el`; every time limit follows from --max-stall 60."""
    words = ["--job", "el", "--max-stall", 60, "--tee", "none", *options]
    return Job(home, words, [SCRIPT, steps, home / "out", kind], env)


def resize(job: Job, nodes: object) -> tuple[int, Any]:
    """`ckptctl resize`: its exit code, and the answer."""
    (run,) = job.ledger().jobs
    words = ["--state-dir", str(job.state_dir), "--json", "resize", run.job, "--nodes", str(nodes)]
    done = CliRunner().invoke(ckptctl, words)
    assert done.stdout, done.output
    return done.exit_code, json.loads(done.stdout)["resized"]


def resized(job: Job, nodes: object, ranks: int) -> None:
    """Ask for a size, and wait until so many ranks train."""
    before = job.ledger().generations[-1].generation
    code, answer = resize(job, nodes)
    assert (code, answer["verdict"]) == (0, "accepted"), answer
    trains(job, ranks, after=before)


def trains(job: Job, ranks: int, *, after: int = 0, steps: int = 4) -> int:
    """Until so many ranks have made some steps in one generation after this one; return its number."""

    def there() -> bool:
        found = last_seen(job.home / "out")
        generation = max((one.generation for one in found), default=0)
        made = [one.step for one in found if one.generation == generation]
        if generation <= after or len(made) != ranks:
            return False
        last = job.ledger().generations[-1]
        begun = (last.generation, len(last.places)) == (generation, ranks)
        return begun and min(made) >= (last.restore_step or 0) + steps

    wait_until(there, DEADLINE_S, job)
    return job.ledger().generations[-1].generation


def end(job: Job) -> Snapshot:
    """All ranks end after one of their next steps, and leave nothing."""
    names = {str(pid) for pid in job.processes()}
    (job.home / "out/end").touch()
    job.ended(0, DEADLINE_S)
    # What torch shares has the number of the process in its name.
    left = [path.name for path in Path("/dev/shm").iterdir() if names.intersection(path.name.split("_"))]
    assert not left, left
    return job.ledger()


# --------------------------------------------------------------------------------- how it should be


@functools.cache
def made_alone(steps: int) -> tuple[Seen, ...]:
    """A run of one rank, which nobody tells to be more."""
    with tempfile.TemporaryDirectory(prefix="ckptless-reference-") as scratch:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RECUT_", "CKPTLESS_"))}
        subprocess.run(
            [sys.executable, str(SCRIPT), str(steps), scratch, "ddp"],
            env={**inherited, "OMP_NUM_THREADS": "1"},
            check=True,
            # A soak has thousands, and other runs beside it.
            timeout=DEADLINE_S + 0.1 * steps,
        )
        found = sorted(steps_seen(Path(scratch)), key=lambda one: one.step)
    assert [one.step for one in found] == list(range(1, steps + 1))
    per_epoch = SAMPLES // BATCH
    for first in range(0, steps - per_epoch + 1, per_epoch):
        epoch = [number for one in found[first : first + per_epoch] for number in one.samples]
        assert sorted(epoch) == list(range(SAMPLES))
    return tuple(found)


@dataclass
class Story:
    """The steps that count: of each what all of its ranks have noted, in order, redone ones left out.

    `pids`: by generation, node and slot.
    """

    ledger: Snapshot
    steps: dict[int, list[Seen]] = field(default_factory=dict)
    cuts: dict[int, list[Cut]] = field(default_factory=dict)
    pids: dict[tuple[int, int, int], int] = field(default_factory=dict)

    @property
    def worlds(self) -> list[int]:
        """The number of ranks of each generation."""
        return [len(one.places) for one in self.ledger.generations]

    def replaced(self) -> set[tuple[int, int]]:
        """The slots that had one process in a generation, and another one in the next that trained."""
        trained = sorted({generation for generation, _node, _slot in self.pids})
        return {
            (node, slot)
            for before, after in itertools.pairwise(trained)
            for (generation, node, slot), pid in self.pids.items()
            if generation == before and self.pids.get((after, node, slot), pid) != pid
        }


def story(job: Job, ledger: Snapshot) -> Story:
    """Read what a job has left, and see that all that has to hold for any job does.

    Every part of every step, also of those that were done again, has the samples that it should have, and
    the loss of a run that never changed its size; nothing is missing; a state that was cut anew is bit for
    bit what the number of ranks before had committed of that step.
    """
    found = Story(ledger)
    for rank, words in lines(job.home / "out", "resized"):
        cut = Cut(rank, *words)
        found.cuts.setdefault(cut.generation, []).append(cut)
    seen = steps_seen(job.home / "out")
    alone = made_alone(-(-max(one.step for one in seen) // AT_ONCE) * AT_ONCE)
    by_generation: dict[int, dict[int, list[Seen]]] = {}
    for one in sorted(seen, key=lambda one: one.rank):
        by_generation.setdefault(one.generation, {}).setdefault(one.step, []).append(one)
    for generation in ledger.generations:
        restored, world = generation.restore_step or 0, len(generation.places)
        found.steps = {step: ranks for step, ranks in found.steps.items() if step <= restored}
        for cut in found.cuts.get(generation.generation, []):
            assert (cut.step, cut.new) == (restored, world), cut
            committed = {one.digest for one in found.steps[restored]} if restored else {cut.digest}
            assert committed == {cut.digest}, f"{cut}, and what was committed is {committed}\n{job.story()}"
        for step, ranks in by_generation.get(generation.generation, {}).items():
            assert step > restored
            _as_alone(ranks, world, alone[step - 1])
            found.steps[step] = ranks
            for one in ranks:
                found.pids[generation.generation, *generation.places[one.rank]] = one.pid
    assert sorted(found.steps) == list(range(1, max(found.steps) + 1)), job.story()
    for step, ranks in found.steps.items():
        assert [one.rank for one in ranks] == list(range(_world(ledger, ranks[0].generation))), step
        assert samples_of(ranks) == alone[step - 1].samples
        assert len({one.digest for one in ranks}) == 1, ranks
    (row,) = ledger.jobs
    assert (row.state, row.exit_code) == ("done", 0)
    assert not ledger.problems
    return found


def _world(ledger: Snapshot, generation: int) -> int:
    (places,) = (one.places for one in ledger.generations if one.generation == generation)
    return len(places)


def _as_alone(ranks: list[Seen], world: int, alone: Seen) -> None:
    for one in ranks:
        first, last = BATCH * one.rank // world, BATCH * (one.rank + 1) // world
        assert one.samples == alone.samples[first:last], (one, world, alone)
        if one.step <= CLOSE_STEPS:
            assert abs(one.loss - alone.loss) <= CLOSE * abs(alone.loss), (one, alone)
        assert "differ" not in one.digest, one


def pid_of(job: Job, rank: int) -> int:
    """The process that last had this rank."""
    lines_of = (job.home / f"out/pid-{rank}.txt").read_text().splitlines()
    return int(json.loads(lines_of[-1])[0])


def arm(job: Job, strike: int) -> None:
    """From now on a fault of RECUT_STRIKES is in force."""
    (job.home / f"out/arm-{strike}").touch()


def struck(job: Job, strike: int) -> bool:
    return (job.home / f"out/struck-{strike}").exists()


def went_on(out: Path, before: Sequence[Seen], worlds: tuple[int, int], step: int) -> None:
    """A job of `worlds[0]` ranks made the steps `before`; its next start had `worlds[1]`, and this step.

    The state of all is the same bits as at that step; each sample of each step is seen, and only once.
    """
    pids = {one.pid for one in before}
    cuts = [Cut(rank, *words) for rank, words in lines(out, "resized")]
    kept = {one.digest for one in before if one.step == step}
    assert {(c.old, c.new, c.step) for c in cuts} == {(*worlds, step)}
    assert [c.rank for c in cuts] == list(range(worlds[1]))
    assert {c.digest for c in cuts} == kept
    after, alone = [one for one in steps_seen(out) if one.pid not in pids], made_alone(AT_ONCE)
    assert min(one.step for one in after) == step + 1
    for number in range(1, max(one.step for one in after) + 1):
        ranks = [one for one in (before if number <= step else after) if one.step == number]
        assert len(ranks) == worlds[number > step], (number, ranks)
        assert len({one.digest for one in ranks}) == 1, (number, ranks)
        assert samples_of(ranks) == alone[number - 1].samples, (number, ranks)
        assert abs(ranks[0].loss - alone[number - 1].loss) <= CLOSE * abs(alone[number - 1].loss), ranks
