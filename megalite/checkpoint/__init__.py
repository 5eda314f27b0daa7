"""Layer 4: what a checkpoint holds, when one may be trusted, and who may touch its folders."""
