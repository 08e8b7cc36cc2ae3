"""`... -m ckptless.daemon.agent.local_fork ARGUMENT...`: an agent of local mode that has its zygote already.

To be run by a zygote. All nodes of a local run are on one machine, so torch is loaded once, by a zygote of
the launcher's: what it forks for a node forks that node's zygote, and becomes the agent by exec. So the agent
is its zygote's parent, as where it has started it; and a zygote that dies is started again in the usual way.
"""

import argparse
import os
import socket
import sys

from ckptless.daemon.agent.ranks import zygote
from ckptless.daemon.agent.ranks.signals import ignore_others


def main() -> None:
    """Fork the zygote; become the agent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--preload", action="append", default=[])
    options, command = parser.parse_known_args()
    ignore_others()
    agent = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if child == 0:
        ours.close()
        # A Ctrl-C at the terminal is the agent's to answer.
        os.setsid()
        # They are loaded: this only says what in them does not go well with fork.
        zygote.live(theirs, agent, options.preload, ahead=True)
        return
    ours.set_inheritable(True)
    words = [sys.executable, *command, "--zygote-pid", str(child), "--zygote-fd", str(ours.fileno())]
    os.execv(sys.executable, words)


if __name__ == "__main__":
    main()
