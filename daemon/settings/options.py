"""The table of options: each key of ckptless.yaml, option of ckptless-run and word of sbatch --ckptless.

A row is a field: its name, type and default, and beside the type what is accepted, where it may be given, and
a line of help. The reader of the file, the command line, variables of the SPANK plugin, error messages and
`ckptctl config` follow from it; and the facts in the manual pages and in etc/ckptless.yaml, and
slurm_ext/spank/table.h, which `make options` writes and a test compares.
"""

# ruff: noqa: RUF009  # each call in a dataclass makes a field

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args

from click import STRING

from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.protocol.health import Action
from ckptless.daemon.protocol.limits import MOST_INTERFACES, MOST_NODES
from ckptless.daemon.protocol.log import LogFormat, RunLogFormat
from ckptless.daemon.protocol.model import Limits
from ckptless.daemon.settings.option_kinds import (
    Option,
    checked,
    choice,
    counts,
    endpoint,
    file,
    flag,
    folder,
    is_bind,
    is_shared_bind,
    mapping,
    memory,
    names,
    networks,
    number,
    paths,
    shared_binds,
    span,
    speed,
    text,
)

LogLevel = Literal["debug", "info", "warning", "error"]
Backend = Literal["auto", "commands", "pyslurm"]
OnNodeLost = Literal["down", "drain", "none"]
TwinsMode = Literal["off", "warn", "act"]


# torchrun's own variable and default.
SHUTDOWN_TIMEOUT, DEFAULT_SHUTDOWN_S = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30.0


def _path(longest: int) -> re.Pattern[str]:
    return re.compile(rf"(?=.{{1,{longest}}}\Z)/[^\x00-\x1f]*")


# sockaddr_un has 108 bytes with the zero byte behind the name.
_is_path, _is_socket = _path(4096).fullmatch, _path(107).fullmatch
_SOCKET = "the absolute path of a Unix socket, at most 107 bytes long"
_NETWORK, _INTERFACE = "a network such as 10.1.0.0/16", "an interface such as ib0"

# Longer than a slow step or an evaluation.
DEFAULT_MAX_STALL_S = 300.0

# Rows of the file that the command line has too, or the sbatch spec.
MAX_STALL = span(
    "Seconds without a step that are too many; every deadline follows from it.",
    low=5,
    high=86400,
    such_as="90s or 5m",
    spec="max-stall",
    unsaid=f"{DEFAULT_MAX_STALL_S:.0f}; in a Slurm job, what sbatch --ckptless said, else max_stall of "
    "ckptless.yaml",
)
BANDWIDTH = speed(
    "As 500MB/s: what each node sends to others of the state at most, or none for no limit.",
    low=1e6,  # below this, what a transfer sends at once would take longer than a moment
    high=1e12,
    such_as="500MB/s",
    spec="bandwidth",
    unsaid="what sbatch --ckptless or the site says",
)
_OWN_ADDRESS = "with --local each node has an address of its own"
INTERFACE = Option(
    "As ib0, 10.1.0.0/16, or ib0+ib1: the interfaces or networks that the state is sent over.",
    words=(_NETWORK, _INTERFACE, f"up to {MOST_INTERFACES} of them such as ib0+ib1"),
    read=shared_binds,
    quoted=False,
    metavar="NAME",
    spec="interface",
    slurm_only=_OWN_ADDRESS,
    unsaid="what sbatch --ckptless or the site says, else that of the nodes' names",
)
COMM_INTERFACE = text(
    _NETWORK,
    _INTERFACE,
    good=is_shared_bind,
    quoted=False,
    metavar="NAME",
    help="As ib0 or 10.1.0.0/16: the interface or network that the ranks talk over.",
    slurm_only=_OWN_ADDRESS,
    unsaid="what the site says, else torch's and NCCL's own choice; GLOO_SOCKET_IFNAME and "
    "NCCL_SOCKET_IFNAME count more",
)
_SITES = "what the site says, else as the script says"
DATA_BUDGET = memory(
    "As 512MiB: what batches that are made ahead take on a node at most, of each loader.",
    low=1 << 20,
    high=1 << 50,
    such_as="512MiB or 4GiB",
    unsaid=_SITES,
)
DATA_PREFETCH = number("Batches that are made ahead of each replica at most.", low=1, high=256, unsaid=_SITES)


# ------------------------------------------------------------------------------- the site's file

