"""The launcher's word to an agent: in a file that only the user can read, or in the step's environment."""

import base64
import re
import socket
from collections.abc import Mapping
from typing import Any

import msgspec

from ckptless.daemon.protocol.errors import StartError, UsageError
from ckptless.daemon.protocol.log import RunLogFormat
from ckptless.daemon.protocol.messages import JobSpec
from ckptless.daemon.protocol.saving import SaveConfig
from ckptless.daemon.settings.bind import choose, choose_interface, interfaces
from ckptless.daemon.settings.options import (
    DEFAULT_SHUTDOWN_S,
    DataSettings,
    ReplicationSettings,
    RunOptions,
    TwinsMode,
)

# The environment variable that carries a SharedConfig (base64 of JSON) to the agents of a Slurm job.
AGENT_CONFIG = "CKPTLESS_AGENT_CONFIG"
GLOO_IFNAME, NCCL_IFNAME = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
# What an agent does that was told nothing else.
_RUN = RunOptions()


class SharedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part that is the same for every agent of a job.

    `argv` is the script (or, with `module`, the module) and its arguments. `tee`: ranks whose output is shown
    on the console as well, by rank; None for all. `copies` is how many other nodes hold each record.
    `start_s`: seconds in which the node's daemon must have taken the agent. `outcome_dir`: where the agent
    writes how the job ended, if anywhere. `save`: where steps are saved, if anywhere. `replication`: how
    copies of the state go to the other nodes. `twins`: what is done when ranks that should have the same
    tensors do not. `restarts`: how often Slurm has started the job again; None where it never does.
    `comm_interface`: the interface or network that ranks talk over; None leaves that to torch. `data`: what
    training data may take in memory. `shutdown_s`: from SIGTERM until a rank gets SIGKILL. `in_step`: the
    agents are the job's step, beside which there is no launcher. `draw_dir`: where an agent tells the
    launcher how many nodes are to be drawn in, and which are given back; None: nobody looks. `policy`:
    values of the user's own for each number of nodes, as JSON; "" for none. `log_format`: the agent's,
    and of what this package logs in its ranks.
    """

    spec: JobSpec
    argv: tuple[str, ...]
    module: bool
    cwd: str
    daemon_socket: str
    log_dir: str
    preload: tuple[str, ...]
    tee: tuple[int, ...] | None = (0,)
    copies: int = _RUN.replicas
    zygote_deadline_s: float = 300.0
    start_s: float = _RUN.start_timeout
    outcome_dir: str | None = None
    draw_dir: str | None = None
    save: SaveConfig | None = None
    replication: ReplicationSettings = ReplicationSettings()
    twins: TwinsMode = _RUN.twins
    restarts: int | None = None
    comm_interface: str | None = None
    data: DataSettings = DataSettings()
    shutdown_s: float = DEFAULT_SHUTDOWN_S
    in_step: bool = False
    policy: str = ""
    log_format: RunLogFormat = _RUN.log_format

    @property
    def leave_s(self) -> float:
        """The time that an agent may take for its ranks' end and the last save, once the job is over."""
        return self.shutdown_s + (self.save.end_s if self.save is not None else 0.0)


