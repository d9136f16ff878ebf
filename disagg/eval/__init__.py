"""What codecs do to a model's text, on the pages that are served: perplexity, recall, bytes."""
