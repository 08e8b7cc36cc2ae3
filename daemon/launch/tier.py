"""How much of ckptless a run uses: everything (tier 4), or the start of process groups alone (tier 1)."""

from collections.abc import Mapping

from ckptless.daemon.api.errors import UsageError

# The same as --tier 1, for whoever cannot change the command.
ROOTLESS = "CKPTLESS_ROOTLESS"
# What makes no sense without recovery, and must not be dropped silently.
_NOT_FOR_TIER_1 = ("spares", "max_restarts", "requeue", "save_dir", "save_every")


def recovers(options: Mapping[str, object], env: Mapping[str, str]) -> bool:
    """Whether faults are answered (tier 4), by the option, else by the environment. Raises UsageError."""
    said = options.get("tier")
    if said is None:
        text = env.get(ROOTLESS, "")
        if text not in ("", "0", "1"):
            raise UsageError(f"{ROOTLESS} is {text[:40]!r}: it must be 1, or 0, or not be set")
        said = "1" if text == "1" else "4"
    if said == "4":
        return True
    given = [name for name in _NOT_FOR_TIER_1 if options.get(name)]
    if given:
        name = given[0].replace("_", "-")
        raise UsageError(f"--{name} is for runs that recover: leave it out with --tier 1 ({ROOTLESS}=1)")
    return False


def check_spares(spares: int, *, recovers: bool) -> None:
    """Raise UsageError where sbatch has asked for spares that nothing would use."""
    if spares and not recovers:
        raise UsageError(
            f"with --tier 1 ({ROOTLESS}=1) the {spares} spares of sbatch --ckptless would do nothing: "
            "add --spares 0 to train on them too, or ask for none"
        )
