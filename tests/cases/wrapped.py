"""Read compiled and distributed networks, and read from several threads; run as a process of its own."""

import faulthandler
import os
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from minimand.errors import ConversionError
from minimand.network import read, role
from minimand.nn import convert, plan
from minimand.solvers import ProxGD

from .forwards.architectures import GPT, ResNet


def found(network):
    return [(call.path, call.name) for call in network.calls if role(call) in ("linear", "conv")]


def alone() -> None:
    """Start a group of one process that sends nothing: no thread of a backend lives, so none can be waited for."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)


def keep(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the gradients as they are: their mean over one process."""
    mean = torch.futures.Future()
    mean.set_result(bucket.buffer())
    return mean


def compiled() -> None:
    """A compiled network, compiled parts, a network compiled in place, a compiled function."""
    plain = ResNet()
    expected, x = found(read(plain, torch.randn(2, 3, 8, 8))), torch.randn(2, 3, 8, 8)
    whole = read(torch.compile(plain), x)
    assert found(whole) == [(f"_orig_mod.{path}", name) for path, name in expected]
    assert whole.verify(torch.randn(2, 3, 8, 8))
    plain.layer1[0] = torch.compile(plain.layer1[0])
    part = read(plain, x)
    assert [path.replace("._orig_mod", "") for path, _ in found(part)] == [path for path, _ in expected]
    assert part.verify(torch.randn(2, 3, 8, 8))
    assert not part.opaque()

    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.act = torch.compile(lambda x: torch.relu(x) * 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(self.fc(x))

    function = Compiled()
    function.compile()
    network = read(function)
    assert [call.name for call in network.calls] == ["linear", "relu", "mul"]
    assert network.verify(torch.randn(2, 4))
    assert not network.opaque()


def distributed() -> None:
    """A network in DistributedDataParallel, in a group of one."""
    alone()
    model = nn.parallel.DistributedDataParallel(ResNet())
    model.register_comm_hook(None, keep)
    network = read(model, torch.randn(2, 3, 8, 8))
    assert found(network)[0] == ("module.conv1", "conv2d")
    assert network.verify(torch.randn(2, 3, 8, 8))
    assert not network.opaque()
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def sharded() -> None:
    """A network sharded by FSDP, whose gathered weights have no memory after a forward, in a group of one."""
    from torch.distributed.fsdp import fully_shard

    alone()
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, 4)
    expected, answer = found(read(model, x)), model(x)
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    assert found(read(model, x)) == expected
    assert torch.equal(model(x), answer)
    for call in (convert, plan):
        with pytest.raises(ConversionError, match="0 is sharded; convert the model first"):
            call(model, ProxGD(3), example=x)


def threads() -> None:
    """Several threads read one network while another one runs it."""
    model, x = GPT().eval(), torch.randint(0, 11, (2, 5))
    expected, answer = found(read(model, x)), model(x)[0]
    results, stop = [], threading.Event()

    def run() -> None:
        while not stop.is_set():
            model(x)

    runner = threading.Thread(target=run)
    readers = [threading.Thread(target=lambda: results.append(read(model, x))) for _ in range(4)]
    runner.start()
    for thread in readers:
        thread.start()
    for thread in readers:
        thread.join()
    stop.set()
    runner.join()
    assert [found(network) for network in results] == [expected] * 4
    assert all(len(network.frames) == len(results[0].frames) for network in results)
    assert torch.equal(model(x)[0], answer)
    assert not any(module._forward_hooks for module in model.modules())


if __name__ == "__main__":
    # A process that hangs says where, and ends before the law's patience does.
    faulthandler.dump_traceback_later(240, exit=True)
    torch.manual_seed(0)
    {"compiled": compiled, "distributed": distributed, "sharded": sharded, "threads": threads}[sys.argv[1]]()
    # Torch may abort a process with a group that ends the ordinary way.
    os._exit(0)
