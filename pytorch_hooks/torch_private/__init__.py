"""The private names and calls of torch that we use, and the test of whether they still work."""
