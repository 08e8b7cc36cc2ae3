"""FSDP2 modules that go on as the same objects, wherever in an iteration their generation ended."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ckptless.pytorch_hooks import torch_fsdp


class Sharded:
    """Every FSDP2 module of a state, 1-D or 2-D (HSDP), as it was when the state was built."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._built = [(state, torch_fsdp.switches(state)) for state in torch_fsdp.states(modules)]

    def __len__(self) -> int:
        return len(self._built)

    def holds_gradients(self) -> bool:
        """Whether there are gradients that are not yet reduced, and so in no parameter's `grad`."""
        return any(torch_fsdp.holds_gradients(state) for state, _switches in self._built)

    def renew(self) -> None:
        """Back to before the iteration: parameters are shards, nothing is pending, gradients are gone.

        `set_requires_gradient_sync` and the like are as the state was built, which is what a newcomer has:
        the iteration may have ended between two micro-batches. Makes no collective and waits for none.
        """
        for state, switches in self._built:
            torch_fsdp.reset(state)
            torch_fsdp.switch(state, switches)
            torch_fsdp.drop_gradients(state)
