"""State that is kept where nobody looks at first: after faults the losses are the same, or it is refused."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from .localrun import FAULTY_DEADLINE_S, HERE, Job, Lines, read_toy

pytestmark = pytest.mark.timeout(400)

Fault = tuple[int, int, str]

STEPS = 40
RANKS = 2
QUICK: Sequence[Fault] = ((0, 3, "update"), (1, 11, "commit"), (0, 17, "forward"), (1, 25, "backward"))


@contextmanager
def unseen(home: Path, kind: str, faults: Sequence[Fault] = (), steps: int = STEPS) -> Iterator[Job]:
    words = ["--nodes", RANKS, "--spares", 1, "--max-stall", 60, "--tee", "none"]
    script = [HERE / "unseen.py", kind, steps, home / "out", json.dumps(faults)]
    with Job(home, words, script) as job:
        yield job


@functools.cache
def clean(kind: str, steps: int = STEPS) -> Lines:
    with tempfile.TemporaryDirectory(prefix="ckptless-unseen-") as scratch:
        with unseen(Path(scratch), kind, steps=steps) as job:
            job.ended(0)
        found = read_toy(Path(scratch) / "out").losses
    assert set(found) == {(rank, step) for rank in range(RANKS) for step in range(1, steps + 1)}
    return found


def same(home: Path, kind: str, faults: Sequence[Fault], steps: int = STEPS) -> None:
    """Every loss and every batch, redone ones too, is that of a run without a fault."""
    with unseen(home, kind, faults, steps) as job:
        job.ended(0, FAULTY_DEADLINE_S)
        found = read_toy(home / "out")
        assert found.struck == frozenset(range(len(faults))), job.story()
        wrong = {at: lines for at, lines in found.losses.items() if lines != clean(kind, steps)[at]}
        assert not wrong, f"{len(wrong)} losses differ, first {sorted(wrong)[:4]}\n{job.story()}"
        assert set(found.losses) == set(clean(kind, steps))


KINDS = (
    "handwritten",
    "grouped",
    "listed",
    "container",
    "fsdp-container",
    "ema",
    "extra",
    "talking",
    "closure",
)
# One of each thing that is taken another way; the others are `slow`.
FEW = ("listed", "fsdp-container", "extra", "talking", "closure")


@pytest.mark.parametrize("kind", [k if k in FEW else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_a_few_faults(tmp_path: Path, kind: str) -> None:
    same(tmp_path, kind, QUICK)


def fifteen(seed: int, steps: int) -> list[Fault]:
    chance = random.Random(seed)
    at = sorted(chance.sample(range(steps), 15))
    places = ("forward", "backward", "update", "commit")
    return [(chance.randrange(RANKS), step, chance.choice(places)) for step in at]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_fifteen_faults(tmp_path: Path, kind: str) -> None:
    same(tmp_path, kind, fifteen(len(kind), 150), 150)


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("diverges", 4, ("points to the script, not to a node", "run.compare()")),
        pytest.param(
            "compared",
            1,
            ("different tensors, first state.model.module.a.weight (16, 8) after the update",),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_script_that_makes_ranks_differ_is_told_so(
    tmp_path: Path, kind: str, code: int, words: tuple[str, ...]
) -> None:
    with unseen(tmp_path, kind) as job:
        job.ended(code)
        assert all(word in job.stderr for word in words), job.story()
        assert max(step for _rank, step in read_toy(tmp_path / "out").losses) <= 7


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("opaque", ("state.updates is a Opaque whose state cannot be found", "state_dict")),
        ("cut", ("ranks 0 and 1 have different tensors, first state.model.a.weight", "DTensor")),
        pytest.param("stages", ("ranks 0 and 1 have different tensors",), marks=pytest.mark.slow),
    ],
)
def test_refused_before_the_first_step(tmp_path: Path, kind: str, words: tuple[str, ...]) -> None:
    with unseen(tmp_path, kind) as job:
        job.ended(1)
        assert all(word in job.stderr for word in words), job.story()
        assert not read_toy(tmp_path / "out").losses


LOOPS = """
import os, signal, sys, torch, ckptless
from pathlib import Path
from torch.utils.data import DataLoader

HOW, OUT = sys.argv[1], Path(sys.argv[2])

def train(run):
    def build():
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        own = {"epoch": 0} if HOW == "has its own" else {}
        return ckptless.State(model=model, optimizer=torch.optim.AdamW(model.parameters()), **own)

    state, loader = run.keep(build), DataLoader(torch.ones(6, 2), 1)
    held = DataLoader(torch.ones(4, 2), 2)
    shuffled = DataLoader(torch.ones(4, 2), 2, shuffle=True)
    def steps():
        if HOW == "several":
            yield from run.batches(loader, epochs=3)
        elif HOW == "one after the other":
            for name in ("warm-up", "", "last"):
                yield from run.batches(loader, name=name)
        elif HOW == "two in each":
            right = DataLoader(torch.ones(6, 2), 1)
            for _ in range(run.epoch, 3):
                yield from run.batches(loader)
                yield from run.batches(right, name="right")
        elif HOW == "has its own":
            while state.epoch < 3:
                yield from run.batches(loader)
                state.epoch += 1
        else:
            first = 0 if HOW == "does not ask" else run.epoch
            for _ in range(first, 3):
                yield from loader if HOW == "past" else run.batches(loader)
    least = 1e9
    for x in steps():
        loss = state.model(x).mean()
        loss.backward()
        if HOW == "carries":
            least = min(least, loss.item())
        state.optimizer.step()
        state.optimizer.zero_grad()
        for y in shuffled if HOW == "evaluates before" else held:
            state.model(y)
        run.commit()
        if run.step == 9 and run.rank == 1 and run.generation == 1 and HOW != "past":
            os.kill(os.getpid(), signal.SIGKILL)
        LATE
    (OUT / f"steps-{run.rank}").write_text(str(run.step))

