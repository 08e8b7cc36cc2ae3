"""Benches beside the peers: the same model, step and faults for each, in turns, and what is told of them."""
