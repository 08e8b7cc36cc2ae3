"""What a script adds to a recovery: an abort, a clean-up and a check of its own."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.devices import accelerator
from ckptless.pytorch_hooks.errors import DeviceLost

logger = logging.getLogger(__name__)

# As the health checks of nvidia-resiliency-ext and HyperPod have.
DEADLINE_S = 30.0

Hook = Callable[[], object]


@dataclass(frozen=True)
class UserHooks:
    """Functions without arguments that `ckptless.run` was given, each None where there is none.

    `abort` is called in a thread of its own when a fault ends a generation: to free what ckptless does not
    know of. `finalize` and then `health_check` are called in every process that lives through a fault, when
    its device is idle and before it joins the next generation. `warmup` is called in a spare while it waits.
    """

    abort: Hook | None = None
    finalize: Hook | None = None
    health_check: Hook | None = None
    warmup: Hook | None = None

    def checked(self) -> "UserHooks":
        """Return it. Raises UsageError where one is no function."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not callable(value):
                raise UsageError(f"{field.name}={value!r}: give ckptless.run a function without arguments")
        return self

    def call(self, tell: Callable[[str, str], None]) -> None:
        """Call what comes before the next generation; `tell(kind, text)` of it. Raises DeviceLost.

        Who raises, or takes longer than DEADLINE_S, says that this process is not fit to go on.
        """
        for kind, hook in (("finalize", self.finalize), ("health-check", self.health_check)):
            if hook is None:
                continue
            try:
                accelerator.within(DEADLINE_S, hook, f"the script's {kind} is not done")
            except DeviceLost as lost:
                tell(kind, str(lost))
                raise
            tell(kind, f"the script's {kind} was passed")


NO_HOOKS = UserHooks()
