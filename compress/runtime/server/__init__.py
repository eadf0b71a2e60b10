"""A checkpoint behind HTTP: continuous batching, requests and answers in OpenAI's form, metrics."""
