"""A network whose layers are the iterations of an optimisation algorithm."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ...arguments import checked
from ...errors import CapabilityError, OptionError, Sealed, ShapeError, require_fitting
from ...solvers.iterate import iterate
from .coefficients import Coefficients, Learning, parse_learnable
from .splitting import ADMMUpdate
from .updates import GradientUpdate, HeavyBallUpdate, NesterovUpdate, Place, Update

__all__ = ["OptimizationNet", "Transition", "TwoStreamBlock", "resolve"]

_NAMED: dict[str, Callable[[], Update]] = {
    "gd": GradientUpdate,
    "heavy_ball": HeavyBallUpdate,
    "nesterov": NesterovUpdate,
    "admm": ADMMUpdate,
}


def resolve(algorithm: str | Update) -> Update:
    """The update with a given name, or the given update."""
    if isinstance(algorithm, Update):
        return algorithm
    if not isinstance(algorithm, str) or algorithm not in _NAMED:
        names = ", ".join(map(repr, _NAMED))
        raise OptionError(f"algorithm must be {names} or an update such as HeavyBallUpdate(1, 0), got {algorithm!r}")
    return _NAMED[algorithm]()


class TwoStreamBlock(nn.Module):
    """Separate blocks for the two streams of ADMM. Both streams share a block that is not wrapped.

    >>> import torch
    >>> TwoStreamBlock(nn.Linear(2, 2), nn.Linear(2, 2))(torch.ones(1, 2), torch.ones(1, 2))[1].shape
    torch.Size([1, 2])
    """

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = second

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """The value of each stream."""
        return self.first(first), self.second(second)


class Transition(nn.Module):
    """A block that changes the shape. The iteration continues from the output of the shortcut, without momentum.

    Args:
        block: T, which maps to the new shape; a :class:`TwoStreamBlock` for separate streams.
        shortcut: Maps iterates to the new shape, like ResNet's projections; None for algorithms that do not add
            iterates to values (gradient descent, Nesterov's two terms).

    >>> Transition(nn.Linear(2, 3), nn.Linear(2, 3, bias=False)).shortcut
    Linear(in_features=2, out_features=3, bias=False)
    """

    def __init__(self, block: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.block = block
        self.shortcut = shortcut


@checked
class OptimizationNet(Sealed, nn.Module):
    r"""A network as an algorithm: its blocks :math:`T_1, \dots, T_K` are gradient steps, its skip connections momentum.

    For a symmetric positive definite W and an activation φ the layer :math:`\varphi(Wx)` is a gradient step on
    :class:`~minimand.functions.LayerObjective` in the variable :math:`z = W^{1/2}x`. So a feed-forward network is
    gradient descent, and other algorithms give other networks:

    ================  ==================================================================================
    ``"gd"``          :math:`x^+ = T(x)`
    ``"heavy_ball"``  :math:`x^+ = T(x) + \beta_1 x + \beta_2 x_-` (16), ½ and −½; (1, 0) is ResNet
    ``"nesterov"``    :math:`x^+ = T(\beta_1 x + \beta_2 x_-)`, with Nesterov's growing momentum
    ``"admm"``        two streams and the running sum of their difference
    ================  ==================================================================================

    An update object sets further options: :class:`~minimand.nn.HeavyBallUpdate`, :class:`~minimand.nn.NesterovUpdate`,
    and from :mod:`minimand.nn.blocks` ``AcceleratedUpdate`` (18), ``ADMMUpdate``, ``MergeUpdate`` (20) and
    ``DenseUpdate``.

    Args:
        blocks: T₁ … T_K, any modules. All keep the shape, except those wrapped in :class:`Transition`.
        algorithm: A name or an update.
        learnable: False: the algorithm's coefficients. True or ``"scalar"``: one learned coefficient per term, which
            starts at the algorithm's value. ``"channel"``: one per term and channel. A :class:`Learning` adds a
            constraint.
        channels: The channels of the iterates, for ``learnable="channel"``: one number, or one per block.
        activation: Applied after every update. If it is a prox, the network is the proximal form of the algorithm.
            ResNet has a ReLU here.

    Source: [Lin2019], Lemma 4 and eqs. (16), (18), (20).

    >>> import torch
    >>> blocks = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)]
    >>> x = torch.randn(2, 4)
    >>> torch.equal(OptimizationNet(blocks, "gd")(x), nn.Sequential(*blocks)(x))
    True
    >>> resnet = OptimizationNet(blocks, HeavyBallUpdate(1.0, 0.0))
    >>> y = x
    >>> for block in blocks:
    ...     y = block(y) + y
    >>> torch.equal(resnet(x), y)
    True
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        algorithm: str | Update = "gd",
        *,
        learnable: bool | str | Learning = False,
        channels: int | Sequence[int] | None = None,
        activation: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.update = resolve(algorithm)
        how = parse_learnable(learnable)
        _check_blocks(blocks, self.update)
        widths = _widths(channels, len(blocks))
        self.blocks = nn.ModuleList(blocks)
        self.coefficients = nn.ModuleList()
        self.learned = how is not None
        for place, width in zip(_places(blocks, self.update), widths, strict=True):
            start, groups = self.update.coefficients(place, self.learned), self.update.groups(place, self.learned)
            self.coefficients.append(Coefficients(start, how, width, groups))
        _check_signs(self.coefficients, how, self.update)
        self.activation = nn.Identity() if activation is None else activation

    def forward(self, x: Tensor) -> Tensor:
        """The last iterate, the mean of two streams, or the concatenation of dense iterates."""
        if not isinstance(x, Tensor):
            raise CapabilityError(f"an OptimizationNet takes a tensor, got a {type(x).__name__}; convert it first")
        if x.dim() < 2:
            raise ShapeError(
                f"an OptimizationNet takes a batch, got an input of shape {tuple(x.shape)}; add a dimension"
            )
        state = self.update.start((x,) * self.update.streams, self.learned)
        return self.update.output(iterate(self._advance, state, len(self.blocks))[0])

    def iterates(self, x: Tensor) -> list[Tensor]:
        """The output of the network after 0, 1, … blocks.

        >>> import torch
        >>> net = OptimizationNet([nn.Linear(2, 2)] * 3, "heavy_ball")
        >>> len(net.iterates(torch.ones(1, 2)))
        4
        """
        state = self.update.start((x,) * self.update.streams, self.learned)
        found = [self.update.output(state)]

        def record(state: Any, done: int) -> bool:
            found.append(self.update.output(state))
            return False

        iterate(self._advance, state, len(self.blocks), until=record)
        return found

    def _advance(self, state: Any, k: int) -> Any:
        """One block and its update; errors name the block."""
        try:
            return self._follow(state, k)
        except (RuntimeError, ValueError) as error:
            if type(error) not in (RuntimeError, ValueError):  # an error of minimand or of the block, or out of memory
                raise
            name, shape = type(self.blocks[k]).__name__, tuple(state[0].shape)
            weight = next(self.blocks[k].parameters(), None)
            if weight is not None and state[0].is_floating_point():
                require_fitting(f"blocks.{k} ({name})", state[0], weight, error)
            raise ShapeError(f"blocks.{k} ({name}) does not take iterates of shape {shape}: {error}") from error

    def _follow(self, state: Any, k: int) -> Any:
        block, update = self.blocks[k], self.update
        weights = self.coefficients[k](state[0].dim(), state[0].dtype)
        points = update.points(state, weights)
        if isinstance(block, Transition):
            values = _each(block.block, points, f"blocks.{k}.block")
            if block.shortcut is None:
                return update.start(tuple(self.activation(value) for value in values), self.learned)
            skips = _each(block.shortcut, points, f"blocks.{k}.shortcut")
            for point, value, skip in zip(points, values, skips, strict=True):
                if value.shape != skip.shape:
                    raise ShapeError(
                        f"blocks.{k} maps {tuple(point.shape)} to {tuple(value.shape)}, but its shortcut maps it to "
                        f"{tuple(skip.shape)}; both must return the same shape"
                    )
            state = update.start(skips, self.learned)
        else:
            values = _each(block, points, f"blocks.{k}")
        for value in values:
            if (problem := update.check(value, state, weights)) is not None:
                raise ShapeError(
                    f"blocks.{k} ({type(block).__name__}) {problem}, but the iterates of a stage have one shape; "
                    f"wrap a block that changes the shape: Transition(block, shortcut)"
                )
        return update.combine(state, values, weights, self.activation)

    def extra_repr(self) -> str:
        """The algorithm."""
        return f"update={self.update}"


