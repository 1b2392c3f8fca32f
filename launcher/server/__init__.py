"""The service behind `longstride serve`: requests, one thread that samples, and HTTP around them."""
