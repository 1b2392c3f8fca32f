"""Parts for Longstride: a mixer, a feed-forward and a pattern."""
