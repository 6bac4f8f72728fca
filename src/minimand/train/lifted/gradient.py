"""LPOM's gradient of a recorded network: residuals go down through adjoints and differences of activations."""

import functools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CapabilityError, NonFiniteError, OptionError, ShapeError, require_finite, require_values
from ...network.nested import tensors
from ...network.record import Value
from ...network.running import bound
from .losses import LOSSES, Loss, encode_targets
from .options import weights_per_layer
from .program import Head, LinearCall, Program, UnitCall, compile_network
from .tape import Cotangents, Tape, forward, name_first_nonfinite
from .units import Unit

__all__ = ["RATIO", "REDUCTIONS", "GraphPass", "LiftedGraph", "head_residual"]

REDUCTIONS = ("mean", "sum")
#: Upper μ over lower μ of the gradient.
RATIO = 0.1
#: The shortest step of an activation; below it the difference is its limit to rounding.
_SHORTEST = 1e-18
_PROGRAMS = 8


class GraphPass:
    """A forward pass of a batch: its tape, its parameters, and the loss of every output."""

    def __init__(self, program: Program, tape: Tape, parameters: dict[str, nn.Parameter], losses: list[Loss]) -> None:
        self.program = program
        self.tape = tape
        self.parameters = parameters
        self.losses = losses

    @functools.cached_property
    def loss(self) -> float:
        """The loss, summed over the batch and the outputs."""
        return sum(float(loss.value(head.unit.phi(z))) for head, loss, z in self.heads())

    def heads(self) -> Iterable[tuple[Head, Loss, Tensor]]:
        """Every output with its loss and its z as rows."""
        for head, loss in zip(self.program.heads, self.losses, strict=True):
            yield head, loss, as_rows(self.tape.value(head.input))


