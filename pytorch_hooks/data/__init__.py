"""Training data: batches made ahead of use, once per node, in memory that outlives the training processes."""
