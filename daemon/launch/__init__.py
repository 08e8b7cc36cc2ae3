"""`ckptless-run`: torchrun's command line; starts the agents."""
