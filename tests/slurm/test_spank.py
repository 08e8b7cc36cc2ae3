"""The SPANK plugin on a real Slurm: what sbatch, salloc and srun take, refuse and set; who hears of a job."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .cluster import requirements
from .cluster.api import Cluster
from .cluster.plan import Plan
from .miniconf import (
    LAUNCHER,
    LAUNCHER_SCRIPT,
    LOADED,
    PLUGIN,
    PLUGSTACK,
    ROOTFS,
    SHOW,
    SLURM_EXT,
    User,
    build,
    eventually,
    notices,
    ours,
    puts_in_front,
    recorder,
)

if TYPE_CHECKING:
    from .conftest import MakeCluster

COMMANDS = ("sbatch", "salloc", "srun")
PREFIXES = [("sbatch", "SBATCH"), ("salloc", "SALLOC"), ("srun", "SLURM")]
NOTIFY_DEADLINE_S = 0.3
STEPS_STAY = {"SLURM_NO_KILL": "set", "SLURM_KILL_BAD_EXIT": "0", "SLURM_WAIT": "0"}


def asked(spec: str, **more: str) -> dict[str, str]:
    return {"CKPTLESS": spec, "CKPTLESS_SPEC": spec, **STEPS_STAY, **more}


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lacks = requirements.missing(ROOTFS) + ([] if shutil.which("cc") else ["a C compiler"])
    if lacks and os.environ.get("CKPTLESS_REQUIRE_SLURM") == "1":
        pytest.fail(f"no Slurm cluster with the plugin here, it takes {', '.join(lacks)}")
    if lacks:
        pytest.skip(f"no Slurm cluster with the plugin here, it takes {', '.join(lacks)}")
    return build("spank", "ckptless_spank.so", tmp_path_factory.mktemp("spank"))


@pytest.fixture(scope="module")
def cluster(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes. slurmd must find the plugin at its start, or it never calls it for prolog and epilog."""
    files: dict[str, str | bytes] = {
        PLUGIN: plugin.read_bytes(),
        PLUGSTACK: LOADED,
        LAUNCHER: LAUNCHER_SCRIPT,
    }
    # debug3: slurmctld then logs what it was asked for
    conf = {"PrologFlags": "Alloc", "SlurmctldDebug": "debug3"}
    plan = Plan(nodes=3, conf=conf, rootfs=ROOTFS)
    with Cluster(tmp_path_factory.mktemp("slurm") / "cluster", plan, files=files) as made:
        yield made


@pytest.fixture
def user(cluster: Cluster) -> User:
    return User(cluster)


