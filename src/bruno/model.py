"""The model: preprocessing, flow and process as one density of sets."""

from __future__ import annotations

import hashlib
import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn

from bruno import known_models
from bruno.arrays import ArrayLike, Arrays, as_tensor, check_element_type, fields_to_numpy
from bruno.checks import check_count
from bruno.components import build_flow, build_preprocessing, build_process, check_size
from bruno.config import ModelConfig
from bruno.files import raw_bytes
from bruno.flow import Bijection, Imputer, SplineCoupling, initialise
from bruno.flow.preprocessing import ColumnScales, Gaussianise, Pixels, Standardise, dequantise
from bruno.kinds import Kind, kind_of
from bruno.posterior import Posterior, Samples
from bruno.process import Evidence, ExchangeableProcess
from bruno.process.checks import check_generator, check_type, may_look_at_values

__all__ = ["Bruno", "Encoded", "Posterior", "Samples"]


class Encoded(NamedTuple):
    """Latents of a batch of elements, and the log-det of the map to them."""

    z: Float[Tensor, "*batch dim"]
    log_det: Float[Tensor, "*batch"]

    def numpy(self) -> dict[str, Any]:
        """The fields by name as numpy arrays: detached and on the CPU."""
        return fields_to_numpy(self._asdict())


class Bruno(nn.Module):
    """An exchangeable density of sets: p(x_i | x_1..x_{i−1}) for elements of any shape, exact.

    Each element goes through the preprocessing and the flow, x -> z; every dimension of z is an exchangeable
    process; log p(x) = log p(z) + log |det ∂z/∂x|.

    Elements are tensors, numpy arrays, PIL images, or lists of these. Integers are dequantised with uniform
    noise from a `generator`. Without a generator, ½ is added instead, so that an element always has the same
    latents and can be removed again. Use a generator to train and to measure bits/dim.

    Rows may have missing numbers, NaN, if the model has an imputer. `log_prob` and `condition` impute them
    from the rows' own sets, the methods of `Posterior` from its set; `encode` and `latents` only take
    complete rows.

    Args:
        shape: shape of an element.
        flow: any `Bijection` from elements to vectors of the same size.
        process: a process with as many dimensions.
        preprocessing: the first step, `Logit` or `Gaussianise` for pixels, `Standardise` or `ColumnScales`
            for real numbers.
        config: config that the model was built from; `bruno.save` needs it.
        imputer: for rows with missing numbers.

    >>> from bruno.config import FlowConfig, ModelConfig
    >>> flow = FlowConfig("dense", couplings=2, units=8)
    >>> model = Bruno.from_config(ModelConfig((2,), levels=0, flow=flow))
    >>> machine = torch.tensor([[0.1, 2.0], [0.2, 2.1], [0.0, 1.9]])
    >>> posterior = model.condition(machine)
    >>> posterior
    Posterior(batch_shape=(), seen=3)
    >>> usual, outlier = posterior.score(torch.tensor([[0.1, 2.0], [0.1, -2.0]]))
    >>> bool(usual > outlier)
    True
    >>> posterior.sample(5).x.shape
    torch.Size([5, 2])
    """

    source: str | None = None  # the file or run folder that it was read from or written to

    def __init__(
        self,
        shape: tuple[int, ...],
        flow: Bijection,
        process: ExchangeableProcess,
        preprocessing: Pixels | Standardise,
        config: ModelConfig | None = None,
        imputer: Imputer | None = None,
    ) -> None:
        super().__init__()
        check_type("shape", shape, tuple, list)
        check_type("flow", flow, Bijection)
        check_type("process", process, ExchangeableProcess)
        check_type("preprocessing", preprocessing, Pixels, Standardise)
        self.shape, self.dim = tuple(shape), math.prod(shape)
        if process.dim != self.dim:
            raise ValueError(
                f"`process` must have {self.dim} dimensions for {self.shape}; got {process.dim}."
            )
        if flow.output_shape(self.shape) != (self.dim,):
            raise ValueError(
                f"`flow` must return vectors of {self.dim} numbers for shape {self.shape}; got "
                f"{flow.output_shape(self.shape)}. Put Flatten({self.shape}) in a Chain before or after it."
            )
        self.preprocessing, self.flow, self.process = preprocessing, flow, process
        self.config, self.imputer = config, imputer

    def __new__(cls, *args: Any, **kwargs: Any) -> Bruno:
        """A model that posteriors can find by its fingerprint; also called for copies and pickles."""
        model = super().__new__(cls)
        known_models.register(model)
        return model

    @classmethod
    def from_config(cls, config: ModelConfig, *, seed: int | None = None) -> Bruno:
        """Build a model with fresh weights, drawn from torch's global generator.

        With a seed, they are drawn from the seed, and the global generator stays as it is.
        """
        check_type("config", config, ModelConfig)
        check_size(config)
        if seed is not None:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                return cls.from_config(config)
        imputer = Imputer(config.shape[0]) if config.missing == "impute" else None
        return cls(
            config.shape,
            build_flow(config),
            build_process(config),
            build_preprocessing(config),
            config,
            imputer,
        )

    @property
    def levels(self) -> int:
        """Number of values that a pixel can take; 0 for real numbers."""
        return self.preprocessing.levels if isinstance(self.preprocessing, Pixels) else 0

    @property
    def kind(self) -> Kind:
        """The kind of element: `Images` or `Rows`."""
        return kind_of(self.shape, self.levels)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.process.mean.device

    @property
    def is_fitted(self) -> bool:
        """Whether the preprocessing and the imputer are fitted, or have nothing to fit."""
        return all(bool(getattr(part, "fitted", True)) for part in (self.preprocessing, self.imputer))

    @torch.no_grad()
    def fit_preprocessing(self, x: ArrayLike, labels: Int[Tensor, " n"] | Arrays | None = None) -> None:
        """Fit the preprocessing and the imputer to the training elements (n, *shape); only the first time.

        A logit has nothing to fit. `Gaussianise` learns the distribution of pixels, `Standardise` and
        `ColumnScales` learn the scales of columns. Rows may have missing numbers, NaN.

        Args:
            x: all training elements, as a batch may lack rare values.
            labels: the set of each element, for the imputer; by default all are one set.
        """
        x = self.as_elements(x)
        if isinstance(self.preprocessing, Standardise | Gaussianise):
            self.preprocessing.fit(x)
        if self.imputer is not None and not self.imputer.fitted:
            self.imputer.fit(self.preprocessing(x.double())[0], self._sets_of_rows(x, labels))

    def initialise(self, x: ArrayLike, generator: Generator | None = None) -> None:
        """Initialise weight-normalised layers from elements (*batch, *shape); a second call changes nothing.

        A preprocessing that was not fitted before (`fit_preprocessing`) is fitted to the same elements.
        """
        x = self.as_elements(x)
        if self.batch_of(x).numel() < 2:
            raise ValueError(
                f"`x` must have at least two elements, to estimate a scale; got {tuple(x.shape)}."
            )
        if isinstance(self.preprocessing, Standardise | Gaussianise):
            self.preprocessing.fit(x.reshape(-1, *self.shape))
        initialise(self, lambda: self.encode(x, generator))

    def impute(
        self,
        x: ArrayLike,
        labels: Int[Tensor, " n"] | Arrays | None = None,
        generator: Generator | None = None,
    ) -> Tensor:
        """Rows with their missing numbers, NaN, imputed from all rows of the same set.

        Args:
            x: rows (n, dim), on any device; the result is on the same one. Images are returned unchanged.
            labels: the set of each row; by default all are one set.
            generator: draw the numbers from their distribution; by default, they are its means.
        """
        check_generator(generator)
        x = as_tensor(x, device=self.device, kind=self.kind)
        if not self.kind.is_images and x.shape[1:] != self.shape:
            raise ValueError(f"`x` must be rows (n, {self.dim}); got shape {tuple(x.shape)}.")
        if self.kind.is_images or not bool(x.isnan().any()):
            return x
        if self.imputer is None:
            raise ValueError(
                "`x` must be complete for this model; got missing numbers (NaN). Train it with `missing` set "
                "to 'impute'."
            )
        if not self.imputer.fitted:
            raise ValueError(
                "`x` must be complete until the imputer is fitted; got missing numbers (NaN). Fit it to the "
                "training rows: model.fit_preprocessing(rows, labels)."
            )
        y = self.preprocessing(x.to(self.device).double())[0]
        filled = self.preprocessing.inverse(self.imputer(y, self._sets_of_rows(x, labels), generator))[0]
        return torch.where(x.isnan(), filled.to(x), x)

    def _sets_of_rows(self, x: Tensor, labels: Tensor | Arrays | None) -> Int[Tensor, " n"]:
        """The set of each row, on the device of the model; 0 if there are no labels."""
        if labels is None:
            return torch.zeros(len(x), dtype=torch.long, device=self.device)
        found = as_tensor(labels, "labels")
        if found.shape != x.shape[:1]:
            raise ValueError(f"`labels` must be one number for each of {len(x)} rows; got {len(found)}.")
        return found.to(self.device)

    def encode(
        self,
        x: ArrayLike,
        generator: Generator | None = None,
        *,
        on_scales: bool = False,
        validate: bool = True,
    ) -> Encoded:
        """Latents of elements (*batch, *shape).

        Args:
            x: the elements.
            generator: source of the dequantisation noise; ½ is added without one.
            on_scales: give log-dets without those of log and asinh scales (`ColumnScales.scale_log_det`), to
                compare densities of different rows.
            validate: check the values, which synchronises with the GPU.
        """
        check_generator(generator)
        x = self.as_elements(x)
        if validate and may_look_at_values(x):
            self.kind.check(x)
        flat = x.reshape(-1, *self.shape)
        if not x.is_floating_point():
            flat = dequantise(flat, generator)
        elif generator is not None and isinstance(self.preprocessing, ColumnScales):
            flat = self.preprocessing.dequantise(flat, generator)
        dtype, batch = self.process.mean.dtype, self.batch_of(x)
        flat = flat.to(torch.promote_types(flat.dtype, dtype))
        y, first = self.preprocessing(flat)
        if on_scales and isinstance(self.preprocessing, ColumnScales):
            first = first - self.preprocessing.scale_log_det(flat)
        z, second = self.flow(y.to(dtype))
        return Encoded(z.reshape(*batch, self.dim), (first.to(dtype) + second).reshape(batch))

    @torch.no_grad()
    def encode_in_batches(
        self,
        x: ArrayLike,
        generator: Generator | None = None,
        *,
        on_scales: bool = False,
        batch_size: int = 256,
    ) -> Encoded:
        """`encode` for any number of elements (*batch, *shape), on any device, without gradients."""
        x = self.as_elements(x, move=False)
        check_count("batch_size", batch_size)
        parts = [
            self.encode(part.to(self.device), generator, on_scales=on_scales)
            for part in x.reshape(-1, *self.shape).split(batch_size)
        ]
        z, log_det = (torch.cat(some) for some in zip(*parts, strict=True))
        return Encoded(z.reshape(*self.batch_of(x), self.dim), log_det.reshape(self.batch_of(x)))

    def latents(
        self, x: ArrayLike, generator: Generator | None = None, *, batch_size: int = 256
    ) -> Float[Tensor, "*batch dim"]:
        """The latents of `encode_in_batches`."""
        return self.encode_in_batches(x, generator, batch_size=batch_size).z

    def normalised(self, x: ArrayLike) -> Float[Tensor, "*batch_and_shape"]:
        """Elements (*batch, *shape) on a common scale: pixels on [0, 1], columns standardised, NaN as 0.

        The result lies on the device of `x`.
        """
        x = self.as_elements(x, move=False)
        if self.kind.is_images:
            return x / self.levels
        flat = x.reshape(-1, *self.shape).to(self.device)
        standardised: Tensor = self.preprocessing(flat)[0]
        return standardised.nan_to_num(nan=0.0).reshape(x.shape).to(x.device)

    def decode(self, z: Float[Tensor, "*batch dim"] | Arrays) -> Float[Tensor, "*batch_and_shape"]:
        """Elements from latents, in the range of the data."""
        return self.decode_samples(z).x

    def log_prob(
        self, x: ArrayLike, generator: Generator | None = None, *, validate: bool = True
    ) -> Float[Tensor, "*batch n"]:
        """log p(x_i | x_1..x_{i−1}) for sets (*batch, n, *shape), for all i at once."""
        z, log_det = self.encode(self._complete_sets(x, validate), generator, validate=validate)
        return self.process.step_log_prob(z, validate=validate) + log_det

    def bits_per_dim(self, log_prob: Tensor | Arrays) -> Tensor:
        """−log₂ p per dimension: bits/dim."""
        return -as_tensor(log_prob, "log_prob", device=self.device) / (self.dim * math.log(2))

    def prior(self) -> Posterior:
        """The posterior given no elements."""
        return Posterior(self, Evidence.empty(self.dim, device=self.device))

    def condition(self, x: ArrayLike, generator: Generator | None = None) -> Posterior:
        """The posterior given sets (*batch, n, *shape).

        Without a generator, integers are dequantised with ½. If the model learnt to classify without noise,
        samples have fewer specks given noisy elements, with a generator.
        """
        return Posterior(self, Evidence.of(self.encode(self._complete_sets(x), generator).z))

    def fingerprint(self) -> str:
        """A short hash of everything that latents depend on: models with equal hashes have equal latents.

        It covers the weights, the shape of an element, the preprocessing with its levels and alpha, and the
        intervals of splines. The fingerprint of a frozen model is computed once.
        """
        return known_models.cached_fingerprint(self, self._computed_fingerprint)

    def _computed_fingerprint(self) -> str:
        alpha = getattr(self.preprocessing, "alpha", None)
        intervals = [part.interval for part in self.flow.modules() if isinstance(part, SplineCoupling)]
        settings = (type(self.preprocessing).__name__, self.levels, alpha, self.shape, *intervals)
        digest = hashlib.sha256(repr(settings).encode())
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(raw_bytes(tensor))
        return digest.hexdigest()[:16]

    def __sklearn_clone__(self) -> Bruno:
        """The model itself: clones of an estimator share it, and do not copy its weights."""
        return self

    def is_same(self, other: Bruno) -> bool:
        """Whether this model and another one have the same latents."""
        return other is self or other.fingerprint() == self.fingerprint()

    def decode_samples(self, z: Float[Tensor, "*batch dim"] | Arrays) -> Samples:
        """Elements from latents, clamped to the range of the data as latents far in the tail may overflow."""
        z = as_tensor(z, "z", device=self.device)
        if z.shape[-1:] != (self.dim,):
            raise ValueError(f"`z` must end in {self.dim} dimensions; got shape {tuple(z.shape)}.")
        y, _ = self.flow.inverse(z.reshape(-1, self.dim).to(self.process.mean.dtype))
        x, outside = self.preprocessing.clamped(self.preprocessing.inverse(y)[0])
        return Samples(x.reshape(*z.shape[:-1], *self.shape), int(outside.sum()), self.levels)

    def _complete_sets(self, x: ArrayLike, validate: bool = True) -> Tensor:
        """Sets (*batch, n, *shape), each with its missing numbers imputed, unless values are not checked."""
        x = self.as_elements(x)
        if not self.batch_of(x):
            raise ValueError(
                f"`x` must be sets (*batch, n, *{self.shape}); got shape {tuple(x.shape)}. "
                "A set of one element is [x]."
            )
        if self.imputer is None or not validate:
            return x
        batch = x.shape[:-2]
        labels = torch.arange(batch.numel(), device=x.device).repeat_interleave(x.shape[-2])
        return self.impute(x.reshape(-1, self.dim), labels).view(x.shape)

    def as_elements(self, x: ArrayLike, *, move: bool = True) -> Tensor:
        """Elements (*batch, *shape) as a tensor with a shape and dtype that the model takes.

        Unless `move`, a tensor stays on its device.
        """
        given, x = x, as_tensor(x, device=self.device, kind=self.kind)
        axes = len(self.shape)
        if x.shape[x.ndim - axes :] != self.shape or x.ndim < axes:
            hint = ""
            if axes == 3 and x.ndim >= 3 and (*x.shape[-1:], *x.shape[-3:-1]) == self.shape:
                hint = " Channels come first: torch.movedim(x, -1, -3) or np.moveaxis(x, -1, -3)."
            raise ValueError(f"`x` must end in shape {self.shape}; got {tuple(x.shape)}.{hint}")
        if not x.numel():
            raise ValueError(
                f"`x` must hold at least one element; got shape {tuple(x.shape)}. "
                "A set without elements is model.prior()."
            )
        check_element_type(x, self.kind, given)
        return x.to(self.device) if move else x

    def batch_of(self, x: Tensor) -> torch.Size:
        """The batch axes of elements."""
        return x.shape[: x.ndim - len(self.shape)]
