"""Signals that end a run, those that are a user's word to the ranks, and those that mean nothing to us."""

import signal

# As torchrun.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# Slurm sends these to every process of a step (`scancel --signal`, `#SBATCH --signal`), the ranks among them.
USERS = (signal.SIGUSR1, signal.SIGUSR2)
_NOBODYS = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO, signal.SIGPWR)


def ignore_others() -> None:
    """Ignore signals that are no word to a run: the default of these is to end the process."""
    for number in (*USERS, *_NOBODYS):
        signal.signal(number, signal.SIG_IGN)