# --- options


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_the_option(user: User, command: str) -> None:
    text = user.run(f"{command} --help").stdout
    assert "--ckptless=[SPEC]" in text


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--ckptless=bogus", '--ckptless: "bogus" is not known; say auto, off, or a list of'),
        ("--ckptless=spares=-1", '"spares=-1" is not valid; spares wants a number from 0 to 1024'),
        ("-N2 --ckptless=spares=2", "with 2 spares, a job of 2 nodes has none left to train on"),
        ("-N1-2 --ckptless=spares=2", "with 2 spares, a job of 2 nodes has none left"),
        (
            "-N2 --ckptless=sizes=2:1",
            '"sizes=2:1" is not valid; sizes wants up to 16 numbers from 1 to 65536',
        ),
        ("-N2 --ckptless=sizes=1:2,step=1", "sizes says the same as min-nodes, max-nodes and step together"),
        ("-N2 --ckptless=sizes=1:3", "the job trains on 2 nodes, spares apart, which is none of sizes=1:3"),
        (
            "-N3 --ckptless=spares=1,min-nodes=3",
            "min-nodes=3 is more than the 2 nodes that the job trains on",
        ),
        ("-N3 --ckptless=max-nodes=2", "max-nodes=2 is less than the 3 nodes"),
        ("-N1-3 --ckptless=min-nodes=3,max-nodes=2", "min-nodes=3 is more than max-nodes=2"),
        (
            "-N3 --ckptless=min-nodes=2,step=2",
            "from the 3 nodes that the job trains on, steps of 2 do not lead",
        ),
        ("-N3 --ckptless=spares=1,max-nodes=4", "to grow to 4 nodes, and has 2 to train on, 1 spare, and"),
        ("-N1 --ckptless : -N1", "a heterogeneous job (with : or hetjob) cannot train with ckptless"),
        ("-N1 : -N1 --ckptless", "a heterogeneous job (with : or hetjob) cannot train with ckptless"),
    ],
)
def test_nonsense_is_refused_at_submit(user: User, command: str, options: str, says: str) -> None:
    result = user.run(f"{command} {options} {user.script('hostname')}")
    assert result.returncode != 0
    assert result.stderr.count("error: ckptless: ") == 1
    assert says in result.stderr
    assert user.run("squeue -h").stdout == ""


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (("#SBATCH --ckptless=bogus",), '"bogus" is not known'),
        (("#SBATCH -N2", "#SBATCH --ckptless=spares=2"), "with 2 spares, a job of 2 nodes has none left"),
        (("#SBATCH --nodes=1", "#SBATCH --ckptless=spares=1"), "a job of 1 node has none"),
        (
            ("#SBATCH --nodes=2", "#SBATCH --ckptless=max-nodes=3"),
            "to grow to 3 nodes, and has 2 to train on",
        ),
        (("#SBATCH -N1 --ckptless", "#SBATCH hetjob", "#SBATCH -N1"), "a heterogeneous job (with : or het"),
        (("#SBATCH -N1", "#SBATCH hetjob", "#SBATCH -N1 --ckptless"), "a heterogeneous job (with : or het"),
    ],
)
def test_nonsense_in_the_script_is_refused(user: User, lines: tuple[str, ...], says: str) -> None:
    result = user.run(f"sbatch {user.script(*lines, 'hostname')}")
    assert result.returncode != 0
    assert says in result.stderr


@pytest.mark.parametrize(
    ("command", "prefix"), [("sbatch", "SBATCH"), ("salloc", "SALLOC"), ("srun", "SLURM")]
)
def test_nonsense_in_the_environment_is_refused(user: User, command: str, prefix: str) -> None:
    script = user.script("hostname")
    result = user.run(f"{command} {script}", **{f"{prefix}_CKPTLESS": "junk"})
    assert result.returncode == 1
    assert f'{prefix}_CKPTLESS: "junk" is not known' in result.stderr


# --- effects


@pytest.mark.parametrize("command", COMMANDS)
def test_job_and_steps_outlive_a_node(user: User, command: str) -> None:
    for environment in user.environments(f"{command} -N1 --ckptless"):
        assert environment == asked("auto")
    assert user.no_kill()


@pytest.mark.parametrize("command", COMMANDS)
def test_values_are_in_the_environment(user: User, command: str) -> None:
    line = f"{command} -N2 --ckptless=max-stall=2m,replicas=2,spares=1"
    for environment in user.environments(line):
        assert environment == asked(
            "spares=1,replicas=2,max-stall=120",
            CKPTLESS_SPARES="1",
            CKPTLESS_REPLICAS="2",
            CKPTLESS_MAX_STALL="120",
        )


@pytest.mark.parametrize("command", COMMANDS)
def test_sizes_are_in_the_environment(user: User, command: str) -> None:
    spec = "spares=1,min-nodes=1,max-nodes=3,step=1,scale-up-after=60"
    words = {"MIN_NODES": "1", "MAX_NODES": "3", "STEP": "1", "SCALE_UP_AFTER": "60", "SPARES": "1"}
    for environment in user.environments(f"{command} -N3 --ckptless={spec.replace('60', '1m')}"):
        assert environment == asked(spec, **{f"CKPTLESS_{word}": value for word, value in words.items()})


@pytest.mark.parametrize("command", ["sbatch", "salloc"])
def test_nodes_to_draw_in_are_in_the_environment(user: User, command: str) -> None:
    spec = "max-nodes=3,draw-in=2,draw-in-patience=120"
    words = {"MAX_NODES": "3", "DRAW_IN": "2", "DRAW_IN_PATIENCE": "120"}
    # The step is none of its own.
    for environment in user.environments(f"{command} -N1 --ckptless={spec.replace('120', '2m')}"):
        assert environment == asked(spec, **{f"CKPTLESS_{word}": value for word, value in words.items()})


