"""Plan and convert networks of every kind, and report the answers; run as a process of its own."""

import copy
import json
import sys
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from minimand.errors import ConversionError
from minimand.nn import as_algorithm, convert, plan, revert
from minimand.solvers import ProxSG

from .conversion import ONE
from .forwards import FORWARDS

#: Functions of torch of one tensor, by name.
UNARY = [
    "abs", "absolute", "acos", "acosh", "adjoint", "alias_copy", "all", "amax", "amin", "aminmax", "angle", "any",
    "argmax", "argmin", "argsort", "argwhere", "asin", "asinh", "atan", "atanh", "atleast_1d", "atleast_2d",
    "atleast_3d", "bernoulli_clamped", "block_diag", "cartesian_flat", "ceil", "chain_matmul", "cholesky_psd",
    "clone", "conj", "conj_physical", "corrcoef", "cos", "cosh", "count_nonzero", "cov", "cumsum0", "cummax0",
    "cummin0", "cumprod0", "deg2rad", "detach", "diag", "diag_embed", "diagflat", "diagonal", "diff", "digamma",
    "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "fix", "flatten", "fliplr", "flipud", "floor", "frac",
    "frexp", "gradient", "histc", "i0", "imag_of_fft", "isfinite", "isinf", "isnan", "isneginf", "isposinf",
    "isreal", "kthvalue1", "lgamma", "log", "log10", "log1p", "log2", "logcumsumexp0", "logdet_psd", "logit",
    "logsumexp0", "matrix_exp_square", "max", "mean", "median", "min", "mode", "msort", "multinomial1",
    "nan_to_num", "nanmean", "nanmedian", "nansum", "neg", "negative", "nonzero", "norm", "numel", "ones_like",
    "permute_back", "positive", "prod", "quantile_half", "rad2deg", "rand_like", "randn_like", "randint_like",
    "real", "reciprocal", "relu", "rot90", "round", "rsqrt", "sgn", "sigmoid", "sign", "signbit", "sin", "sinc",
    "sinh", "softmax1", "sort", "sqrt", "square", "squeeze", "std", "std_mean", "sum", "svd_values", "t", "tan",
    "tanh", "topk1", "trace_square", "triu", "tril", "trunc", "unique", "unsqueeze0", "var", "var_mean",
    "vander1", "zeros_like",
]  # fmt: skip
_SPECIAL = {
    "bernoulli_clamped": lambda x: torch.bernoulli(x.sigmoid()),
    "cartesian_flat": lambda x: torch.cartesian_prod(x[0], x[0]),
    "chain_matmul": lambda x: torch.linalg.multi_dot([x, x.T, x]),
    "cholesky_psd": lambda x: torch.linalg.cholesky(x.T @ x + torch.eye(x.shape[1])),
    "cumsum0": lambda x: torch.cumsum(x, 0),
    "cummax0": lambda x: torch.cummax(x, 0),
    "cummin0": lambda x: torch.cummin(x, 0),
    "cumprod0": lambda x: torch.cumprod(x, 0),
    "imag_of_fft": lambda x: torch.fft.fft(x).imag,
    "kthvalue1": lambda x: torch.kthvalue(x, 1),
    "logcumsumexp0": lambda x: torch.logcumsumexp(x, 0),
    "logdet_psd": lambda x: torch.logdet(x.T @ x + torch.eye(x.shape[1])),
    "logsumexp0": lambda x: torch.logsumexp(x, 0),
    "matrix_exp_square": lambda x: torch.matrix_exp(x.T @ x),
    "multinomial1": lambda x: torch.multinomial(x.sigmoid(), 1),
    "permute_back": lambda x: torch.permute(x, (1, 0)),
    "quantile_half": lambda x: torch.quantile(x, 0.5),
    "randint_like": lambda x: torch.randint_like(x, 3),
    "softmax1": lambda x: torch.softmax(x, 1),
    "svd_values": lambda x: torch.linalg.svdvals(x),
    "topk1": lambda x: torch.topk(x, 1),
    "trace_square": lambda x: torch.trace(x.T @ x),
    "unsqueeze0": lambda x: torch.unsqueeze(x, 0),
    "vander1": lambda x: torch.vander(x[0]),
}
#: Other calls: tensors sized by the input, functions of several arguments, indexing, Python's questions.
CALLS = {
    "zeros": lambda x: torch.zeros(x.shape[0], 4) + x,
    "arange": lambda x: torch.arange(x.shape[1]) + x,
    "arange mask": lambda x: (torch.arange(x.shape[0])[:, None] >= torch.arange(x.shape[0])[None]).float() @ x,
    "ones": lambda x: torch.ones(x.size(0), 1) * x,
    "randn": lambda x: torch.randn(x.shape) * x,
    "full": lambda x: torch.full((len(x), 4), 2.0) * x,
    "empty": lambda x: torch.empty(x.shape).fill_(1.0) * x,
    "eye": lambda x: x @ torch.eye(x.shape[1]),
    "linspace": lambda x: torch.linspace(0, 1, x.shape[1]) * x,
    "tril mask": lambda x: torch.tril(torch.ones(x.shape[0], x.shape[0])) @ x,
    "tensor": lambda x: torch.tensor([1.0, 2.0, 3.0, 4.0]) * x,
    "as_tensor": lambda x: torch.as_tensor(x.shape[1]) * x,
    "masked_fill": lambda x: x.masked_fill(torch.ones(len(x), 1, dtype=torch.bool), float("-inf")).softmax(0),
    "pow": lambda x: torch.pow(x, 2),
    "number to a power": lambda x: 2.0**x,
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "float_power": lambda x: torch.float_power(x, 2),
    "remainder": lambda x: torch.remainder(x, 2),
    "result_type": lambda x: x.to(torch.result_type(x, 1.0)),
    "xlogy": lambda x: torch.xlogy(x, 2.0),
    "add": lambda x: torch.add(x, x, alpha=2),
    "addmm": lambda x: torch.addmm(x @ x.T, x, x.T),
    "baddbmm": lambda x: torch.baddbmm((x @ x.T)[None], x[None], x.T[None]),
    "bmm": lambda x: torch.bmm(x[None], x.T[None]),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "tensordot": lambda x: torch.tensordot(x, x, dims=([1], [1])),
    "cat": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x]),
    "chunk": lambda x: torch.chunk(x, 2, 1),
    "split": lambda x: torch.split(x, 1),
    "unbind": lambda x: torch.unbind(x),
    "gather": lambda x: torch.gather(x, 1, torch.zeros(len(x), 1, dtype=torch.long)),
    "scatter": lambda x: torch.scatter(x, 1, torch.zeros(len(x), 1, dtype=torch.long), 1.0),
    "index_select": lambda x: torch.index_select(x, 1, torch.tensor([0, 1])),
    "index_add": lambda x: x.index_add(0, torch.zeros(len(x), dtype=torch.long), x),
    "take": lambda x: torch.take(x, torch.tensor([0])),
    "roll": lambda x: torch.roll(x, 1),
    "flip": lambda x: torch.flip(x, [0]),
    "clamp": lambda x: torch.clamp(x, torch.zeros(4), torch.ones(4)),
    "maximum": lambda x: torch.maximum(x, x.flip(0)),
    "lerp": lambda x: torch.lerp(x, 2 * x, 0.5),
    "cdist": lambda x: torch.cdist(x, x),
    "cosine": lambda x: F.cosine_similarity(x, x.flip(0)),
    "normalize": lambda x: F.normalize(x),
    "pad": lambda x: F.pad(x, (1, 1)),
    "interpolate": lambda x: F.interpolate(x[:, None], scale_factor=2),
    "unfold": lambda x: F.unfold(x[None, None], 2),
    "one_hot": lambda x: F.one_hot(x.argmax(1), 4),
    "embedding": lambda x: F.embedding(x.argmax(1), x.T),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long)),
    "mse": lambda x: F.mse_loss(x, 2 * x),
    "searchsorted": lambda x: torch.searchsorted(x.sort().values, x),
    "bucketize": lambda x: torch.bucketize(x, torch.tensor([0.0, 1.0])),
    "meshgrid": lambda x: torch.meshgrid(x[0], x[0], indexing="ij"),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "boolean index": lambda x: x[x > 0],
    "slice assignment": lambda x: _assigned(x.clone()),
    "in place": lambda x: x.clone().mul_(2).add_(1),
    "svd": lambda x: torch.linalg.svd(x)[1],
    "solve": lambda x: torch.linalg.solve(x.T @ x + torch.eye(4), x.T),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "complex": lambda x: torch.polar(x.abs(), x).real,
    "half": lambda x: x.half().float(),
    "double": lambda x: x.double().float(),
    "to": lambda x: x.to(torch.bfloat16),
    "expand": lambda x: x[None].expand(3, -1, -1),
    "repeat": lambda x: x.repeat(2, 2),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "tolist": lambda x: torch.tensor(x.tolist()),
    "item": lambda x: x * x.sum().item(),
    "float": lambda x: x * float(x[0, 0]),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy().copy()),
    "len and iteration": lambda x: sum(row.sum() for row in x) * len(x),
    "comparison in Python": lambda x: x if x.sum() > 0 else -x,
    "print": lambda x: x * len(repr(x)),
    "no_grad": lambda x: torch.no_grad()(torch.sin)(x),
    "detached": lambda x: x.detach().requires_grad_().sum(),
    "vmap": lambda x: torch.vmap(torch.sin)(x),
    "sparse": lambda x: x.to_sparse().to_dense(),
    "new_zeros": lambda x: x.new_zeros(len(x), 4) + x,
    "rsub": lambda x: 1.0 - x,
    "contains": lambda x: x * (0.0 in x),
}