TIMEOUT = span(low=0.01, high=86400, such_as="250ms or 2s", nothing="left out")


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """Timeouts in seconds that the file sets by hand; None is derived from `max_stall`."""

    beat_s: float | None = TIMEOUT.default()
    dark_s: float | None = TIMEOUT.default()
    pong_s: float | None = TIMEOUT.default()
    leave_s: float | None = TIMEOUT.default()
    join_s: float | None = TIMEOUT.default()
    stall_s: float | None = TIMEOUT.default()
    lease_s: float | None = TIMEOUT.default()


# The budgets' defaults are those of the ladder.
_LADDER = Limits.from_max_stall(1)


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """The tries of each rung of the ladder; `Limits` says what each is for. The window is in seconds."""

    raise_tries: int = number(high=100).default(_LADDER.raise_tries)
    process_tries: int = number(high=100).default(_LADDER.process_tries)
    flap_tries: int = number(low=1, high=100).default(_LADDER.flap_tries)
    flap_window_s: float = span(low=1, high=86400, such_as="30m").default(_LADDER.flap_window_s)


@dataclass(frozen=True, kw_only=True)
class DaemonSettings:
    """The daemon's port and memory. Port 6821 is the first after those that Slurm uses.

    `bind` is the address, interface or network for the other daemons; None is the address of the node's name.
    """

    port: int = number(low=1024, high=65535, what="a TCP port", restart=True).default(6821)
    bind: str | None = text(
        "an IP address", _NETWORK, _INTERFACE, good=is_bind, quoted=False, restart=True
    ).default()
    socket: str = text(_SOCKET, good=_is_socket, restart=True).default("/run/ckptless/ckptlessd.sock")
    state_dir: str = text("an absolute path", good=_is_path, restart=True).default("/var/lib/ckptless")
    log_level: LogLevel = choice(among=get_args(LogLevel)).default("info")
    log_format: LogFormat = choice(among=get_args(LogFormat)).default("text")


@dataclass(frozen=True, kw_only=True)
class SlurmSettings:
    """The ways in which the daemon speaks with Slurm.

    `poll_s`: seconds between two looks at the jobs, and at the nodes of those that are led from here; one
    costs about 10 ms of CPU.
    `on_node_lost`: down by default (30 s after it was drained), since Slurm itself would wait for
    SlurmdTimeout, and since it kills what might still run there.
    """

    backend: Backend = choice(among=get_args(Backend), restart=True).default("auto")
    poll_s: float = span(low=1, high=3600, such_as="30s").default(30.0)
    on_node_lost: OnNodeLost = choice(among=get_args(OnNodeLost)).default("down")
    bin_dir: str | None = text(
        "the absolute path of the folder with scontrol", good=_is_path, restart=True
    ).default()


@dataclass(frozen=True, kw_only=True)
class MungeSettings:
    """The socket of munged; None is where libmunge looks by itself."""

    socket: str | None = text(_SOCKET, good=_is_socket, restart=True).default()


@dataclass(frozen=True, kw_only=True)
class ReplicationSettings:
    """The network and the rate of copies of the state from agent to agent.

    `bandwidth_rate`: bytes per second that each agent sends at most; None for no limit. `interface`:
    interfaces or networks that each node has an address of, joined by +; None: that of the node's name.
    """

    bandwidth_rate: float | None = BANDWIDTH.default()
    interface: str | None = INTERFACE.default()


@dataclass(frozen=True, kw_only=True)
class CommSettings:
    """Over what the ranks talk to each other, where a job says nothing else: `interface` as for copies."""

    interface: str | None = COMM_INTERFACE.default()


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The memory of one loader's batches on a node, where its script would take more; None: no limit.

    `prefetch`: batches made ahead of each replica's use.
    """

    budget_nbytes: int | None = DATA_BUDGET.default()
    prefetch: int | None = DATA_PREFETCH.default()


@dataclass(frozen=True, kw_only=True)
class KeepSettings:
    """The memory that a daemon keeps of jobs that end before their training; see `requeue_table`."""

    memory_nbytes: int = memory(low=0, high=1 << 50, such_as="512MiB or 64GiB").default(4 << 30)
    ttl_s: float = span(low=1, high=86400, such_as="15m").default(900.0)


@dataclass(frozen=True, kw_only=True)
class LedgerSettings:
    """For how long the story of a job that is over is kept, and how large a daemon's ledger may be for it."""

    keep_s: float = span(low=3600, high=10 * 365 * 86400, such_as="720h").default(90 * 86400.0)
    size_nbytes: int = memory(low=16 << 20, high=1 << 40, such_as="256MiB or 4GiB").default(1 << 30)