@pytest.mark.parametrize(
    ("command", "env", "says"),
    [
        ("srun -N2", {}, "a task of srun has nobody who could ask Slurm for nodes"),
        ("srun -N2", {"SLURM_CKPTLESS": "draw-in=1"}, "a task of srun has nobody"),
        ("sbatch --array=1-2", {}, "Slurm adds no node to a task of a job array"),
        ("sbatch", {"SBATCH_ARRAY_INX": "1"}, "Slurm adds no node to a task of a job array"),
    ],
)
def test_where_no_node_can_be_added(user: User, command: str, env: dict[str, str], says: str) -> None:
    option = "" if "SLURM_CKPTLESS" in env else "--ckptless=draw-in=1"
    result = user.run(f"{command} {option} {user.script('hostname')}", **env)
    assert result.returncode == 1
    assert result.stderr.count("error: ckptless: ") == 1
    assert says in result.stderr
    assert user.run("squeue -h").stdout == ""


def test_a_step_of_a_job_that_draws_nodes_in_draws_none(user: User) -> None:
    script = user.script(
        f"srun -N1 -n1 --ckptless=max-stall=9 {SHOW} || echo refused",
        f"srun -N1 -n1 --ckptless=draw-in=0 {SHOW}",
    )
    _, text = user.batch(f"sbatch -N1 --ckptless=draw-in=2 {script}")
    (step,) = (ours(json.loads(row)) for row in text.splitlines() if row.startswith("{"))
    assert step["CKPTLESS"] == "draw-in=0"
    assert "refused" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_without_the_option_nothing_is_different(user: User, command: str) -> None:
    for environment in user.environments(f"{command} -N1"):
        assert environment == {}
    assert not user.no_kill()
    for environment in user.environments(f"{command} -N1 --ckptless=off"):
        assert environment == {}
    assert not user.no_kill()


@pytest.mark.parametrize(
    ("directive", "env", "options", "spec"),
    [
        ("--ckptless=replicas=1", "", "", "replicas=1"),
        ("--ckptless=replicas=1", "replicas=2", "", "replicas=2"),
        ("--ckptless=replicas=1", "replicas=2", "--ckptless=replicas=3", "replicas=3"),
        ("--ckptless=replicas=1", "", "--ckptless", "auto"),
        ("--ckptless=off", "auto", "", "auto"),
        ("--ckptless", "off", "", ""),
        ("--ckptless", "", "--ckptless=off", ""),
        ("--ckptless", "auto", "--ckptless=off", ""),
        ("", "auto", "", "auto"),
        ("", "auto", "--ckptless=off", ""),
    ],
)
def test_the_command_line_beats_the_environment_beats_the_script(
    user: User, directive: str, env: str, options: str, spec: str
) -> None:
    lines = [f"#SBATCH {directive}"] if directive else []
    variables = {"SBATCH_CKPTLESS": env} if env else {}
    batch, step = user.environments(f"sbatch -N1 {options}", *lines, **variables)
    assert batch.get("CKPTLESS", "") == step.get("CKPTLESS", "") == spec
    assert user.no_kill() == bool(spec)


@pytest.mark.parametrize(
    ("command", "prefix"), [("sbatch", "SBATCH"), ("salloc", "SALLOC"), ("srun", "SLURM")]
)
def test_own_variables_of_each_command(user: User, command: str, prefix: str) -> None:
    batch, _ = user.environments(f"{command} -N2", **{f"{prefix}_CKPTLESS": "spares=1,replicas=1"})
    assert batch["CKPTLESS"] == "spares=1,replicas=1"


