"""What of the cluster can be told without one: plans, texts, states, when a service is started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import files, nodes, requirements
from .control import ask
from .plan import ClusterError, Plan, Service, Share
from .supervise import RESTART_PAUSE_S, Supervisor

SERVICE = Service(name="echo-d", argv=("echo", "{node}"), user="tester", env={"WORD": "on-{node}"})


def test_whoever_lacks_something_is_told_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert requirements.missing()[0] == "root"
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    lacks = requirements.missing(str(tmp_path))
    wanted = {"slurmctld (package slurmctld)", "munged (package munge)", "the user slurm"}
    assert {f"{lack} in {tmp_path}" for lack in wanted} <= set(lacks)
    assert requirements.missing(str(tmp_path / "nowhere"))


def test_plan_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    plan = Plan(
        nodes=3,
        conf={"KillWait": "7"},
        lines=("a", "b"),
        shares=(Share(path="/a", at="/b", writable=True),),
        services=(SERVICE,),
        path="/x/bin",
    )
    plan.dump(tmp_path / "plan")
    assert Plan.load(tmp_path / "plan") == plan
    assert Plan(nodes=200).address("node200") == "10.99.0.210"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"nodes": 0}, "1 to 200"),
        ({"services": (Service(name="slurmd", argv=("a",)),)}, "not in use"),
        ({"services": (Service(name="a/b", argv=("a",)),)}, "letters and digits"),
        ({"services": (SERVICE, SERVICE)}, "not in use"),
    ],
)
def test_impossible_plans_are_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        Plan(**wrong)  # type: ignore[arg-type]


def test_settings_of_slurm_are_replaced_whatever_their_case() -> None:
    text = files.slurm_conf(Plan(nodes=12, conf={"slurmdTIMEOUT": "9", "TCPTimeout": "", "Extra": "1"}))
    keys = [line.split("=")[0].lower() for line in text.splitlines()]
    assert keys.count("slurmdtimeout") == 1
    assert "slurmdTIMEOUT=9" in text
    assert "tcptimeout" not in keys
    assert "Extra=1" in text
    assert "NodeName=node[01-12] CPUs=8 " in text
    assert "NodeName=node01 " in files.slurm_conf(Plan(nodes=1))


def test_cgroups_are_named_or_off_by_release() -> None:
    assert files.cgroup_conf("slurm-wlm 22.05.8") == "CgroupPlugin=cgroup/v1\n"
    assert (
        files.cgroup_conf("slurm 24.11.5") == files.cgroup_conf("slurm 26.05.5") == "CgroupPlugin=disabled\n"
    )


def test_users_of_the_cluster_replace_those_that_are_in_their_way() -> None:
    system = "root:x:0:0::/root:/bin/sh\nann:x:5001:1::/home/ann:/bin/sh\ntester:x:1:1::/:/bin/sh\n"
    made = files.passwd(system)
    assert [line.split(":")[0] for line in made.splitlines()] == ["root", "tester", "other"]
    assert files.account(made, "tester") == files.Account("tester", 5001, 5001, "/home/tester")
    assert files.account(made, "ann") is None


def test_states_and_starts_are_read_from_what_slurm_prints() -> None:
    assert nodes.parse("node01 idle\nnode02 down*\n") == {"node01": "idle", "node02": "down*"}
    assert [state for state in ("idle", "down*", "drained", "mixed", "idle*") if nodes.is_lost(state)] == [
        "down*",
        "drained",
    ]
    text = (
        "NodeName=a Arch=x\n   BootTime=4 SlurmdStartTime=5 X=1\n".replace("\n   ", " ")
        + "NodeName=b BootTime=None SlurmdStartTime=None\n"
        + "NodeName=c BootTime=None SlurmdStartTime=5\n"
    )
    assert nodes.slurmd_starts(text) == {"a": 5}


def test_supervisor_restarts_what_was_not_stopped() -> None:
    started: list[tuple[str, ...]] = []

    def spawn(service: Service, argv: tuple[str, ...]) -> int:
        started.append(argv)
        return len(started)

    kept = Service(name="kept", argv=("k",), boot_options=("-b",))
    once = Service(name="once", argv=("o",), restart=False)
    supervisor = Supervisor([kept, once], spawn, lambda: 0.0)
    assert [supervisor.start(name) for name in ("kept", "once", "kept")] == [1, 2, 1]
    assert supervisor.run_due(0.0) is None
    for pid in (1, 2, 99):
        supervisor.ended(pid, 1, now_s=10.0)
    assert supervisor.run_due(10.0) == pytest.approx(RESTART_PAUSE_S)
    assert supervisor.run_due(10.0 + RESTART_PAUSE_S) is None
    assert started == [("k", "-b"), ("o",), ("k",)]
    assert supervisor.stopping("kept") == 3
    supervisor.ended(3, -15, now_s=11.0)
    assert supervisor.run_due(12.0) is None
    assert supervisor.pid("kept") is None
    assert supervisor.stopping("once") is None


def test_whoever_asks_a_dead_machine_is_told() -> None:
    with pytest.raises(ClusterError, match="does not answer"):
        ask(2**22 + 1, {"do": "status"})
