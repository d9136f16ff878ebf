"""Quality of a model under each codec, on pages as they are served: perplexity, recall, bytes."""
