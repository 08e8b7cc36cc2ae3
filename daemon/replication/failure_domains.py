"""Pure: failure domains, the sets of nodes that one rack, switch or power unit takes down together."""

from collections.abc import Collection, Mapping, Sequence

from ckptless.daemon.protocol.errors import UsageError


def domain_of(domains: Sequence[str], node: int) -> str:
    """The domain of a node, by its number; a node of which nothing is known is a domain of its own."""
    name = domains[node] if node < len(domains) else ""
    # No name of a domain holds a space: see `check_name`.
    return name or f"node {node}"


def check_name(name: object) -> str:
    """Return a domain's name: 1 to 64 printable characters without spaces. Raises UsageError for another."""
    if not isinstance(name, str):
        raise UsageError(f"the name {str(name)[:80]} must be text: put it in quotes")
    if not 0 < len(name) <= 64 or not name.isprintable() or " " in name:
        raise UsageError(f"{name[:80]!r} is no name of a domain: 1 to 64 letters, digits and signs")
    return name


def by_members(names: Sequence[str], members: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    """`JobSpec.domains` for nodes of these names: the first domain that has the node, "" where none does.

    Empty where that says nothing: no node is in any, or all of them are in the same one.
    """
    home: dict[str, str] = {}
    for domain, nodes in members.items():
        for node in nodes:
            home.setdefault(node, domain)
    found = tuple(home.get(name, "") for name in names)
    return found if len(set(found)) > 1 else ()
