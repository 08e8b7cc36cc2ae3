"""What the launcher tells an agent, in a file that only the user can read."""

import msgspec

from ckptless.daemon.api.messages import JobSpec


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an agent is told.

    `argv` is the script (or, with `module`, the module) and its arguments. `env` is the ranks' environment
    without torchrun's variables. `tee`: ranks whose output is shown on the console as well, by rank; None for
    all. `store_address` is where its key-value store listens (in local mode 127.0.0.1, which every resolver
    knows: torch looks the name of its store up). `copies` is how many other nodes hold each record.
    """

    node: int
    name: str
    address: str
    store_address: str
    spec: JobSpec
    argv: tuple[str, ...]
    module: bool
    env: dict[str, str]
    cwd: str
    daemon_socket: str
    rank_socket: str
    log_dir: str
    preload: tuple[str, ...]
    tee: tuple[int, ...] | None = (0,)
    copies: int = 2
    zygote_deadline_s: float = 300.0
