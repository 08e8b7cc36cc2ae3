"""The texts in /etc of every machine. Pure: a plan and the system's own files in, texts out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .plan import CONTROLLER, USERS, Plan

# What a site has, but for what would only make tests slow: the pause of a kill, the passes of the scheduler.
DEFAULTS: Mapping[str, str] = {
    "ClusterName": "test",
    "SlurmctldHost": CONTROLLER,
    "SlurmUser": "slurm",
    "AuthType": "auth/munge",
    "CredType": "cred/munge",
    "MpiDefault": "none",
    "StateSaveLocation": "/var/spool/slurmctld",
    "SlurmdSpoolDir": "/var/spool/slurmd",
    "SlurmctldPidFile": "/run/slurm/slurmctld.pid",
    "SlurmdPidFile": "/run/slurm/slurmd.pid",
    "SlurmctldDebug": "verbose",
    "SlurmdDebug": "verbose",
    # Each machine has a PID namespace of its own: nothing of a job outlives it, without cgroups.
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "JobAcctGatherType": "jobacct_gather/none",
    "AccountingStorageType": "accounting_storage/none",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core",
    # As many CPUs as the plan says, whatever the machine has.
    "SlurmdParameters": "config_overrides",
    "SchedulerType": "sched/backfill",
    "SchedulerParameters": "batch_sched_delay=0,sched_interval=5,bf_interval=5",
    "ReturnToService": "1",
    "SlurmdTimeout": "300",
    "SlurmctldTimeout": "120",
    "MessageTimeout": "10",
    "TCPTimeout": "2",
    "KillWait": "5",
    "CompleteWait": "0",
    "InactiveLimit": "0",
    "PlugStackConfig": "/etc/slurm/plugstack.conf",
}


def slurm_conf(plan: Plan) -> str:
    """slurm.conf: the defaults, changed as the plan says."""
    settings = {key: (key, value) for key, value in DEFAULTS.items()}
    names = {key.lower(): key for key in DEFAULTS}  # Slurm's keys have no case
    for key, value in plan.conf.items():
        settings[names.get(key.lower(), key)] = (key, value)
    lines = [f"{key}={value}" for key, value in settings.values() if value]
    first, last = plan.node_names[0], plan.node_names[-1]
    hosts = first if first == last else f"node[{first[4:]}-{last[4:]}]"
    lines += [
        f"NodeName={hosts} CPUs={plan.cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={plan.cpus}"
        f" ThreadsPerCore=1 RealMemory={plan.memory_mb} State=UNKNOWN {plan.node_options}".rstrip(),
        "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
        *plan.lines,
    ]
    return "\n".join(lines) + "\n"


def cgroup_conf(slurm_version: str) -> str:
    """cgroup.conf that lets slurmd start without a cgroup file system, given what `slurmd -V` says."""
    # Nothing configured uses cgroups, yet 22.05 wants a version named: its v1 plugin then touches nothing.
    found = re.search(r"(\d+)\.(\d+)", slurm_version)
    release = (int(found[1]), int(found[2])) if found else (0, 0)
    return f"CgroupPlugin={'disabled' if release >= (23, 11) else 'cgroup/v1'}\n"


def hosts(plan: Plan) -> str:
    """/etc/hosts."""
    return "127.0.0.1 localhost\n" + "".join(f"{plan.address(name)} {name}\n" for name in plan.machines)


# Without a network to ask, any source but files only costs timeouts.
NSSWITCH = "".join(
    f"{database}: files\n"
    for database in ("passwd", "group", "shadow", "hosts", "networks", "protocols", "services", "ethers")
)


def passwd(system: str) -> str:
    """The system's /etc/passwd and the users of the cluster."""
    return _without_users(system, 2) + "".join(
        f"{name}:x:{uid}:{uid}::/home/{name}:/bin/bash\n" for name, uid in USERS.items()
    )


def group(system: str) -> str:
    """The system's /etc/group and the groups of the cluster's users."""
    return _without_users(system, 2) + "".join(f"{name}:x:{uid}:\n" for name, uid in USERS.items())


def _without_users(text: str, id_field: int) -> str:
    ids = {str(uid) for uid in USERS.values()}
    kept = []
    for line in text.splitlines():
        words = line.split(":")
        if words[0] not in USERS and (len(words) <= id_field or words[id_field] not in ids):
            kept.append(line + "\n")
    return "".join(kept)


@dataclass(frozen=True)
class Account:
    """A line of /etc/passwd."""

    name: str
    uid: int
    gid: int
    home: str


def account(passwd_text: str, name: str) -> Account | None:
    """The account of that name in the cluster's own passwd: another root may number its users differently."""
    for line in passwd_text.splitlines():
        words = line.split(":")
        if words[0] == name and len(words) >= 6:
            return Account(name, int(words[2]), int(words[3]), words[5])
    return None
