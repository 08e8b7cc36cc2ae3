"""What all tests run with."""

import os

# torch's TCPStore asks the name server for the name of each peer's address, loopback or not, and waits five
# seconds for an answer that is lost on the way.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
