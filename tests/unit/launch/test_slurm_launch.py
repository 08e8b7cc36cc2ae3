"""Around the steps of a job: the folder of a run, the environment of its agents, what a waiting task says."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from ckptless.daemon.agent.ranks.socket_folder import RANKS, SocketFolder
from ckptless.daemon.launch import slurm, step
from ckptless.daemon.launch.slurm import SlurmRun, make_log_dir, named_log_dir, step_env
from ckptless.daemon.launch.step import StepRun
from ckptless.daemon.protocol.errors import StartError, UsageError
from ckptless.daemon.protocol.messages import JobSpec, Limits, Outcome
from ckptless.daemon.protocol.outcome import write_outcome
from ckptless.daemon.settings.agent_config import AGENT_CONFIG, SharedConfig


def config(log_dir: Path = Path("/nowhere"), job: str = "4711") -> SharedConfig:
    spec = JobSpec(
        job=job,
        command=("t",),
        nodes=1,
        spares=1,
        slots_per_node=1,
        limits=Limits.from_max_stall(60),
        names=("n1", "n2"),
    )
    return SharedConfig(
        spec=spec,
        argv=("t",),
        module=False,
        cwd="/",
        daemon_socket="/s",
        log_dir=str(log_dir),
        preload=(),
    )


# ------------------------------------------------------------------------------------------- folders


def test_every_run_of_a_job_gets_the_next_folder(tmp_path: Path) -> None:
    parent = tmp_path / "not" / "there"
    assert make_log_dir(parent, 4711) == (parent / "ckptless-4711", "4711")
    assert make_log_dir(parent, 4711) == (parent / "ckptless-4711.1", "4711.1")
    assert make_log_dir(parent, 47) == (parent / "ckptless-47", "47")
    assert make_log_dir(parent, 4711) == (parent / "ckptless-4711.2", "4711.2")


def test_a_folder_is_told_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agents have another working directory."""
    monkeypatch.chdir(tmp_path)
    assert make_log_dir(Path(), 1)[0] == tmp_path / "ckptless-1"
    assert named_log_dir(Path("x"), "1.s0") == tmp_path / "x" / "ckptless-1.s0"


def test_runs_that_begin_at_once_share_nothing(tmp_path: Path) -> None:
    together = threading.Barrier(8)

    def begin(_: int) -> tuple[Path, str]:
        together.wait(30)
        return make_log_dir(tmp_path / "logs", 4711)

    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            made = list(pool.map(begin, range(8)))
            assert len({folder for folder, _ in made}) == len({name for _, name in made}) == 8
    assert len(list((tmp_path / "logs").iterdir())) == 160


def test_the_tasks_of_a_step_share_a_folder(tmp_path: Path) -> None:
    assert named_log_dir(tmp_path, "1.s0") == named_log_dir(tmp_path, "1.s0")


def test_a_place_without_a_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="choose another --log-dir"):
        make_log_dir(tmp_path / "file", 1)
    with pytest.raises(UsageError, match="choose another --log-dir"):
        named_log_dir(tmp_path / "file", "1.s0")


def test_a_job_of_too_many_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "MAX_RUNS", 3)
    for _ in range(3):
        make_log_dir(tmp_path, 1)
    with pytest.raises(UsageError, match="3 runs of job 1"):
        make_log_dir(tmp_path, 1)


# --------------------------------------------------------------------------------------- environment


def test_the_steps_environment_carries_the_run_and_all_else() -> None:
    env = {"PATH": "/bin", "SLURM_JOB_ID": "4711", "MY_DATA": "a=b", AGENT_CONFIG: "of an outer run"}
    found = step_env(env, config())
    assert found.items() >= {"PATH": "/bin", "SLURM_JOB_ID": "4711", "MY_DATA": "a=b"}.items()
    assert msgspec.json.decode(base64.b64decode(found[AGENT_CONFIG]), type=SharedConfig) == config()
    assert env[AGENT_CONFIG] == "of an outer run"


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_CPUS_PER_TASK",
        "SRUN_CPUS_PER_TASK",
        "SLURM_TRES_PER_TASK",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_GPUS_PER_TASK",
        "SLURM_GPUS",
        "SLURM_NTASKS_PER_GPU",
        "SLURM_GPU_BIND",
    ],
)
def test_what_would_give_the_agent_one_tasks_share(name: str) -> None:
    """srun(1) takes these for options: per task for a step of one task, or of all nodes for one node."""
    assert name not in step_env({name: "1"}, config())


# ------------------------------------------------------------------------------------ how a run ended


def _ended(tmp_path: Path, state: str, code: int) -> None:
    outcome = msgspec.convert({"state": state, "exit_code": code, "reason": "because"}, Outcome)
    write_outcome(tmp_path, "4711", outcome)


