"""Accelerated models in unusual hands: replicas, copies made in hooks, modes, calls that fail."""

import copy
import pickle

import pytest
import torch
from adapter_models import ALL_PARTS, IMAGES, assert_same, left, pair, report, timm_vit
from checks import assert_close
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import vitfast
from vitfast import backend


def doubled(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


@pytest.mark.slow
def test_a_replica_of_data_parallel_runs_its_own_weights():
    """It has the attributes of the original, also the call in place of its code."""
    model, original = pair(timm_vit().eval())
    model(IMAGES)
    replicas = []
    for each in (model, original):
        replica = each.blocks[0]._replicate_for_data_parallel()
        replica.__dict__["_modules"] = {n: doubled(copy.deepcopy(m)) for n, m in each.blocks[0]._modules.items()}
        replicas.append(replica)
    tokens = torch.randn(2, 5, 32)
    assert_close(*(replica(tokens) for replica in replicas), atol=1e-5)
    assert not torch.equal(replicas[0](tokens), model.blocks[0](tokens))


class Snapshots:
    """A hook that copies its module, and another way to run it."""

    taken: list[nn.Module] = []

    def __call__(self, module, *_):
        Snapshots.taken += [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]


@pytest.mark.slow
def test_copies_that_a_hook_makes_are_their_own():
    """While its hooks run, a layer has a forward on its instance."""
    (model, original), tokens = pair(timm_vit().eval()), torch.randn(2, 5, 32)
    model.blocks[0].register_forward_hook(Snapshots())
    model(IMAGES)
    truth = doubled(copy.deepcopy(original.blocks[0]))(tokens)
    for snapshot in Snapshots.taken:
        snapshot._forward_hooks.clear()
        assert_close(doubled(snapshot)(tokens), truth, atol=1e-5)
    assert len(Snapshots.taken) == 2 and "forward" not in vars(model.blocks[0])


@pytest.mark.slow
def test_a_forward_that_a_hook_sets_stays():
    models = pair(timm_vit().eval())

    def wrap_once(module, _):
        if "forward" not in module.__dict__ or not getattr(module, "is_wrapped", False):
            own, module.is_wrapped = module.forward, True
            module.forward = lambda x: 2 * own(x)

    for each in models:
        each(IMAGES)
        each.blocks[1].register_forward_pre_hook(wrap_once)
    for _ in range(3):
        assert_close(*(each(IMAGES) for each in models), atol=1e-5)


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is F.linear else found


@pytest.mark.slow
def test_a_mode_for_torchs_functions_sees_the_librarys_calls():
    model, original = pair(timm_vit().eval())
    model(IMAGES)
    with Doubling():
        assert_close(model(IMAGES), original(IMAGES), atol=1e-5)
    assert {why for why in left(model)} == {"in its last call: a TorchFunctionMode is at work"}
    with torch.device("cpu"):
        assert_same(model, original, dict(x=IMAGES))
    assert not left(model)


def raises(*_):
    raise ValueError("the user's")


@pytest.mark.slow
def test_a_call_that_fails_loses_no_operation_of_later_ones():
    """Calls that fail in the library's code, and some that Dynamo cannot capture whole."""
    model, original = pair(timm_vit())
    hook = model.blocks[1].mlp.register_forward_pre_hook(raises)
    for call in (
        lambda: model(IMAGES),
        lambda: model(torch.randn(2, 3, 16, 24)),
        lambda: model(IMAGES.double()),
        lambda: model.norm(torch.randn(2, 5, 32), out=None),
    ):
        with pytest.raises((ValueError, RuntimeError, AssertionError, TypeError)):
            call()
        hook.remove()
    hook = model.blocks[1].mlp.register_full_backward_hook(lambda *_: None)
    model(IMAGES)
    hook.remove()
    for block in (*model.blocks, *original.blocks):
        block.attn.fused_attn = False  # which has no tangents
    with forward_ad.dual_level():
        model(forward_ad.make_dual(IMAGES, IMAGES))
    assert_same(model, original, dict(x=IMAGES))
    assert len(report(model).replaced) == ALL_PARTS and not left(model)


def test_the_report_on_a_model_leaves_that_on_graphs_as_it_is():
    before = list(backend._reports)
    assert report(vitfast.accelerate(timm_vit())).replaced and list(backend._reports) == before
