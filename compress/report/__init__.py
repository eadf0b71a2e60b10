"""What a run found, for a person to decide from: figures, words, plots, pages."""
