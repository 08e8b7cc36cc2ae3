"""Become Python in a network namespace: `python -m tests.local.inside NAMESPACE ARGUMENT...`."""

import os
import sys

if __name__ == "__main__":
    words = ["ip", "netns", "exec", sys.argv[1], sys.executable, *sys.argv[2:]]
    os.execvp(words[0], words)
