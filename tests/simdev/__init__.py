"""A simulated accelerator for tests: asynchronous streams, memory the CPU may not touch, collectives."""
