"""The key-value store of a generation: what torch's clients take for a TCPStore, spread over the agents."""
