"""`ckptlessd` on a cluster: settings, Slurm, MUNGE and systemd, put together around the service."""

import asyncio
import logging
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

from ckptless.daemon import log
from ckptless.daemon.api.errors import CkptlessError
from ckptless.daemon.clock import Clock
from ckptless.daemon.config import DaemonConfig, KeepConfig
from ckptless.daemon.peers.munge import Munge
from ckptless.daemon.peers.vouch import MungeVouch
from ckptless.daemon.service import Service, serve_forever
from ckptless.daemon.settings import Settings, load_settings, needs_restart
from ckptless.daemon.settings_bind import listen_address
from ckptless.daemon.slurm.cached import CachedSlurm
from ckptless.daemon.slurm.cluster import SlurmCluster
from ckptless.daemon.slurm.select import select
from ckptless.daemon.sysd.listen import inherited
from ckptless.daemon.sysd.notify import Notifier
from ckptless.daemon.sysd.watchdog import Watchdog, Watched, period_s

logger = logging.getLogger(__name__)

# Anybody's agent may connect; what it may do depends on whose it is (SO_PEERCRED).
SOCKET_MODE = 0o666


def run(path: Path | None, *, verbose: bool) -> int:
    """Serve until SIGTERM; the exit code. Raises UsageError for settings that are wrong."""
    settings = load_settings(path)
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    log.configure(f"ckptlessd[{name}]", verbose=verbose, level=settings.daemon.log_level)
    return asyncio.run(_serve(settings, name))


def daemon_config(settings: Settings, name: str) -> DaemonConfig:
    """What the service needs of the settings. Raises UsageError where this node has no such address."""
    return DaemonConfig(
        name=name,
        address=listen_address(settings.daemon.bind, name),
        port=settings.daemon.port,
        state_dir=settings.daemon.state_dir,
        socket=settings.daemon.socket,
        socket_mode=SOCKET_MODE,
        timers=settings.timers,
        keep=_keep(settings),
    )


def _keep(settings: Settings) -> KeepConfig:
    return KeepConfig(nbytes=settings.keep.memory_nbytes, ttl_s=settings.keep.ttl_s)


async def _serve(settings: Settings, name: str) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    notifier = Notifier.from_environment(os.environ)
    backend = await select(settings.slurm.backend, _folder(settings.slurm.bin_dir))
    cluster = SlurmCluster(
        CachedSlurm(backend, Clock()), name, settings.daemon.port, settings.slurm.on_node_lost
    )
    vouch = MungeVouch(Munge(_folder(settings.munge.socket)))
    service = Service(daemon_config(settings, name), cluster, vouch, inherited(os.environ).get("agents"))
    supervised = _Supervised(settings, name, notifier, service, cluster)
    loop.add_signal_handler(signal.SIGHUP, supervised.reload)
    service.on_tick, service.on_ready = supervised.ticked, supervised.ready
    watch = cluster.watch(lambda: service.jobs, settings.slurm.poll_s, service.keeper, service.ledger)
    tasks = [asyncio.create_task(watch)]
    watchdog = supervised.watchdog(period_s(os.environ))
    if watchdog is not None:
        tasks.append(asyncio.create_task(watchdog.run()))
    try:
        return await serve_forever(service, stop)
    finally:
        notifier.stopping()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await cluster.aclose()


@dataclass
class _Supervised:
    """What systemd hears of the daemon, and asks of it."""

    settings: Settings
    name: str
    notifier: Notifier
    service: Service
    cluster: SlurmCluster
    ticks: int = 0

    def ticked(self) -> None:
        self.ticks += 1

    def ready(self) -> None:
        self.notifier.ready(f"{self.name}: serving")

    def watchdog(self, period_s: float | None) -> Watchdog | None:
        if period_s is None:
            return None
        ledger = self.service.ledger
        parts = [Watched("tick", lambda: self.ticks), Watched("ledger", lambda: ledger.passes, ledger.poke)]
        return Watchdog(self.notifier, period_s, parts)

    def reload(self) -> None:
        """SIGHUP. A file that is wrong changes nothing; some keys need a restart."""
        self.notifier.reloading()
        try:
            fresh = load_settings(self.settings.file)
        except CkptlessError as error:
            logger.error("not reloaded: %s", error)  # noqa: TRY400  # one sentence says it
        else:
            self.cluster.on_node_lost, self.service.timers = fresh.slurm.on_node_lost, fresh.timers
            self.service.keeper.limit(_keep(fresh))
            late = needs_restart(self.settings, fresh)
            logger.info("reloaded%s", f"; after a restart only: {', '.join(late)}" if late else "")
        self.ready()


def _folder(text: str | None) -> Path | None:
    return None if text is None else Path(text)
