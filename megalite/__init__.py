"""megalite: a compact GPT pretraining framework in the Megatron manner, with checkpointing built in."""

__version__ = "0.1.0"
