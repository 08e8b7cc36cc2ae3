"""The ways in which a generation is over, as exceptions of the training thread."""

from __future__ import annotations

from ckptless.daemon.protocol.errors import UsageError


class GenerationEnded(BaseException):
    """Raised where a rank works in a generation that has been declared over.

    Not an `Exception`: a training script's `except Exception` around a step must not swallow the verdict
    and go on with gradients of a world that no longer exists.
    """


class CollectiveFailed(RuntimeError):
    """A collective broke (a peer is gone, a timeout ran out) and no verdict has come yet."""


class TorchMismatch(RuntimeError):
    """The installed torch lacks something, or has it in another shape, that recovery stands on."""


class CarriedError(UsageError):
    """A refusal of steps that stood on what no version has: another try would make the next one without it,
    and so end well, with other numbers. It ends the job, whatever steps there have been.
    """


class StateMoved(RuntimeError):
    """Somebody else than an optimizer wrote to what a commit was still being copied from: that step is not
    committed, and the job goes on from the one before.
    """


class FrozenChanged(StateMoved):
    """The same of a tensor that was frozen, so that it was not copied again: it had changed unseen."""


class DeviceLost(BaseException):
    """This process's accelerator cannot be used any more by it: only another process may mend that.

    Not an `Exception`, as `GenerationEnded` is not.
    """
