"""Which operations of a forward pass use a parameter, from the autograd graph of its output."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["Use", "uses"]

# Where the first factor of a product stands among its arguments, and as what the two factors are saved.
_PRODUCTS = {"Mm": (0, "self", "mat2"), "Bmm": (0, "self", "mat2"), "Addmm": (1, "mat1", "mat2")}
_SPLITS = ("SplitWithSizes", "Split", "UnsafeSplit")
_RESHAPES = ("ToCopy", "Expand", "View", "UnsafeView", "ReshapeAlias")
_MOVES = ("T", "Transpose", "Permute", "Unsqueeze")


class Use(NamedTuple):
    """The use of rows ``start`` to ``stop`` of a parameter by an operation in the autograd graph.

    ``kind`` is "product", "convolution" or, if the operation is neither, the operation's name. ``left``: the parameter
    is the left factor of a product. ``transposed``: it is inputs × outputs.
    """

    node: Any
    parameter: Tensor
    start: int
    stop: int
    kind: str
    transposed: bool = False
    left: bool = False

    def saved(self) -> Tensor:
        """The rows of a product, or the input of a convolution."""
        name = "input" if self.kind == "convolution" else _PRODUCTS[_name(self.node)][1 + self.left]
        return self.by_rows(getattr(self.node, f"_saved_{name}"))

    def by_rows(self, other: Tensor) -> Tensor:
        """The other factor of a product, or the gradient at its result, as rows."""
        other = other[0] if self.kind == "product" and other.dim() == 3 else other
        return other.mT if self.left else other


def uses(outputs: list[Tensor], inputs: list[Tensor]) -> Iterator[Use]:
    """All uses of parameters between the inputs and the outputs, from the autograd graph."""
    seen = {t.grad_fn for t in inputs if t.grad_fn is not None}
    stack = [t.grad_fn for t in outputs if t.grad_fn is not None and t.grad_fn not in seen]
    while stack:
        node: Any = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for place, (child, index) in enumerate(node.next_functions):
            found = _source(child, index)
            if found is None:
                stack += [] if child is None else [child]
            else:
                yield _use(node, place, *found)


def _name(node: Any) -> str:
    return str(node.name()).removesuffix("Backward0")


def _use(node: Any, place: int, parameter: Tensor, start: int, stop: int, flipped: bool) -> Use:
    name, other = _name(node), Use(node, parameter, start, stop, _name(node))
    if name == "Convolution" and place == 1:
        return other._replace(kind="convolution")
    left = place == _PRODUCTS.get(name, (0,))[0]
    unit = getattr(node, "_saved_alpha", 1) == 1 and getattr(node, "_saved_beta", 1) == 1
    if name not in _PRODUCTS or not unit or (name == "Addmm" and place == 0):
        return other
    # The left factor is outputs × inputs, the right one inputs × outputs.
    made = other._replace(kind="product", left=left, transposed=flipped if left else not flipped)
    factor = getattr(node, f"_saved_{_PRODUCTS[name][1 + left]}")
    fits = made.saved().shape[-1] == parameter.shape[0 if made.transposed else 1]
    return made if fits and (factor.dim() == 2 or len(factor) == 1) else other


def _source(node: Any, index: int) -> tuple[Tensor, int, int, bool] | None:
    """The parameter behind a node that casts, splits or rearranges it: which rows, and whether it is transposed."""
    chain = list[Any]()
    while node is not None and not hasattr(node, "variable"):
        name = _name(node)
        if name not in _RESHAPES + _MOVES and not (name in _SPLITS and node._saved_dim == 0):
            return None
        chain.append((name, node, index))
        node, index = node.next_functions[0]
    if node is None:
        return None
    # The dimensions of the parameter, in their present order; None is one of size 1.
    axes: list[int | None] = list(range(node.variable.dim()))
    start, size, plain = 0, len(node.variable), list(axes)
    while chain:
        name, step, output = chain.pop()
        if name in _SPLITS:
            if axes != plain or size != len(node.variable):
                return None
            sizes = getattr(step, "_saved_split_sizes", None)
            size = step._saved_split_size if sizes is None else sizes[output]
            start = size * output if sizes is None else sum(sizes[:output])
        elif name == "Unsqueeze":
            at = _signed(step._saved_dim)
            axes.insert(at if at >= 0 else len(axes) + 1 + at, None)
        elif name == "Permute":
            axes = [axes[_signed(at)] for at in step._saved_dims]
        elif name in _MOVES:
            i, j = (_signed(getattr(step, f"_saved_dim{k}", k)) for k in (0, 1))
            axes[i], axes[j] = axes[j], axes[i]
        # A reshape keeps the order of the entries, but not the dimensions that a later move speaks of.
        elif name != "ToCopy" and any(later not in _RESHAPES for later, _, _ in chain):
            return None
    kept = [axis for axis in axes if axis is not None]
    return (node.variable, start, start + size, kept != plain) if kept in (plain, [1, 0]) else None


def _signed(dim: int) -> int:
    """A dimension, which autograd saves as an unsigned number."""
    return dim - (1 << 64) if dim >> 63 else dim
