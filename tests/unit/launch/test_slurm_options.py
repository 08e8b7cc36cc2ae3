"""From the command line and Slurm's environment to a run: what it becomes, and what is refused."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from ckptless.daemon.launch import main
from ckptless.daemon.launch.options import slurm_run
from ckptless.daemon.launch.preload import ALWAYS
from ckptless.daemon.launch.slurm import SlurmRun
from ckptless.daemon.launch.step import StepRun
from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.protocol.model import Limits
from ckptless.daemon.settings import site as site_settings
from ckptless.daemon.settings.agent_config import AGENT_CONFIG, SharedConfig
from ckptless.daemon.settings.options import ReplicationSettings

JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "node[01-05]",
    "SLURM_NTASKS_PER_NODE": "2",
    "CKPTLESS_SPARES": "1",
}
TASK = {
    **JOB,
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
Run = Callable[..., SlurmRun | StepRun]


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(site_settings, "DEFAULT_FILE", tmp_path / "no-such.yaml")
    Path("train.py").touch()
    return tmp_path


def options(*words: str) -> tuple[str, tuple[str, ...], dict[str, object]]:
    """As click hands them to the command."""
    context = main.command.make_context("ckptless-run", list(words))
    with context:
        params = dict(context.params)
    script, script_args = params.pop("script"), params.pop("script_args")
    return script, script_args, main.given(params)


def run(*words: str, env: Mapping[str, str] = JOB) -> SlurmRun | StepRun:
    return slurm_run(*options(*words), env)


def refused(*words: str, env: Mapping[str, str] = JOB) -> str:
    with pytest.raises(UsageError) as caught:
        run(*words, env=env)
    text = str(caught.value)
    assert text
    assert "\n" not in text
    return text


def test_a_run_in_a_batch_script(folder: Path) -> None:
    found = run("train.py", "--lr", "1")
    assert isinstance(found, SlurmRun)
    config = found.config
    spec = config.spec
    assert (spec.job, spec.nodes, spec.spares, spec.slots_per_node) == ("4711", 4, 1, 2)
    assert spec.names == tuple(f"node0{n}" for n in range(1, 6))
    assert spec.limits == Limits.from_max_stall(300.0)
    assert config.argv == spec.command == (str(folder / "train.py"), "--lr", "1")
    assert (config.cwd, config.copies, config.tee) == (str(folder), 2, (0,))
    assert config.log_dir == config.outcome_dir == str(folder / "ckptless-4711")
    assert Path(config.log_dir).is_dir()
    assert config.preload == ALWAYS
    assert spec.recovers
    assert config.daemon_socket == "/run/ckptless/ckptlessd.sock"


@pytest.mark.parametrize(
    ("words", "more"),
    [(["--tier", "1"], {}), ([], {"CKPTLESS_ROOTLESS": "1"}), (["--tier=1"], {"CKPTLESS_ROOTLESS": "0"})],
)
@pytest.mark.parametrize("around", [JOB, TASK])
def test_tier_1(words: list[str], more: Mapping[str, str], around: Mapping[str, str]) -> None:
    env = {**around, **more, "CKPTLESS_SPARES": "0"}
    config = run(*words, "train.py", env=env).config
    assert not config.spec.recovers
    assert config.preload == ALWAYS
    # The command line counts more.
    assert run("--tier", "4", "train.py", env=env).config.spec.recovers


@pytest.mark.parametrize(
    ("words", "more", "text"),
    [
        (["--spares", "1"], {}, "--spares is for runs that recover"),
        (["--max-restarts", "1"], {}, "--max-restarts is for runs that recover"),
        (["--save-dir", "/tmp"], {}, "--save-dir is for runs that recover"),
        ([], {}, "add --spares 0"),
        ([], {"CKPTLESS_ROOTLESS": "yes"}, "CKPTLESS_ROOTLESS is 'yes': it must be 1, or 0"),
    ],
)
def test_what_tier_1_has_not(words: list[str], more: Mapping[str, str], text: str) -> None:
    env = {**JOB, "CKPTLESS_ROOTLESS": "1", **more}
    assert text in refused(*words, "train.py", env=env)


def test_further_nodes_of_the_allocation_stay_unused() -> None:
    spec = run("--nodes", "2", "train.py").config.spec
    assert (spec.nodes, spec.spares, spec.names) == (2, 1, ("node01", "node02", "node03"))


def test_the_options_come_before_what_sbatch_said(folder: Path) -> None:
    env = {**JOB, "CKPTLESS_REPLICAS": "3", "CKPTLESS_MAX_STALL": "90"}
    config = run("train.py", env=env).config
    assert (config.copies, config.spec.limits) == (3, Limits.from_max_stall(90.0))
    words = "--spares 2 --replicas 1 --max-stall 60 --nproc-per-node 4 --max-restarts 5 --log-dir logs/here"
    config = run(*words.split(), "--tee", "all", "train.py", env=env).config
    assert (config.spec.nodes, config.spec.spares, config.spec.slots_per_node) == (3, 2, 4)
    assert (config.copies, config.tee) == (1, None)
    assert config.spec.limits == Limits.from_max_stall(60.0, start_tries=5)
    assert config.log_dir == str(folder / "logs/here/ckptless-4711")


def test_the_sites_settings_are_the_defaults(folder: Path) -> None:
    (folder / "no-such.yaml").write_text("version: 1\nmax_stall: 60s\ndaemon: {socket: /tmp/x.sock}\n")
    config = run("train.py").config
    assert config.spec.limits == Limits.from_max_stall(60.0)
    assert config.daemon_socket == "/tmp/x.sock"


def test_how_copies_go_to_the_other_nodes(folder: Path) -> None:
    assert run("train.py").config.replication == ReplicationSettings()
    (folder / "no-such.yaml").write_text("version: 1\nreplication: {bandwidth: 1GB/s, interface: ib0}\n")
    assert run("train.py").config.replication == ReplicationSettings(bandwidth_rate=1e9, interface="ib0")
    env = {**JOB, "CKPTLESS_BANDWIDTH": "2GB/s"}
    config = run("--replication-interface", "10.1.0.0/16", "train.py", env=env).config
    assert config.replication == ReplicationSettings(bandwidth_rate=2e9, interface="10.1.0.0/16")


def test_the_sites_failure_domains(folder: Path) -> None:
    found = run("train.py")
    assert isinstance(found, SlurmRun)
    assert found.domains is None
    (folder / "no-such.yaml").write_text(
        "version: 1\ndomains: {rack1: 'node[01-02]', rack2: 'node[03-09]'}\n"
    )
    found = run("train.py")
    assert isinstance(found, SlurmRun)
    assert found.domains is not None
    assert found.domains["rack1"] == ("node01", "node02")
    # The tasks of a step would each find out for themselves, and could differ.
    assert run("train.py", env=TASK).config.spec.domains == ()


def test_two_runs_of_a_job_have_names_and_folders_of_their_own() -> None:
    configs = [run("train.py").config for _ in range(3)]
    assert [config.spec.job for config in configs] == ["4711", "4711.1", "4711.2"]
    assert len({config.log_dir for config in configs}) == 3
    assert len({config.spec.launch for config in configs}) == 3


@pytest.mark.parametrize(
    ("node", "local", "first", "says"), [(0, 0, True, True), (1, 0, True, False), (0, 1, False, False)]
)
def test_a_task_of_a_step(node: int, local: int, first: bool, says: bool) -> None:
    found = run("train.py", env={**TASK, "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)})
    assert isinstance(found, StepRun)
    assert (found.first, found.says) == (first, says)
    spec = found.config.spec
    assert (spec.job, spec.nodes, spec.spares, spec.names) == ("4711.s0", 1, 1, ("node01", "node02"))


def test_every_task_of_a_step_finds_the_same_run() -> None:
    tasks = [
        {**TASK, "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
        for node in range(2)
        for local in range(2)
    ]
    assert len({msgspec.json.encode(run("train.py", env=task).config) for task in tasks}) == 1


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        (("python", "train.py", "--lr", "1"), ("train.py", "--lr", "1")),
        (("python3.11", "-u", "train.py"), ("train.py",)),
        (("/usr/bin/python3", "train.py"), ("train.py",)),
        (("train.py", "python", "-u"), ("train.py", "python", "-u")),
    ],
)
def test_python_in_front_is_taken_off(words: tuple[str, ...], argv: tuple[str, ...], folder: Path) -> None:
    assert run(*words).config.argv == (str(folder / argv[0]), *argv[1:])


def test_the_scripts_own_u_stays_with_the_script(folder: Path) -> None:
    found = run("python", "-u", "train.py", "-u", "somebody")
    assert found.config.argv == (str(folder / "train.py"), "-u", "somebody")


def test_a_module() -> None:
    config = run("-m", "my.training", "--nodes", "9").config
    assert config.module
    assert config.argv == ("my.training", "--nodes", "9")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("nothing.py",), "there is no script nothing.py"),
        (("python", "nothing.py"), "there is no script nothing.py"),
        (("python", "-m", "my.training"), "write ckptless-run -m my.training"),
        (("python",), "there is no script python"),
        (("python", "-u"), "there is no script"),
        ((".",), "there is no script ."),
        (("--job", "mine", "train.py"), "--job is for --local"),
        (("--state-dir", "here", "train.py"), "--state-dir is for --local"),
        (("--port", "99", "train.py"), "--port is for --local"),
        (("--replication-bandwidth", "9", "train.py"), "--replication-bandwidth is '9'"),
        (("--replication-interface", "10.1.2.3", "train.py"), "--replication-interface is '10.1.2.3'"),
        (("--spares", "5", "train.py"), "ask for more nodes"),
        (("--nodes", "5", "train.py"), "--nodes=6"),
        (("--tee", "0;1", "train.py"), "--tee 0;1"),
        (("--tee", "", "train.py"), "--tee"),
        (("--log-dir", "train.py", "train.py"), "choose another --log-dir"),
        (("--log-dir", "/proc/nowhere", "train.py"), "choose another --log-dir"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], says: str) -> None:
    assert says in refused(*words)


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({}, "add --local"),
        ({"SLURM_JOB_ID": "4711"}, "add --local"),
        ({**JOB, "SLURM_JOB_ID": "x"}, "damaged"),
        ({**JOB, "SLURM_JOB_NODELIST": ""}, "damaged"),
        ({**JOB, "CKPTLESS_SPARES": "many"}, "CKPTLESS_SPARES"),
        ({**JOB, "CKPTLESS_SPARES": "7"}, "with 7 spares, a job of 5 nodes has none left to train on"),
        ({**JOB, "CKPTLESS_REPLICAS": "two"}, "CKPTLESS_REPLICAS"),
        ({**JOB, "CKPTLESS_MAX_STALL": "5m"}, "CKPTLESS_MAX_STALL"),
        ({**JOB, "CKPTLESS_SPARES": "1025"}, "CKPTLESS_SPARES is 1025: it must be from 0 to 1024"),
        ({**JOB, "CKPTLESS_REPLICAS": "0"}, "CKPTLESS_REPLICAS is 0: it must be from 1 to 64"),
        ({**JOB, "CKPTLESS_MAX_STALL": "86401"}, "CKPTLESS_MAX_STALL is 86401: it must be from 5 to 86400"),
        ({**JOB, "SLURM_HET_SIZE": "2"}, "a heterogeneous job (with : or hetjob) cannot train"),
        ({"SLURM_HET_SIZE": "2"}, "a heterogeneous job (with : or hetjob) cannot train"),
    ],
)
def test_surroundings_that_are_refused(env: Mapping[str, str], says: str) -> None:
    assert says in refused("train.py", env=env)


@pytest.mark.parametrize("text", ["0", "1"])
def test_a_stall_that_the_command_line_would_refuse(text: str) -> None:
    assert "CKPTLESS_MAX_STALL" in refused("train.py", env={**JOB, "CKPTLESS_MAX_STALL": text})


@pytest.mark.parametrize(
    ("words", "env"),
    [(("--tee", "x", "train.py"), JOB), (("train.py",), {**JOB, "CKPTLESS_REPLICAS": "two"})],
)
def test_a_refused_run_leaves_nothing_behind(words: tuple[str, ...], env: Mapping[str, str]) -> None:
    refused(*words, env=env)
    assert [path.name for path in Path().iterdir()] == ["train.py"]


def test_a_mistake_in_a_job_ends_with_code_2_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(main.command, ["--job", "mine", "train.py"])
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "ckptless-run: error: --job is for --local: leave it out in a Slurm job"
    ]


def test_what_the_agents_get_is_what_was_made() -> None:
    """Through the environment, as srun carries it."""
    config = run("--tee", "none", "train.py").config
    text = base64.b64encode(msgspec.json.encode(config)).decode()
    assert msgspec.json.decode(base64.b64decode(text), type=SharedConfig) == config
    assert AGENT_CONFIG == "CKPTLESS_AGENT_CONFIG"
