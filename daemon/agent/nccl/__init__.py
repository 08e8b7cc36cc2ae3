"""NCCL without a root: the roots, ids and bootstrap of one agent, as stock NCCL asks for them."""
