"""What runs inside the training process: `run`, `Run`, `State`."""