# NONE has slurmd log in as the user, which a chroot of the matrix is not made for.
@pytest.mark.parametrize("export", ["NIL"] if ROOTFS else ["NIL", "NONE"])
def test_the_environment_reaches_the_job_whatever_is_exported(user: User, export: str) -> None:
    for environment in user.environments(f"sbatch -N2 --export={export} --ckptless=spares=1"):
        assert environment == asked("spares=1", CKPTLESS_SPARES="1")


@pytest.mark.skipif(not puts_in_front(), reason="Slurm before 23.11 cannot put a program in front of a task")
def test_the_launcher_is_put_in_front_of_what_srun_starts(user: User) -> None:
    """Once; not in front of itself, nor of steps that do not ask for it, nor of a batch script."""
    show = "sh -c 'echo \"launched: $LAUNCHED\"'"
    for line, times in (
        (f"srun -N1 --ckptless {show}", "+"),
        (f"srun -N1 --ckptless {LAUNCHER} {show}", "+"),
        (f"srun -N1 {show}", ""),
        (f"srun -N1 --ckptless=off {show}", ""),
        (f"srun -N1 --ckptless srun --overlap {show}", "+"),
    ):
        assert user.run(line).stdout.strip() == f"launched: {times}".strip(), line
    _, text = user.batch(
        f"sbatch -N1 --ckptless {user.script(show, f'srun {show}', f'srun --ckptless {show}')}"
    )
    assert [row for row in text.splitlines() if row.startswith("launched")] == [
        "launched: ", "launched: ", "launched: +"
    ]  # fmt: skip


@pytest.mark.skipif(puts_in_front(), reason="Slurm 23.11 or newer can put a program in front of a task")
def test_an_older_srun_says_what_to_write(user: User) -> None:
    result = user.run("srun -N1 --ckptless hostname")
    assert (
        "cannot put /etc/slurm/ckptless-run in front of hostname; say: srun --ckptless ckptless-run"
        in result.stderr
    )
    assert result.returncode == 0


def test_words_of_the_program_are_not_options(user: User) -> None:
    user.script('echo "got $*"', "env | grep -c CKPTLESS")
    for line in ("salloc -N1 --exclusive bash job.sh --ckptless", "srun -N 1 -- ./job.sh --ckptless"):
        assert user.run(line).stdout.splitlines() == ["got --ckptless", "0", "the end"]
        assert not user.no_kill()


def test_a_users_own_choice_stays(user: User) -> None:
    kept = "ckptless: --no-kill=off is kept, as you said it: a lost node ends the job"
    script = user.script("#SBATCH --ckptless", "true")
    for line, env in (
        (f"sbatch --no-kill=off {script}", {}),
        (f"sbatch {script}", {"SBATCH_NO_KILL": "off"}),
        ("srun -N1 --ckptless --no-kill=off ckptless-run --help", {}),
    ):
        result = user.run(line, **env)
        assert kept in result.stderr
        assert not user.no_kill()
    result = user.run(f"sbatch {script}", SLURM_KILL_BAD_EXIT="1")
    assert "ckptless: SLURM_KILL_BAD_EXIT=1 is kept, as your environment has it" in result.stderr
    assert user.no_kill()
    result = user.run(f"sbatch {user.script('#SBATCH --ckptless', '#SBATCH --no-kill=off', 'true')}")
    assert kept in result.stderr
    assert not user.no_kill()


def test_a_job_from_within_a_job_is_its_own(user: User) -> None:
    inner = user.cluster.shared / "inner.sh"
    inner.write_text(f"#!/bin/bash\n{SHOW} > inner.new\nmv inner.new inner.out\n")
    script = user.script("sbatch -N1 inner.sh")
    user.batch(f"sbatch -N2 --ckptless=spares=1 {script}")
    found = user.cluster.shared / "inner.out"
    eventually(found.exists)
    environment = json.loads(found.read_text())
    assert [name for name in environment if "CKPTLESS" in name.upper()] == []
    assert ours(environment) == {}
    assert not user.no_kill()


