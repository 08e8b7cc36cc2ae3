"""torchtitan under ckptless: `train(config)`, or `-m ckptless.torchtitan`; needs `ckptless[torchtitan]`."""

from ckptless.pytorch_hooks.adapters.torchtitan import main, train

__all__ = ["main", "train"]

if __name__ == "__main__":
    main()
