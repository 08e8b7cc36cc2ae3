"""What the daemon says to systemd and takes from it; without libsystemd, and silent without systemd."""
