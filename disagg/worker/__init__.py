"""One worker process: its prefill side, its decode side and the hand-off between two of them."""
