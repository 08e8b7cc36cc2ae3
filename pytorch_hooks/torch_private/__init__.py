"""What we use of torch that is private: names, calls, and the test of whether they still work."""
