"""`-m ckptless.torchtitan --module llama3 --config ...`: as `-m torchtitan.train`, of the same options."""

from ckptless.pytorch_hooks.adapters.torchtitan import main

main()
