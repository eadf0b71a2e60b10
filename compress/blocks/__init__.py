"""A model's decoder blocks, one at a time: what they read and give, and how they are quantized."""
