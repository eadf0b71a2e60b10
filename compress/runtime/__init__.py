"""What runs a checkpoint: quantized layers, loading from disk, generation, latency."""
