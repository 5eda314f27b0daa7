"""The optimizer whose fp32 masters and moments are cut over the data-parallel ranks (ZeRO stage 1)."""

from __future__ import annotations

from megalite.optimizer.optimizer import MixedPrecisionOptimizer, StepOutcome
from megalite.parallel.buffers import BucketLayout, ParamAndGradBuffer
from megalite.utils.dist import Group


class DistributedOptimizer(MixedPrecisionOptimizer):
    """Owns one shard of each bucket; after the update the shards of the parameters are gathered.

    It needs no gathered gradients: each bucket's reduce-scatter leaves exactly the shard that it owns.
    """

    shards_over_dp = True

    def _ownership(self, buffer: ParamAndGradBuffer, bucket: BucketLayout) -> tuple[int, int]:
        return buffer.own_shard(bucket)

    @property
    def _norm_group(self) -> Group:
        return self.parallel.world

    def step(self) -> StepOutcome:
        outcome = super().step()
        if outcome.updated:
            for chunk in self.chunks:
                chunk.start_param_sync()
        return outcome
