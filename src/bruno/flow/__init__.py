"""Bijections between data and latents, exact both ways."""

from bruno.flow.bijection import Bijection, Chain, FactorOut, Flatten, Squeeze
from bruno.flow.coupling import AffineCoupling, Channels, Checkerboard, OddEven, Partition
from bruno.flow.networks import ConvNetwork, DenseNetwork, initialise
from bruno.flow.realnvp import ConvRealNVP, DenseRealNVP, set_compiled, set_network_dtype, set_recompute
from bruno.threads import configure

__all__ = [
    "AffineCoupling",
    "Bijection",
    "Chain",
    "Channels",
    "Checkerboard",
    "ConvNetwork",
    "ConvRealNVP",
    "DenseNetwork",
    "DenseRealNVP",
    "FactorOut",
    "Flatten",
    "OddEven",
    "Partition",
    "Squeeze",
    "initialise",
    "set_compiled",
    "set_network_dtype",
    "set_recompute",
]

configure()
