"""A commit in the training process: when, what is copied beside the training, and the versions."""
