"""Stands in for an accelerator: a kernel takes its time, and no CPU.

Jobs paced by it keep their step time on a machine with fewer cores than ranks, so that a planted cost is a known share of it.
"""

import time

import torch


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, None


def kernel(x, step_ms, samples):
    """``x``, after a third of ``step_ms`` for a batch of ``samples``; the other two thirds go into its backward."""
    return _Kernel.apply(x, step_ms / 3e3 * len(x) / samples)
