"""Ways to compute attention over a pattern; none imports another."""
