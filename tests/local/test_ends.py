"""Ends that are not good: the reason in one sentence, the right exit code, and nothing left behind."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from .localrun import TOY, Job, read_toy, toy

OFTEN = {"rank": 0, "where": "forward", "kind": "raise", "step": 3, "often": True}


def script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "script.py"
    path.write_text(text)
    return path


def test_no_spare_left(tmp_path: Path) -> None:
    faults = [{"rank": 1, "where": "forward", "kind": "node", "step": 5}]
    with toy(tmp_path, faults, nodes=2, steps=40) as job:
        job.ended(4)
        (row,) = job.ledger().jobs
        assert (row.state, row.exit_code) == ("failed", 4)
        assert row.reason is not None
        assert "no spare left for rank 1" in row.reason
        assert "node-1" in row.reason
        assert row.reason in job.stderr
        assert job.ledger().recoveries[-1].outcome == "failed"


def test_the_only_node_dies_and_an_earlier_run_of_that_name_is_not_meant(tmp_path: Path) -> None:
    node = tmp_path / "state/node-0"
    node.mkdir(parents=True)
    for folder in (node, node.parent):
        (folder / "FORMAT").write_text("1\n")
    earlier = {"job": "again", "state": "done", "exit_code": 0, "reason": "every rank ended by itself"}
    (node / "outcome.json").write_text(json.dumps(earlier))
    faults = [{"rank": 0, "where": "forward", "kind": "node", "step": 5}]
    with toy(tmp_path, faults, nodes=1, options=["--job", "again"]) as job:
        job.ended(3)
        assert "no node is left" in job.stderr


def test_the_same_exception_every_time(tmp_path: Path) -> None:
    # As long as steps are made in between, it may come as often as it likes.
    faults = [{**OFTEN, "step": step, "often": False} for step in (3, 4, 5, 6)]
    with toy(tmp_path, [*faults, {**OFTEN, "step": 9}], nodes=2, steps=40) as job:
        job.ended(1)
        (row,) = job.ledger().jobs
        assert (row.state, row.exit_code) == ("failed", 1)
        assert "ValueError: the toy raises, as told" in str(row.reason)
        assert str(row.reason) in job.stderr
        assert 6 <= len(job.ledger().generations) <= 7
        # Also the whole traceback, where the user looks for it.
        assert "in steps" in (job.state_dir / "node-0/logs/rank-00000.log").read_text()
    assert read_toy(tmp_path / "out").struck >= frozenset(range(4))


def test_a_rank_that_dies_every_time(tmp_path: Path) -> None:
    faults = [{"rank": 0, "where": "forward", "kind": "kill", "step": 3, "often": True}]
    with toy(tmp_path, faults, nodes=1, steps=20) as job:
        job.ended(4)
        assert "SIGKILL" in str(job.ledger().jobs[0].reason)


REFUSED = """
import sys, torch, ckptless
import torch.distributed.rpc
who, where = sys.argv[1:]

def train(run):
    def build():
        print("built", run.rank)
        if where == "build" and who in ("all", str(run.rank)):
            return "no State"
        if where == "rpc":
            torch.distributed.rpc.init_rpc(f"w{run.rank}", rank=run.rank, world_size=2)
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        return ckptless.State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    state = run.keep(build)
    for _ in range(3):
        state.model(torch.ones(1)).sum().backward()
        state.optimizer.step()
        if where != "carry":
            state.optimizer.zero_grad()
        if where == "commit" and who in ("all", str(run.rank)):
            state.model(torch.ones(1)).sum().backward()
        run.commit()