@dataclass(frozen=True, kw_only=True)
class ElasticSettings:
    """Whether jobs may be elastic, and in which partitions and QOS; none are named: in all.

    `draw_in`: whether any job may have nodes added to it. `give_way`: whether elastic jobs that may draw
    nodes in give some back while a job of higher priority waits for them. `leave_drained`: whether jobs leave
    a node that is drained, or that a reservation for maintenance begins on, where they can go on without it.
    """

    allow: bool = checked("true", "false", good=lambda v: isinstance(v, bool)).default(True)
    partitions: tuple[str, ...] = Option(
        words=("a list of partitions, each once, such as [gpu, debug]",), read=names
    ).default(())
    qos: tuple[str, ...] = Option(
        words=("a list of QOS, each once, such as [normal, low]",), read=names
    ).default(())
    draw_in: bool = checked("true", "false", good=lambda v: isinstance(v, bool)).default(True)
    give_way: bool = checked("true", "false", good=lambda v: isinstance(v, bool)).default(False)
    leave_drained: bool = checked("true", "false", good=lambda v: isinstance(v, bool)).default(False)


def _is_command(line: str) -> bool:
    try:
        words = shlex.split(line)
    except ValueError:
        return False
    return bool(words) and words[0].startswith("/") and len(line) <= 4096 and line.isprintable()


@dataclass(frozen=True, kw_only=True)
class HealthSettings:
    """What looks at a node's health, and what is done about what it finds.

    `act`: the most that is done. `most_per_hour`: so many nodes of the cluster one probe's word may drain
    within an hour. `undrain_after_s`: a node that was drained for its health, and is well for so long, is
    undrained; None: never. `without`: probes that do not look. `disks`: folders that need room; `mounts`:
    file systems that have to answer. `commands`: lines to run, by a name; `actions`: what is done for a
    finding, by its code, where the table says something else. `move_stragglers`: jobs leave a node with a
    rank that is slower than the others in so many windows more, once it is named; 0: never.
    """

    act: Action = choice(among=get_args(Action)).default("evict")
    most_per_hour: int = number(low=0, high=1000).default(2)
    undrain_after_s: float | None = span(low=60, high=30 * 86400, such_as="1h", nothing="left out").default()
    without: tuple[str, ...] = Option(
        words=("a list of probes, each once, such as [nvml, link]",), read=names, restart=True
    ).default(())
    disks: tuple[str, ...] = Option(
        words=("a list of absolute paths, each once, such as [/local, /scratch]",), read=paths, restart=True
    ).default(())
    mounts: tuple[str, ...] = Option(
        words=("a list of absolute paths, each once, such as [/home, /scratch]",), read=paths, restart=True
    ).default(())
    commands: Mapping[str, str] | None = Option(
        words=("names with commands by their absolute paths, as in `nhc: /usr/sbin/nhc -a`",),
        read=lambda written: mapping(written, _is_command),
        restart=True,
    ).default()
    actions: Mapping[str, Action] | None = Option(
        words=("codes with note, drain, move or evict, as in `xid-13: drain`",),
        read=lambda written: mapping(written, get_args(Action).__contains__),
        restart=True,
    ).default()
    move_stragglers: int = number(low=0, high=1000).default(0)


@dataclass(frozen=True, kw_only=True)
class MetricsSettings:
    """Where Prometheus finds the daemon's metrics, and how much they say.

    `listen`: address and port of /metrics; `allow`: networks that may read there, beside this node itself.
    `textfile`: the file for node_exporter. `jobs`: whether single jobs are told of, by their numbers.
    """

    listen: str | None = text(
        "a numeric address and a port from 1024 to 65535, such as 127.0.0.1:9821 or [::1]:9821",
        good=endpoint,
        quoted=False,
        restart=True,
    ).default()
    allow: tuple[str, ...] = Option(
        words=("a list of networks, each once, such as [10.1.0.0/16]",), read=networks, restart=True
    ).default(())
    textfile: str | None = text(
        "the absolute path of a file whose name ends in .prom",
        good=re.compile(r"(?=.{1,4096}\Z)/(?:[^\x00-\x1f]*/)?[^\x00-\x1f/]+\.prom").fullmatch,
        restart=True,
    ).default()
    jobs: bool = checked("true", "false", good=lambda v: isinstance(v, bool), restart=True).default(False)


