"""Which node's agent keeps a key: a function of the key's name, the same at every node. Pure.

Where the name says which rank writes it, that rank's node keeps it, so that writing costs no message. Gloo's
keys of the default group do: they end in the rank. (Those of other groups end in the rank within the group,
which says nothing here.) So do those that are named after a rank. All others are dealt out by a digest of
the name.
"""

import re
from collections.abc import Sequence

import xxhash

from ckptless.daemon.api.errors import ProtocolError

# torch's own name of the default group is 0; ckptless.run has a prefix of its own in place of torch's, and
# keys of one rank beside those of groups.
_GLOO = re.compile(rb"(?:(?:default_pg/)?0//[a-z]{1,16}//|ckptless/[0-9]{1,18}/0//)[0-9]{1,6}/([0-9]{1,9})")
_OF_RANK = re.compile(rb"ckptless/[0-9]{1,18}/rank/([0-9]{1,9})/.*", re.DOTALL)
_OURS = re.compile(rb"ckptless/([0-9]{1,18})/")
# Each rank asks for the same keys: so many of them, of so many bytes at most, are not looked at again.
KNOWN, KNOWN_NBYTES = 65536, 256


class Homes:
    """The homes of one generation's keys; `nodes[rank]` is the node of a rank. Raises ValueError for none.

    `ranks` is that list; `nodes` has each of them once.
    """

    def __init__(self, nodes: Sequence[int], generation: int = 0) -> None:
        if not nodes:
            raise ValueError("a store without a node")
        self.ranks, self._generation = tuple(nodes), generation
        self._known: dict[bytes, int] = {}
        self.nodes = tuple(sorted(set(nodes)))

    def of(self, key: bytes) -> int:
        """The node that keeps `key`."""
        known = self._known.get(key)
        if known is None:
            known = self._home(key)
            if len(self._known) < KNOWN and len(key) <= KNOWN_NBYTES:
                self._known[key] = known
        return known

    def _home(self, key: bytes) -> int:
        found = _GLOO.fullmatch(key) or _OF_RANK.fullmatch(key)
        if found is not None and (rank := int(found[1])) < len(self.ranks):
            return self.ranks[rank]
        return self.nodes[xxhash.xxh3_64_intdigest(key) % len(self.nodes)]

    def admit(self, key: bytes) -> None:
        """Raises ProtocolError for a key that says that it is of another generation."""
        found = _OURS.match(key)
        if found is not None and self._generation and int(found[1]) != self._generation:
            raise ProtocolError(f"a key of generation {int(found[1])}, in generation {self._generation}")
