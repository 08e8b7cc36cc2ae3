"""What a script does between `keep` and its loop: it did so at its begin, and does so again after a fault."""

from __future__ import annotations

import torch

from ckptless.pytorch_hooks.errors import CarriedError
from ckptless.pytorch_hooks.state import Draft, State, TensorSet, draft, private, restore, rng
from ckptless.pytorch_hooks.state.objects import every_tensor, parts_of
from ckptless.pytorch_hooks.state.walk import shown


class Entry:
    """The State as `keep` gave it; and in a generation that goes on, all of it that is not in tensors.

    The step after the restored one is to find the State, and random numbers, as that step has left them.
    Main thread only.
    """

    def __init__(self, state: State, tensors: TensorSet, *, goes_on: bool) -> None:
        self._state, self._tensors = state, tensors
        self._versions = self._now()
        self._random = rng.capture() if goes_on else None
        made = draft(state, 0, tensors=tensors) if goes_on else None
        self._parts = {} if made is None else self._known(made)
        self._record = None if made is None else made.finish()

    @property
    def goes_on(self) -> bool:
        """Whether steps came before."""
        return self._record is not None

    def written(self) -> str | None:
        """Return the name of a parameter, or an optimizer's tensor, that was written to since."""
        now = self._now()
        found = (name for name, version in self._versions.items() if now.get(name) != version)
        return next(map(shown, found), None)

    def put_back(self) -> list[str]:
        """Take back what was changed since, and what was drawn; return the names of what was changed.

        Raises CarriedError where it was written to a parameter: what that was before nobody has here.
        """
        name = self.written()
        if name is not None:
            raise CarriedError(
                f"after a fault the script has written to {name} between run.keep and its loop, as it did "
                "when it began: write to it in the function that is given to run.keep, or only where "
                "run.step is 0"
            )
        if self._record is None or self._random is None:
            return []
        now = self._known(draft(self._state, 0, tensors=self._tensors))
        changed = sorted(name for name, packed in self._parts.items() if now.get(name) != packed)
        if changed:
            restore(self._record, self._state)
        rng.restore(self._random)
        return changed

    def _known(self, made: Draft) -> dict[str, bytes]:
        """Return all of it but what torch's own objects keep beside their state_dict: hooks, say."""
        parts = parts_of(self._state)
        of_torch = {
            f"attributes of state.{name}" for name in (*parts.optimizers, *parts.stateful, *parts.modules)
        }
        return {name: packed for name, packed in made.parts().items() if name not in of_torch}

    def _now(self) -> dict[str, tuple[int, int, int]]:
        # Not of buffers: a forward pass may write to them, and most are in the record.
        tensors = every_tensor(self._state)
        return {one.name: _version(one.tensor) for one in tensors if not one.name.startswith("b:")}


def _version(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return what each write in place makes another one, and another tensor is."""
    return id(tensor), private.version(tensor), private.version(private.local(tensor))
