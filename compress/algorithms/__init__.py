"""Pure functions on tensors, each with the paper it comes from."""