def _each(module: nn.Module, points: tuple[Tensor, ...], name: str) -> tuple[Tensor, ...]:
    """The values of a module at every point; equal points are evaluated once."""
    if isinstance(module, TwoStreamBlock):
        values: tuple[Tensor, ...] = module(*points)
    else:
        value = module(points[0])
        values = (value, *(value if point is points[0] else module(point) for point in points[1:]))
    for value in values:
        if not isinstance(value, Tensor):
            raise ShapeError(
                f"{name} ({type(module).__name__}) returns a {type(value).__name__}, but a block must return a tensor; "
                f"wrap it in a module that returns one of its outputs"
            )
    return values


def _places(blocks: Sequence[nn.Module], update: Update) -> Iterator[Place]:
    """The position of each block in its stage. A shortcut begins a stage; without one the next block does."""
    step = 0
    for block in blocks:
        changes = isinstance(block, Transition)
        if changes and update.skips:
            step = 0
        yield Place(step, len(blocks), changes)
        step = 0 if changes and not update.skips else step + 1


def _widths(channels: int | Sequence[int] | None, count: int) -> Sequence[int | None]:
    if channels is None or isinstance(channels, int):
        return [channels] * count
    if len(channels) != count:
        raise OptionError(f"channels must be one number or one per block, got {len(channels)} for {count} blocks")
    return channels