class AgentConfig(SharedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an agent is told.

    `rank_socket` is where it listens for its ranks; "" for one in a folder of its own.
    `env` is the ranks' environment without torchrun's variables. In a file it is only what is added to the
    agent's own: nobody's secrets lie on a disk.
    `copies_addresses`: where other agents reach this one, and from where it connects to them, one of each
    interface; none: at `address`, and from wherever the kernel likes.
    `comm_address`: where ranks of other nodes reach those of this one; None: at `address`.
    """

    node: int
    name: str
    address: str
    env: dict[str, str]
    rank_socket: str
    copies_addresses: tuple[str, ...] = ()
    comm_address: str | None = None


def of_this_node(env: Mapping[str, str], cores: int) -> AgentConfig:
    """The configuration of the agent in a Slurm step. Raises UsageError, StartError."""
    text = env.get(AGENT_CONFIG)
    if text is None:
        raise UsageError(f"{AGENT_CONFIG} is not set: agents are started by ckptless-run")
    try:
        shared = msgspec.json.decode(base64.b64decode(text, validate=True), type=SharedConfig)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(
            f"{AGENT_CONFIG} is damaged ({error}): agents are started by ckptless-run"
        ) from error
    name = env.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    if name not in shared.spec.names:
        raise UsageError(f"{name} is not among the job's nodes ({', '.join(shared.spec.names)})")
    address = _address(name)
    own = {key: value for key, value in env.items() if key != AGENT_CONFIG}
    own.update(_threads(own, shared.spec.slots_per_node, cores))
    names, comm_address = _comm(own, shared.comm_interface)
    own.update(names)
    return agent_config(
        shared,
        # A node that was given back and drawn in again has another number since.
        node=len(shared.spec.names) - 1 - shared.spec.names[::-1].index(name),
        name=name,
        address=address,
        env=own,
        rank_socket="",
        copies_addresses=_copies_addresses(shared.replication.interface),
        comm_address=comm_address,
    )


def on_host(shared: SharedConfig, env: Mapping[str, str], address: str, **own: Any) -> AgentConfig:
    """The configuration of the agent of a host without Slurm, which has `address`. Raises StartError.

    Ranks talk over the interface of that address, if nothing else is said.
    """
    env = {**env, **thread_env(env, shared.spec.slots_per_node)}
    names, comm_address = _comm(env, shared.comm_interface or address)
    return agent_config(
        shared,
        address=address,
        env={**env, **names},
        copies_addresses=_copies_addresses(shared.replication.interface),
        comm_address=comm_address,
        **own,
    )


def agent_config(shared: SharedConfig, **own: Any) -> AgentConfig:
    """The configuration of one agent: what all have, and its `own`."""
    return AgentConfig(**{**msgspec.structs.asdict(shared), **own})


def encoded(shared: SharedConfig) -> str:
    """The configuration as the variable AGENT_CONFIG has it."""
    return base64.b64encode(msgspec.json.encode(shared)).decode()


def thread_env(env: Mapping[str, str], ranks: int) -> dict[str, str]:
    """Return what must be set before torch is loaded: as torchrun, 1 where several ranks share a machine.

    No other number: sums depend on it, and a recovery may take a rank to another node.
    """
    return {} if "OMP_NUM_THREADS" in env or ranks <= 1 else {"OMP_NUM_THREADS": "1"}


def _threads(env: Mapping[str, str], slots: int, cores: int) -> dict[str, str]:
    """Return as many as torchrun; where Slurm gave one rank fewer CPUs than it lets a process see, those."""
    given = env.get("SLURM_CPUS_ON_NODE", "")
    mine = min(cores, int(given)) if re.fullmatch(r"[1-9]\d{0,5}", given) else cores
    if "OMP_NUM_THREADS" not in env and slots == 1 and mine < cores:
        return {"OMP_NUM_THREADS": str(mine)}
    return thread_env(env, slots)


def _copies_addresses(interface: str | None) -> tuple[str, ...]:
    """The node's address on each network that was chosen. Raises StartError for none, and for one twice."""
    if interface is None:
        return ()
    here = tuple(one for one in interfaces() if not one.address.is_loopback)
    setting = "the interface or network for copies (replication.interface)"
    found: dict[str, str] = {}
    for name in interface.split("+"):
        try:
            address = choose(name, here, setting)
        except UsageError as error:
            raise StartError(str(error)) from error
        if address in found:
            raise StartError(
                f"{setting} has {found[address]} and {name}, which are both {address} on this node"
            )
        found[address] = name
    return tuple(found)


def _comm(env: Mapping[str, str], interface: str | None) -> tuple[dict[str, str], str | None]:
    """The variables by which Gloo and NCCL are told of it, and the node's address there.

    What the user has set stays. Raises StartError where the node has no such interface.
    """
    users = env.get(GLOO_IFNAME, "").partition(",")[0]
    names: dict[str, str] = {}
    try:
        if interface is not None:
            setting = "the interface or network for training (comm.interface)"
            chosen = choose_interface(interface, interfaces(), setting)
            # With = NCCL takes this name alone, without it all that begin so.
            names = {GLOO_IFNAME: chosen.name, NCCL_IFNAME: f"={chosen.name}"}
        if users:
            return _unset(names, env), str(choose_interface(users, interfaces(), GLOO_IFNAME).address)
    except UsageError as error:
        raise StartError(str(error)) from error
    return _unset(names, env), str(chosen.address) if interface is not None else None


def _unset(names: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in names.items() if not env.get(name)}


def _address(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UsageError(f"the node's name {name} has no address here: {error}") from error