class LiftedGraph:
    """A network as the graph of its linear calls and activations, on batches of any shape."""

    def __init__(self, model: nn.Module, losses: Sequence[str]) -> None:
        self.model = model
        self.losses = losses
        self._programs: OrderedDict[Any, Program] = OrderedDict()

    def program(self, x: Any) -> Program:
        """The program of a batch: read again when shapes, modes or frozen parameters have changed."""
        kinds = tuple((tuple(t.shape), t.dtype, t.device) for t in tensors(bound(x)))
        modes = tuple((id(module), module.training) for module in self.model.modules())
        key = kinds, modes, tuple(p.requires_grad for p in self.model.parameters())
        if key not in self._programs:
            self._programs[key] = compile_network(self.model, x)
            while len(self._programs) > _PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        return self._programs[key]

    def program_of(self, example: Any) -> Program:
        """The program for an example, or for a made-up input."""
        return compile_network(self.model) if example is None else self.program(example)

    def forward(self, x: Any, y: Any) -> GraphPass:
        """The forward pass of a batch; running statistics do not change here."""
        parameters: dict[str, nn.Parameter] = dict(self.model.named_parameters(remove_duplicate=False))
        inputs = list(tensors(bound(x)))
        _check(inputs, parameters)
        program = self.program(x)
        sources = _sources(program, parameters)
        tape = forward(program, inputs, sources)
        found = GraphPass(program, tape, parameters, self._losses(program, tape, y))
        if not _is_finite(found.loss):
            for number, tensor in enumerate(inputs):
                require_finite("the input x" if len(inputs) == 1 else f"input {number} of x", tensor)
            for name, parameter in parameters.items():
                require_finite(name, parameter.detach())
            name_first_nonfinite(program, inputs, sources)
            raise NonFiniteError(f"the loss is {found.loss}; scale the inputs or lower the rate")
        return found

    def _losses(self, program: Program, tape: Tape, y: Any) -> list[Loss]:
        several = len(program.heads) > 1
        targets = list(y) if several and isinstance(y, tuple | list) else [y]
        names = list(self.losses) * (len(program.heads) if len(self.losses) == 1 else 1)
        for what, given in (("target", targets), ("loss", names)):
            if len(given) != len(program.heads):
                raise ShapeError(
                    f"the network returns {len(program.heads)} tensors; give one {what} for each in a tuple"
                )
        return [
            LOSSES[name](_target(target, tape.value(head.input), name))
            for name, target, head in zip(names, targets, program.heads, strict=True)
        ]

    def backward(self, x: Any, y: Any, mu: float | Sequence[float] | None, reduction: str) -> float:
        """See :meth:`minimand.train.LPOM.backward`."""
        if reduction not in REDUCTIONS:
            raise OptionError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
        batch = self.forward(x, y)
        samples = next(iter(tensors(bound(x)))).shape[0]
        share = 1.0 / samples if reduction == "mean" else 1.0
        found = self.gradients(batch, mu)
        for name, change in found.items():
            if not _is_finite(float(change.sum())) and not bool(torch.isfinite(change).all()):
                raise NonFiniteError(
                    f"the gradient of {name} is NaN or Inf, and no gradient was changed; scale the inputs"
                )
        for name, change in found.items():
            parameter = batch.parameters[name]
            if parameter.grad is None:
                parameter.grad = change.reshape(parameter.shape).mul(-share)
            else:
                parameter.grad.add_(change.reshape(parameter.shape), alpha=-share)
        update_statistics(batch.tape)
        return share * batch.loss

    def gradients(self, batch: GraphPass, mu: float | Sequence[float] | None) -> dict[str, Tensor]:
        r"""The negative gradients by parameter, summed over the batch.

        At an activation with :math:`\mu_v` the residual times :math:`\mu_v` is
        :math:`\mu_v(\varphi(z_v + p_v/\mu_v) - \varphi(z_v))`, where p is the sum of what the calls above send down.
        """
        program, tape = batch.program, batch.tape
        weights = self.weights(program, mu)
        cotangents = Cotangents()
        for head, loss, z in batch.heads():
            change = head_residual(head.unit, loss, z, weights[head])
            cotangents.add(head.input, from_rows(change, tape.value(head.input)))
        for operation in reversed(program.operations):
            if isinstance(operation, LinearCall):
                tape.pull(operation, cotangents)
                continue
            found = [part for value in operation.outputs if (part := cotangents.take(value)) is not None]
            if operation.active and found:
                step = max(1.0 / weights[operation], _SHORTEST)
                p = functools.reduce(torch.add, found)
                cotangents.add(operation.input, operation.unit.change(tape.value(operation.input), p, step))
        learned = [value for value in program.network.values if value.source == "parameter"]
        return {value.name: part for value in learned if (part := cotangents.take(value)) is not None}

    def weights(self, program: Program, mu: float | Sequence[float] | None) -> dict[UnitCall | Head, float]:
        """μ of every activation and output."""
        blocks: list[UnitCall | Head] = [*program.units, *program.heads]
        if mu is None:
            # Levels beyond the range of numbers have the same limit.
            return {b: RATIO ** -min(b.level, 300) if isinstance(b, UnitCall) else 1.0 for b in blocks}
        return dict(zip(blocks, weights_per_layer(mu, len(blocks)), strict=True))


def head_residual(unit: Unit, loss: Loss, z: Tensor, mu: float) -> Tensor:
    r"""The residual :math:`\mu(X - \varphi(z))` of an output, where X minimises its block.

    X solves :math:`X = \varphi(z - \nabla\ell(X)/\mu)`.
    """
    if unit.linear:
        if isinstance(loss, LOSSES["squared"]):  # type: ignore[arg-type]
            return (loss.target - z) * (mu / (1 + mu))
        return -loss.gradient(loss.prox(z, 1.0 / mu))
    return unit.change(z, -loss.gradient(head_minimizer(unit, loss, z, mu)), max(1.0 / mu, _SHORTEST))


def head_minimizer(unit: Unit, loss: Loss, z: Tensor, mu: float, x: Tensor | None = None) -> Tensor:
    """The minimiser over an output that ends in an activation; for cross-entropy by majorised steps from x."""
    if unit.linear:
        return loss.prox(z, 1.0 / mu)
    if isinstance(loss, LOSSES["squared"]):  # type: ignore[arg-type]
        return unit.resolve(z + loss.target / mu, 1.0 / mu)
    x = unit.phi(z) if x is None else x
    curvature = 0.5 * float(loss.target.sum(-1).max()) / mu
    for _ in range(20):
        x = unit.resolve(z + curvature * x - loss.gradient(x) / mu, curvature)
    return x


