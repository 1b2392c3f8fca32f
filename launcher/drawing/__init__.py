"""Pictures of patterns, attention and samples: `longstride show pattern|attention` and `data show`."""
