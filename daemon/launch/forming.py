"""Says in the job's own output whom a run waits for before its first generation, and what will end that."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from ckptless.daemon.api.forming import clear, has_begun, nodes_up
from ckptless.daemon.api.messages import JobSpec
from ckptless.daemon.control.fencing import FORMING_DEADLINE_S
from ckptless.daemon.slurm.hostlist import compress

logger = logging.getLogger(__name__)

LOOK_S = 1.0
FIRST_S = 5.0
# Twice as long from one line to the next, up to this.
LONGEST_S = 60.0


def waiting_text(spec: JobSpec, missing: Mapping[str, str], waited_s: float) -> str:
    """The line for nodes that are `missing`, each with what is known of it."""
    reasons: dict[str, list[str]] = {}
    for name, reason in missing.items():
        reasons.setdefault(reason, []).append(name)
    who = "; ".join(f"{compress(names)} ({reason})" for reason, names in reasons.items())
    total = spec.nodes + spec.spares
    if len(missing) <= spec.spares:
        allowed = "1 spare allows" if spec.spares == 1 else f"{spec.spares} spares allow"
        end = f"the job begins without, as its {allowed}"
    else:
        end = "the job ends (never-formed)"
    return (
        f"waiting for {who}; {total - len(missing)} of {total} nodes are up after {waited_s:.0f} s. "
        f"After {FORMING_DEADLINE_S:.0f} s, or when Slurm has them down, {end}"
    )


class Forming:
    """Owned by the launcher's event loop; `state` says of a node's step what is known of it."""

    def __init__(self, spec: JobSpec, log_dir: Path, state: Callable[[str], str], began_s: float) -> None:
        self._spec, self._log_dir, self._state = spec, log_dir, state
        self._began_s, self._looked_s = began_s, began_s
        self._next_s, self._pause_s = began_s + FIRST_S, FIRST_S
        self.over = False

    def missing(self) -> tuple[str, ...]:
        """The nodes whose agents are not up, in the job's order."""
        up = nodes_up(self._log_dir)
        return tuple(name for name in self._spec.names if name not in up)

    def look(self, now_s: float) -> tuple[str, ...]:
        """Now and then: say what has become of it. The nodes without which training has just begun."""
        if self.over or now_s - self._looked_s < LOOK_S:
            return ()
        self._looked_s = now_s
        begun = has_begun(self._log_dir)
        if not begun and now_s < self._next_s:
            return ()
        missing = self.missing()
        if begun:
            self.over = True
            if missing:
                logger.warning("training begins without %s", compress(missing))
            clear(self._log_dir)
            return missing
        if missing:
            states = {name: self._state(name) for name in missing}
            logger.warning("%s", waiting_text(self._spec, states, now_s - self._began_s))
            self._pause_s = min(2 * self._pause_s, LONGEST_S)
            self._next_s = now_s + self._pause_s
        return ()
