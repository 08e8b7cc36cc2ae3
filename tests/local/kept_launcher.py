"""Two starts of one job on the same nodes: `kept_launcher.py HOME OPTIONS...`, else as ckptless-run.

A cluster's daemons outlive a job. Here they outlive the first start (JOB.0), which ends by SIGTERM or by
itself, and serve the second (JOB.1), which begins once there is a file HOME/again. The exit code is its own.
"""

import asyncio
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from ckptless.daemon.agent.ranks.socket_folder import SocketFolder
from ckptless.daemon.launch import local, main, nodes
from ckptless.daemon.launch import options as launch_options
from ckptless.daemon.launch.options import newest, saved_step
from ckptless.daemon.settings.agent_config import SharedConfig
from ckptless.daemon.settings.config import KeepConfig, LocalConfig

POLL_S = 0.05


class Shared(SocketFolder):
    """The folder of both starts, since the daemons are."""

    def close(self) -> None:
        """It is the second start that removes it, see `Both`."""


class Start(local.LocalRun):
    """One start; the first begins the daemons, and the second ends them."""

    def __init__(self, config: SharedConfig, more: dict[str, Any], earlier: "Start | None" = None) -> None:
        self._restarts = 0 if earlier is None else 1
        name = f"{config.spec.job.partition('.')[0]}.{self._restarts}"
        # The run id stays, as of a Slurm job, however often it starts.
        spec, spares = config.spec, os.environ.get("TOY_KEEP_SPARES")
        if earlier is not None and spares is not None:
            # Of the same nodes others wait.
            spec = replace(spec, nodes=spec.nodes + spec.spares - int(spares), spares=int(spares))
        spec = replace(spec, job=name, launch=secrets.token_hex(16), saved_step=saved_step(config.save))
        super().__init__(replace(config, spec=spec), **more)
        self._earlier = earlier

    def _prepare(self) -> None:
        if self._earlier is None:
            super()._prepare()
        else:
            self._nodes = self._earlier._nodes
        keep = KeepConfig(nbytes=int(os.environ.get("TOY_KEEP_NBYTES", str(1 << 30))), ttl_s=600.0)
        for node in self._nodes:
            daemon = msgspec.json.decode((node.dir / "daemon.json").read_bytes(), type=LocalConfig)
            nodes.write_config(node.dir / "daemon.json", replace(daemon, keep=keep))
            agent = replace(self._agent_config(node), restarts=self._restarts)
            nodes.write_config(node.dir / "agent.json", agent)

    async def _start_daemons(self) -> None:
        if self._earlier is None:
            await super()._start_daemons()
            return
        lost = os.environ.get("TOY_KEEP_LOST", "").split(",")
        for node in self._nodes:
            if str(node.number) in lost and node.daemon is not None:
                # Another node in its place: nothing is kept there.
                await nodes.end([node.daemon], 15.0)
                await self._start_daemon(node)
                await self._daemon_ready(node)

    async def _end_all(self) -> None:
        if self._earlier is not None:
            await super()._end_all()
            return
        agents = [node.agent for node in self._nodes if node.agent is not None]
        await nodes.end(agents, 15.0)
        daemons = {node.daemon.pid for node in self._nodes if node.daemon is not None}
        while set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())) - daemons:
            self._adopt_orphans()
            await asyncio.sleep(POLL_S)


class Both:
    """In place of LocalRun."""

    def __init__(self, config: SharedConfig, **more: Any) -> None:
        self._config, self._more = config, more

    async def run(self) -> int:
        folder = Shared(self._config.spec.job)
        stand_in: Any = lambda _job: folder  # noqa: E731
        vars(nodes)["SocketFolder"] = stand_in
        try:
            return await self._run()
        finally:
            SocketFolder.close(folder)

    async def _run(self) -> int:
        first = Start(self._config, self._more)
        (HOME / "first").write_text(str(await first.run()))
        while not (HOME / "again").exists():  # noqa: ASYNC110  # it is another process that makes it
            await asyncio.sleep(POLL_S)
        config, save = self._config, self._config.save
        if save is not None:
            found = newest(Path(save.directory))
            save = replace(save, resume="" if found is None else str(found[0]))
        return await Start(replace(config, save=save), self._more, first).run()


if __name__ == "__main__":
    HOME = Path(sys.argv.pop(1))
    stand_in: Any = Both
    launch_options.LocalRun = stand_in  # type: ignore[attr-defined]
    main.main()