def test_a_job_knows_when_it_was_submitted(user: User) -> None:
    """What tells it from another one of its number; its steps say the same, another job does not."""
    name = "SLURM_SPANK_CKPTLESS_SUBMITTED"
    script = user.script(SHOW, f"srun -N1 -n1 {SHOW}", f"srun -N1 -n1 --ckptless=replicas=3 {SHOW}")
    found: list[int] = []
    for options in ("", "--export=NONE"):
        _, text = user.batch(f"sbatch -N1 --ckptless {options} {script}")
        times = {json.loads(row)[name] for row in text.splitlines() if row.startswith("{")}
        assert len(times) == 1
        found += map(int, times)
    assert 0 < found[0] < found[1] < time.time_ns()
    assert time.time_ns() - found[0] < 3600 * 10**9


def test_a_step_takes_what_it_does_not_say_from_its_job(user: User) -> None:
    script = user.script(
        f"srun -N1 -n1 --ckptless=replicas=3 {SHOW}",
        f"srun -N1 -n1 --ckptless=spares=0 {SHOW}",
        f"srun -N1 -n1 --ckptless=off {SHOW}",
    )
    _, text = user.batch(f"sbatch -N2 --ckptless=spares=1,replicas=1 {script}")
    more, other, off = (ours(json.loads(row)) for row in text.splitlines() if row.startswith("{"))
    assert more["CKPTLESS"] == "spares=1,replicas=3"
    assert other["CKPTLESS"] == "spares=0,replicas=1"
    assert off == {}


def test_a_step_may_say_sizes_of_its_own_in_the_other_way(user: User) -> None:
    script = user.script(
        f"srun -N1 -n1 --ckptless=sizes=1:3 {SHOW}",
        f"srun -N1 -n1 --ckptless=min-nodes=2 {SHOW}",
        f"srun -N1 -n1 --ckptless=replicas=1,spares=1 {SHOW} || echo refused",
        f"srun -n2 --ckptless=sizes=1:3 {SHOW} || echo no such size",
    )
    _, text = user.batch(f"sbatch -N2 --ckptless=min-nodes=1,scale-up-after=9 {script}")
    sizes, range_ = (ours(json.loads(row)) for row in text.splitlines() if row.startswith("{"))
    assert sizes["CKPTLESS"] == "scale-up-after=9,sizes=1:3"
    assert range_["CKPTLESS"] == "min-nodes=2,scale-up-after=9"
    assert "refused" in text  # one node, which is a spare
    assert "no such size" in text


def test_a_lost_node_ends_neither_job_nor_step(user: User) -> None:
    """The whole point: a plain `sbatch --ckptless` with a plain `srun`."""
    shared = user.cluster.shared
    for old in shared.glob("alive-*"):
        old.unlink()
    task = "touch alive-$SLURM_PROCID; until test -e stop; do sleep 0.1; done; touch done-$SLURM_PROCID"
    (shared / "stop").unlink(missing_ok=True)
    script = user.script("#SBATCH --ckptless", f"srun bash -c '{task}'", "touch after")
    job = user.run(f"sbatch --parsable -N3 --ntasks-per-node=1 {script}").stdout.strip()
    eventually(lambda: len(list(shared.glob("alive-*"))) == 3)
    user.cluster.power_off("node02")
    user.cluster.run("ctl", "scontrol", "update", "nodename=node02", "state=down", "reason=power")
    (shared / "stop").touch()
    eventually((shared / "after").exists)
    assert (shared / "done-0").exists()
    assert (shared / "done-2").exists()
    assert not (shared / "done-1").exists()
    eventually(lambda: "JobState=COMPLETED" in user.run(f"scontrol show job {job}").stdout)


# --- prolog and epilog


def test_daemons_hear_of_ckptless_jobs(user: User) -> None:
    with recorder(user.cluster, "node01") as one, recorder(user.cluster, "node02") as two:
        assert user.run("srun -N2 -w node01,node02 true").returncode == 0
        script = user.script("srun true")
        result, _ = user.batch(f"sbatch --parsable -N2 --ckptless=max-stall=2m,spares=1 {script}")
        job = int(result.stdout)
        eventually(lambda: len(notices(one)) == len(notices(two)) == 2)
        for heard in (one, two):
            assert notices(heard) == [
                {"type": kind, "protocol": 1, "job_id": job, "uid": 5001, "spec": "spares=1,max-stall=120"}
                for kind in ("JobStarted", "JobEnded")
            ]