@pytest.mark.parametrize(("state", "code"), [("done", 0), ("failed", 1), ("stopped", 143)])
def test_the_exit_code_is_the_outcomes(tmp_path: Path, state: str, code: int) -> None:
    _ended(tmp_path, state, code)
    assert SlurmRun(config(tmp_path), {})._result() == code


def test_without_an_outcome_it_says_where_to_look(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=str(tmp_path)):
        SlurmRun(config(tmp_path), {})._result()


# ------------------------------------------------------------------------ a task that is not the agent


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[socket.socket]:
    """Yield where the node's agent will listen."""
    with contextlib.closing(SocketFolder(f"{os.getpid()}-{tmp_path.name}")) as folder:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(folder.socket(RANKS))
        yield listener


def _waiter(tmp_path: Path) -> StepRun:
    return StepRun(config(tmp_path, f"{os.getpid()}-{tmp_path.name}"), {}, first=False, says=False)


def test_it_waits_for_the_agent_to_come_and_to_hang_up(tmp_path: Path, agent: socket.socket) -> None:
    waiter = _waiter(tmp_path)
    with agent, ThreadPoolExecutor(1) as pool:
        code = pool.submit(waiter.run)
        time.sleep(0.3)  # it finds nobody at first
        agent.listen()
        connection, _ = agent.accept()
        with connection:
            connection.sendall(b"whatever an agent may say to a stranger")
            time.sleep(0.3)
            assert not code.done()
            write_outcome(tmp_path, waiter.config.spec.job, Outcome(state="failed", exit_code=7, reason="x"))
        assert code.result(20) == 7


def test_it_does_not_wait_for_ever(
    tmp_path: Path, agent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "AGENT_DEADLINE_S", 0.3)
    monkeypatch.setattr(step, "OUTCOME_DEADLINE_S", 0.3)
    with agent:
        with pytest.raises(StartError, match="did not come up"):
            _waiter(tmp_path).run()
        agent.listen()
        with ThreadPoolExecutor(1) as pool:
            code = pool.submit(_waiter(tmp_path).run)
            agent.accept()[0].close()
            assert code.result(20) == StartError.exit_code


def test_the_first_task_of_a_node_becomes_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[str], dict[str, str]]] = []

    def execve(_: str, words: list[str], env: dict[str, str]) -> None:
        seen.append((words, env))
        raise InterruptedError

    monkeypatch.setattr(os, "execve", execve)
    run = StepRun(config(tmp_path), {"SLURM_STEP_ID": "0"}, first=True, says=True, verbose=True)
    with pytest.raises(InterruptedError):
        run.run()
    ((words, env),) = seen
    assert words[-2:] == ["--slurm", "--verbose"]
    assert env["SLURM_STEP_ID"] == "0"
    assert msgspec.json.decode(base64.b64decode(env[AGENT_CONFIG]), type=SharedConfig) == run.config


# ------------------------------------------------------------------------------------------- domains


def test_every_agent_is_told_the_same_failure_domains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, ...]] = []

    async def start(run: SlurmRun, name: str) -> slurm.NodeStep:
        told.append(run.config.spec.domains)
        return slurm.NodeStep(name, tmp_path / "console", tmp_path / "log")

    async def config_of_slurm() -> dict[str, str]:
        return {"TaskPlugin": "task/none"}

    monkeypatch.setattr(SlurmRun, "_start", start)
    monkeypatch.setattr(slurm, "slurm_config", config_of_slurm)
    run = SlurmRun(config(tmp_path), {}, domains={"a": ("n1",), "b": ("n2",)})
    with pytest.raises(StartError):
        asyncio.run(run.run())  # no step is running: nobody is left
    assert told == [("a", "b")] * 2


@pytest.mark.parametrize("code", [UsageError.exit_code, StartError.exit_code])
def test_an_agent_that_cannot_start_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The others, which wait for it, are ended."""
    processes: list[asyncio.subprocess.Process] = []

    async def start(_run: SlurmRun, name: str) -> slurm.NodeStep:
        step = slurm.NodeStep(name, tmp_path / f"console-{name}", tmp_path / f"log-{name}")
        what = f"echo {name} has no such address >&2; exit {code}" if name == "n2" else "exec sleep 100"
        with step.log.open("wb") as log:
            step.process = await asyncio.create_subprocess_exec("sh", "-c", what, stderr=log)
        processes.append(step.process)
        return step

    async def config_of_slurm() -> dict[str, str]:
        return {"TaskPlugin": "task/none"}

    monkeypatch.setattr(SlurmRun, "_start", start)
    monkeypatch.setattr(slurm, "slurm_config", config_of_slurm)
    with pytest.raises(StartError, match="n2: n2 has no such address"):
        asyncio.run(SlurmRun(config(tmp_path), {}).run())
    assert [process.returncode for process in processes] == [-signal.SIGTERM, code]