def as_rows(output: Tensor) -> Tensor:
    """An output as rows × numbers; of images, every position is a row of channels."""
    if output.dim() == 2:
        return output
    if output.dim() < 2:
        return output.reshape(-1, 1)
    return output.movedim(1, -1).flatten(0, -2)


def from_rows(rows: Tensor, like: Tensor) -> Tensor:
    """The inverse of :func:`as_rows`."""
    if like.dim() <= 2:
        return rows.reshape(like.shape)
    return rows.reshape(like.movedim(1, -1).shape).movedim(-1, 1)


def _target(y: Any, output: Tensor, loss: str) -> Tensor:
    if isinstance(y, Tensor) and output.dim() != 2:
        labels = y.is_floating_point() is False
        if output.dim() > 2 and labels and y.shape != (output.shape[0], *output.shape[2:]):
            raise ShapeError(
                f"integer labels have shape {tuple(y.shape)}, but the output {tuple(output.shape)} needs one per "
                f"position, {(output.shape[0], *output.shape[2:])}"
            )
        if not labels and y.shape != output.shape:
            raise ShapeError(f"float targets have shape {tuple(y.shape)}, but the output has {tuple(output.shape)}")
        y = y.flatten() if labels else as_rows(y)
    return encode_targets(y, as_rows(output), loss)


def _check(inputs: Sequence[Tensor], parameters: dict[str, nn.Parameter]) -> None:
    if not inputs or not all(tensor.dim() and tensor.shape[0] for tensor in inputs):
        raise ShapeError("x must be a tensor of at least one sample, or a tuple of such tensors")
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise OptionError(
            "every parameter is frozen, so there is nothing to train; set requires_grad_(True) on those that "
            "should move"
        )
    for number, tensor in enumerate(inputs):
        require_values("x" if len(inputs) == 1 else f"input {number} of x", tensor)
    for name, parameter in parameters.items():
        for tensor in inputs:
            if tensor.is_floating_point() and tensor.dtype != parameter.dtype and parameter.is_floating_point():
                raise ShapeError(f"x is {tensor.dtype}, but {name} is {parameter.dtype}; convert x or the network")
            if tensor.device != parameter.device:
                raise CapabilityError(f"x is on {tensor.device}, but {name} on {parameter.device}; move one")
        if parameter.requires_grad and parameter.is_inference():
            raise CapabilityError(
                f"{name} was made in inference mode and cannot be trained; build the network outside of "
                f"torch.inference_mode()"
            )


def _is_finite(number: float) -> bool:
    return abs(number) < float("inf")


def _sources(program: Program, parameters: dict[str, nn.Parameter]) -> dict[int, Tensor]:
    """The present parameters and buffers, and the constants, by the index of their value."""
    buffers = dict(program.network.model.named_buffers(remove_duplicate=False))
    found: dict[int, Tensor] = {}
    for value in program.network.values:
        if value.source == "parameter":
            found[value.index] = parameters[value.name].detach()
        elif value.source == "buffer":
            found[value.index] = buffers[value.name]
        elif value.source in ("constant", "unseen"):
            found[value.index] = program.network.held[value.index]
    return found


def update_statistics(tape: Tape) -> None:
    """Update the running statistics of the normalisations, as a forward pass in training does."""
    for operation, applied in tape.applied.items():
        if applied.statistics is None:
            continue
        module = tape.program.network.module(operation.call.path)
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            applied.statistics.update_running(module)  # type: ignore[arg-type]
        elif operation.bound is not None:
            given = operation.bound.arguments
            running = [given.get(name) for name in ("running_mean", "running_var")]
            unbiased = applied.statistics.count / max(applied.statistics.count - 1, 1)
            measured = (applied.statistics.mean, applied.statistics.variance * unbiased)
            for value, new in zip(running, measured, strict=True):
                if isinstance(value, Value):
                    tape.value(value).lerp_(new, given.get("momentum", 0.1))
