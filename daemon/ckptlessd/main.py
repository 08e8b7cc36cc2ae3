"""`ckptlessd`, the per-node daemon: settings, Slurm, MUNGE and systemd put together around its service."""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ckptless import __version__
from ckptless.daemon.ckptlessd.clock import Clock
from ckptless.daemon.ckptlessd.cluster import LocalCluster
from ckptless.daemon.ckptlessd.health.probes import probes
from ckptless.daemon.ckptlessd.health.watch import Health
from ckptless.daemon.ckptlessd.journal import Journal
from ckptless.daemon.ckptlessd.metrics.readings import Facts
from ckptless.daemon.ckptlessd.service import Service, serve_forever
from ckptless.daemon.ckptlessd.slurm_cluster import SlurmCluster
from ckptless.daemon.ckptlessd.systemd import Notifier, Watchdog, Watched, inherited, period_s
from ckptless.daemon.ledger.store import Retention
from ckptless.daemon.protocol import log
from ckptless.daemon.protocol.errors import CkptlessError, UsageError
from ckptless.daemon.settings.bind import listen_address
from ckptless.daemon.settings.config import DaemonConfig, KeepConfig, LocalConfig, load, read_key
from ckptless.daemon.settings.options import MetricsSettings
from ckptless.daemon.settings.site import Settings, load_settings, needs_restart
from ckptless.daemon.slurm.cached import CachedSlurm
from ckptless.daemon.slurm.select import select
from ckptless.daemon.transport.credentials import KeyCredentials, MungeCredentials
from ckptless.daemon.transport.munge import Munge
from ckptless.daemon.transport.tasks import Tasks, end_all

logger = logging.getLogger(__name__)

GC_THRESHOLD = (50_000, 10, 10)
# Anybody's agent may connect; what it may do depends on whose it is (SO_PEERCRED).
SOCKET_MODE = 0o666


def _stop_event() -> asyncio.Event:
    """Set by SIGTERM and SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def _serve_local(config: LocalConfig) -> int:
    """Serve as a node of local mode, until told to stop; the exit code."""
    cluster = LocalCluster(config.node, config.peers, Path(config.state_dir), witness=config.one_machine)
    credentials = KeyCredentials(read_key(Path(config.key_file)))
    return await serve_forever(Service(config.daemon, cluster, credentials), _stop_event())


def daemon_config(settings: Settings, name: str) -> DaemonConfig:
    """Return the service's part of the settings. Raises UsageError where this node has no such address."""
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


def _retention(settings: Settings) -> Retention:
    return Retention(keep_s=settings.ledger.keep_s, most_nbytes=settings.ledger.size_nbytes)


def _keep(settings: Settings) -> KeepConfig:
    return KeepConfig(nbytes=settings.keep.memory_nbytes, ttl_s=settings.keep.ttl_s)


def serving(metrics: MetricsSettings, facts: Callable[[], Facts]) -> list[Coroutine[Any, Any, None]]:
    """Return what serves the metrics, if the site wants it. Raises UsageError without prometheus_client."""
    if metrics.listen is None and metrics.textfile is None:
        return []
    try:
        from ckptless.daemon.ckptlessd.metrics.serving import Metrics
    except ModuleNotFoundError as error:
        raise UsageError(
            "metrics.listen and metrics.textfile need prometheus-client: "
            "pip install 'ckptless[daemon]', or leave both out"
        ) from error
    return [Metrics(metrics, facts).run()]


