"""vitfast.adapters.register: blocks of a user's own."""

import copy

import pytest
import torch
import torch.nn.functional as F
from checks import assert_close, gradients, randomize
from operation_calls import calls
from torch import nn

import vitfast
from vitfast import InputError
from vitfast.adapters import Attention, Layer, Mlp, register, registry

BOTH = {"attention block": 1, "MLP block": 1}


class SelfAttention(nn.Module):
    """As in facebookresearch/dinov2: q, k and v together, the softmax written out."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        weights = self.attn_drop((q * self.scale @ k.transpose(-2, -1)).softmax(-1))
        return self.proj_drop(self.proj((weights @ v).transpose(1, 2).flatten(2)))


class Scale(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), 0.5))

    def forward(self, x):
        return x * self.gamma


class Drop(nn.Module):
    """Stochastic depth as dinov2 draws it."""

    def __init__(self, rate):
        super().__init__()
        self.drop_prob = rate

    def forward(self, x):
        if not self.training or self.drop_prob == 0:
            return x
        keep = 1 - self.drop_prob
        return x * x.new_empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(keep).div_(keep)


class FeedForward(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc1, self.act, self.fc2, self.drop = (
            nn.Linear(dim, 2 * dim),
            nn.GELU(),
            nn.Linear(2 * dim, dim),
            nn.Dropout(0.0),
        )

    def forward(self, x):
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class Gated(nn.Module):
    """w3(silu(w1 x) * w2 x), with the first two in one layer."""

    def __init__(self, dim):
        super().__init__()
        self.w12, self.w3 = nn.Linear(dim, 4 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        gate, up = self.w12(x).chunk(2, -1)
        return self.w3(F.silu(gate) * up)


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


LAYER = Layer(
    make=lambda cls: cls(32, 2),
    attention=Attention(scale="scale", idle=("attn_drop", "proj_drop")),
    mlp=Mlp(idle=("drop",)),
    behind=(("ls1", "drop_path1"), ("ls2", "drop_path1")),
    extras=("drop_path2",),
)
GATED = LAYER._replace(
    make=lambda cls: cls(32, 2, Gated), mlp=Mlp(fc1="w12", gate="first", act=None, activation="silu", fc2="w3")
)


def assert_equal_and_counted(original, x, expected=BOTH, **kwargs):
    model = vitfast.accelerate(copy.deepcopy(original))
    outs = []
    for each in (model, original):
        torch.manual_seed(3)
        out = each(x, **kwargs)
        outs.append((out, gradients(each, out, torch.ones_like(out))))
    assert_close(outs[0][0], outs[1][0], atol=1e-5)
    for name, grad in outs[1][1].items():
        assert_close(outs[0][1][name], grad, atol=2e-5, rtol=1e-4, name=name)
    assert calls(model, x, **kwargs) == expected
    assert vitfast.restore(model) is model and type(model) is type(original)


@pytest.mark.parametrize("mlp", [FeedForward, Gated])
def test_dinov2s_block(mlp):
    Block = make_block()
    # as it is today, without a description, nothing is done
    assert not vitfast.acceleration_report(vitfast.accelerate(Block(32, 2))).replaced
    register(Block, LAYER, GATED)
    block = randomize(Block(32, 2, mlp)).train()
    assert_equal_and_counted(block, torch.randn(8, 5, 32))
    copied = copy.deepcopy(vitfast.accelerate(block))
    assert type(copied) is type(block) is not Block and isinstance(copied, Block)


def test_dinov2s_own_names():
    """The table has dinov2's classes, by their names."""
    Block = make_block()
    Block.__module__, Block.__qualname__ = "dinov2.layers.block", "Block"
    Block.__init__.__defaults__ = (FeedForward, 0.1)
    init = Block.__init__
    Block.__init__ = lambda self, dim, heads, ratio=1.0, qkv_bias=True, init_values=0.5, drop_path=0.1: init(
        self, dim, heads, drop_path=drop_path
    )
    assert_equal_and_counted(randomize(Block(32, 2)).train(), torch.randn(8, 5, 32))
    model = vitfast.accelerate(Block(32, 2, drop_path=0.3).train())
    model(torch.randn(8, 5, 32))
    assert {"drops images" in entry.why for entry in vitfast.acceleration_report(model).left} == {True}
    assert calls(model.eval(), torch.randn(2, 5, 32)) == BOTH