def _assigned(x):
    x[:, 0] = 1.0
    x[x > 1] = 0.0
    return x


class Using(nn.Module):
    """A forward that calls a function between two layers."""

    def __init__(self, function):
        super().__init__()
        self.a, self.b, self.function = nn.Linear(6, 4), nn.Linear(4, 3), function

    def forward(self, x):
        h = torch.relu(self.a(x))
        found = [t for t in tree_leaves(self.function(h)) if isinstance(t, torch.Tensor)]
        return (
            self.b(h)
            + sum(t.to_dense().real.double().sum() if t.is_complex() else t.double().sum() for t in found) * 0.1
        )


def functions():
    found = {f"torch.{name}": _SPECIAL.get(name) or getattr(torch, name) for name in UNARY}
    return found | CALLS


def network(name):
    """A network, its example, and whether its outputs can be compared."""
    torch.manual_seed(0)
    if name in FORWARDS:
        case = FORWARDS[name]
        fixed = "draws" not in (case.opaque or "") and name not in ("generators", "stateful")
        return case.make(), case.example(), fixed
    return Using(functions()[name]), torch.randn(5, 6), True


def run(model, example):
    torch.manual_seed(3)
    with torch.no_grad():
        output = (
            model(**example)
            if isinstance(example, dict)
            else model(*(example if type(example) is tuple else (example,)))
        )
    return [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]


