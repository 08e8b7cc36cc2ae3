"""`python -m ckptless.doctor`: what this torch, NCCL and machine will do under ckptless, and why."""
