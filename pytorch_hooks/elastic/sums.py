"""Sums of every virtual rank's tensors, in the order of their tree: the same bits at every real rank.

Each real rank brings the sums of its largest subtrees. All of them are cut into as many pieces as there are
real ranks; each adds up one piece of all subtrees, and gives the sum to the others. So every rank sends twice
what the tensors have, as in an all-reduce, where the blocks are whole subtrees.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from ckptless.pytorch_hooks.elastic.tree import Node, fold, subtrees

BUCKET_NBYTES = 32 << 20
"""So much of one subtree goes at once."""

Flats: TypeAlias = list[torch.Tensor]
"""All tensors of a leaf or a subtree in a row: one row for each dtype and device."""

# The newer name; torch warns of the older one where it has both.
gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Share(NamedTuple):
    """A real rank's number, how many there are, and how many virtual ones."""

    rank: int
    ranks: int
    virtual: int


class Packing:
    """Where each of a leaf's tensors lies in its flat ones."""

    def __init__(self, likes: Sequence[torch.Tensor]) -> None:
        """`likes`: tensors of these shapes, dtypes and devices, in order."""
        self._shapes = [tuple(one.shape) for one in likes]
        kinds = [(one.dtype, one.device) for one in likes]
        self._kinds = list(dict.fromkeys(kinds))
        self._of = [self._kinds.index(kind) for kind in kinds]
        self._counts = [
            [one.numel() for one, of in zip(likes, self._of, strict=True) if of == index]
            for index in range(len(self._kinds))
        ]

    @property
    def on_cpu(self) -> bool:
        """Whether any of them is on the CPU."""
        return any(device.type == "cpu" for _dtype, device in self._kinds)

    @property
    def described(self) -> str:
        """The facts that must be alike on all ranks, in words."""
        return repr((self._shapes, self._of, [str(dtype) for dtype, _device in self._kinds]))

    def pack(self, tensors: Sequence[torch.Tensor | None]) -> Flats:
        """Copy tensors into flat ones; zeros for those that are None."""
        with torch.no_grad():
            found = [
                torch.empty(sum(counts), dtype=dtype, device=device)
                for (dtype, device), counts in zip(self._kinds, self._counts, strict=True)
            ]
            for view, tensor in zip(self.unpack(found), tensors, strict=True):
                if tensor is None:
                    view.zero_()
                else:
                    view.copy_(tensor)
        return found

    def unpack(self, flats: Flats) -> list[torch.Tensor]:
        """Return the tensors that lie in flat ones: the same memory, each with a version of its own."""
        pieces = [iter(torch.split(flat, counts)) for flat, counts in zip(flats, self._counts, strict=True)]
        return [next(pieces[of]).view(shape).data for of, shape in zip(self._of, self._shapes, strict=True)]


def add(left: Flats, right: Flats) -> Flats:
    """Add `right` to `left`, and return that."""
    for one, other in zip(left, right, strict=True):
        one.add_(other)
    return left


class Sum:
    """The sum over all virtual ranks, on its way; `mine` are this rank's subtrees, which may be written to.

    Two collectives for each bucket, on tensors' own devices; none where there is one rank only.
    """

    def __init__(self, share: Share, mine: Sequence[tuple[Node, Flats]]) -> None:
        self._buckets: list[_Bucket] = []
        if share.ranks == 1:
            ((_root, self._sums),) = mine
            return
        self._sums = [torch.empty_like(flat) for flat in mine[0][1]]
        self._buckets = [
            _Bucket(share, [flats[index][span] for _node, flats in mine], whole[span])
            for index, whole in enumerate(self._sums)
            for span in _spans(whole, share.ranks)
        ]

    def finish(self) -> Flats:
        """Return it once it is there. Raises GenerationEnded, CollectiveFailed."""
        for bucket in self._buckets:
            bucket.add_up()
        for bucket in self._buckets:
            bucket.finish()
        return self._sums


def _spans(flat: torch.Tensor, ranks: int) -> Iterator[slice]:
    count = max(1, BUCKET_NBYTES // flat.element_size() // ranks) * ranks
    for begin in range(0, flat.numel(), count):
        yield slice(begin, min(flat.numel(), begin + count))


class _Bucket:
    """A part of the flat tensors that goes at once; cut into one piece for each rank."""

    def __init__(self, share: Share, parts: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        """`parts`: of each of this rank's subtrees; `target`: where the sum is to be."""
        self._share, self._target = share, target
        self._piece = -(-target.numel() // share.ranks)
        sent = target.new_zeros(share.ranks, len(parts), self._piece)
        for index, part in enumerate(parts):
            whole = part.numel() // self._piece
            sent[:whole, index] = part[: whole * self._piece].view(whole, self._piece)
            if rest := part.numel() - whole * self._piece:
                sent[whole, index, :rest] = part[whole * self._piece :]
        self._nodes = [subtrees(rank, share.ranks, share.virtual) for rank in range(share.ranks)]
        counts = [len(nodes) for nodes in self._nodes]
        self._all = target.new_empty(sum(counts), self._piece)
        self._work = self._exchange(sent, counts)
        # Gloo reads it until then.
        self._sent = sent
        self._gathered = target.new_empty(share.ranks * self._piece)

    def _exchange(self, sent: torch.Tensor, counts: list[int]) -> Any:
        """Give every rank its piece of each subtree. As bytes: backends differ in the dtypes they know."""
        nbytes = self._piece * sent.element_size()
        mine = counts[self._share.rank]
        return dist.all_to_all_single(
            _bytes(self._all),
            _bytes(sent),
            [count * nbytes for count in counts],
            [mine * nbytes] * self._share.ranks,
            async_op=True,
        )

    def add_up(self) -> None:
        """Add up this rank's piece of all subtrees, and send it to the others."""
        # no deadline: the group has one
        self._work.wait()
        nodes = [node for nodes in self._nodes for node in nodes]
        parts = zip(nodes, self._all.unbind(), strict=True)
        ((_root, total),) = fold(self._share.virtual, parts, torch.Tensor.add_)
        self._mine = total.contiguous()
        self._work = gather_single(_bytes(self._gathered), _bytes(self._mine), async_op=True)

    def finish(self) -> None:
        """Put the sum in its place."""
        # no deadline: the group has one
        self._work.wait()
        self._target.copy_(self._gathered[: self._target.numel()])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
