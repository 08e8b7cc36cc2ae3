"""The accelerator of a rank: when it is at rest, whether it is sound, what has arrived from it."""
