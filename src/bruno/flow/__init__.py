"""Bijections between data and latents, exact both ways."""

from bruno.flow.bijection import Bijection, Chain, FactorOut, Flatten, Squeeze
from bruno.flow.coupling import (
    AffineCoupling,
    Channels,
    Checkerboard,
    Coupling,
    OddEven,
    Partition,
    SplineCoupling,
    set_compiled,
    set_network_dtype,
    set_recompute,
)
from bruno.flow.dropout import Dropout, set_dropout
from bruno.flow.imputation import Imputer
from bruno.flow.mixing import ChannelMixing
from bruno.flow.networks import ConvNetwork, DenseNetwork, initialise
from bruno.flow.realnvp import ConvRealNVP, DenseRealNVP, Splines
from bruno.threads import configure

__all__ = [
    "AffineCoupling",
    "Bijection",
    "Chain",
    "ChannelMixing",
    "Channels",
    "Checkerboard",
    "ConvNetwork",
    "ConvRealNVP",
    "Coupling",
    "DenseNetwork",
    "DenseRealNVP",
    "Dropout",
    "FactorOut",
    "Flatten",
    "Imputer",
    "OddEven",
    "Partition",
    "SplineCoupling",
    "Splines",
    "Squeeze",
    "initialise",
    "set_compiled",
    "set_dropout",
    "set_network_dtype",
    "set_recompute",
]

configure()