def _check_signs(rows: Iterable[nn.Module], how: Learning | None, update: Update) -> None:
    """Reject ``"positive"`` if all coefficients start at 0: they have no sign to keep and would stay 0."""
    starts = [value for row in rows if isinstance(row, Coefficients) for value in row.start]
    if how is not None and how.constraint == "positive" and starts and not any(starts):
        raise OptionError(
            f'every coefficient of {update} starts at 0 and has no sign to keep, so "positive" would learn none; '
            f'start elsewhere, or use constraint "sum" or None'
        )


def _check_blocks(blocks: Sequence[nn.Module], update: Update) -> None:
    """Check that ``blocks`` is a list of modules that fit the algorithm; lists all problems."""
    name = type(update).__name__
    if isinstance(blocks, nn.Module) and not isinstance(blocks, nn.Sequential | nn.ModuleList):
        raise OptionError(f"blocks must be a list of modules, got a {type(blocks).__name__}; pass [block, …]")
    if len(blocks) == 0:
        raise OptionError("blocks is empty; an OptimizationNet needs one block per iteration")
    problems = []
    for k, block in enumerate(blocks):
        inner = block.block if isinstance(block, Transition) else block
        if not isinstance(inner, nn.Module):
            problems.append(f"blocks.{k} is not a module: {inner!r}")
        if isinstance(inner, TwoStreamBlock) and update.streams == 1:
            problems.append(f"blocks.{k} is a TwoStreamBlock, but {name} has one stream; use ADMMUpdate or MergeUpdate")
        if isinstance(block, Transition) and update.skips and block.shortcut is None:
            problems.append(f"blocks.{k} changes the shape, but {name} adds iterates to its value; give it a shortcut")
        if isinstance(block, Transition) and not update.skips and block.shortcut is not None:
            problems.append(f"blocks.{k} has a shortcut, which {name} does not use; remove it")
    if problems:
        raise OptionError("; ".join(problems))
