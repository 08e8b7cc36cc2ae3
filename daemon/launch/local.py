"""Local mode: every "node" is on this machine, with a loopback address and a state directory of its own.

The launcher stands in for two things that a cluster has: Slurm, which gives out nodes, and systemd, which
starts a daemon again (`nodes.py`). Everything else is the same code as on a cluster.
"""

import logging
import os
import secrets
from pathlib import Path

import msgspec

from ckptless.daemon.ckptlessd.state_dir import open_state_dir
from ckptless.daemon.launch.late import LateNodes
from ckptless.daemon.launch.nodes import Node, Nodes, free_port
from ckptless.daemon.ledger.paths import default_state_dir
from ckptless.daemon.protocol.forming import forget_wanted, nodes_asked_for, nodes_up
from ckptless.daemon.settings.agent_config import AgentConfig, SharedConfig, agent_config, thread_env
from ckptless.daemon.settings.config import LocalConfig, Peer
from ckptless.daemon.transport.handshake import new_key

logger = logging.getLogger(__name__)


class LocalRun(Nodes):
    """One run with all of its nodes here."""

    def __init__(
        self,
        config: SharedConfig,
        *,
        state_dir: Path | None = None,
        log_dir: Path | None = None,
        port: int = 0,
        verbose: bool = False,
    ) -> None:
        """`config` but for what each node has of its own; `port` 0 is any free one, on each node another.

        `log_dir`: there is one, for what all ranks print.
        """
        root = (state_dir or default_state_dir().parent / config.spec.job).absolute()
        super().__init__(msgspec.structs.replace(config, draw_dir=str(root)), root, verbose=verbose)
        self._port, self._log_dir = port, log_dir
        self._moves_latest = state_dir is None
        self._late = LateNodes(self.spec.nodes + self.spec.spares, self.spec.late)

    def lose_agent(self, agent: int) -> None:
        """Kill a node, whose agent has this process id."""
        for node in self._nodes:
            if node.agent is not None and node.agent.pid == agent:
                self.lose(node)

    # ----------------------------------------------------------------------------------- prepare

    def _prepare(self) -> None:
        """Directories, key, configuration files. Raises UsageError."""
        open_state_dir(self.state_dir)
        if self._moves_latest:
            point_latest(self.state_dir)
        forget_wanted(self.state_dir)
        key_file = self.state_dir / "key"
        key_file.touch(mode=0o600)
        key_file.write_bytes(new_key())
        # A /24 of loopback for this run: its ports cannot meet another run's.
        net = f"127.{64 + secrets.randbelow(64)}.{secrets.randbelow(256)}"
        total = self.spec.nodes + self.spec.spares + self.spec.late
        peers = tuple(self._peer(number, f"{net}.{number + 1}") for number in range(total))
        for peer in peers:
            daemon = LocalConfig(
                node=peer.node,
                state_dir=str(self.state_dir / peer.name),
                socket=self._socket(peer.node, "daemon"),
                key_file=str(key_file),
                peers=peers,
                log_format=self._config.log_format,
            )
            self._add(peer, daemon)

    def _peer(self, number: int, address: str) -> Peer:
        port = self._port or free_port(address)
        return Peer(node=number, name=f"node-{number}", address=address, port=port)

    def _agent_config(self, node: Node) -> AgentConfig:
        env = dict(os.environ)
        most = max((self.spec.nodes, *self.spec.sizes))
        env.update(thread_env(env, most * self.spec.slots_per_node))
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return agent_config(
            self._config,
            spec=self.spec,
            node=node.number,
            name=node.peer.name,
            address=node.peer.address,
            env=env,
            daemon_socket=self._socket(node.number, "daemon"),
            rank_socket=self._socket(node.number, "ranks"),
            log_dir=str(self._logs_of(node)),
            copies_addresses=(node.peer.address,),
        )

    # ---------------------------------------------------------------------------- start, and later

    async def _start_all(self) -> None:
        await super()._start_all()
        logger.info(
            "job %s: nodes %d, spares %d; follow it with: ckptctl --state-dir %s events -f",
            self.spec.job,
            self.spec.nodes,
            self.spec.spares,
            self.state_dir,
        )

    @property
    def _founders(self) -> list[Node]:
        return self._nodes[: self._late.first]

    async def _draw_in(self) -> None:
        """Start those of the further nodes that the job wants: on a cluster Slurm would give them."""
        names = nodes_up(self.state_dir)
        up = {node.number for node in self._nodes if node.peer.name in names}
        ended = {node.number for node in self._nodes if node.agent and node.agent.returncode is not None}
        for _ in range(self._late.missing(nodes_asked_for(self.state_dir), up, ended)):
            node = self._nodes[self._late.start()]
            logger.info("%s: drawn in", node.peer.name)
            await self._start_daemon(node)
            await self._daemon_ready(node)
            await self._begin_agent(node)


def point_latest(state_dir: Path) -> None:
    """`latest` beside the runs points at the newest, which is what ckptctl shows by default."""
    latest = default_state_dir()
    if latest.parent != state_dir.parent:
        return
    partial = latest.with_name(f".latest-{secrets.token_hex(4)}")
    partial.symlink_to(state_dir.name)
    partial.rename(latest)
