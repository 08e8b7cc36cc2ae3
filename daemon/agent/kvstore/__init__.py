"""The key-value store of a generation: what torch's clients take for a TCPStore. One agent keeps the keys."""
