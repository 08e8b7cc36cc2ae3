"""What an agent holds is looked at here: is it the version it should be, to the last byte?"""

import asyncio
from collections.abc import Callable

from ckptless.daemon.agent.versions.memory import Region
from ckptless.daemon.agent.versions.vault import Vault
from ckptless.daemon.api import version
from ckptless.daemon.api.errors import BadVersionError
from ckptless.daemon.api.messages import TensorsAt

OnEvent = Callable[[str, str], None]


def header_of(region: Region, at: TensorsAt) -> version.Header:
    """The header of a version that lies here; its chunks are not read. Raises BadVersionError."""
    with region.view(at.offset, at.nbytes) as view:
        header = version.decode(view, at.digest)
    if header.total_nbytes != at.nbytes:
        raise BadVersionError(f"{at.nbytes} bytes; the header says {header.total_nbytes}")
    return header


class Soundness:
    """Looks at the tensors in a vault, and drops what is bad. Owned by the agent's event loop.

    `generation` is the newest that there is: nothing can be of a later one.
    """

    def __init__(self, origin: version.Origin, vault: Vault) -> None:
        self._origin, self._vault = origin, vault
        self.generation = 0
        self.on_event: OnEvent = lambda _kind, _text: None

    async def holds(self, shard: int, step: int) -> bool:
        """Whether a sound version of a step is here: every byte of it is read, in a thread."""
        found = self._vault.tensors(shard, step)
        if found is None:
            return False
        at, region = found
        try:
            with region.view(at.offset, at.nbytes) as view:
                header = await asyncio.to_thread(version.verify, view, at.digest)
            header.check(self._origin, shard, step, self.generation)
        except BadVersionError as error:
            self.drop(shard, step, at, str(error))
            return False
        # It may have been written over meanwhile.
        return self._vault.tensors(shard, step) == found

    async def holds_chunks(self, shard: int, step: int, start: int, end: int) -> bool:
        """As `holds`, of some chunks of it, which are bytes `start` to `end` of the payload."""
        if not self.seems(shard, step):
            return False
        found = self._vault.tensors(shard, step)
        assert found is not None
        at, region = found
        header = header_of(region, at)
        with region.view(at.offset, at.nbytes) as view:
            bad = await asyncio.to_thread(version.bad_chunk, view, header, start, end)
        if bad is not None:
            self.drop(shard, step, at, f"chunk {bad} of {len(header.chunks)} does not match")
        return self._vault.tensors(shard, step) == found

    def seems(self, shard: int, step: int) -> bool:
        """Whether a version of a step is here, as far as its header tells."""
        found = self._vault.tensors(shard, step)
        if found is None:
            return False
        at, region = found
        try:
            header_of(region, at).check(self._origin, shard, step, self.generation)
        except BadVersionError as error:
            self.drop(shard, step, at, str(error))
            return False
        return True

    def drop(self, shard: int, step: int, at: TensorsAt, why: str) -> None:
        """What lies there is held no more, and everybody is told, unless something else took its place."""
        if self._vault.drop_tensors(shard, step, at):
            self.on_event("bad-version", f"shard {shard}, step {step}: {why}")
