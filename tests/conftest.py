"""What all tests run with."""

import os

from hypothesis import HealthCheck, settings

# torch's TCPStore asks the name server for the name of each peer's address, loopback or not, and waits five
# seconds for an answer that is lost on the way.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# No test depends on the machine's speed: a case, and drawing its inputs, may take as long as they do.
settings.register_profile("ckptless", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ckptless")
