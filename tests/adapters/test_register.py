"""vitfast.adapters.register: blocks of a user's own, what they return, and what is refused."""

import copy
import threading
from unittest import mock

import pytest
import torch
from adapter_models import assert_same, calls, left, pair, running, timm_vit
from checks import assert_close, randomize
from own_blocks import Drop, FeedForward, Gated, Scale, SelfAttention
from timm.models.vision_transformer import Block as TimmBlock
from torch import nn

import vitfast
from vitfast import InputError
from vitfast.adapters import Attention, Layer, Mlp, register, registry

BOTH = {"attention block": 1, "MLP block": 1}
X = torch.randn(4, 5, 32, generator=torch.manual_seed(0))


def make_block():
    """A fresh class each time: what is registered is a class."""

    class Block(nn.Module):
        """The block of facebookresearch/dinov2, whose second branch drops with the first's module."""

        def __init__(self, dim, num_heads, mlp=FeedForward, drop_path=0.1):
            super().__init__()
            self.norm1, self.attn, self.ls1 = nn.LayerNorm(dim), SelfAttention(dim, num_heads), Scale(dim)
            self.norm2, self.mlp, self.ls2 = nn.LayerNorm(dim), mlp(dim), Scale(dim)
            self.drop_path1, self.drop_path2 = Drop(drop_path), Drop(drop_path)
            self.sample_drop_ratio = drop_path

        def forward(self, x):
            x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
            return x + self.drop_path1(self.ls2(self.mlp(self.norm2(x))))

    return Block


ATTENTION = Attention(scale="scale", idle=("attn_drop", "proj_drop"))
LAYER = Layer(
    make=lambda cls: cls(32, 2),
    attention=ATTENTION,
    mlp=Mlp(idle=("drop",)),
    behind=(("ls1", "drop_path1"), ("ls2", "drop_path1")),
    extras=("drop_path2",),
)
GATED = LAYER._replace(
    make=lambda cls: cls(32, 2, Gated), mlp=Mlp(fc1="w12", gate="first", act=None, activation="silu", fc2="w3")
)


def assert_equal_and_counted(original, expected=BOTH, **batch):
    model = vitfast.accelerate(copy.deepcopy(randomize(original)))
    assert_same(model, original, batch)
    assert calls(model, **batch) == expected
    assert vitfast.restore(model) is model and type(model) is type(original)


@pytest.mark.parametrize("mlp", [FeedForward, Gated])
def test_dinov2s_block(mlp):
    Block = make_block()
    assert not running(vitfast.accelerate(Block(32, 2))), "without a description nothing is done"
    state = torch.get_rng_state()
    with mock.patch.object(torch.cuda, "manual_seed_all") as seeded:
        register(Block, LAYER, GATED)
    assert torch.equal(state, torch.get_rng_state()) and not seeded.called, "the check leaves no trace"
    block = Block(32, 2, mlp).train()
    assert_equal_and_counted(block, x=X)
    copied = copy.deepcopy(vitfast.accelerate(block))
    assert type(copied) is type(block) is not Block and isinstance(copied, Block)


def test_dinov2s_own_names():
    """The table has dinov2's classes, by their names."""
    Block = make_block()
    init = Block.__init__

    def of_dinov2(self, dim, heads, ratio=1.0, qkv_bias=True, init_values=0.5, drop_path=0.1):
        init(self, dim, heads, drop_path=drop_path)

    Block.__module__, Block.__qualname__, Block.__init__ = "dinov2.layers.block", "Block", of_dinov2
    assert_equal_and_counted(Block(32, 2).train(), x=X)
    model = vitfast.accelerate(Block(32, 2, drop_path=0.3).train())
    model(X)
    assert left(model) and all("drops images" in why for why in left(model))
    assert calls(model.eval(), X) == BOTH


def test_a_block_that_cannot_be_copied():
    """Such as one that holds a lock, or a table that its constructor computes from a parameter."""

    class Locked(make_block()):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.lock = threading.Lock()

    register(Locked, LAYER)
    model = vitfast.accelerate(Locked(32, 2).eval())
    assert calls(model, X) == BOTH


