"""The stages of the pipeline, a file each, in the order in which they run."""
