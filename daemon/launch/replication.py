"""Over which networks a run's copies go, how fast, and its ranks talk: by options, sbatch, or the site."""

from collections.abc import Mapping

from ckptless.daemon.agent.config import ReplicationConfig
from ckptless.daemon.api.errors import UsageError
from ckptless.daemon.settings import WANTED, CommSettings, ReplicationSettings
from ckptless.daemon.settings_bind import is_shared_bind
from ckptless.daemon.settings_file import rate

# Set by the SPANK plugin (`sbatch --ckptless`).
BANDWIDTH = "CKPTLESS_BANDWIDTH"
INTERFACE = "CKPTLESS_INTERFACE"
NO_LIMIT = "none"
LEAST, MOST = 1e6, 1e12


def replication_config(
    options: Mapping[str, object], env: Mapping[str, str], site: ReplicationSettings
) -> ReplicationConfig:
    """Raises UsageError."""
    bandwidth, interface = site.bandwidth_rate or 0.0, site.interface
    for source, text in _said(options, "replication_bandwidth", env, BANDWIDTH):
        bandwidth = _rate(source, text)
    for source, text in _said(options, "replication_interface", env, INTERFACE):
        interface = _interface(source, text)
    return ReplicationConfig(bandwidth=bandwidth, interface=interface)


def comm_interface(options: Mapping[str, object], site: CommSettings) -> str | None:
    """What the ranks talk over. Raises UsageError."""
    given = options.get("comm_interface")
    return _interface("--comm-interface", given) if isinstance(given, str) else site.interface


def _said(
    options: Mapping[str, object], option: str, env: Mapping[str, str], variable: str
) -> list[tuple[str, str]]:
    """By whom, and what; nothing where neither says anything."""
    given = options.get(option)
    if isinstance(given, str):
        return [(f"--{option.replace('_', '-')}", given)]
    return [(variable, env[variable])] if env.get(variable) else []


def _rate(source: str, text: str) -> float:
    found = 0.0 if text == NO_LIMIT else rate(text)
    if found is None or (text != NO_LIMIT and not LEAST <= found <= MOST):
        wanted = WANTED["replication.bandwidth"].replace("null", NO_LIMIT)
        raise UsageError(f"{source} is {text[:40]!r}: it must be {wanted}")
    return found


def _interface(source: str, text: str) -> str:
    if not is_shared_bind(text):
        wanted = WANTED["replication.interface"].removesuffix(", or null").replace(", an ", " or an ")
        raise UsageError(f"{source} is {text[:60]!r}: it must be {wanted}")
    return text
