"""What a run costs, before anything starts: `longstride plan`."""