ckptless.run(train)
"""


@pytest.mark.parametrize(
    ("how", "words", "steps"),
    [
        ("past", "takes batches of a DataLoader itself", 18),
        ("does not ask", "range(run.epoch, epochs)", 18),
        ("carries", "least: variables of the training loop", 18),
        ("asks late", " of script.py ends the loop behind run.commit", 18),
        ("evaluates", "random numbers were drawn between the commit of step 1 and", 18),
        ("picks", "random numbers were drawn between the commit of step 1 and", 18),
        ("evaluates before", "", 18),
        ("asks", "", 18),
        ("several", "", 18),
        ("one after the other", "", 18),
        ("two in each", "", 36),
        ("has its own", "", 18),
    ],
)
def test_a_loop_that_would_not_go_on_where_it_was_is_told(
    tmp_path: Path, how: str, words: str, steps: int
) -> None:
    script = tmp_path / "script.py"
    late = {
        "asks late": "if run.step == 18: break",
        "evaluates": "[state.model(y) for y in shuffled]",
        "picks": '__import__("random").random()',
    }
    script.write_text(LOOPS.replace("LATE", late.get(how, "")))
    with Job(tmp_path / "job", ["--nodes", RANKS, "--tee", "none"], [script, how, tmp_path]) as job:
        job.ended(0)
        kinds = ("outside-state", "late-break")
        told = {event.text for event in job.ledger().events if event.kind in kinds}
    assert len(told) == bool(words)
    assert all(words in text for text in told)
    assert {(tmp_path / f"steps-{rank}").read_text() for rank in range(RANKS)} == {str(steps)}


SWALLOWS = """
import os, signal, sys, time, torch, ckptless
from pathlib import Path
from torch.utils.data import DataLoader

OUT = Path(sys.argv[1])

def train(run):
    def build():
        torch.manual_seed(1)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        return ckptless.State(model=model, optimizer=torch.optim.AdamW(model.parameters()))

    state = run.keep(build)
    for x in run.batches(DataLoader(torch.arange(32.0).view(16, 2), 1, shuffle=True)):
        try:
            if run.step == 5 and run.rank == 0:
                (OUT / "in-it").touch()
            if (run.step, run.rank, run.generation) == (5, 1, 1):
                limit = time.monotonic() + 60
                while not (OUT / "in-it").exists() and time.monotonic() < limit:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            noise = torch.rand(2)
            loss = state.model(x + noise).mean()
            loss.backward()
            state.optimizer.step()
        except Exception:
            with (OUT / f"swallowed-{run.rank}").open("a") as log:
                log.write(f"{run.step}\\n")
            continue
        finally:
            state.optimizer.zero_grad()
        with (OUT / f"noise-{run.rank}").open("a") as log:
            log.write(f"{run.step} {noise.tolist()}\\n")
        run.commit()

ckptless.run(train)
"""


THREADED = """
import threading, torch, ckptless
from torch.utils.data import DataLoader

def train(run):
    def build():
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        return ckptless.State(model=model, optimizer=torch.optim.AdamW(model.parameters()))

    state, raised = run.keep(build), []
    batches = run.batches(DataLoader(torch.ones(6, 2), 1))
    def ahead():
        try:
            next(batches)
        except Exception as error:
            raised.append(error)
    thread = threading.Thread(target=ahead)
    thread.start()
    thread.join(60)
    raise raised[0]

ckptless.run(train)
"""


def test_a_thread_that_takes_batches_ahead_is_refused(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(THREADED)
    with Job(tmp_path / "job", ["--nodes", RANKS, "--tee", "none"], [script]) as job:
        job.ended(1)
        assert "asked for a batch by another thread than run.keep" in str(job.ledger().jobs[0].reason)


def test_a_script_that_catches_whatever_a_step_raises_takes_no_further_batch(tmp_path: Path) -> None:
    """What ended the step comes again at the next batch, where the script does not catch it."""
    (script := tmp_path / "script.py").write_text(SWALLOWS)
    with Job(tmp_path / "job", ["--nodes", RANKS, "--tee", "none"], [script, tmp_path]) as job:
        job.ended(0)
    assert (tmp_path / "swallowed-0").read_text().splitlines() == ["5"]
    lines = set((tmp_path / "noise-0").read_text().splitlines())
    assert sorted(int(line.split()[0]) for line in lines) == [*range(16)], "a step was another one again"