def test_another_default_dtype(monkeypatch):
    monkeypatch.setattr(registry, "_checked", dict.fromkeys([nn.Conv2d], registry._checked[nn.Conv2d]))
    own = make_block()
    try:
        torch.set_default_dtype(torch.float64)
        register(own, LAYER)
        model = nn.ModuleDict(dict(own=own(32, 2), timm=timm_vit()))
        assert not left(vitfast.accelerate(model))
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_model_with_places():
    Block = make_block()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.final = nn.Conv2d(3, 32, 8, 8), nn.LayerNorm(32)
            self.blocks = nn.Sequential(Block(32, 2), Block(32, 2))

        def forward(self, x):
            return self.final(self.blocks(self.stem(x).flatten(2).transpose(1, 2)))

    register(Block, LAYER)
    register(Model, places=("stem", "final"))
    expected = {"attention block": 2, "MLP block": 2, "norm": 1, "patch projection": 1}
    assert_equal_and_counted(Model().eval(), expected, x=torch.randn(2, 3, 16, 16))


def test_a_class_that_is_registered_again():
    """As when a cell of a notebook is run twice: what was accelerated stays known."""
    Block = make_block()
    register(Block, LAYER)
    model = vitfast.accelerate(nn.Sequential(Block(32, 2))).eval()
    register(Block, LAYER._replace(make=lambda cls: cls(32, 2, drop_path=0.2)))
    assert running(model) == 2 and calls(model, X) == BOTH
    assert running(vitfast.accelerate(model)) == 2
    assert type(vitfast.restore(model)[0]) is Block
    assert calls(vitfast.accelerate(model), X) == BOTH


def with_a_gain():
    class WithGain(make_block()):
        def __init__(self, *args):
            super().__init__(*args)
            self.register_buffer("gain", torch.tensor(1.0))

        def forward(self, x):
            return self.gain * super().forward(x)

    return WithGain


# What is changed in LAYER, or in the class, and what the error says after "... is not as described".
WRONG = [
    (dict(norms=("n1", "norm2")), ": norms: Block has no `n1`"),
    (dict(norms=("norm1",)), ": norms and behind are pairs"),
    (dict(norms=("norm2", "norm1")), ": the operations give other numbers"),
    (dict(attention=ATTENTION._replace(path="attention")), ": attention.path: Block has no `attention`"),
    (dict(attention=ATTENTION._replace(qkv="in_proj")), ": attention.qkv: Block has no `attn.in_proj`"),
    (dict(attention=ATTENTION._replace(heads="heads")), ": attention.heads: Block has no `attn.heads`"),
    (dict(mlp=Mlp(fc1="fc2", fc2="fc1")), ""),
    (dict(mlp=Mlp(gate="gate")), ": mlp.gate: Block has no `mlp.gate`"),
    (dict(mlp=Mlp(act=None)), ": mlp: give act or activation"),
    (dict(behind=(("gamma",), ("ls2", "drop_path1"))), ": behind: Block has no `gamma`"),
    (dict(behind=(("ls1",), ("ls2",))), ": drop_path1 is not known"),
    (dict(takes=("rope",)), ": takes: Block's forward has no argument `rope`"),
    (dict(logits=lambda layer, given, x: "never"), ": attention block: no operation ran, in its last call: never"),
    (dict(make=lambda cls: nn.Linear(32, 32)), ": make gives a Linear"),
    (dict(attention=ATTENTION._replace(scale=None)), ": its attention's scale is not 1 / sqrt"),
    (with_a_gain, ": gain is not known"),
]


