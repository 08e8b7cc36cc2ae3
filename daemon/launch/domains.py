"""The failure domains of a run's nodes, as far as anybody knows. Not to know them is no reason to fail."""

import logging
from collections.abc import Mapping, Sequence

from ckptless.daemon.api.errors import CkptlessError
from ckptless.daemon.control.domains import by_members
from ckptless.daemon.slurm.commands import Commands
from ckptless.daemon.slurm.deadline import Deadline
from ckptless.daemon.slurm.errors import from_message
from ckptless.daemon.slurm.hostlist import compress
from ckptless.daemon.slurm.text import read_topology

logger = logging.getLogger(__name__)

TOPOLOGY_DEADLINE_S = 10.0
# They go to the agents with all the rest in one variable of the environment, where 128 KiB is the end: longer
# names become numbers.
MOST_TEXT = 16_000


async def find_domains(names: Sequence[str], site: Mapping[str, Sequence[str]] | None) -> tuple[str, ...]:
    """`JobSpec.domains` for nodes of these names: from the site's own table, or from Slurm's topology.

    Says in a line of the log what it found. Raises nothing of Slurm's or ours: then no domain is known.
    """
    found, source = by_members(names, site or {}), "the settings"
    if site is None:
        try:
            found, source = by_members(names, await _topology()), "Slurm's topology"
        except CkptlessError as error:
            logger.info("failure domains are not known: %s", error)
            return ()
    if not found:
        logger.info("failure domains are not known: every node counts as one of its own")
        return ()
    known = sorted({domain for domain in found if domain})
    parts = [
        f"{domain} {compress(name for name, its in zip(names, found, strict=True) if its == domain)}"
        for domain in known[:8]
    ]
    more = f", and {len(known) - 8} more" if len(known) > 8 else ""
    logger.info("failure domains, from %s: %s%s", source, ", ".join(parts), more)
    if sum(map(len, found)) > MOST_TEXT:
        found = tuple(str(known.index(domain)) if domain else "" for domain in found)
    return found


async def _topology() -> dict[str, tuple[str, ...]]:
    done = await Commands().command(Deadline(TOPOLOGY_DEADLINE_S), "scontrol", "show", "topology")
    if done.status != 0:
        raise from_message("show its topology", done.err or done.out)
    return read_topology(done.out)
