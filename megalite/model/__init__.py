"""Layer 3: the GPT model, cut over tensor and pipeline ranks."""
