"""What planning reckons with: memory, time and lengths of requests, as pure functions."""
