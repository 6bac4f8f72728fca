"""Monotone block-coordinate descent of LPOM's energy on a graph: activations, outputs and the parameters of modules."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...network.nested import replace, tensors
from ...network.record import Value
from ...solvers.linear import conjugate_gradient
from .gradient import GraphPass, as_rows, from_rows, head_minimizer
from .program import Head, LinearCall, Operation, UnitCall
from .rules import Applied
from .tape import Cotangents

__all__ = ["GraphBlocks"]

Block = UnitCall | Head
CG_ITERATIONS = 10
HALVINGS = 30


class _Segment:
    """The linear calls that a change of some values reaches before the next activations, and what it reaches."""

    def __init__(self, blocks: "GraphBlocks", values: Iterable[Value]) -> None:
        reached, self.calls = set(values), []
        for operation in blocks.program.operations:
            if isinstance(operation, LinearCall) and any(v in reached for v in operation.call.inputs):
                reached.update(operation.outputs)
                self.calls.append(operation)
        self.above: list[Block] = [block for block in blocks.weights if block.input in reached]


class GraphBlocks:
    r"""The blocks of LPOM's energy on a batch, with the masks, statistics and positions of its forward pass.

    .. math::

        F = \sum_h \ell_h(X_h) + \sum_v \mu_v\bigl(\tilde f_v(X_v) + \tilde g_v(z_v) - \langle X_v, z_v\rangle\bigr)

    over all activations and outputs. Every :math:`z_v` is affine in the X below it. It is also affine in each parameter
    that is used once between two activations. The step on :math:`X_v` is that of :class:`~minimand.train.LPOM` on a
    chain; c is found by doubling until F does not rise, in place of a bound on norms. A module's parameters move along
    ten conjugate gradient iterations on the quadratic majoriser, halved until F does not rise.
    """

    def __init__(self, batch: GraphPass, weights: dict[Block, float]) -> None:
        self.batch, self.program, self.weights = batch, batch.program, weights
        self.sources = dict(batch.tape.sources)
        self.applied: dict[LinearCall, Applied] = dict(batch.tape.applied)
        self.values: dict[int, Tensor] = {}
        self.steps: dict[UnitCall, float] = {}
        for operation in self.program.operations:
            self._store(operation, self._forward(operation))
        self.zs: dict[Block, Tensor] = {block: self._value(block.input) for block in weights}
        self.xs: dict[Block, Tensor] = {block: block.unit.phi(z) for block, z in self.zs.items()}
        self.losses = dict(zip(self.program.heads, batch.losses, strict=True))

    # -- evaluation -----------------------------------------------------------------------------------------------

    def _value(self, value: Value) -> Tensor:
        return self.sources[value.index] if value.index in self.sources else self.values[value.index]

    def _store(self, operation: Operation, out: Any) -> None:
        results = list(tensors(out))
        results = results * len(operation.outputs) if len(results) < len(operation.outputs) else results
        self.values.update({value.index: part for value, part in zip(operation.outputs, results, strict=False)})

    def _forward(self, operation: Operation) -> Any:
        if isinstance(operation, UnitCall):
            return operation.unit.phi(self._value(operation.input))
        if operation.rule is None:
            return self.batch.tape.constants[operation]
        return self._call(operation).out

    def _call(self, operation: LinearCall) -> Applied:
        """A linear call on the present values, with what its batch froze."""
        assert operation.bound is not None
        assert operation.rule is not None
        again = self.applied[operation].again
        if again is None:
            args, kwargs = replace((operation.bound.args, operation.bound.kwargs), Value, self._value)
            made = operation.rule(*args, **kwargs)
        else:
            made = again(**replace(dict(operation.bound.arguments), Value, self._value))
        self.applied[operation] = made
        return made

    def _run(self, segment: _Segment) -> dict[Block, Tensor]:
        """The z above a segment, at the present values."""
        for operation in segment.calls:
            self._store(operation, self._call(operation).out)
        return {block: self._value(block.input) for block in segment.above}

    def _pull(self, segment: _Segment, residuals: dict[Block, Tensor]) -> Cotangents:
        """The adjoint of a segment: from changes of the z above to its values."""
        cotangents = Cotangents()
        for block, change in residuals.items():
            cotangents.add(block.input, change)
        for operation in reversed(segment.calls):
            found = [cotangents.take(value) for value in operation.outputs]
            if all(part is None for part in found) or operation.bound is None or not operation.wanted:
                continue
            several = isinstance(self.applied[operation].out, tuple | list)
            g: Any = found if several else sum(part for part in found if part is not None)
            given = replace(dict(operation.bound.arguments), Value, self._value)
            for name, change in self.applied[operation].pull(g, operation.wanted, given).items():
                values = operation.bound.arguments[name]
                pairs = zip(values, change, strict=True) if isinstance(values, list | tuple) else ((values, change),)
                for value, part in pairs:
                    if isinstance(value, Value):
                        cotangents.add(value, part)
        return cotangents

    def _gap(self, block: Block, z: Tensor) -> float:
        return self.weights[block] * float(block.unit.gap(self.xs[block], z))

    def _residuals(self, blocks: Iterable[Block]) -> dict[Block, Tensor]:
        """μ times the residual of every activation or output."""
        return {b: self.weights[b] * b.unit.residual(self.xs[b], self.zs[b]) for b in blocks}

    def terms(self) -> Iterator[tuple[str, float]]:
        """The terms of the energy with their names: the losses, then one for each activation and output."""
        for head, loss in self.losses.items():
            yield f"the loss of {head.path}", float(loss.value(as_rows(self.xs[head])))
        for block in self.weights:
            yield f"the term of {block.path}", self._gap(block, self.zs[block])

    def energy(self) -> float:
        """The energy, summed in double precision."""
        return sum(term for _, term in self.terms())

    # -- blocks -----------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Move every output and every activation once, from the outputs to the inputs."""
        for head, loss in self.losses.items():
            rows, like = as_rows(self.zs[head]), self.zs[head]
            now = as_rows(self.xs[head])
            self.xs[head] = from_rows(head_minimizer(head.unit, loss, rows, self.weights[head], now), like)
        for unit in reversed(self.program.units):
            if unit.active:
                self._move_activation(unit)

    def _move_activation(self, unit: UnitCall) -> None:
        segment = _Segment(self, unit.outputs)
        self._place(unit, self.xs[unit])
        zs = self._run(segment)
        pulled = self._pull(segment, self._residuals(segment.above))
        change = sum(part for value in unit.outputs if (part := pulled.take(value)) is not None)
        if not isinstance(change, Tensor):
            return
        mu, old, z = self.weights[unit], self.xs[unit], self.zs[unit]
        before = self._gap(unit, z) + sum(self._gap(block, zs[block]) for block in segment.above)
        c = 0.5 * self.steps.get(unit, 2.0)
        for _ in range(HALVINGS):
            self.xs[unit] = unit.unit.resolve(z + c * old + change / mu, c)
            self._place(unit, self.xs[unit])
            moved = self._run(segment)
            after = self._gap(unit, z) + sum(self._gap(block, moved[block]) for block in segment.above)
            if after <= before:
                self.steps[unit] = c
                self.zs.update(moved)
                return
            c *= 2
        self.xs[unit] = old
        self._place(unit, old)
        self.zs.update(self._run(segment))

    def _place(self, unit: UnitCall, x: Tensor) -> None:
        self.values.update({value.index: x for value in unit.outputs})

    def move_weights(self) -> None:
        """Lower the energy in the parameters of every module, one module after the other."""
        for unit in self.program.units:
            self._place(unit, self.xs[unit])
        for operation in self.program.operations:
            if isinstance(operation, LinearCall):
                self._store(operation, self._forward(operation))
        for values in self._modules().values():
            self._move_module(values)

    def _modules(self) -> dict[str, list[Value]]:
        """The trained parameters by the module that owns them."""
        found: dict[str, list[Value]] = {}
        for value in self.program.network.values:
            if value.source == "parameter" and self.batch.parameters[value.name].requires_grad:
                found.setdefault(value.name.rpartition(".")[0], []).append(value)
        return found

    def _move_module(self, values: list[Value]) -> None:
        segment = _Segment(self, values)
        if not segment.above:
            return
        zs, old = self._run(segment), [self._value(value) for value in values]
        pulled = self._pull(segment, self._residuals(segment.above))
        descent = _flat([_or_zero(pulled.take(value), now) for value, now in zip(values, old, strict=True)])
        before = sum(self._gap(block, zs[block]) for block in segment.above)

        def normal(direction: Tensor) -> Tensor:
            self._set(values, old, direction, 1.0)
            moved = self._run(segment)
            weighted = {b: self.weights[b] * b.unit.slope * (moved[b] - zs[b]) for b in segment.above}
            self._set(values, old, direction, 0.0)
            self._run(segment)
            found = self._pull(segment, weighted)
            return _flat([_or_zero(found.take(value), now) for value, now in zip(values, old, strict=True)])

        direction = conjugate_gradient(normal, descent, CG_ITERATIONS)
        length = 1.0
        for _ in range(HALVINGS):
            self._set(values, old, direction, length)
            moved = self._run(segment)
            if sum(self._gap(block, moved[block]) for block in segment.above) <= before:
                self.zs.update(moved)
                for value in values:
                    self.batch.parameters[value.name].data.copy_(self._value(value))
                return
            length /= 2
        self._set(values, old, direction, 0.0)
        self.zs.update(self._run(segment))

    def _set(self, values: list[Value], old: list[Tensor], direction: Tensor, length: float) -> None:
        offset = 0
        for value, now in zip(values, old, strict=True):
            part = direction[0, offset : offset + now.numel()].reshape(now.shape)
            self.sources[value.index] = now + length * part if length else now
            offset += now.numel()


def _flat(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts]).unsqueeze(0)


def _or_zero(found: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if found is None else found.reshape(like.shape)