def test_pytorchs_encoder_layer():
    for options in (dict(batch_first=True), dict(), dict(batch_first=True, bias=False)):
        layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, "gelu", norm_first=True, **options)
        assert_equal_and_counted(randomize(layer).train(), torch.randn(2, 5, 32))
    post = vitfast.accelerate(nn.TransformerEncoderLayer(32, 2, 64, 0.0, "gelu", batch_first=True))
    assert "norm_first=False" in vitfast.acceleration_report(post).left[0].why
    dropping = vitfast.accelerate(nn.TransformerEncoderLayer(32, 2, 64, 0.1, "gelu", norm_first=True)).train()
    assert calls(dropping, torch.randn(2, 5, 32)) == {} and calls(dropping.eval(), torch.randn(2, 5, 32)) == BOTH
    relu = vitfast.accelerate(nn.TransformerEncoderLayer(32, 2, 64, 0.0, norm_first=True))
    assert calls(relu, torch.randn(2, 5, 32)) == {"attention block": 1}


def test_open_clips_block():
    transformer = pytest.importorskip("open_clip.transformer")
    for act, scale in ((nn.GELU, 0.5), (transformer.QuickGELU, None)):
        block = transformer.ResidualAttentionBlock(32, 2, 2.0, scale, act_layer=act)
        assert_equal_and_counted(randomize(block).train(), torch.randn(2, 5, 32))
        causal = torch.full((5, 5), float("-inf")).triu(1)
        assert_equal_and_counted(randomize(block).train(), torch.randn(2, 5, 32), attn_mask=causal)


PACKED = Attention(qkv="in_proj_weight", proj="out_proj", dropout="dropout")


def test_open_clips_block_described_anew():
    """As one of a fork's: its own class, with a description written out here."""
    transformer = pytest.importorskip("open_clip.transformer")

    class Forked(transformer.ResidualAttentionBlock):
        pass

    register(
        Forked,
        Layer(
            make=lambda cls: cls(32, 2, 2.0, 0.5),
            norms=("ln_1", "ln_2"),
            attention=PACKED,
            mlp=Mlp(fc1="c_fc", act="gelu", fc2="c_proj"),
            behind=(("ls_1",), ("ls_2",)),
            takes=("attn_mask",),
            logits=lambda block, given, x: dict(mask=given.get("attn_mask")),
            attention_half=lambda block, x, given: x + block.ls_1(block.attention(q_x=block.ln_1(x), **given)),
        ),
    )
    block, x = randomize(Forked(32, 2, 2.0, 0.5)).train(), torch.randn(2, 5, 32)
    assert_equal_and_counted(block, x)
    assert_equal_and_counted(block, x, attn_mask=torch.full((5, 5), float("-inf")).triu(1))


def test_pytorchs_encoder_layer_described_anew():
    class Mine(nn.TransformerEncoderLayer):
        pass

    register(
        Mine,
        Layer(
            make=lambda cls: cls(32, 2, 64, 0.0, "gelu", batch_first=True, norm_first=True),
            attention=PACKED._replace(path="self_attn"),
            mlp=Mlp(path="", fc1="linear1", act="activation", fc2="linear2", idle=("dropout",)),
            behind=(("dropout1",), ("dropout2",)),
            attention_half=lambda layer, x, given: x + layer._sa_block(layer.norm1(x), None, None),
            mlp_half=lambda layer, x: x + layer._ff_block(layer.norm2(x)),
        ),
    )
    layer = Mine(32, 2, 64, 0.0, "gelu", batch_first=True, norm_first=True)
    assert_equal_and_counted(randomize(layer).train(), torch.randn(2, 5, 32))


def test_a_model_with_places():
    Block = make_block()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.blocks, self.final = (
                nn.Conv2d(3, 32, 8, 8),
                nn.Sequential(Block(32, 2), Block(32, 2)),
                nn.LayerNorm(32),
            )

        def forward(self, x):
            return self.final(self.blocks(self.stem(x).flatten(2).transpose(1, 2)))

    register(Block, LAYER)
    register(Model, places=("stem", "final"))
    assert_equal_and_counted(
        randomize(Model()).eval(),
        torch.randn(2, 3, 16, 16),
        {"attention block": 2, "MLP block": 2, "norm": 1, "patch projection": 1},
    )


