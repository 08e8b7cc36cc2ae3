"""What benches work out of what they have measured."""
