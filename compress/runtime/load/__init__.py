"""A load of requests, put on a model: what it is, how it went, and what bounds it."""