@dataclass(frozen=True, kw_only=True)
class SettingsFile:
    """The file. `domains` are hostlists by the name of the failure domain."""

    version: int = checked("1, as in `version: 1`", good=lambda v: type(v) is int and v == 1).required()
    max_stall_s: float = MAX_STALL.default(DEFAULT_MAX_STALL_S)
    domains: dict[Any, Any] | None = checked(
        "names with hostlists, as in `rack1: node[01-16]`", good=lambda v: isinstance(v, Mapping)
    ).default()
    timeouts: Overrides = Overrides()
    budgets: Budgets = Budgets()
    daemon: DaemonSettings = DaemonSettings()
    slurm: SlurmSettings = SlurmSettings()
    munge: MungeSettings = MungeSettings()
    replication: ReplicationSettings = ReplicationSettings()
    comm: CommSettings = CommSettings()
    data: DataSettings = DataSettings()
    keep: KeepSettings = KeepSettings()
    ledger: LedgerSettings = LedgerSettings()
    elastic: ElasticSettings = ElasticSettings()
    health: HealthSettings = HealthSettings()
    metrics: MetricsSettings = MetricsSettings()


# ------------------------------------------------------------------------------ the command line


_nodes = partial(number, low=1, high=MOST_NODES)
_pause = partial(span, low=1, high=86400, such_as="30s or 5m")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of ckptless-run, in the order of its help. None is "not said"."""

    local: bool = flag("Make the nodes on this machine; needs no root and no Slurm.").default(False)
    hosts: Path | None = file(
        "Run on the hosts of this file, one a line, which ssh reaches; needs no Slurm.",
        unsaid="in a Slurm job its nodes",
    ).default()
    rehearse: bool = flag(
        "Run the script for a few steps on this machine, without faults and with, and tell what differs.",
        local_only=True,
    ).default(False)
    rehearse_steps: int = number(
        "Steps of each run of a rehearsal.", low=4, high=10**6, local_only=True, unsaid="8"
    ).default(0)
    nodes: str | None = Option(
        "Nodes that train.",
        also=("--nnodes",),
        metavar="N",
        torchruns=True,
        unsaid="1; in a Slurm job, all that are no spares",
    ).default()
    spares: int = number(
        "More nodes that wait, warm, to replace one.",
        high=1024,
        spec="spares",
        unsaid="{}, or what sbatch --ckptless said",
    ).default(0)
    min_nodes: int | None = _nodes(
        "Go on with so few nodes, where one is lost and no spare is left.",
        spec="min-nodes",
        unsaid="what sbatch --ckptless said, else as many as train",
    ).default()
    max_nodes: int | None = _nodes(
        "Grow to so many nodes, once that many are there.",
        spec="max-nodes",
        unsaid="what sbatch --ckptless said, else as many as train",
    ).default()
    step: int | None = _nodes(
        "So many nodes are given back, or added, at once, as those of one replica of the model.",
        spec="step",
        unsaid="what sbatch --ckptless said, else 1",
    ).default()
    sizes: tuple[int, ...] = counts(
        "As 4:8:12: on so many nodes the job may train, instead of a least, a most and a step.",
        low=1,
        high=MOST_NODES,
        most=16,
        spec="sizes",
        unsaid="what sbatch --ckptless said",
    ).default(())
    scale_up_after_s: float | None = _pause(
        "How long there must have been nodes to grow with before the job grows.",
        low=0,
        spec="scale-up-after",
        unsaid="what sbatch --ckptless said, else 30",
    ).default()
    scale_timeout_s: float | None = _pause(
        "How long ranks of an elastic job may take to join with their state; those later are replaced.",
        spec="scale-timeout",
        unsaid="what sbatch --ckptless said, else as long as a stall may last",
    ).default()
    graceful_s: float | None = _pause(
        "How long the training function of an elastic job may take to be left before its process is ended.",
        spec="graceful",
        unsaid="what sbatch --ckptless said, else a tenth of the longest stall",
    ).default()
    draw_in: int | None = number(
        "Nodes that the job may draw in over its life, of those that are idle in its partition.",
        high=1024,
        spec="draw-in",
        unsaid="0, or what sbatch --ckptless said",
    ).default()
    draw_in_patience_s: float | None = _pause(
        "How long a job that cannot go on waits for a node to draw in before it ends.",
        low=0,
        spec="draw-in-patience",
        unsaid="what sbatch --ckptless said, else 60",
    ).default()
    elastic_policy: Path | None = file(
        "A YAML file with values of your own for each number of nodes: run.policy has those of the present.",
        unsaid="run.policy is empty",
    ).default()
    nproc_per_node: str | None = Option(
        "Ranks on each node; or gpu, cpu, xpu, auto: as many as this node has.",
        metavar="N",
        torchruns=True,
        unsaid="1; in a Slurm job, its tasks or GPUs per node",
    ).default()
    max_restarts: int = number("For scripts without ckptless.run: as torchrun.", torchruns=True).default(0)
    tier: str | None = choice(
        "1: process groups start without a root or a central store, and nothing else; a rank that "
        "fails ends the job.",
        among=("1", "4"),
        unsaid="4, all that the script uses; CKPTLESS_ROOTLESS=1 in the environment is 1",
    ).default()
    max_stall_s: float | None = MAX_STALL.default()
    module: bool = flag(
        "The script is a module's name, as in python -m.", short="-m", torchruns=True
    ).default(False)
    preload: tuple[str, ...] = Option(
        "Import this before the ranks are forked (torch always is).", metavar="MODULE", multiple=True
    ).default(())
    tee: str | None = Option(
        "Ranks whose output is shown here too: all or none, ranks as in 0,3, or as torchrun 3 for all "
        "and 0:3,1:3 for local ranks.",
        short="-t",
        metavar="RANKS",
        torchruns=True,
        unsaid="rank 0, where torchrun shows all",
    ).default()
    redirects: str | None = Option(
        "As torchrun: with 3 no output is shown here, with 0:3 none of local rank 0.  Every rank has a log.",
        short="-r",
        metavar="WHICH",
        torchruns=True,
    ).default()
    local_ranks_filter: str | None = Option(
        "As torchrun: show only the output of these local ranks.", metavar="0,1", torchruns=True
    ).default()
    replicas: int = number(
        "Nodes that hold a copy of each rank's part of the state.",
        low=1,
        high=64,
        spec="replicas",
        unsaid="{}, or what sbatch --ckptless said",
    ).default(2)
    replication_bandwidth_rate: float | None = BANDWIDTH.default()
    replication_interface: str | None = INTERFACE.default()
    comm_interface: str | None = COMM_INTERFACE.default()
    data_budget_nbytes: int | None = DATA_BUDGET.default()
    data_prefetch: int | None = DATA_PREFETCH.default()
    twins: TwinsMode = choice(
        "Compare, at every commit, what ranks with the same tensors have; where they differ, say so, or "
        "go back to where they agreed.",
        among=get_args(TwinsMode),
    ).default("act")
    domains: str | None = Option(
        "With --local: the failure domain of each node, the spares' last.",
        metavar="A,A,B",
        local_only=True,
        unsaid="none are known",
    ).default()
    requeue: int = number(
        "In a Slurm job: so often it goes back into the queue where it cannot go on.",
        slurm_only="leave it out with --local",
    ).default(0)
    save_dir: Path | None = folder(
        "Save steps below this folder, which all nodes see, in the format of "
        "torch.distributed.checkpoint; and go on from the newest one there.",
        file_okay=False,
    ).default()
    save_every: int = number(
        "Steps between two saves; 0: only at the end, and by ckptctl save.", metavar="STEPS"
    ).default(0)
    save_total_limit: int = number("Saved steps to keep.", low=1).default(3)
    start_timeout: int = number(
        "How long a daemon that starts may do nothing, and how long an agent waits for its node's.",
        low=1,
        high=86400,
        metavar="SECONDS",
    ).default(30)
    shutdown_timeout: int | None = number(
        "What ranks that handle SIGTERM get to end by themselves, before SIGKILL.",
        high=86400,
        metavar="SECONDS",
        unsaid=f"{SHUTDOWN_TIMEOUT}, else {DEFAULT_SHUTDOWN_S:.0f}",
    ).default()
    job: str | None = Option(
        "The job's name in the ledger.", metavar="NAME", local_only=True, unsaid="made up"
    ).default()
    state_dir: Path | None = folder(
        "Where ledger and logs go.", local_only=True, unsaid="under ~/.local/state/ckptless"
    ).default()
    log_dir: Path | None = folder(
        "Where a folder ckptless-JOB for output is made; in a Slurm job all nodes must see it.",
        torchruns=True,
        unsaid="the folder that the command was started in; with --local below --state-dir",
    ).default()
    port: int = number(
        "TCP port of the daemons; 0: any free one.", high=65535, metavar="PORT", local_only=True
    ).default(0)
    log_format: RunLogFormat = choice(
        "The lines that ckptless itself logs, in the launcher, the agents and the ranks: text, or JSON.",
        among=get_args(RunLogFormat),
    ).default("text")
    master_addr: str | None = Option(
        "Where this command is run on each node by somebody else: the address of node 0.",
        metavar="ADDRESS",
        torchruns=True,
        unsaid="MASTER_ADDR",
    ).default()
    master_port: int | None = number(
        "The port of node 0 where the nodes meet.",
        low=1,
        high=65535,
        metavar="PORT",
        torchruns=True,
        unsaid="MASTER_PORT, else 29500",
    ).default()
    node_rank: int | None = number(
        "The number of this node, from 0 on; the last --spares of them wait.",
        high=MOST_NODES,
        torchruns=True,
        unsaid="NODE_RANK, or the rank that mpirun gives the only process of a node",
    ).default()
    local_addr: str | None = Option(
        "The address at which the other nodes reach this one.",
        metavar="ADDRESS",
        torchruns=True,
        unsaid="that of the connection to node 0",
    ).default()
    verbose: bool = flag("Log more.", short="-v").default(False)


# ------------------------------------------------------------------------------- rules and rows

# In a job of as many spares as nodes nobody trains. The plugin has the sentence from table.h.
NONE_LEFT = (
    "with {spares} spare{s}, a job of {nodes} node{n} has none left to train on; ask for more nodes (-N) "
    "or for fewer spares"
)
NO_HET = (
    "a heterogeneous job (with : or hetjob) cannot train with ckptless, which would use its first component "
    "alone; submit one job whose nodes are all alike"
)


def check_fits(spares: int, nodes: int) -> None:
    """Raise UsageError where no node of the job's `nodes`, spares included, is left to train on."""
    if spares >= nodes:
        s, n = ("" if count == 1 else "s" for count in (spares, nodes))
        raise UsageError(NONE_LEFT.format(spares=spares, s=s, nodes=nodes, n=n))


