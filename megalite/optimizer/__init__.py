"""Layer 3: mixed-precision optimizers over flat buffers, clipping, and the learning-rate schedule."""