@pytest.mark.parametrize("change, why", WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_a_wrong_description_is_refused(change, why):
    Block, layer = (change(), LAYER) if callable(change) else (make_block(), LAYER._replace(**change))
    with pytest.raises(InputError, match=f"register: {Block.__name__} is not as described{why}"):
        register(Block, layer)
    assert not running(vitfast.accelerate(Block(32, 2)))


BAD = [
    (lambda: (make_block()(32, 2), LAYER), {}, "must be a class of modules"),
    (lambda: (make_block(),), {}, "give a Layer, or places"),
    (lambda: (make_block(), Attention()), {}, "layers must be vitfast.adapters.Layer, got Attention"),
    (lambda: (make_block(), LAYER), dict(places="patches"), "places must be a tuple of paths, got "),
    (lambda: (make_block(), LAYER), dict(places=("patches", 3)), "places must be a tuple of paths, got "),
]


@pytest.mark.parametrize("arguments, places, why", BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_arguments(arguments, places, why):
    with pytest.raises(InputError, match=f"register: .*{why}"):
        register(*arguments(), **places)


WEIGHTS = torch.zeros(1)
PLAIN = (
    registry.CLASSES["timm.models.vision_transformer.Block"]
    .layers[0]
    ._replace(takes=(), logits=lambda layer, given, x: {}, example=lambda tokens: {})
)


def registered(forward):
    """A block of a user's own, (ours, theirs)."""
    own = type("Own", (TimmBlock,), dict(forward=forward))
    register(own, PLAIN)
    return pair(own(32, 2).eval())


def with_attention(self, x, return_attention=False):
    y = TimmBlock.forward(self, x)
    return (y, WEIGHTS) if return_attention else y


def pair_unless_told(self, x, pair=True):
    return (TimmBlock.forward(self, x),) if pair else TimmBlock.forward(self, x)


# A forward, arguments of a call, and whether the operations run in it: not where nobody knows what an argument does.
RETURNS = {
    "one in a tuple": (lambda self, x: (TimmBlock.forward(self, x),), {}, True),
    "one None": (lambda self, x: (TimmBlock.forward(self, x), None), {}, True),
    "two Nones": (lambda self, x: (TimmBlock.forward(self, x), None, None), {}, True),
    "weights that are not asked for": (with_attention, {}, True),
    "weights, asked for by False": (with_attention, dict(return_attention=False), True),
    "weights": (with_attention, dict(return_attention=True), False),
    "a tuple unless told": (pair_unless_told, {}, True),
    "a tuple, told": (pair_unless_told, dict(pair=True), False),
    "a tuple, told not to by False": (pair_unless_told, dict(pair=False), False),
    "a tuple, told not to by None": (pair_unless_told, dict(pair=None), False),
}


@pytest.mark.parametrize("name", RETURNS)
def test_a_layer_returns_what_its_class_does(name):
    forward, given, runs = RETURNS[name]
    ours, theirs = registered(forward)
    out, expected = ours(X, **given), theirs(X, **given)
    assert type(out) is type(expected)
    if isinstance(expected, tuple):
        assert [type(each) for each in out] == [type(each) for each in expected]
        out, expected = out[0], expected[0]
    assert_close(out, expected, atol=1e-5)
    assert calls(ours, X, **given) == (BOTH if runs else {}), left(ours)
    assert runs or left(ours) == [f"in its last call: the call has {next(iter(given))}"] * 2


def test_more_beside_the_tokens_is_refused():
    with pytest.raises(InputError, match="it returns more than its tokens"):
        registered(lambda self, x: (TimmBlock.forward(self, x), WEIGHTS))
    with pytest.raises(InputError, match="other numbers"):
        registered(lambda self, x: (TimmBlock.forward(self, x), *([WEIGHTS] if self.training else [])))


@pytest.mark.parametrize("returns_pair", [False, True])
def test_descriptions_whose_layers_return_differently(returns_pair):
    class Two(TimmBlock):
        def __init__(self, *args, pair=False, **kwargs):
            super().__init__(*args, **kwargs)
            self.pair = pair

        def forward(self, x):
            return (super().forward(x),) if self.pair else super().forward(x)

    register(Two, PLAIN, PLAIN._replace(make=lambda cls: cls(32, 2, pair=True)))
    ours = vitfast.accelerate(Two(32, 2, pair=returns_pair).eval())
    assert type(ours(X)) is (tuple if returns_pair else torch.Tensor)
    assert len(left(ours)) == 1 and "return another tuple than others" in left(ours)[0]