class Row(NamedTuple):
    """A row as the table is walked through; `name` is the field's, and `key` that without its unit."""

    name: str
    key: str
    section: str
    option: Option
    default: Any
    optional: bool

    @property
    def path(self) -> str:
        """The key with its section, "daemon.port"."""
        return f"{self.section}.{self.key}" if self.section else self.key

    @property
    def flags(self) -> tuple[str, ...]:
        """Return the option's names on the command line."""
        return (*filter(None, [self.option.short]), f"--{self.key.replace('_', '-')}", *self.option.also)

    @property
    def unsaid(self) -> str:
        """The default where nothing is said on the command line; "" for nothing."""
        fixed = "{}" if self.default not in (None, ()) and self.default is not False else ""
        return (self.option.unsaid or fixed).format(self.default)

    @property
    def wanted(self) -> str:
        """The words for what the file's value must be."""
        return self.option.wanted(self.option.nothing if self.optional else "")


def rows(part: Any, section: str = "") -> Iterator[Row]:
    """Every row of a part of the table, those of its sections too."""
    for field in fields(part):
        if is_dataclass(field.type):
            yield from rows(field.type, field.name)
            continue
        option: Option = field.metadata["option"]
        key = field.name.removesuffix(option.suffix)
        yield Row(field.name, key, section, option, field.default, NoneType in get_args(field.type))


# The keys of the file in its order.
KEYS = {row.path: row for row in rows(SettingsFile)}
RUN_ROWS = tuple(rows(RunOptions))
_RANGE = ("min_nodes", "max_nodes", "step")


def run_options(given: Mapping[str, object], env: Mapping[str, str] | None = None) -> RunOptions:
    """The options of a run: as given on the command line, else as the SPANK plugin has put them into `env`.

    Raises UsageError for what cannot be.
    """
    found: dict[str, Any] = {}
    # The command line counts more, also where it says the same in another way; torchrun's MIN:MAX is one.
    two = ":" in str(given.get("nodes"))
    drop = _RANGE if given.get("sizes") else ("sizes",) if two or any(map(given.get, _RANGE)) else ()
    drop = (*drop, "min_nodes") if two else drop
    for row in RUN_ROWS:
        option, value = row.option, given.get(row.name)
        if isinstance(value, str) and option.words and option.click_type is STRING:
            found[row.name] = option.read_word(row.flags[-1], value)
        elif value is not None:
            found[row.name] = value
        elif option.spec and env is not None and row.name not in drop and (said := env.get(option.variable)):
            found[row.name] = option.read_word(option.variable, said)
    return RunOptions(**found)
