"""A step of tensor operations as one CUDA graph: thousands of kernels for the price of a single launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

# Autograd, cuDNN and optimisers allocate and choose on their first steps; DistributedDataParallel arranges
# its buckets over the first eleven.
_EAGER_STEPS = 3
_EAGER_STEPS_DISTRIBUTED = 12


class CapturedStep:
    """Calls a step as it is a few times, then captures it once and replays it from there on.

    Every call is a step that counts: none is spent on warming up. The step must leave its result in the same
    way each time, wait for no value of the device, and draw its random numbers from the one generator.

    Args:
        step: takes nothing, works in place, and returns a tensor, which the next call overwrites.
        generator: on the GPU.

    Attributes:
        stream: that the step runs in.
    """

    def __init__(self, step: Callable[[], Tensor], generator: Generator) -> None:
        self._step, self._generator = step, generator
        self._eager = _EAGER_STEPS_DISTRIBUTED if torch.distributed.is_initialized() else _EAGER_STEPS
        self.stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> Tensor:  # noqa: D102
        if self._eager:
            self._eager -= 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                result = self._step()
            torch.cuda.current_stream().wait_stream(self.stream)
            return result
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(self._generator)
            with torch.cuda.graph(graph, stream=self.stream):
                self._result = self._step()
            self._graph = graph
        self._graph.replay()
        return self._result
