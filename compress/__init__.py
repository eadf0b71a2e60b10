"""Take a language model from what it is to what can be deployed, and say what it cost."""