def answer(name):
    """What plan and convert say about a network; raises where an answer is wrong."""
    model, example, comparable = network(name)
    model.eval()
    try:
        steps = plan(model, ONE, example=example)
        assert all(path in str(steps) for path in (*steps.converted, *steps.refused, *steps.left))
        converted = convert(model, steps)
        if name in FORWARDS:
            convert(model, {"*": ProxSG(iters=2)}, example=example, unsupported="skip")
    except ConversionError as refusal:
        return f"refused: {refusal}"
    if comparable:
        for algorithm in ("heavy_ball", "nesterov") if name in FORWARDS else ():
            _same_at_first(model, algorithm, example)
        expected = run(model, copy.deepcopy(example))
        found = run(converted, copy.deepcopy(example))
        assert len(found) == len(expected)
        assert all(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) for a, b in zip(found, expected, strict=True))
    assert not plan(revert(converted), ONE, example=example).left.keys() & steps.converted.keys()
    return f"converted: {len(steps.converted)}, refused: {sorted(steps.refused)}"


def _same_at_first(model, algorithm, example):
    """A residual network keeps its function as another algorithm; others are refused in words."""
    try:
        other = as_algorithm(model, algorithm, example=example)
    except ConversionError as refusal:
        if "no residual stage" in str(refusal):
            return
        raise
    pairs = zip(run(other, copy.deepcopy(example)), run(model, copy.deepcopy(example)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for case in json.loads(sys.stdin.read()):
        print(json.dumps([case, answer(case)]), flush=True)
