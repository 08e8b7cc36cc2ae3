"""Batches of training data: they are made once on a node, and lie in memory for all its ranks."""