async def _serve(settings: Settings, name: str) -> int:
    """Serve as a node of a cluster, until told to stop; the exit code."""
    stop = _stop_event()
    notifier = Notifier.from_environment(os.environ)
    backend = await select(settings.slurm.backend, _folder(settings.slurm.bin_dir))
    cluster = SlurmCluster(
        CachedSlurm(backend, Clock()), name, settings.daemon.port, settings.slurm.on_node_lost
    )
    cluster.gives_way = settings.elastic.give_way
    cluster.leaves_drained = settings.elastic.leave_drained
    credentials = MungeCredentials(Munge(_folder(settings.munge.socket)))
    service = Service(
        daemon_config(settings, name), cluster, credentials, inherited(os.environ).get("agents")
    )
    metrics = serving(settings.metrics, service.facts)
    service.retention = _retention(settings)
    health = Health(name, settings.health, cluster.own_node, service.ledger, service.now)
    health.jobs, service.health = lambda: service.jobs, health
    supervised = _Supervised(settings, name, notifier, service, cluster, health)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, supervised.reload)
    service.on_tick, service.on_ready = supervised.ticked, supervised.ready
    watch = cluster.watch(lambda: service.jobs, settings.slurm.poll_s, service.requeue_memory, service.ledger)
    own = cluster.own_node.as_slurm_has_it
    looking = health.run(probes(settings.health, settings.daemon.state_dir, cluster.is_idle, own))
    tasks = Tasks()
    for part in (watch, looking, *metrics):
        tasks.spawn(part).add_done_callback(_tell_failed)
    watchdog = supervised.watchdog(period_s(os.environ))
    if watchdog is not None:
        tasks.spawn(watchdog.run())
    try:
        return await serve_forever(service, stop)
    finally:
        notifier.stopping()
        await end_all(tasks)
        await cluster.aclose()


def _tell_failed(task: "asyncio.Task[None]") -> None:
    """Log the error of a part that watches: nobody else misses it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a part of this daemon has failed; jobs go on without it", exc_info=error)


@dataclass
class _Supervised:
    """The daemon under systemd: what that hears of it, and asks of it."""

    settings: Settings
    name: str
    notifier: Notifier
    service: Service
    cluster: SlurmCluster
    health: Health
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
            self.cluster.on_node_lost = fresh.slurm.on_node_lost
            self.cluster.gives_way = fresh.elastic.give_way
            self.cluster.leaves_drained = fresh.elastic.leave_drained
            self.health.set_settings(fresh.health)
            self.service.set_timers(fresh.timers)
            self.service.retention = _retention(fresh)
            self.service.requeue_memory.limit(_keep(fresh))
            late = needs_restart(self.settings, fresh)
            logger.info("reloaded%s", f"; after a restart only: {', '.join(late)}" if late else "")
        self.ready()


def _folder(text: str | None) -> Path | None:
    return None if text is None else Path(text)


@click.command()
@click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path),
    help="The cluster's settings.  [default: /etc/ckptless/ckptless.yaml]",
)
@click.option("--local", type=click.Path(path_type=Path), hidden=True, help="A node of local mode.")
@click.option("-v", "--verbose", is_flag=True, help="Log more.")
@click.version_option(__version__, "-V", "--version", message="%(prog)s %(version)s")
def command(path: Path | None, local: Path | None, verbose: bool) -> None:
    """Decide, record and watch for the jobs of one node."""
    try:
        if local is None:
            settings = load_settings(path)
            name = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
            kind, level = settings.daemon.log_format, settings.daemon.log_level
            who = f"ckptlessd[{name}]"
            journal = Journal(who) if kind == "journal" else None
            log.configure(who, verbose=verbose, level=level, log_format=kind, elsewhere=journal)
            sys.exit(asyncio.run(_serve(settings, name)))
        config = load(local, LocalConfig)
        log.configure(f"ckptlessd[{config.daemon.name}]", verbose=verbose, log_format=config.log_format)
        sys.exit(asyncio.run(_serve_local(config)))
    except CkptlessError as error:
        click.echo(f"ckptlessd: error: {error}", err=True)
        sys.exit(error.exit_code)


def main() -> None:
    """Entry point."""
    # Of a large job it keeps a million values in no cycle: looking for one took longer than to plan.
    gc.set_threshold(*GC_THRESHOLD)
    command(prog_name="ckptlessd")


if __name__ == "__main__":
    main()
