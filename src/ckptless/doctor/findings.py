"""Pure: from what was read to what follows from it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ckptless import nccl_settings
from ckptless.daemon.agent.nccl.wire import LAYOUTS, Layout
from ckptless.daemon.agent.ranks.environment import GLOO, NCCL_COMM_ID, RANKS_PER_ROOT
from ckptless.doctor.facts import Facts
from ckptless.torch_versions import (
    NEWEST,
    OLDEST,
    OLDEST_NCCL,
    OLDEST_NCCL2_TORCH,
    OLDEST_SCALABLE_NCCL,
    OLDEST_SCALABLE_TORCH,
    Version,
    parse,
    shown,
)

Grade = Literal["fine", "limited", "broken"]
EXIT_CODES: Mapping[Grade, int] = {"fine": 0, "limited": 1, "broken": 2}

FEW_FILES = 4096
_SET_BY_AGENTS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", RANKS_PER_ROOT)


@dataclass(frozen=True)
class Finding:
    """One answer: what it is about, how bad it is, what is so, and what to do about it ("" for nothing)."""

    about: str
    grade: Grade
    text: str
    advice: str = ""

    def told(self) -> dict[str, Any]:
        """Return it for --json."""
        return asdict(self)


def find(facts: Facts) -> list[Finding]:
    """All findings, in the order in which they are shown."""
    parts: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
        _torch, _nccl, _abort, _environment, _interfaces, _ports, _store, _limits, _slurm,
    )  # fmt: skip
    return [finding for part in parts for finding in part(facts)]


def worst(findings: list[Finding]) -> Grade:
    """The grade of all of them together."""
    grades: tuple[Grade, ...] = ("fine", "limited", "broken")
    return max((one.grade for one in findings), key=grades.index, default="fine")


# --------------------------------------------------------------------------------- torch and NCCL


def _torch(facts: Facts) -> Iterator[Finding]:
    if facts.torch is None:
        advice = "install torch in the environment that ckptless is in, or ask about one with --torch"
        yield Finding("torch", "broken", "torch is not installed here", advice)
        return
    version, span = facts.torch.version, f"{shown(OLDEST)} to {shown(NEWEST)}"
    name = f"torch {shown(version)}"
    if version[:2] < OLDEST:
        text = f"{name} is too old to recover in place, for FSDP2 and for saving ({span})"
        yield Finding(
            "torch", "limited", text, "ckptless-run --tier 1 works; take a newer torch for the rest"
        )
        return
    if version[:2] > NEWEST:
        text = f"{name} is newer than what ckptless was tested with ({span})"
        yield Finding("torch", "limited", text, "ckptless-run tries it before a run, once in an environment")
    else:
        yield Finding("torch", "fine", f"{name} is one that ckptless was made for ({span})")
    for part, sentence in (facts.torch.moved or {}).items():
        yield Finding(part, "broken" if part == "recovery in place" else "limited", sentence)
    if facts.torch.tried:
        advice = f"take torch {span}; ckptless-run --tier 1 works"
        yield Finding("recovery in place", "broken", facts.torch.tried, advice)
    elif facts.torch.tried is not None:
        text = "groups were made, left and renewed in two processes, and DDP and FSDP2 came to the same bits"
        yield Finding("recovery in place", "fine", text)
    if facts.torch.moved is not None and not facts.torch.moved:
        yield Finding(
            "torch's private parts", "fine", "the guards of recovery in place, FSDP2 and saving pass"
        )


def layout_of(version: Version) -> Layout | None:
    """The layout of a check-in that an NCCL of this version sends; None where it is not known."""
    for layout in LAYOUTS.values():
        oldest, newest = (parse(text) for text in layout.versions.split(" to "))
        if oldest <= version[:2] <= newest:
            return layout
    return None


def _nccl(facts: Facts) -> Iterator[Finding]:
    if facts.nccl is None:
        text = "no NCCL is here: ranks use Gloo, unless their machine has one"
        yield Finding("NCCL", "fine", text)
        return
    version, name = facts.nccl.version, f"NCCL {shown(facts.nccl.version)} ({facts.nccl.source})"
    layout = layout_of(version)
    if layout is None and version[:2] < OLDEST_NCCL:
        yield Finding("NCCL", "limited", f"{name} is too old: it makes ids and roots of its own")
        return
    if layout is None:
        text = f"the bootstrap layout of {name} is not known yet"
        advice = (
            "if it is not its predecessor's, the first communicator fails, and NCCL has its own roots from "
            "the next generation on"
        )
        yield Finding("NCCL", "limited", text, advice)
        return
    nbytes = next(size for size, one in LAYOUTS.items() if one is layout)
    form = f"its check-in has {nbytes} bytes (NCCL {layout.versions})"
    stock = _why_stock(facts, version)
    if stock:
        text = f"{name}: {form}; NCCL's own roots are used, and ids go through the store: {stock}"
        yield Finding("NCCL", "limited", text)
    elif _nccl2(facts):
        text = f"{name}: {form}; nobody has tried agents as the roots of this torch's new NCCL groups (nccl2)"
        yield Finding("NCCL", "limited", text, "TORCH_DIST_USE_NCCL2=0 brings back those that were tried")
    else:
        yield Finding("NCCL", "fine", f"{name}: {form}; ids are computed, and agents are the roots")


def _abort(facts: Facts) -> Iterator[Finding]:
    """Whether a rank survives the end of its collectives on a device."""
    if facts.nccl is None:
        return
    if (trouble := nccl_settings.why_not(facts.nccl.version)) is not None:
        yield Finding("NCCL abort", "broken", trouble)
    wanted, replaced = nccl_settings.settle(facts.env)
    for one in replaced:
        text = (
            f"it is {facts.env[one.name][:40]}, and ckptless.run sets {one.value}: {one.why} ({one.source})"
        )
        yield Finding(one.name, "limited", text, f"unset {one.name}")
    for one in nccl_settings.SETTINGS:
        if one in replaced:
            continue
        kept = one.name not in wanted
        text = f"{facts.env[one.name][:40]} is kept" if kept else f"ckptless.run sets {one.value}"
        yield Finding(one.name, "fine", f"{text}: {one.why} ({one.source})")


def _nccl2(facts: Facts) -> bool:
    """Whether "nccl" makes groups of the new kind."""
    new = facts.torch is not None and facts.torch.version[:2] >= OLDEST_NCCL2_TORCH
    return new and facts.env.get("TORCH_DIST_USE_NCCL2") != "0"


def _why_stock(facts: Facts, version: Version) -> str:
    """Return why ids are not computed; "" where they are."""
    if version[:2] < OLDEST_SCALABLE_NCCL:
        return f"it takes one id only, as all before {shown(OLDEST_SCALABLE_NCCL)}"
    if facts.torch is not None and facts.torch.version[:2] < OLDEST_SCALABLE_TORCH:
        return f"torch {shown(facts.torch.version)} hands it one id only"
    return ""


# -------------------------------------------------------------------------------- the environment


def _environment(facts: Facts) -> Iterator[Finding]:
    env = facts.env
    if NCCL_COMM_ID in env:
        text = f"{NCCL_COMM_ID} is set: it would tie the job to one node, so ranks do not get it"
        yield Finding("environment", "limited", text, f"unset {NCCL_COMM_ID}")
    theirs = [name for name in _SET_BY_AGENTS if name in env]
    if theirs:
        text = f"{', '.join(theirs)} are set here; agents give ranks their own"
        yield Finding("environment", "fine", text)
    for name, ours in GLOO.items():
        if env.get(name, ours) != ours:
            text = f"{name} is {env[name][:40]}: ranks keep that, where agents would set {ours}"
            yield Finding("environment", "limited", text, f"unset {name} for a faster start")
    if env.get("TORCH_NCCL_BCAST_UNIQUEID") == "0":
        text = "TORCH_NCCL_BCAST_UNIQUEID=0 leaves NCCL's ids unset"
        yield Finding("environment", "broken", text, "unset TORCH_NCCL_BCAST_UNIQUEID")


def _interfaces(facts: Facts) -> Iterator[Finding]:
    known = {name for name, _ in facts.interfaces}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        text = facts.env.get(variable, "")
        # NCCL's begin with = for exactly that name and ^ for all others; else they are prefixes.
        names = [name for name in text.removeprefix("=").split(",") if name and not text.startswith("^")]
        exact = variable.startswith("GLOO") or text.startswith("=")
        gone = [n for n in names if n not in known and (exact or not any(k.startswith(n) for k in known))]
        if gone:
            here = ", ".join(sorted(known)) or "none"
            advice = "name one that every node of the job has"
            yield Finding(variable, "broken", f"{variable} names {', '.join(gone)}; here are {here}", advice)
    listed = ", ".join(f"{name} {address}" for name, address in facts.interfaces)
    yield Finding("interfaces", "fine", f"addresses: {listed or 'none'}")


def _ports(facts: Facts) -> Iterator[Finding]:
    """Agents let the system choose; the daemon's port is fixed, and a client may have got it before."""
    if not facts.ephemeral or facts.daemon is None:
        return
    first, last = facts.ephemeral
    span = f"net.ipv4.ip_local_port_range ({first} to {last})"
    if first <= facts.daemon.port <= last:
        text = f"the daemons' port {facts.daemon.port} lies within {span}: any client may have it already"
        advice = "set daemon.port in ckptless.yaml below it, or reserve it (net.ipv4.ip_local_reserved_ports)"
        yield Finding("ports", "limited", text, advice)
    else:
        text = f"the daemons' port {facts.daemon.port} lies outside {span}; agents' are the system's choice"
        yield Finding("ports", "fine", text)


