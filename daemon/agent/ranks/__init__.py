"""The training processes of a node: forked from a zygote, watched, and ended."""