def test_what_a_user_forges_is_not_passed_on(user: User) -> None:
    with recorder(user.cluster, "node01") as heard:
        forged = {"SPANK_CKPTLESS": "rm -rf", "SLURM_SPANK__SLURM_SPANK_OPTION_ckptless_ckptless": "rm -rf"}
        assert user.run("srun -N1 -w node01 true", **forged).returncode == 0
        user.batch(f"sbatch -N1 -w node01 {user.script()}", **forged)
        assert notices(heard) == []


def test_a_dead_or_deaf_daemon_delays_nobody(user: User) -> None:
    def job_s(options: str) -> float:
        began = time.monotonic()
        assert user.run(f"srun -N1 -w node01 {options} true").returncode == 0
        return time.monotonic() - began

    def least_s(options: str) -> float:
        """Of some, as the machine may have other things to do."""
        return min(job_s(options) for _ in range(3))

    job_s("")  # the first one warms caches
    plain_s, absent_s = least_s(""), least_s("--ckptless")
    with recorder(user.cluster, "node01") as heard:
        pid = heard.read_text().split()[1]
        served_s = least_s("--ckptless")
        user.cluster.run("node01", "kill", "-STOP", pid)
        deaf_s, deaf_plain_s = least_s("--ckptless"), least_s("")
        user.cluster.run("node01", "kill", "-KILL", pid)
        dead_s = least_s("--ckptless")
    print(f"{plain_s=:.3f} {absent_s=:.3f} {served_s=:.3f} {deaf_s=:.3f} {deaf_plain_s=:.3f} {dead_s=:.3f}")
    for took_s in (absent_s, served_s, deaf_plain_s, dead_s):
        assert took_s < plain_s + 0.5
    # srun asks once a second whether the prolog is over
    assert deaf_s < plain_s + NOTIFY_DEADLINE_S + 1 + 0.5
    user.cluster.wait_idle("node01")


@pytest.mark.parametrize("command", COMMANDS)
def test_where_jobs_may_be_elastic(user: User, command: str) -> None:
    line = f"{command} -N2 --ckptless=min-nodes=1"
    program = user.script("true")
    try:
        user.cluster.write(PLUGSTACK, f"{LOADED.strip()} elastic=no\n")
        result = user.run(f"{line} {program}")
        assert "ckptless: this site has no elastic jobs; leave out min-nodes" in result.stderr
        assert user.run(f"{command} -N2 --ckptless=replicas=1 {program}").returncode == 0
        user.cluster.write(PLUGSTACK, f"{LOADED.strip()} elastic=big,other\n")
        says = "ckptless: partition main has no elastic jobs, as have big,other; choose among these"
        assert says in user.run(f"{line} -p main {program}").stderr
        prefix = "SLURM" if command == "srun" else command.upper()
        assert says in user.run(f"{line} {program}", **{f"{prefix}_PARTITION": "main"}).stderr
        user.cluster.write(PLUGSTACK, f"{LOADED.strip()} elastic=big,main\n")
        assert user.run(f"{line} -p main {program}").returncode == 0
        if command == "sbatch":
            user.cluster.write(PLUGSTACK, f"{LOADED.strip()} elastic=big\n")
            assert (
                says.replace("big,other", "big")
                in user.run(
                    f"sbatch {user.script('#SBATCH -N2 -p main', '#SBATCH --ckptless=min-nodes=1', 'true')}"
                ).stderr
            )
    finally:
        user.cluster.write(PLUGSTACK, LOADED)
    eventually(lambda: user.run("squeue -h").stdout == "")


def test_a_mistake_in_plugstack_conf_is_named(user: User) -> None:
    user.cluster.write(PLUGSTACK, f"optional {PLUGIN} sockets=/x\n")
    try:
        result = user.run("srun -N1 hostname")
        assert 'ckptless: plugstack.conf: "sockets=/x" is not known' in result.stderr
        assert result.returncode == 0
        assert user.run("sbatch --ckptless --wrap true").returncode != 0
    finally:
        user.cluster.write(PLUGSTACK, LOADED)


