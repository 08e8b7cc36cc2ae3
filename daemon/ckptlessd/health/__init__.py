"""The node's health: probes that look, what their findings mean, and what is done about it."""
