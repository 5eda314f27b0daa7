"""Layer 2: token files, the order of samples, and the micro-batches made of them."""
