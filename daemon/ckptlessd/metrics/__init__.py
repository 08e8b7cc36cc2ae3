"""What this daemon tells Prometheus of its node, of the jobs that it leads, and of itself."""