ckptless.run(train)
"""


@pytest.mark.parametrize(
    ("where", "who", "words"),
    [
        ("build", "all", "must return a State"),
        ("build", "1", "must return a State"),
        ("commit", "all", "has a gradient"),
        ("rpc", "all", "is a worker of torch.distributed.rpc"),
        # At the second step: without what the first one had, it would go well at the next try.
        ("carry", "all", "carries its gradient over"),
    ],
)
def test_what_is_refused_at_the_first_steps_is_said_once(
    tmp_path: Path, where: str, who: str, words: str
) -> None:
    with Job(tmp_path / "run", ["--nodes", 2, "--spares", 1], [script(tmp_path, REFUSED), who, where]) as job:
        job.ended(1)
        (row,) = job.ledger().jobs
        assert " raised " in str(row.reason)
        assert words in str(row.reason)
        assert str(row.reason) in job.stderr
        assert len(job.ledger().generations) == 1, job.story()
        assert {one.kind for one in job.ledger().faults} - {"broken"} == {"refused"}, job.story()
        assert (job.state_dir / "node-1/logs/rank-00001.log").read_text().count("built 1\n") <= 1


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("raise RuntimeError('before the run')", 1, "exit code 1"),
        ("import sys; sys.exit(3)", 3, "exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 4, "SIGKILL"),
    ],
)
def test_a_script_that_ends_before_the_run(tmp_path: Path, text: str, code: int, words: str) -> None:
    with Job(tmp_path / "run", ["--nodes", 1], [script(tmp_path, text)]) as job:
        job.ended(code)
        assert words in str(job.ledger().jobs[0].reason)
        assert words in job.stderr
        if "raise" in text:
            assert "RuntimeError: before the run" in job.stdout  # rank 0 is shown here


def test_a_loss_that_is_no_number_is_the_trainings_business(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with toy(tmp_path, nodes=2, steps=30, env={"TOY_NAN_FROM": "10"}, options=["--port", port]) as job:
        job.ended(0)
        ledger = job.ledger()
        config = json.loads((job.state_dir / "node-1/daemon.json").read_text())
    found = read_toy(tmp_path / "out").losses
    assert {line.split()[0] for (_, step), lines in found.items() if step > 10 for line in lines} == {"nan"}
    assert not ledger.faults
    assert len(ledger.generations) == 1
    # The port that was asked for is the one that was taken.
    assert {peer["port"] for peer in config["peers"]} == {port}


# ------------------------------------------------------------------------------------ wrong options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodez", "4"], ["--nodez"]),
        (["--nodes", "0"], ["nodes"]),
        (["--nodes", "2", "--spares", "1025"], ["--spares", "1024"]),
        (["--nproc-per-node", "many"], ["nproc-per-node"]),
        (["--port", "70000"], ["port"]),
        (["--tee", "first"], ["--tee first"]),
        (["--max-stall", "1"], ["max-stall"]),
    ],
)
def test_wrong_options(tmp_path: Path, options: list[str], words: list[str]) -> None:
    with Job(tmp_path / "run", options, [TOY, 1, tmp_path / "out"]) as job:
        job.refused(2, *words)
        assert not job.state_dir.exists()


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    with Job(tmp_path / "run", [], [tmp_path / "train.py"]) as job:
        job.refused(2, str(tmp_path / "train.py"))
        assert not job.state_dir.exists()


def test_no_script_at_all(tmp_path: Path) -> None:
    with Job(tmp_path / "run", ["--nodes", 2], []) as job:
        job.refused(2, "SCRIPT")


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with Job(tmp_path / "run", ["--port", port], [TOY, 1, tmp_path / "out"]) as job:
            job.refused(3, "node-0", str(port), "in use")


def test_a_state_directory_of_another_version(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "FORMAT").write_text("99\n")
    (state / "ledger.db").write_text("whatever it is then")
    with Job(tmp_path / "run", [], [TOY, 1, tmp_path / "out"], state_dir=state) as job:
        job.refused(2, str(state), "format 99", "choose another")
    assert sorted(path.name for path in state.iterdir()) == ["FORMAT", "ledger.db"]


def test_a_state_directory_that_is_not_ours(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "thesis.tex").write_text("mine")
    with Job(tmp_path / "run", [], [TOY, 1, tmp_path / "out"], state_dir=state) as job:
        job.refused(2, str(state), "not empty")
    assert [path.name for path in state.iterdir()] == ["thesis.tex"]


def test_a_state_directory_that_is_a_file(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.write_text("mine")
    with Job(tmp_path / "run", [], [TOY, 1, tmp_path / "out"], state_dir=state) as job:
        job.refused(2, str(state))
