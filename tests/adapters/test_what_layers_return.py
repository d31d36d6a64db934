"""accelerate: a layer returns what its class does, a tuple or not, and a forward that was put back is no stranger."""

import copy

import pytest
import torch
from adapter_models import accelerated_pair, hf_vit, randomize, timm_vit
from checks import assert_close
from timm.models.vision_transformer import Block

import vitfast
from vitfast import InputError
from vitfast.adapters import register, registry
from vitfast.ops._dispatch import counting

X = torch.randn(2, 5, 32)
WEIGHTS = torch.zeros(1)


def registered(forward):
    """A block of a user's own, (theirs, ours)."""
    (description, *_) = registry.LAYERS["timm.models.vision_transformer.Block"]
    own = type("Own", (Block,), dict(forward=forward))
    register(own, description._replace(takes=(), logits=lambda layer, given, x: {}, example=lambda tokens: {}))
    block = randomize(own(32, 2)).eval()
    return block, vitfast.accelerate(copy.deepcopy(block))


def assert_returns_the_same(theirs, ours, **given):
    expected, out = theirs(X, **given), ours(X, **given)
    assert type(out) is type(expected)
    if isinstance(expected, tuple):
        assert len(out) == len(expected) and all(type(a) is type(b) for a, b in zip(out, expected))
        out, expected = out[0], expected[0]
    assert_close(out, expected, atol=1e-5)


@pytest.mark.parametrize("rest", [(), (None,), (None, None)])
def test_nothing_beside_the_tokens(rest):
    theirs, ours = registered(lambda self, x: (Block.forward(self, x), *rest))
    with counting() as ran:
        assert_returns_the_same(theirs, ours)
    assert ran["attention_block"] == ran["mlp_block"] == 1


def test_more_beside_the_tokens_is_refused():
    with pytest.raises(InputError, match="it returns more than its tokens"):
        registered(lambda self, x: (Block.forward(self, x), WEIGHTS))
    with pytest.raises(InputError, match="other numbers"):
        registered(lambda self, x: (Block.forward(self, x), *([WEIGHTS] if self.training else [])))


def test_a_tuple_where_the_call_asks_for_one():
    def forward(self, x, return_attention=False):
        y = Block.forward(self, x)
        return (y, WEIGHTS) if return_attention else y

    theirs, ours = registered(forward)
    for given in ({}, dict(return_attention=False), dict(return_attention=True)):
        assert_returns_the_same(theirs, ours, **given)
    assert "the call has return_attention" in str(vitfast.acceleration_report(ours))


@pytest.mark.parametrize("off", [False, None])
def test_an_argument_that_is_on_unless_told(off):
    theirs, ours = registered(lambda self, x, pair=True: (Block.forward(self, x),) if pair else Block.forward(self, x))
    for given in ({}, dict(pair=True), dict(pair=off)):
        assert_returns_the_same(theirs, ours, **given)


def test_descriptions_whose_layers_return_differently():
    (description, *_) = registry.LAYERS["timm.models.vision_transformer.Block"]

    class Two(Block):
        def __init__(self, *args, pair=False, **kwargs):
            super().__init__(*args, **kwargs)
            self.pair = pair

        def forward(self, x):
            return (super().forward(x),) if self.pair else super().forward(x)

    plain = description._replace(takes=(), logits=lambda layer, given, x: {}, example=lambda tokens: {})
    register(Two, plain, plain._replace(make=lambda cls: cls(32, 2, pair=True)))
    for pair in (False, True):
        theirs = randomize(Two(32, 2, pair=pair)).eval()
        ours = vitfast.accelerate(copy.deepcopy(theirs))
        assert_returns_the_same(theirs, ours)
        assert "return another tuple than others" in str(vitfast.acceleration_report(ours))


@pytest.mark.parametrize("make", [timm_vit, hf_vit])
def test_a_forward_that_was_put_back(make):
    """transformers 5.0 records by a forward on the instance, and puts the bound one of the class there afterwards."""
    (model, original), images = accelerated_pair(make), torch.randn(2, 3, 16, 16)
    expected = original.eval()(images)
    model.eval()

    def put_back():
        for module in model.modules():
            module.forward = module.forward

    def same():
        out = model(images)
        for a, b in zip(*((x,) if isinstance(x, torch.Tensor) else x.to_tuple() for x in (out, expected))):
            assert_close(a, b, atol=1e-5)

    for step in (put_back, lambda: vitfast.restore(model), put_back, lambda: vitfast.accelerate(model)):
        step()
        same()
        if step is put_back:
            assert all("forward" in module.__dict__ for module in model.modules())
    put_back()
    with counting() as ran:
        same()
    report = vitfast.acceleration_report(model)
    assert ran["attention_block"] == ran["mlp_block"] == 2 and not report.left, report


def test_a_forward_that_is_another_is_kept():
    model = timm_vit()
    block = model.blocks[0]
    block.forward = lambda x, **given: 2 * x
    vitfast.accelerate(model)
    assert type(block) is Block and "has a forward of its own" in str(vitfast.acceleration_report(model))
    block = model.blocks[1]
    block.forward = lambda x, **given: 2 * x
    vitfast.restore(model)
    assert torch.equal(block(X), 2 * X) and type(block) is Block
