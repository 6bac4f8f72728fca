"""Which operations of a forward pass use a parameter, from the autograd graph of its output."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["Use", "uses"]


class Use(NamedTuple):
    """The use of rows ``start`` to ``stop`` of a parameter by an operation in the autograd graph.

    ``kind`` is "product", "convolution" or, if the operation is neither, the operation's name.
    """

    node: Any
    parameter: Tensor
    start: int
    stop: int
    kind: str
    transposed: bool

    def saved(self) -> Tensor:
        """The operation's other argument: the rows of a product, the input of a convolution."""
        name = {"ConvolutionBackward0": "input", "AddmmBackward0": "mat1"}.get(self.node.name(), "self")
        kept: Tensor = getattr(self.node, f"_saved_{name}")
        return kept


_PLACES = {"MmBackward0": 1, "AddmmBackward0": 2, "ConvolutionBackward0": 1}


def uses(outputs: list[Tensor], inputs: list[Tensor]) -> Iterator[Use]:
    """All uses of parameters between the inputs and the outputs, from the autograd graph."""
    seen = {t.grad_fn for t in inputs if t.grad_fn is not None}
    stack = [t.grad_fn for t in outputs if t.grad_fn is not None and t.grad_fn not in seen]
    while stack:
        node: Any = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        name = node.name()
        unit = getattr(node, "_saved_alpha", 1) == 1 and getattr(node, "_saved_beta", 1) == 1
        for place, (child, index) in enumerate(node.next_functions):
            found = _source(child, index)
            if found is None:
                stack += [] if child is None else [child]
            elif place == _PLACES.get(name) and unit:
                yield Use(node, *found[:3], "convolution" if name[0] == "C" else "product", not found[3])
            else:
                yield Use(node, *found[:3], name, False)


def _source(node: Any, index: int) -> tuple[Tensor, int, int, bool] | None:
    """The parameter behind a node that casts, splits or transposes it: which rows, and whether it is transposed."""
    flipped, spans = False, list[tuple[int, int]]()
    while node is not None and not hasattr(node, "variable"):
        name = node.name()
        if name in ("TBackward0", "TransposeBackward0", "PermuteBackward0"):
            # Weights are matrices: two dimensions are exchanged, unless a permutation keeps them.
            flipped ^= getattr(node, "_saved_dims", (1, 0))[0] != 0
        elif name == "SplitWithSizesBackward0" and node._saved_dim == 0:
            sizes = node._saved_split_sizes
            spans.append((sum(sizes[:index]), sizes[index]))
        elif name in ("SplitBackward0", "UnsafeSplitBackward0") and node._saved_dim == 0:
            spans.append((node._saved_split_size * index, node._saved_split_size))
        elif name != "ToCopyBackward0":
            return None
        node, index = node.next_functions[0]
    if node is None or len(spans) > 1:
        return None
    start, size = spans[0] if spans else (0, len(node.variable))
    return node.variable, start, start + size, flipped
