"""torchrun's command line: each option does the same here, is not needed, or is refused in a sentence.

As torchrun does, an option that is not given is taken from the environment: PET_NNODES for --nnodes.
"""

import re
import signal
import subprocess
import sys
from collections.abc import Mapping

from ckptless.daemon.agent.ranks.signals import ENDING, USERS
from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.settings.options import RunOptions

# What brings torchrun's nodes together, or is how it looks after processes: the agents know by themselves.
NOT_NEEDED = (
    *("standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"),
    *("monitor_interval", "start_method", "run_path", "signals_to_handle"),
)
# Bring nodes together that somebody else has started; elsewhere there is nothing to bring together.
MEETING = ("master_addr", "master_port", "node_rank", "local_addr")
# Why it cannot be had, and what to do.
REFUSED = {
    "no_python": "ranks are forked from a Python that has torch loaded: give a Python script, or -m MODULE",
    "role": "every rank has the role `default`: leave it out",
    "event_log_handler": "events are what `ckptctl events --json` shows: leave it out",
    "logs_specs": "each rank has one log file of its own: leave it out",
    "duplicate_stdout_filters": "each rank has one log file: leave it out, and filter that",
    "duplicate_stderr_filters": "each rank has one log file: leave it out, and filter that",
    "numa_binding": "Slurm binds tasks to CPUs: leave it out, or bind in the script by LOCAL_RANK",
    "virtual_local_rank": "each rank sees all GPUs of its node: leave it out, and use LOCAL_RANK",
}
# What torchrun has when they are not given.
DEFAULTS = {"role": "default", "event_log_handler": "null"}
# PET_... in the environment, except for these two.
NOT_OF_THE_ENVIRONMENT = frozenset(("logs_specs", "numa_binding"))

COUNT_DEADLINE_S = 120.0
_COUNT = (
    "import sys; from torch.distributed.run import determine_local_world_size as count;"
    "print(count(sys.argv[1]))"
)
_NONE, _BOTH = 0, 3


def check(given: Mapping[str, object], *, meets: bool = False) -> tuple[str, ...]:
    """Return the options that were given and have no effect, where nodes meet or do not.

    Raises UsageError for what cannot be had.
    """
    for name, why in REFUSED.items():
        if given.get(name) and given[name] != DEFAULTS.get(name):
            raise UsageError(f"{_dashed(name)}: {why}")
    names = str(given.get("signals_to_handle") or "").split(",")
    known = {signal.Signals(number).name for number in (*ENDING, *USERS)}
    if strange := [name for name in names if name.strip() not in {*known, ""}]:
        raise UsageError(f"--signals-to-handle {strange[0]}: only {', '.join(sorted(known))} reach the ranks")
    idle = NOT_NEEDED if meets else (*NOT_NEEDED, *MEETING)
    return tuple(_dashed(name) for name in idle if given.get(name) or type(given.get(name)) is int)


def count_nodes(text: str) -> tuple[int, int]:
    """The least and the largest number of nodes that train: `MIN:MAX`, or one number. Raises UsageError."""
    found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text, re.ASCII)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < least <= most:
        raise UsageError(f"--nnodes {text}: give a whole number from 1 on, or two as in 2:4")
    return least, most


def count_ranks(text: str) -> int:
    """A number, or what torchrun makes of a word (gpu, cpu, xpu, auto): it is asked, on this node.

    Raises UsageError.
    """
    if re.fullmatch(r"-?\d{1,6}", text, re.ASCII):
        count = text
    else:
        command = [sys.executable, "-c", _COUNT, text]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=COUNT_DEADLINE_S, check=True
            )
        except subprocess.CalledProcessError as error:
            said = error.stderr.strip().splitlines() or ["it says nothing"]
            raise UsageError(f"--nproc-per-node {text}: {said[-1].rpartition('Error: ')[2]}") from error
        except subprocess.TimeoutExpired as error:
            late = f"torch did not say how many that are in {COUNT_DEADLINE_S:.0f} s; give a number"
            raise UsageError(f"--nproc-per-node {text}: {late}") from error
        count = done.stdout.split()[-1]
    if int(count) < 1:
        raise UsageError(f"--nproc-per-node {text} is {count}: there must be at least one rank on a node")
    return int(count)


# --------------------------------------------------------------------------- whose output is shown


def shown(options: RunOptions, nodes: int, slots: int) -> tuple[int, ...] | None:
    """Ranks whose output is shown on the console, by --tee, --redirects and --local-ranks-filter; None: all.

    Where nothing is said it is rank 0, where torchrun shows all: jobs have more than one node here. What is
    said in torchrun's way means what it means there; a local rank is the rank's place on its first node.
    """
    tee, redirects, wanted = options.tee, options.redirects, options.local_ranks_filter
    own = _own(tee)
    if own is not _SAYS_NOTHING:
        return own
    teed, redirected = _streams("--tee", tee), _streams("--redirects", redirects)
    if not wanted and not any(teed.values()) and not any(redirected.values()):
        return (0,)
    chosen = _local_ranks(wanted) if wanted else range(slots)
    local = [
        number
        for number in range(slots)
        if number in chosen and (_of(teed, number) == _BOTH or _of(redirected, number) == _NONE)
    ]
    if len(local) == slots:
        return None
    return tuple(rank for rank in range(nodes * slots) if rank % slots in local)


_SAYS_NOTHING = (-1,)


def _own(tee: str | None) -> tuple[int, ...] | None:
    """Read what torchrun has no word for: all, none, or ranks of the whole job with a comma."""
    if tee in ("all", "none"):
        return None if tee == "all" else ()
    if isinstance(tee, str) and re.fullmatch(r"\d{1,6}(,\d{1,6})+", tee, re.ASCII):
        return tuple(int(part) for part in tee.split(","))
    return _SAYS_NOTHING


def _streams(option: str, text: str | None) -> dict[int, int]:
    """torchrun's Std.from_str: one number for all local ranks (-1 here), or one for some of them."""
    if text is None:
        return {-1: _NONE}
    if re.fullmatch("[0123]", text, re.ASCII):
        found = {-1: int(text)}
    elif re.fullmatch(r"(\d{1,6}:[0123],)*\d{1,6}:[0123]", text, re.ASCII):
        found = {int(rank): int(std) for rank, std in (part.split(":") for part in text.split(","))}
    else:
        words = ", or all, or none, or ranks as in 0,3" if option == "--tee" else ""
        raise UsageError(f"{option} {text}: give 3 for all ranks, 0:3,1:3 for local ranks{words}")
    if not {_NONE, _BOTH}.issuperset(found.values()):
        raise UsageError(f"{option} {text}: a rank's stdout and stderr are one stream here; give 3 for both")
    return found


def _of(streams: Mapping[int, int], local_rank: int) -> int:
    return streams.get(local_rank, streams.get(-1, _NONE))


def _local_ranks(text: str) -> set[int]:
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text, re.ASCII):
        raise UsageError(f"--local-ranks-filter {text}: give local ranks as in 0,1,2")
    return {int(part) for part in text.split(",")}


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"
