"""The connection of a training process to the agent of its node, and the key of its job."""
