"""Parts for Longstride: a mixer, a feed-forward, a pattern and a modality."""
