"""Ways of planning, framing and moving the bytes of a checkpoint."""
