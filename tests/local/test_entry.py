"""What a script does between `run.keep` and its loop is done again after a fault, and changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from .localrun import FAULTY_DEADLINE_S, Job

SCRIPT = """
import os, signal, sys, torch, ckptless
from pathlib import Path
from torch.utils.data import DataLoader

HOW, OUT, KILLS = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "kills"

def train(run):
    def build():
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return ckptless.State(model=model, optimizer=optimizer, scheduler=scheduler, best=1e9)

    s = run.keep(build)
    if HOW == "changes":
        s.optimizer.param_groups[0]["lr"] = 0.05
        s.best = 5.0
        torch.manual_seed(7)
    if HOW == "writes" or (HOW == "asks" and run.step == 0):
        torch.nn.init.ones_(s.model.module.weight)

    def step(x):
        loss = s.model(x + torch.randn_like(x)).square().mean()
        loss.backward()
        s.optimizer.step()
        s.optimizer.zero_grad()
        s.best = min(s.best, loss.item())
        run.commit(loss=loss)
        if KILLS and run.step in (9, 15) and run.rank == 1:
            if not (OUT / f"kill-{run.step}").exists():
                (OUT / f"kill-{run.step}").touch()
                os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(run.epoch, 2):
        for x in run.batches(DataLoader(torch.ones(6, 4))):
            step(x)
        s.scheduler.step()
        for x in run.batches(DataLoader(torch.ones(6, 4)), name="other"):
            step(x)
    state = [p.tolist() for p in s.model.parameters()], s.optimizer.param_groups[0]["lr"], s.best
    (OUT / f"end-{run.rank}").write_text(f"{run.step} {state} {torch.rand(1).item()}")

ckptless.run(train)
"""


def trained(home: Path, how: str, *, kills: bool, code: int = 0) -> tuple[dict[str, str], set[str], str]:
    """Return what the ranks have come to, the kinds of events, and what the launcher says."""
    home.mkdir()
    script = home / "script.py"
    script.write_text(SCRIPT)
    words = [script, how, home, "kills" if kills else "quiet"]
    with Job(home / "job", ["--nodes", 2, "--tee", "none"], words) as job:
        job.ended(code, FAULTY_DEADLINE_S)
        kinds = {event.kind for event in job.ledger().events}
    return {path.name: path.read_text() for path in home.glob("end-*")}, kinds, job.stderr


@pytest.mark.parametrize("how", ["changes", "asks"])
def test_it_is_as_without_a_fault(tmp_path: Path, how: str) -> None:
    """Rates, plain data, random numbers; a scheduler between two loops of an epoch; what is done once."""
    want, quiet, _ = trained(tmp_path / "quiet", how, kills=False)
    found, kinds, _ = trained(tmp_path / "kills", how, kills=True)
    assert len(list((tmp_path / "kills").glob("kill-*"))) == 2
    assert found == want
    assert len(found) == 2
    assert "put-back" in kinds
    assert not {"put-back", "written-early"} & quiet


def test_tensors_that_are_written_to_again_end_the_job(tmp_path: Path) -> None:
    found, kinds, said = trained(tmp_path / "kills", "writes", kills=True, code=1)
    assert found == {}
    assert "written-early" in kinds
    assert "has written to state.model.module.weight between run.keep and its loop" in said