def _store(facts: Facts) -> Iterator[Finding]:
    if facts.guard == "none":
        text = "the kernel does not say whose a connection is: an agent's store takes any process of its node"
        yield Finding("store", "limited", text, "allow NETLINK_SOCK_DIAG, or reading /proc/net/tcp")
        return
    how = "NETLINK_SOCK_DIAG" if facts.guard == "netlink" else "/proc/net/tcp, which takes milliseconds"
    yield Finding("store", "fine", f"an agent's store lets in processes of its job only (by {how})")


# ------------------------------------------------------------------------------ machine and Slurm


def _limits(facts: Facts) -> Iterator[Finding]:
    limits = facts.limits
    if limits.memfd:
        text = f"no memfd can be made here ({limits.memfd}): versions of the state have no place"
        yield Finding("memory", "broken", text, "allow memfd_create(2), or use --tier 1")
    if limits.address_space_nbytes is not None:
        text = f"RLIMIT_AS is {_size(limits.address_space_nbytes)}: versions of the state count against it"
        yield Finding("memory", "limited", text, "ulimit -v unlimited")
    if limits.files is not None and limits.files < FEW_FILES:
        text = f"RLIMIT_NOFILE is {limits.files}: few for many ranks with a full mesh of Gloo"
        yield Finding("files", "limited", text, f"ulimit -n {FEW_FILES} or more")
    if not limits.memfd and limits.available_nbytes is not None:
        shm = f", /dev/shm has {_size(limits.shm_free_nbytes)}" if limits.shm_free_nbytes is not None else ""
        text = f"memory for versions of the state: {_size(limits.available_nbytes)} available{shm}"
        yield Finding("memory", "fine", text)


def _slurm(facts: Facts) -> Iterator[Finding]:
    if facts.settings_error:
        yield Finding("settings", "broken", facts.settings_error)
    if not facts.slurm:
        text = "no Slurm job is around this process; ckptless-run --local needs none"
        yield Finding("Slurm", "fine", text)
        return
    if facts.srun is None:
        yield Finding("Slurm", "broken", "there is no srun in PATH", "add Slurm's bin folder to PATH")
    else:
        yield Finding("Slurm", "fine", f"inside a job, srun is {facts.srun}")
    if facts.daemon is not None and facts.daemon.error:
        text = f"ckptlessd does not answer at {facts.daemon.socket} ({facts.daemon.error})"
        yield Finding(
            "ckptlessd", "broken", text, "see that it runs on this node: systemctl status ckptlessd"
        )
    elif facts.daemon is not None:
        yield Finding("ckptlessd", "fine", f"ckptlessd takes connections at {facts.daemon.socket}")


def _size(nbytes: int | None) -> str:
    units, value = ["B", "KiB", "MiB", "GiB", "TiB"], float(nbytes or 0)
    while value >= 1000 and len(units) > 1:
        units, value = units[1:], value / 1024
    return f"{value:.3g} {units[0]}"
