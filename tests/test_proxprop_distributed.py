"""Laws: a run resumed from a checkpoint is bit-identical; two ranks with half a batch each equal one process."""

import io
import warnings

import pytest
import torch
from torch import nn

from minimand.train import CachedGram, ExactGram, ProxProp, Relative

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


SHARDED = [("exact", {}), ("cg", {"method": "cg", "cg_iters": 2}), ("relative", {"tau_theta": Relative(5.0)})]


def _uneven():
    """Output units that two ranks cannot share evenly."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 7), nn.ReLU(), nn.Linear(7, 3)
    ).double()


def _sharded_worker(rank):
    warnings.simplefilter("ignore")
    found = {name: _sharded_share(rank, options) for name, options in SHARDED}
    return found | {"skipped": _skipped_share(rank), "refused": _refused_share()}


def _fsdp():
    from torch.distributed.fsdp import fully_shard

    module = _uneven()
    for layer in (module[0], module[3]):
        fully_shard(layer)
    return fully_shard(module)


def _sharded_share(rank, options):
    module = _fsdp()
    found = _train_accumulating(module, lambda x: x[4 * rank : 4 * rank + 4], options)
    return [p.full_tensor().detach() for p in found]


def _skipped_share(rank):
    """NaN on one rank: no rank makes a step."""
    module = _fsdp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    prox = ProxProp(module).attach(optimizer)
    before = [p.full_tensor().detach().clone() for p in module.parameters()]
    with torch.no_grad():
        module[5].weight.grad = torch.zeros_like(module[5].weight)
        module[5].weight.grad.to_local().fill_(torch.nan if rank else 0.0)
    optimizer.step()
    prox.detach()
    return all(torch.equal(p.full_tensor(), q) for p, q in zip(module.parameters(), before, strict=True))


def _refused_share():
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), init_device_mesh("cpu", (2,)), [Shard(1)]))
    try:
        ProxProp(layer, skip_last=False)
    except TypeError as error:
        return str(error)
    return ""


def _train_accumulating(module, mine, options):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9)
    prox = ProxProp(module, **options).attach(optimizer)
    g = torch.Generator().manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            x, y = torch.randn(8, 2, 4, 4, generator=g, dtype=torch.float64), torch.randint(3, (8,), generator=g)
            nn.functional.cross_entropy(module(mine(x)), mine(y)).backward()
        optimizer.step()
    prox.detach()
    return list(module.parameters())


def test_two_ranks_with_sharded_weights_equal_one_process():
    """FSDP2 shards output units, whose directions need the summed Gram matrix only; batches are accumulated."""
    together, other = on_ranks(_sharded_worker)
    for name, options in SHARDED:
        alone = [p.detach() for p in _train_accumulating(_uneven(), lambda x: x, options)]
        torch.testing.assert_close(together[name], alone, rtol=1e-8, atol=1e-10)
    assert together["skipped"]
    assert other["skipped"]
    assert "has a weight in the layout (S(1)): ProxProp takes DTensors that are sharded by output" in other["refused"]
