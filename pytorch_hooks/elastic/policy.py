"""What a job has for its present size: the values of --elastic-policy, which nobody can change."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from ckptless.daemon.protocol.errors import UsageError

NOTHING: Mapping[str, Any] = MappingProxyType({})


def of_size(text: str, nodes: int) -> Mapping[str, Any]:
    """Return the entry for so many nodes, of JSON with one for each size; "": nothing. Raises UsageError."""
    if not text:
        return NOTHING
    try:
        entries = msgspec.json.decode(text, type=dict[str, dict[str, Any]])
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"CKPTLESS_POLICY is no JSON of one mapping for each size: {error}") from error
    if str(nodes) not in entries:
        raise UsageError(f"CKPTLESS_POLICY has no entry for {nodes} nodes, but for {', '.join(entries)}")
    found: Mapping[str, Any] = _frozen(entries[str(nodes)])
    return found


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return MappingProxyType({name: _frozen(inner) for name, inner in value.items()})
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
