"""Laws: a run resumed from a checkpoint is bit-identical; two ranks with half a batch each equal one process."""

import io
import warnings

import pytest
import torch
from torch import nn

from minimand.train import CachedGram, ExactGram, ProxProp

from .cases.ranks import on_ranks


def _convnet(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).double()


def _train(net, prox, optimizer, steps, start=0):
    for step in range(start, start + steps):
        x = torch.randn(8, 2, 6, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def test_a_checkpoint_of_the_optimizer_continues_to_the_bit():
    def build(seed=0, **options):
        net = _convnet(seed)
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        return net, ProxProp(net, gram=CachedGram(every=3), **options).attach(optimizer), optimizer

    net, prox, optimizer = build(tau_theta=0.3)
    straight = _train(net, prox, optimizer, 7)
    net, prox, optimizer = build(tau_theta=0.3)
    _train(net, prox, optimizer, 4)
    file = io.BytesIO()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    saved = torch.load(io.BytesIO(file.getvalue()))
    other, again, fresh = build(1)
    other.load_state_dict(saved["model"])
    fresh.load_state_dict(saved["optimizer"])
    assert again.tau_theta == 0.3
    torch.testing.assert_close(_train(other, again, fresh, 3, start=4), straight, rtol=0, atol=0)
    # A plain optimizer reads the same file, and a plain file leaves the state alone.
    plain = _convnet()
    torch.optim.Adam(plain.parameters()).load_state_dict(saved["optimizer"])
    fresh.load_state_dict(torch.optim.Adam(other.parameters()).state_dict())
    state = again.state_dict()
    wider = nn.Sequential(nn.Conv2d(2, 4, 5), nn.Flatten(), nn.Linear(16, 3))
    with pytest.raises(ValueError, match=r"another network: its weights are \{'0': \[4, 2, 3, 3\]\}"):
        ProxProp(wider).load_state_dict(state)
    with pytest.raises(ValueError, match="another network"):
        ProxProp(_convnet()).load_state_dict({**state, "grams": {"body.0": state["grams"]["0"]}})


def _worker(rank):
    warnings.simplefilter("ignore")
    # In a function of its own: a network that outlives the group may wait for ever in gloo.
    return {name: _share(rank, options, bucket) for name, options, bucket in CASES}


def _share(rank, options, bucket):
    module = _mixed()
    net = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=bucket)
    return _distributed_train(net, module, lambda x: x[4 * rank : 4 * rank + 4], options)


CASES = [
    ("exact", {}, False),
    ("bucket view", {}, True),
    ("cg", {"method": "cg", "cg_iters": 2}, False),
    ("cached", {"gram": CachedGram(every=2, of=ExactGram())}, False),
]


def _mixed():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3)
    ).double()


def _distributed_train(net, module, mine, options):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9)
    prox = ProxProp(module, **options).attach(optimizer)
    g = torch.Generator().manual_seed(1)
    for _ in range(4):
        x, y = torch.randn(8, 2, 4, 4, generator=g, dtype=torch.float64), torch.randint(3, (8,), generator=g)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(mine(x)), mine(y)).backward()
        optimizer.step()
    prox.detach()
    return [p.detach() for p in module.parameters()]


def test_two_ranks_equal_one_process():
    """DDP averages gradients and ProxProp sums Gram matrices: with a mean loss this equals one process."""
    together, _ = on_ranks(_worker)
    for name, options, _ in CASES:
        module = _mixed()
        alone = _distributed_train(module, module, lambda x: x, options)
        torch.testing.assert_close(together[name], alone, rtol=1e-8, atol=1e-10)
