"""A training step as one CUDA graph: thousands of kernels at the cost of a single launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

# In the first steps, autograd, cuDNN and the optimiser allocate memory and select algorithms;
# DistributedDataParallel rearranges its buckets during the first eleven steps.
_EAGER_STEPS = 3
_EAGER_STEPS_DISTRIBUTED = 12


class CapturedStep:
    """Runs a step eagerly a few times, then captures it as a CUDA graph and replays the graph.

    Every call is a training step, including the eager ones. The step must run the same kernels each time,
    never wait for the device, and draw all random numbers from one generator.

    Args:
        step: works in place and returns a tensor, which the next call overwrites.
        generator: source of all random numbers, on the GPU.

    Attributes:
        stream: the CUDA stream that the step runs in.
    """

    def __init__(self, step: Callable[[], Tensor], generator: Generator) -> None:
        self._step, self._generator = step, generator
        self.stream = torch.cuda.Stream()
        self.restart()

    def restart(self) -> None:
        """Capture again, after eager steps, as the step runs other kernels from now on."""
        torch.cuda.synchronize()  # the previous graph may still run
        self._eager = _EAGER_STEPS_DISTRIBUTED if torch.distributed.is_initialized() else _EAGER_STEPS
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
