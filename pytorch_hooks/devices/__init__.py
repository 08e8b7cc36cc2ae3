"""The accelerator of a rank: which one it takes, when it is at rest, whether it is sound."""
