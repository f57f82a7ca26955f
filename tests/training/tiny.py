"""A small model of digits, its trainer, whose steps take milliseconds, and a fake clock."""

from functools import cache

import torch

from bruno import Bruno, FlowConfig, ModelConfig
from bruno.config import TrainConfig
from bruno.data import load_examples
from bruno.data.sampling import SetSampler
from bruno.training.trainer import Trainer

MODEL = ModelConfig((1, 8, 8), flow=FlowConfig("dense", couplings=2, units=16))
SETS = TrainConfig(steps=4, batch=4, set_size=5)
TRAIN = TrainConfig(steps=12, batch=4, set_size=5, discriminative=0.1, episodes=2, way=3, ema=0.9)


@cache
def digits() -> SetSampler:
    return SetSampler(load_examples("digits"))


def trainer(config: TrainConfig = TRAIN, model: ModelConfig = MODEL) -> Trainer:
    torch.manual_seed(0)
    return Trainer(Bruno.from_config(model), digits(), config)


def trained(steps: int, config: TrainConfig = TRAIN) -> Trainer:
    result = trainer(config)
    if steps:
        result.advance(steps)
    return result


def assert_same_state(a: Trainer, b: Trainer) -> None:
    state, other = a.state(), b.state()
    assert state.keys() == other.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, other[name]), name


class FakeClock:
    """A clock that advances only during training steps: by one second each, or longer for the first."""

    def __init__(self, trainer: Trainer, first: float = 1.0) -> None:
        self.time, advance = 1000.0, trainer.advance

        def timed(count, progress=None):
            self.time += count if trainer.index else first
            return advance(count, progress)

        trainer.advance = timed

    def __call__(self) -> float:
        return self.time