@pytest.mark.parametrize(
    "change, why",
    [
        (dict(behind=(("ls1",), ("ls2",))), "drop_path1 is not known"),
        (dict(norms=("norm2", "norm1")), "other numbers"),
        (dict(attention=Attention(heads="groups")), "not as described"),
        (dict(attention=Attention(qkv="query")), "not as described"),
        (dict(mlp=Mlp(fc1="fc2", fc2="fc1")), "not as described"),
        (dict(make=lambda cls: nn.Linear(32, 32)), "make gives a Linear"),
    ],
)
def test_a_wrong_description_is_refused(change, why):
    Block = make_block()
    with pytest.raises(InputError, match=why):
        register(Block, LAYER._replace(**change))
    assert not vitfast.acceleration_report(vitfast.accelerate(Block(32, 2))).replaced


def test_bad_arguments():
    for arguments, why in (
        ((make_block()(32, 2), LAYER), "must be a class of modules"),
        ((make_block(),), "give a Layer, or places"),
        ((make_block(), Attention()), "layers must be vitfast.adapters.Layer, got Attention"),
    ):
        with pytest.raises(InputError, match=why):
            register(*arguments)


def test_the_check_leaves_no_trace():
    Block = make_block()
    state = torch.get_rng_state()
    register(Block, LAYER)
    assert torch.equal(state, torch.get_rng_state()) and Block in registry._registered


def test_a_class_that_is_registered_again():
    """As when a cell of a notebook is run twice: what was accelerated stays known."""
    Block = make_block()
    register(Block, LAYER)
    model, x = vitfast.accelerate(nn.Sequential(Block(32, 2))).eval(), torch.randn(2, 5, 32)
    register(Block, LAYER._replace(make=lambda cls: cls(32, 2, drop_path=0.2)))
    assert len(vitfast.acceleration_report(model).replaced) == 2 and calls(model, x) == BOTH
    assert len(vitfast.acceleration_report(vitfast.accelerate(model)).replaced) == 2
    assert type(vitfast.restore(model)[0]) is Block
    assert calls(vitfast.accelerate(model), x) == BOTH


def with_a_gain(Block):
    class WithGain(Block):
        def __init__(self, *args):
            super().__init__(*args)
            self.register_buffer("gain", torch.tensor(1.0))

        def forward(self, x):
            return self.gain * super().forward(x)

    return WithGain


class FixedScale(SelfAttention):
    """1 / 4 is right for the head size of the check, 16, alone."""

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v, scale=0.25).transpose(1, 2).flatten(2))


def with_a_fixed_scale(Block):
    class WithFixedScale(Block):
        def __init__(self, dim, num_heads):
            super().__init__(dim, num_heads)
            self.attn = FixedScale(dim, num_heads)

    return WithFixedScale


ATTENTION = LAYER.attention
WRONG = {
    "norms: Block has no `n1`": dict(norms=("n1", "norm2")),
    "norms and behind are pairs": dict(norms=("norm1",)),
    "attention.path: Block has no `attention`": dict(attention=ATTENTION._replace(path="attention")),
    "attention.qkv: Block has no `attn.in_proj`": dict(attention=ATTENTION._replace(qkv="in_proj")),
    "attention.heads: Block has no `attn.heads`": dict(attention=ATTENTION._replace(heads="heads")),
    "mlp.gate: Block has no `mlp.gate`": dict(mlp=Mlp(gate="gate")),
    "mlp: give act or activation": dict(mlp=Mlp(act=None)),
    "behind: Block has no `gamma`": dict(behind=(("gamma",), ("ls2", "drop_path1"))),
    "takes: Block's forward has no argument `rope`": dict(takes=("rope",)),
    "attention block: no operation ran, in its last call: never": dict(logits=lambda layer, given, x: "never"),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_description_is_told_by_its_field(message):
    with pytest.raises(InputError, match=f"register: Block is not as described: {message}"):
        register(make_block(), LAYER._replace(**WRONG[message]))


def test_what_one_size_does_not_show():
    fixed = LAYER._replace(attention=ATTENTION._replace(scale=None, idle=("attn_drop", "proj_drop")))
    for Block in (make_block(), with_a_fixed_scale(make_block())):
        with pytest.raises(InputError, match="is not as described: its attention's scale is not 1 / sqrt"):
            register(Block, fixed)
    with pytest.raises(InputError, match="WithGain is not as described: gain is not known"):
        register(with_a_gain(make_block()), LAYER)


@pytest.mark.parametrize("places", ["patches", ("patches", 3)])
def test_places_are_paths(places):
    with pytest.raises(InputError, match="register: places must be a tuple of paths, got "):
        register(make_block(), LAYER, places=places)
