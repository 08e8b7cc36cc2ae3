"""Tests of ckptless.daemon.ckptlessd.health."""
