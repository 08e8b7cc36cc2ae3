"""Steps on the disk, in the format of torch.distributed.checkpoint: written from versions, and read back."""
