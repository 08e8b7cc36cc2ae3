"""`ckptless.run` in the training process: its generations, and its word with the agent."""
