"""Pure: the environment of a training process; torchrun's variables, and what ckptless adds."""

from collections.abc import Mapping

from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.protocol.messages import Assignment, JobSpec, Place

AGENT_SOCKET = "CKPTLESS_AGENT_SOCKET"
# The folder of a saved step that the job goes on from where memory has nothing; empty for none.
RESUME = "CKPTLESS_RESUME"
# Values of the user's own for each number of nodes, as JSON; empty for none.
POLICY = "CKPTLESS_POLICY"
# What lines are that this package logs in a rank: "json", or as the script has them.
LOG_FORMAT = "CKPTLESS_LOG_FORMAT"
SPARE_RANK = -1
# With one root for each rank, every NCCL id is asked of the store, which computes it.
RANKS_PER_ROOT = "TORCH_NCCL_RANKS_PER_ROOT"
TORCH_RANKS_PER_ROOT = 128
# torch reads the variable as a C int.
MAX_RANKS_PER_ROOT = 2**31 - 1
# It makes NCCL start a root at this address, and ask nobody for ids.
NCCL_COMM_ID = "NCCL_COMM_ID"
# Gloo connects two ranks when they first have something to say to each other, not all with all at the start;
# and asks the store for many addresses at once. ckptless.run's own groups are connected at once all the same:
# what is to be cut at a fault has to be known.
GLOO = {"TORCH_GLOO_LAZY_INIT": "1", "GLOO_ENABLE_STORE_V2_API": "1"}
_NOT_THE_USERS = frozenset((NCCL_COMM_ID, AGENT_SOCKET, RESUME, POLICY, LOG_FORMAT))


def user_env(env: Mapping[str, str]) -> dict[str, str]:
    """The environment that the ranks get from the user, and what they get where the user says nothing."""
    return {**GLOO, **{name: value for name, value in env.items() if name not in _NOT_THE_USERS}}


def own_ranks_per_root(env: Mapping[str, str]) -> int | None:
    """The user's own value of that variable, or None. Raises UsageError where torch could not read it."""
    text = env.get(RANKS_PER_ROOT)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:11]) <= MAX_RANKS_PER_ROOT):
        raise UsageError(f"{RANKS_PER_ROOT} must be a whole number from 1 on, or not set; it is {text!r}")
    return int(text)


def ranks_per_root(env: Mapping[str, str], *, stock_roots: bool) -> int:
    """The value for the ranks: the user's own, else 1, or with NCCL's own roots torch's default."""
    return own_ranks_per_root(env) or (TORCH_RANKS_PER_ROOT if stock_roots else 1)


def rank_env(
    spec: JobSpec,
    place: Place,
    assignment: Assignment | None,
    store: tuple[str, int],
    restarts: int,
) -> dict[str, str]:
    """Return what torchrun sets (torch.distributed.elastic, LocalElasticAgent), for the rank in `place`.

    A spare has rank -1 until it takes one over; ckptless.run then corrects its environment.
    """
    rank = assignment.rank_at(place) if assignment is not None else None
    nodes = sorted({p.node for p in assignment.places}) if assignment is not None else []
    group_rank = nodes.index(place.node) if place.node in nodes else SPARE_RANK
    number = str(SPARE_RANK if rank is None else rank)
    return {
        "RANK": number,
        "ROLE_RANK": number,
        "ROLE_NAME": "default",
        "LOCAL_RANK": str(place.slot),
        "GROUP_RANK": str(group_rank),
        "WORLD_SIZE": str(spec.world_size),
        "ROLE_WORLD_SIZE": str(spec.world_size),
        "LOCAL_WORLD_SIZE": str(spec.slots_per_node),
        "GROUP_WORLD_SIZE": str(spec.nodes),
        "MASTER_ADDR": store[0],
        "MASTER_PORT": str(store[1]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": spec.job,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.limits.start_tries),
        # Those that end a job, torchrun's default.
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    }
