"""Data parallelism: gradients are added up in flat buffers and reduced over the data-parallel group, bucket by bucket.

Every bucket is reduce-scattered, whatever the optimizer: the distributed optimizer uses its shard of the result, the
plain one gathers the shards again. So neither the kind of optimizer nor overlap changes a bit of a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import nn

from megalite.parallel.buffers import BucketLayout, ParamAndGradBuffer
from megalite.parallel.layers import traits
from megalite.parallel.state import ParallelState


class DistributedDataParallel:
    """The gradient and parameter buffers of one model chunk, and their communication.

    With ``overlap_grad_reduce`` a bucket is reduced as soon as the last backward has filled it; with
    ``overlap_param_gather`` a gathering of updated parameters is finished by the forward of the module that needs them.
    """

    def __init__(
        self,
        module: nn.Module,
        parallel: ParallelState,
        *,
        bucket_size: int,
        grad_dtype: torch.dtype | None = None,
        gather_gradients: bool = False,
        overlap_grad_reduce: bool = False,
        overlap_param_gather: bool = False,
    ) -> None:
        self.module = module
        self.parallel = parallel
        self.gather_gradients = gather_gradients
        self.overlap_grad_reduce = overlap_grad_reduce
        self.overlap_param_gather = overlap_param_gather
        self.buffers = self._build_buffers(grad_dtype, bucket_size)
        self._bucket_of: dict[nn.Parameter, tuple[int, int]] = {}
        for b, buffer in enumerate(self.buffers):
            for k, bucket in enumerate(buffer.buckets):
                self._bucket_of.update({buffer.parameters[i]: (b, k) for i in bucket.parameters})
        self._is_last_backward = False
        self._missing: dict[tuple[int, int], int] = {}
        self._reducing: dict[tuple[int, int], dist.Work | None] = {}
        self._gathering: dict[tuple[int, int], dist.Work | None] = {}
        # Weak: a parameter would keep this object, and with it the process groups, in a cycle through C++ that no
        # collector sees. Groups that are never taken down have threads that can crash the end of the interpreter.
        on_gradient, on_forward = WeakMethod(self._on_gradient), WeakMethod(self._on_forward)
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(lambda parameter: on_gradient()(parameter))
        if overlap_param_gather:
            for child in module.modules():
                if any(True for _ in child.parameters(recurse=False)):
                    child.register_forward_pre_hook(lambda child, inputs: on_forward()(child, inputs))

    def _build_buffers(self, grad_dtype: torch.dtype | None, bucket_size: int) -> list[ParamAndGradBuffer]:
        by_dtype: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in self.module.named_parameters():
            by_dtype.setdefault(parameter.dtype, []).append((name, parameter))
        return [
            ParamAndGradBuffer(parameters, grad_dtype or dtype, bucket_size, self.parallel.dp_cp)
            for dtype, parameters in by_dtype.items()
        ]

    def _all_buckets(self) -> Iterator[tuple[tuple[int, int], ParamAndGradBuffer, BucketLayout]]:
        for b, buffer in enumerate(self.buffers):
            for k, bucket in enumerate(buffer.buckets):
                yield (b, k), buffer, bucket

    # Gradients

    def zero_gradients(self) -> None:
        """Start a step: forget all gradients."""
        for buffer in self.buffers:
            buffer.gradients.zero_()
        self._is_last_backward = False
        self._reducing = {}
        self._missing = {key: len(bucket.parameters) for key, _, bucket in self._all_buckets()}

    def start_last_backward(self) -> None:
        """Say that the next backward completes the step's gradients."""
        self._is_last_backward = True

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
        if self._is_last_backward:
            self._missing[self._bucket_of[parameter]] -= 1
            if self.overlap_grad_reduce:
                self._reduce_ready_buckets()

    def _reduce_ready_buckets(self) -> None:
        # Strictly in bucket order: gradients may become ready in another order on another rank, and a collective
        # that is posted in a different order on two ranks never ends.
        for key, buffer, bucket in self._all_buckets():
            if key in self._reducing:
                continue
            if self._missing[key] > 0:
                return
            self._reducing[key] = buffer.reduce_scatter_gradients(bucket, async_op=True)

    def finish_gradient_sync(self) -> None:
        """Wait until every bucket is reduced. Collective over dp."""
        for key, buffer, bucket in self._all_buckets():
            if key not in self._reducing:
                self._reducing[key] = buffer.reduce_scatter_gradients(bucket, async_op=self.overlap_grad_reduce)
        for key, buffer, bucket in self._all_buckets():
            work = self._reducing[key]
            if work is not None:
                work.wait()
            if self.gather_gradients:
                buffer.all_gather_shards(buffer.gradients, bucket, async_op=False)

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients."""
        for buffer in self.buffers:
            buffer.gradients.mul_(factor)

    # Parameters

    def start_param_sync(self) -> None:
        """Gather the parameters that the ranks' optimizers have updated; finished at once unless overlapped.

        Collective over dp. Buckets are gathered from the last to the first, the order in which a forward needs them.
        """
        for key, buffer, bucket in reversed(list(self._all_buckets())):
            self._gathering[key] = buffer.all_gather_shards(buffer.values, bucket, async_op=self.overlap_param_gather)
        if not self.overlap_param_gather:
            self._gathering = {}

    def finish_param_sync(self) -> None:
        """Wait until all parameters are up to date, as everything but a forward must before it reads them."""
        for key in list(self._gathering):
            self._wait_for(key)

    def _wait_for(self, key: tuple[int, int]) -> None:
        work = self._gathering.pop(key, None)
        if work is not None:
            work.wait()

    def _on_forward(self, module: nn.Module, inputs: tuple) -> None:
        if self._gathering:
            for parameter in module.parameters(recurse=False):
                self._wait_for(self._bucket_of[parameter])

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield name and parameter in order of registration."""
        return self.module.named_parameters()


def finalize_model_grads(ddp: DistributedDataParallel) -> None:
    """Complete the step's gradients. Collective over dp, tp and the embedding group.

    After the reduction over dp: gradients of parameters that saw only a part of the sequence are added up over tp, then
    the two copies of a tied embedding over the embedding group. Only this rank's shard of each result is meant.
    """
    parallel = ddp.parallel
    ddp.finish_gradient_sync()
    if parallel.tp.size > 1:
        partial = [p.main_grad for _, p in ddp.parameters() if traits(p).sums_over_tp]
        if partial:
            flat = torch.cat([gradient.reshape(-1) for gradient in partial])
            parallel.tp.all_reduce(flat)
            for gradient, total in zip(partial, flat.split([g.numel() for g in partial]), strict=True):
                gradient.copy_(total.view_as(gradient))
    if parallel.embedding is not None and parallel.embedding.size > 1:
        for _, parameter in ddp.parameters():
            if traits(parameter).shared_embedding:
                parallel.embedding.all_reduce(parameter.main_grad)
