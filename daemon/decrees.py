"""Pure: one job's decrees on their way from daemon to daemon, as what differs from the one before."""

from collections.abc import Collection

from ckptless.daemon.control.agreement import Agreement
from ckptless.daemon.control.decree import Decided, Decree, Propose
from ckptless.daemon.control.packing import MissingBaseError, digest_of, pack, unpack
from ckptless.daemon.peers import messages as p


class Decrees:
    """What is needed to pack and unpack them: the newest that this daemon knows, and the one before."""

    def __init__(self, agreement: Agreement, nodes: Collection[int]) -> None:
        self._agreement, self._nodes = agreement, nodes
        self._newest, self._before = agreement.known, agreement.known
        self._packed: tuple[Decree, p.Packed] | None = None
        # Daemons that were sent the newest: who asks for it once more needs the whole.
        self._told: tuple[int, set[int]] = (0, set())

    def pack(self, message: p.Said, to: int | None) -> p.Said:
        """The message as it is sent to a daemon, or to all."""
        if not isinstance(message, p.Agree) or not isinstance(message.say, Propose | Decided):
            return message
        say = message.say
        base = self._known(say.decree.index - 1)
        if base is None or (isinstance(say, Decided) and to is not None and self._was_told(say, to)):
            return message
        if self._packed is None or self._packed[0] is not say.decree:
            body, digest = pack(say.decree, base), digest_of(say.decree)
            if body is None:
                return message
            self._packed = (say.decree, p.Packed(job=message.job, base=base.index, digest=digest, body=body))
        packed = self._packed[1]
        ballot = say.ballot if isinstance(say, Propose) else None
        return p.Packed(
            job=packed.job, base=packed.base, digest=packed.digest, body=packed.body, ballot=ballot
        )

    def unpack(self, packed: p.Packed) -> p.Agree | None:
        """What was packed; None where that cannot be known here. Raises ProtocolError."""
        base = self._known(packed.base)
        if base is None:
            return None
        try:
            decree = unpack(packed.body, base, packed.digest, self._nodes)
        except MissingBaseError:
            return None
        say = (
            Decided(decree=decree) if packed.ballot is None else Propose(ballot=packed.ballot, decree=decree)
        )
        return p.Agree(job=packed.job, say=say)

    def _was_told(self, say: Decided, node: int) -> bool:
        if self._told[0] != say.decree.index:
            self._told = (say.decree.index, set())
        before = node in self._told[1]
        self._told[1].add(node)
        return before

    def is_old(self, packed: p.Packed) -> bool:
        """Whether it says what this daemon knows already."""
        return packed.ballot is None and self._agreement.known.index > packed.base

    def _known(self, index: int) -> Decree | None:
        if self._agreement.known is not self._newest:
            self._newest, self._before = self._agreement.known, self._newest
        return next((one for one in (self._newest, self._before) if one.index == index), None)
