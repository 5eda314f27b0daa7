"""megalite: a compact GPT pretraining framework in the Megatron manner, with checkpointing built in."""

import warnings

# torch warns about a package that nvidia-resiliency-ext brings along, once per rank and start; nobody can act on it.
warnings.filterwarnings("ignore", message="The pynvml package is deprecated", category=FutureWarning)

__version__ = "0.1.0"
