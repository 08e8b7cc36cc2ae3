"""Makes this node's slots what an assignment says: ranks that go on, new processes, spares."""

from ckptless.daemon.agent.ranks.rank_processes import RankProcesses
from ckptless.daemon.agent.ranks.slots import Slot
from ckptless.daemon.agent.versions.state_service import StateService
from ckptless.daemon.protocol import messages as m


class Seats:
    """Owned by the agent's event loop."""

    def __init__(self, node: int, crew: RankProcesses, state: StateService) -> None:
        self._node, self._crew, self._state = node, crew, state
        self._assignment: m.Assignment | None = None

    def rank(self, slot: Slot) -> int | None:
        """The rank that is to be in a slot, if any."""
        if self._assignment is None:
            return None
        return self._assignment.rank_at(m.Place(node=self._node, slot=slot.index))

    def tell(self, message: m.ToRank) -> None:
        """To every rank here."""
        for slot in self._crew.slots:
            if slot.tenant is not None and slot.tenant.link is not None and self.rank(slot) is not None:
                slot.tenant.released = isinstance(message, m.Release)
                slot.tenant.link.send(message)

    def stop(self, order: m.Stop) -> None:
        """Tell the ranks; processes without hooks cannot be told, so they end."""
        self.tell(order)
        for slot in self._crew.slots:
            tenant = slot.tenant
            alive = tenant is not None and tenant.process.returncode is None
            if tenant is not None and alive and not tenant.hooked and self.rank(slot) is not None:
                self._crew.retire(slot, tenant)
                slot.enter("exited", slot.generation, m.Cause(kind="stop"))

    def follow(self, assignment: m.Assignment) -> None:
        """A new generation."""
        self._assignment = assignment
        for slot in self._crew.slots:
            self._settle(slot, assignment)

    def _settle(self, slot: Slot, assignment: m.Assignment) -> None:
        rank = self.rank(slot)
        tenant = slot.tenant
        alive = tenant is not None and tenant.process.returncode is None
        if rank is None:
            if tenant is not None and alive and slot.step is not None:
                self._crew.retire(slot, tenant)
                slot.enter("empty", assignment.generation)
            elif tenant is None and slot.phase == "empty":
                self._crew.occupy(slot, None)
            return
        renewed = m.Place(node=self._node, slot=slot.index) in assignment.renew
        keeps = tenant is not None and alive and tenant.hooked and not renewed
        if not keeps:
            if tenant is not None and alive:
                self._crew.retire(slot, tenant)
            self._crew.occupy(slot, assignment)
            self._state.prefetch(rank)
            return
        self.give(slot, rank)

    def give(self, slot: Slot, rank: int) -> None:
        """Its rank to a process that has said Hello."""
        tenant = slot.tenant
        if tenant is None or tenant.link is None or self._assignment is None:
            return
        if not tenant.lived:
            self._state.prefetch(rank)
            self._crew.promote(tenant, rank)
        tenant.lived = True
        slot.enter("assigned", self._assignment.generation)
        tenant.link.send(self._state.assigned(self._assignment, rank))
