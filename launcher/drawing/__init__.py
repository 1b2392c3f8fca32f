"""Pictures of patterns, of a run's attention and loss, and of samples: `longstride show` and `data show`."""
