"""Inputs in every layout in memory: what fake tensors say of each custom operation, and compiled code.

Compiled code is made for the strides that the fakes say, so that other ones are a crash or wrong numbers.
"""

import pytest
import torch
import torch.nn.functional as F
from checks import Calls
from operations import OPERATIONS, results
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from vitfast import ops
from vitfast.kernels import launch
from vitfast.kernels.launch import recording
from vitfast.tools.verify.draw import Draw

interpreted = pytest.mark.skipif(not launch.INTERPRETED, reason="interpreted kernels; test_gpu.py runs the real ones")


def permuted(t: Tensor, order: list[int]) -> Tensor:
    """The same numbers with the axes in this order in memory, the outermost first."""
    return t.permute(order).contiguous().permute([order.index(axis) for axis in range(t.dim())])


def convolved(t: Tensor) -> Tensor:
    """Images as a convolution of channels-last ones gives them, tokens and others as a view of a map's pixels."""
    if t.dim() != 4:
        return permuted(t, [0, *range(2, t.dim()), 1] if t.dim() > 2 else [*range(t.dim())])
    identity = torch.eye(t.shape[1], dtype=t.dtype)[..., None, None]
    return F.conv2d(t.contiguous(memory_format=torch.channels_last), identity)


def sliced(t: Tensor) -> Tensor:
    """The same numbers as every second one along each axis of a larger tensor, from the second on."""
    every_second = tuple(slice(1, None, 2) for _ in t.shape)
    wide = t.new_zeros([2 * n + 1 for n in t.shape])
    wide[every_second] = t
    return wide[every_second]


LAYOUTS = {
    "contiguous": lambda t: t,
    "convolved": convolved,
    "batch last": lambda t: permuted(t, [*range(1, t.dim()), 0]),
    "tokens first": lambda t: permuted(t, [1, 0, *range(2, t.dim())] if t.dim() > 1 else [0]),
    "reversed": lambda t: permuted(t, [*reversed(range(t.dim()))]),
    "expanded": lambda t: t[:1].expand_as(t),
    "one number": lambda t: t.flatten()[0].expand_as(t),
    "sliced": sliced,
}
EACH = pytest.mark.parametrize("layout", LAYOUTS)


def draw(name: str) -> dict[str, Tensor]:
    return OPERATIONS[name].draw(Draw(torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0)))


def described(t: Tensor) -> tuple:
    return t.shape, t.dtype, t.stride(), t.storage_offset()


@pytest.mark.slow
@interpreted
@EACH
def test_fakes_have_the_strides_of_results(layout):
    """Of every custom operation, forward and backward: of one tensor in a layout, of all, and of the gradient alone.

    That no custom operation is left out is seen by test_operations.py, over the same list.
    """
    relaid, fake = LAYOUTS[layout], FakeTensorMode()
    for name, operation in OPERATIONS.items():
        tensors = draw(name)
        cases = [{key: relaid(tensors[key])} for key in tensors]
        for changed in ({}, *cases, {key: t for case in cases for key, t in case.items()}):
            leaves = {key: t.requires_grad_(key in operation.trained) for key, t in (tensors | changed).items()}
            with Calls() as calls, recording(), ops.use_kernels("on"):
                found = operation.function(**leaves)
                found = [o for o in (found if isinstance(found, tuple) else [found]) if o.requires_grad]
                upstream = [relaid(torch.ones(o.shape)) for o in found]
                torch.autograd.grad(found, [leaves[key] for key in operation.trained], upstream)
            called = [call for call in calls.found if call[0].namespace == "vitfast"]
            assert len(called) > 1 and all(o.is_contiguous() for o in found)
            for func, args, _, real in called:
                args = tree_map_only(Tensor, lambda t: fake.from_tensor(t.detach()), args)
                with fake:
                    said = func(*args)
                for given, want in zip(tree_leaves(said), tree_leaves(real), strict=True):
                    assert described(given) == described(want), f"{func} of {list(changed)}"


def viewed(tensors: dict[str, dict[str, Tensor]]) -> list[Tensor]:
    """The outputs of all operations, as views, of which wrong strides allow none."""
    found = [OPERATIONS[name].function(**given) for name, given in tensors.items()]
    return [o.view(-1) for each in found for o in (each if isinstance(each, tuple) else [each])]


MODES = [(mode, "aot_eager", layout) for layout in LAYOUTS for mode in ("on", "off")]
MODES += [("on", "inductor", layout) for layout in ("convolved", "reversed", "sliced")]
MODES += [("off", "inductor", "convolved")]
QUICK = [("on", "aot_eager", "convolved"), ("off", "aot_eager", "convolved")]
CASES = [pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK)) for case in MODES]


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("mode, backend, layout", CASES)
def test_compiled_code_computes_the_same(mode, backend, layout):
    """All operations in one graph, each followed by a view, and every gradient; by kernels and in plain PyTorch."""
    given = {name: {key: LAYOUTS[layout](t) for key, t in draw(name).items()} for name in OPERATIONS}
    names = [(name, key) for name, tensors in given.items() for key in tensors]
    trained = [key for key in names if key[1] in OPERATIONS[key[0]].trained]

    def run(function):
        def of_pairs(**flat):
            return tuple(function({name: {k: flat[f"{name}/{k}"] for k in tensors} for name, tensors in given.items()}))

        tensors = {f"{name}/{key}": given[name][key] for name, key in names}
        return results(of_pairs, tensors, [f"{name}/{key}" for name, key in trained])

    torch._dynamo.reset()
    with ops.use_kernels(mode):
        expected, found = run(viewed), run(torch.compile(viewed, backend=backend, fullgraph=True))
    for ours, theirs in zip(found, expected, strict=True):
        size = max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(ours, theirs, atol=1e-5 * size, rtol=0)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "add_layer_norm", "linear_gelu", "linear_residual", "mlp"])
def test_plain_pytorch_gives_contiguous_maps(name):
    """Of pixels (B, h, w, D) that lie in memory as a convolution leaves them, as the kernels do."""
    tensors = draw(name)
    for key in {"x", "residual"} & tensors.keys():
        tensors[key] = permuted(tensors[key].unflatten(1, (-1, 1)).repeat(1, 1, 3, 1), [0, 3, 1, 2])
        assert not tensors[key].is_contiguous()
    with ops.use_kernels("off"):
        found = OPERATIONS[name].function(**tensors)
    assert all(o.is_contiguous() for o in (found if isinstance(found, tuple) else [found]))
