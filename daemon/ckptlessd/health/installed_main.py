"""What runs in an installed probe's process: `python -m ...installed_main VALUE SOCKET`, see `installed`.

It says what it is, then what each look has found: a line each, of JSON. The kernel ends it where an answer
takes so long that whoever has asked is gone: a signal that nobody handles needs no interpreter that runs.
"""

import math
import os
import signal
import socket
import sys
from importlib.metadata import EntryPoint

import msgspec

from ckptless.daemon.ckptlessd.health.answers import ProbeError, checked, in_words, words
from ckptless.daemon.ckptlessd.health.probe import Probe

GROUP = "ckptless.health"
ASK, END = b"?", b"\n"
# Loading its package, and what it says is missing, may take so long.
START_S = 60.0
# So much later than whoever asks does, the kernel ends it.
SPARE_S = 10.0


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`missing` as `Probe.missing`; `error`: what went wrong, in words; `found`: code, where and evidence."""

    interval_s: float = 0.0
    deadline_s: float = 0.0
    missing: str = ""
    error: str = ""
    found: list[tuple[str, str, str]] = []


def _loaded(value: str) -> tuple[Probe | None, Answer]:
    """Return the probe of an entry point, a class or a function without arguments, and the first answer."""
    try:
        probe = EntryPoint("", value, GROUP).load()()
        interval_s, deadline_s = probe.interval_s, probe.deadline_s
        if not (0 < interval_s < math.inf and 0 < deadline_s < math.inf):
            return None, Answer(missing="its interval_s and deadline_s must be more than 0")
    except BaseException as error:  # noqa: BLE001  (somebody else's code, which may call sys.exit, too)
        return None, Answer(missing=f"it cannot be loaded: {in_words(error)}")
    missing, trouble = "", ""
    try:
        missing = words(probe.missing())
    except ProbeError as error:
        trouble = str(error)
    except BaseException as error:  # noqa: BLE001  (the same)
        trouble = in_words(error)
    times = float(interval_s), float(deadline_s)
    return probe, Answer(interval_s=times[0], deadline_s=times[1], missing=missing, error=trouble)


def _look(probe: Probe) -> Answer:
    try:
        return Answer(found=[(one.code, one.where, one.evidence) for one in checked(probe.look())])
    except ProbeError as error:
        return Answer(error=str(error))
    except BaseException as error:  # noqa: BLE001  (somebody else's code)
        return Answer(error=in_words(error))


def main() -> None:
    """Answer until whoever asks has gone."""
    value, number = sys.argv[1:]
    link = socket.socket(fileno=int(number))
    link.set_inheritable(False)
    signal.setitimer(signal.ITIMER_REAL, START_S + SPARE_S)
    probe, first = _loaded(value)
    signal.setitimer(signal.ITIMER_REAL, 0)
    link.sendall(msgspec.json.encode(first) + END)
    # no deadline: the daemon asks once in a while, and where it ends there is nothing more to read
    while link.recv(1):
        assert probe is not None
        signal.setitimer(signal.ITIMER_REAL, first.deadline_s + SPARE_S)
        answer = _look(probe)
        signal.setitimer(signal.ITIMER_REAL, 0)
        link.sendall(msgspec.json.encode(answer) + END)
    signal.setitimer(signal.ITIMER_REAL, SPARE_S)
    if probe is not None:
        probe.close()
    os._exit(0)  # its threads are nobody's


if __name__ == "__main__":
    main()