# --- what needs a cluster of its own


def test_job_submit_and_notify_without_the_plugin_on_nodes(
    make_cluster: MakeCluster, plugin: Path, tmp_path: Path
) -> None:
    """slurmctld checks by itself, and Prolog= tells the daemon; sbatch has the SPANK plugin."""
    notify = build("hooks", "ckptless-notify", tmp_path / "hooks")
    files: dict[str, str | bytes] = {
        PLUGIN: plugin.read_bytes(),
        "/etc/slurm/job_submit_ckptless.so": build(
            "job_submit", "job_submit_ckptless.so", tmp_path / "job_submit"
        ).read_bytes(),
        "/etc/slurm/ckptless-notify": notify.read_bytes(),
        # not on nodes: the socket that the plugin talks to there is not the recorder's
        PLUGSTACK: f"optional {PLUGIN} socket=/run/none\n",
        "/etc/slurm/prolog": "#!/bin/sh\nexec /shared/ckptless-notify\n",
    }
    (plugins,) = Path(ROOTFS or "/").glob("usr/lib/*/slurm-wlm")
    conf = {
        "PluginDir": f"/{plugins.relative_to(ROOTFS or '/')}:/etc/slurm",
        "JobSubmitPlugins": "ckptless",
        "Prolog": "/etc/slurm/prolog",
        "Epilog": "/etc/slurm/prolog",
        "PrologFlags": "Alloc",
        "SlurmctldDebug": "debug3",
    }
    cluster = make_cluster(Plan(nodes=2, conf=conf), files=files)
    program = cluster.shared / "ckptless-notify"
    shutil.copy(notify, program)
    user = User(cluster)
    with recorder(cluster, "node02") as heard:
        job = int(user.run("sbatch --parsable -N2 --ckptless --wrap true").stdout)
        eventually(lambda: len(notices(heard)) == 2)
        assert notices(heard) == [
            {"type": kind, "protocol": 1, "job_id": job, "uid": 5001, "spec": "auto"}
            for kind in ("JobStarted", "JobEnded")
        ]
    # the number of nodes comes through a pipe, so sbatch cannot know it
    piped = "printf '#!/bin/sh\\n#SBATCH -N2\\n#SBATCH --ckptless=spares=2\\n' | sbatch"
    result = user.run(f"bash -c {shlex.quote(piped)}")
    assert result.returncode != 0
    assert "with 2 spares, a job of 2 nodes has none left to train on" in result.stderr
    piped = "printf '#!/bin/sh\\n#SBATCH -N1 --ckptless\\n#SBATCH hetjob\\n#SBATCH -N1\\n' | sbatch"
    result = user.run(f"bash -c {shlex.quote(piped)}")
    assert result.returncode != 0
    assert "a heterogeneous job (with : or hetjob) cannot train with ckptless" in result.stderr
    cluster.wait_idle()


def test_lua_of_the_readme(make_cluster: MakeCluster, plugin: Path) -> None:
    readme = (SLURM_EXT / "job_submit/README.md").read_text()
    files: dict[str, str | bytes] = {
        PLUGIN: plugin.read_bytes(),
        PLUGSTACK: f"optional {PLUGIN}\n",
        "/etc/slurm/job_submit.lua": readme.split("```lua\n")[1].split("```")[0],
    }
    user = User(make_cluster(Plan(nodes=2, conf={"JobSubmitPlugins": "lua"}), files=files))
    lines = "#!/bin/sh\\n#SBATCH -N2\\n#SBATCH --ckptless=replicas=1,spares=%d\\n"
    result = user.run(f'bash -c "printf {shlex.quote(lines)} 2 | sbatch"')
    assert result.returncode != 0
    assert "with 2 spares, a job of 2 nodes has none left to train on" in result.stderr
    assert user.run(f'bash -c "printf {shlex.quote(lines)} 1 | sbatch"').returncode == 0
    assert user.run("sbatch --wrap true").returncode == 0
