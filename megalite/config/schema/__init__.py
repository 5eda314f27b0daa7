"""All that a user can set: one frozen dataclass per YAML section, and ``Config``, which holds them.

Keys are Megatron's long flag names. The text under a field is its documentation and is printed by ``--help``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megalite.config.schema.data import DataConfig
from megalite.config.schema.model import ModelConfig, ParallelConfig, PrecisionConfig
from megalite.config.schema.run import CheckpointConfig, LoggingConfig, ProfilingConfig, ResilienceConfig
from megalite.config.schema.training import OptimizerConfig, RngConfig, TrainingConfig

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "ProfilingConfig",
    "ResilienceConfig",
    "RngConfig",
    "TrainingConfig",
]


@dataclass(kw_only=True, frozen=True)
class Config:
    """All user input of a run. Each section has checked itself; ``derive`` checks what needs two of them."""

    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    training: TrainingConfig
    optimizer: OptimizerConfig
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    rng: RngConfig = field(default_factory=RngConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
