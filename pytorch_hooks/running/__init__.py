"""`ckptless.run` in the training process: its generations, its models and loaders, its steps."""
