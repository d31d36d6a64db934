"""`accelerate(model, pack=True)`: no operation on padding, no mask of all pairs, and the library's numbers.

The truth is the library's own code in float64, with padding, on random weights and random upstream gradients.
"""

import copy
import gc
from functools import cache

import pytest
import torch
from checks import assert_close, randomize
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from vision_families import FAMILIES, Family, naflexvit

import vitfast
from vitfast import ops
from vitfast.backend import eager, padding

NAFLEX, SIGLIP, PIXTRAL = "NaFlexViT, padded", "SigLIP 2, padded", "Pixtral"
TOWERS = (NAFLEX, SIGLIP, PIXTRAL)
ATOL = {torch.float32: 2e-5, torch.float64: 1e-9}  # of errors that add up in two layers of width 32


def family(name: str) -> Family:
    found = next(each for each in FAMILIES if each.name == name)
    pytest.importorskip(found.library)
    return found


@cache
def state(name: str) -> nn.Module:
    torch.manual_seed(3)
    return randomize(family(name).make()).eval()


def pair(original: nn.Module, dtype=torch.float32) -> tuple[nn.Module, nn.Module]:
    """(accelerated with pack=True, the original in float64)."""
    return vitfast.accelerate(copy.deepcopy(original).to(dtype), pack=True), copy.deepcopy(original).double()


def naflex(**options) -> nn.Module:
    pytest.importorskip("timm")
    return randomize(naflexvit(pos_embed_grid_size=(4, 4), **options)()).eval()


def padded(*grids: tuple[int, int]) -> dict:
    """Patches of images of these grids as NaFlexVit takes them."""
    longest = max(h * w for h, w in grids)
    places, valid = torch.zeros(len(grids), longest, 2, dtype=torch.long), torch.zeros(len(grids), longest, dtype=bool)
    for i, (h, w) in enumerate(grids):
        places[i, : h * w] = torch.cartesian_prod(torch.arange(h), torch.arange(w))
        valid[i, : h * w] = True
    x = torch.randn(len(grids), longest, 192, generator=torch.manual_seed(0))
    return dict(x=x, patch_coord=places, patch_valid=valid)


def batch_of(name: str, *grids: tuple[int, int]) -> dict:
    """A batch of images of these grids of patches."""
    torch.manual_seed(len(grids))
    if name == NAFLEX:
        return padded(*grids)
    if name == PIXTRAL:
        sizes = torch.tensor(grids) * 8
        return dict(pixel_values=torch.randn(len(grids), 3, 32, 32), image_sizes=sizes)
    longest = max(h * w for h, w in grids)
    mask = torch.arange(longest) < torch.tensor([[h * w] for h, w in grids])
    return dict(
        pixel_values=torch.randn(len(grids), longest, 192),
        pixel_attention_mask=mask.long(),
        spatial_shapes=torch.tensor(grids),
    )


BATCHES = [((2, 2), (1, 3), (1, 1)), ((1, 2), (3, 1), (2, 1), (1, 4)), ((1, 1), (4, 4))]


def outputs(model: nn.Module, batch: dict, valid: Tensor | None = None) -> list[Tensor]:
    """All floating tensors that a forward gives, of tokens (B, N, D) those that count."""
    dtype = next(model.parameters()).dtype
    given = {n: x.to(dtype) if x.is_floating_point() else x for n, x in batch.items()}
    torch.manual_seed(1)
    found = [x for x in tree_leaves(model(**given)) if isinstance(x, Tensor) and x.is_floating_point()]
    return [x[valid.bool()] if valid is not None and x.dim() == 3 else x for x in found]


def assert_same(ours: nn.Module, theirs: nn.Module, batch: dict, atol: float = 2e-5) -> None:
    """Outputs of valid tokens, and the gradients of all parameters, for random upstream gradients."""
    found = []
    for model in (ours, theirs):
        outs = outputs(model, batch, batch.get("pixel_attention_mask"))
        upstream = [torch.randn(out.shape, generator=torch.manual_seed(2)).to(out.dtype) for out in outs]
        names, parameters = zip(*[(n, p) for n, p in model.named_parameters() if p.requires_grad])
        grads = torch.autograd.grad(outs, parameters, upstream, allow_unused=True)
        found.append(dict(enumerate(outs)) | dict(zip(names, grads)))
    assert found[0].keys() == found[1].keys()
    for name, truth in found[1].items():
        own = found[0][name]
        assert (own is None) == (truth is None), name
        if truth is not None:
            assert_close(own.double(), truth, atol=atol, rtol=1e-4 if atol > 1e-6 else 1e-9, name=str(name))


def attention_in(model: nn.Module, batch: dict) -> list[tuple[tuple, list | None]]:
    """(shape of the input, offsets) of each attention block and each attention in a forward."""
    seen = []

    def watched(function):
        def call(x, *a, offsets=None, **k):
            seen.append((tuple(x.shape), None if offsets is None else offsets.tolist()))
            return function(x, *a, offsets=offsets, **k)

        return call

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        outputs(model, batch)  # compiled before
        del seen[:]
        for name in ("attention_block", "attention"):
            patch.setattr(ops, name, watched(getattr(ops, name)))
        outputs(model, batch)
    return seen


def packed(model: nn.Module) -> list[str | None]:
    """Of each tower, why its last call was not packed."""
    return [entry.why for entry in vitfast.acceleration_report(model) if entry.part == "packing"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", TOWERS)
def test_valid_tokens_and_gradients_are_the_padded_runs(name, dtype):
    ours, theirs = pair(state(name), dtype)
    for grids in BATCHES:
        if name == SIGLIP or name == NAFLEX or max(map(max, grids)) <= 4:
            atol = ATOL[torch.float32 if name == PIXTRAL else dtype]  # its norms compute in fp32
            assert_same(ours, theirs, batch_of(name, *grids), atol)
            assert packed(ours) == [None]


@pytest.mark.parametrize("name", TOWERS)
def test_attention_gets_offsets(name):
    ours, _ = pair(state(name))
    found = attention_in(ours, batch_of(name, (2, 2), (1, 3), (1, 1)))
    prefix = getattr(ours, "num_prefix_tokens", 0)
    lengths = torch.tensor([0, 4 + prefix, 3 + prefix, 1 + prefix]).cumsum(0).tolist()
    blocks = [(shape, offsets) for shape, offsets in found if offsets is not None]
    assert blocks == [((lengths[-1], 32), lengths)] * 2


@pytest.mark.parametrize("name", TOWERS)
def test_without_pack_padding_has_the_librarys_numbers(name):
    original = state(name)
    ours, batch = vitfast.accelerate(copy.deepcopy(original)), batch_of(name, (2, 2), (1, 3), (1, 1))
    for a, b in zip(outputs(ours, batch), outputs(copy.deepcopy(original).double(), batch), strict=True):
        assert_close(a.double(), b, atol=2e-5)
    assert not packed(ours)
    assert_close(*(outputs(each, batch)[0] for each in (vitfast.accelerate(ours, pack=True), original)), atol=1e9)
    assert packed(ours) == [None]
    assert not packed(vitfast.accelerate(ours)), "the last call decides"


@pytest.mark.parametrize(
    "options",
    [
        dict(class_token=True, reg_tokens=2, rope_type="mixed"),
        dict(class_token=True, rope_type="axial"),
        dict(rope_type="axial", init_values=0.5),
        dict(qkv_bias=False, qk_norm=True, class_token=True),
        dict(global_pool="map"),
        dict(fc_norm=False, use_key_only_attn_mask=True),
    ],
    ids=lambda options: " ".join(options),
)
def test_naflexvits(options):
    try:
        original = naflex(**options)
    except TypeError as error:
        pytest.skip(str(error))
    ours, theirs = pair(original)
    for batch in (padded((2, 3), (4, 4), (1, 5)), padded((1, 2), (3, 1))):
        assert_same(ours, theirs, batch)
        assert packed(ours) == [None]


def test_naflexvits_padding_anywhere_and_images_of_nothing_else():
    ours, theirs = pair(naflex(class_token=True))
    batch = padded((2, 3), (4, 4), (1, 5))
    batch["patch_valid"][0, 1], batch["patch_valid"][2] = False, False
    assert_same(ours, theirs, batch)
    assert {shape for shape, offsets in attention_in(ours, batch) if offsets} == {(5 + 16 + 3, 32)}


def test_batches_without_padding_stay_batches():
    for name in (NAFLEX, SIGLIP):
        ours, theirs = pair(state(name))
        batch = batch_of(name, (1, 3), (3, 1))
        assert_same(ours, theirs, batch)
        assert packed(ours) == [None] and not attention_in(ours, batch), "no function of ours in the graph"
    images = dict(x=torch.randn(2, 3, 32, 32))
    assert_same(*pair(naflex()), images)


@pytest.mark.filterwarnings("ignore:.*checkpointing:FutureWarning")
@pytest.mark.parametrize("name", TOWERS)
def test_activation_checkpointing(name):
    """timm's is around a layer, and runs it again with the same packed tokens; transformers' keeps the padding."""
    models = pair(state(name))
    for model in models:
        if name == NAFLEX:
            model.train().set_grad_checkpointing()
        else:
            model.train().gradient_checkpointing_enable(dict(use_reentrant=False))
    for grids in BATCHES[:2]:
        assert_same(*models, batch_of(name, *grids))
        assert name != NAFLEX or packed(models[0]) == [None]


def dropout(model: nn.Module) -> None:
    """Active, and without effect."""
    for module in model.train().modules():
        if type(getattr(module, "dropout", None)) is float:
            module.dropout = 1e-9
        if isinstance(module, nn.Dropout):
            module.p = 1e-9


@pytest.mark.parametrize("name", TOWERS)
def test_dropout_in_training_keeps_the_padding(name):
    models = pair(state(name))
    for model in models:
        dropout(model)
    for _ in range(2):
        assert_same(*models, batch_of(name, *BATCHES[0]))
        assert packed(models[0])[0] is not None
    models[0].eval()
    outputs(models[0], batch_of(name, *BATCHES[0]))
    assert packed(models[0]) == [None]


def test_drop_path_in_training_keeps_the_padding_and_its_draws():
    original = naflex(drop_path_rate=0.4).train()
    ours, batch = vitfast.accelerate(copy.deepcopy(original), pack=True), padded((2, 3), (4, 4), (1, 5), (2, 2))
    for _ in range(3):
        assert_close(*(outputs(each, batch)[0] for each in (ours, original)), atol=1e-5)
        assert "drop path" in packed(ours)[0]
    ours.eval(), outputs(ours, batch)
    assert packed(ours) == [None]


HOOKS = {
    "a block": lambda model, hook: model.blocks[0].register_forward_hook(hook),
    "in a block": lambda model, hook: model.blocks[1].mlp.fc1.register_forward_hook(hook),
    "the last norm": lambda model, hook: model.norm.register_forward_hook(hook),
    "the model": lambda model, hook: model.register_forward_hook(hook),
    "all modules": lambda model, hook: torch.nn.modules.module.register_module_forward_hook(hook),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_see_the_librarys_tokens(kind):
    ours, theirs = pair(naflex(fc_norm=False))
    batch, shapes = padded((2, 3), (4, 4)), []
    for each in (ours, theirs):
        seen = []
        handle = HOOKS[kind](each, lambda _, __, out, seen=seen: seen.append(out))
        outputs(each, batch)
        shapes.append([out.shape for out in seen if isinstance(out, Tensor)])
        assert each is theirs or "hooks" in packed(ours)[0]
        handle.remove()
    assert shapes[0] and set(shapes[0]) <= set(shapes[1])
    outputs(ours, batch)
    assert packed(ours) == [None], "gone with the hook"


def test_a_forward_of_a_layers_own_keeps_the_padding():
    ours, theirs = pair(naflex())
    for each in (ours, theirs):
        each.blocks[1].forward = lambda x, block=each.blocks[1], **masks: 2 * type(block).forward(block, x, **masks)
    assert_same(ours, theirs, padded((2, 3), (4, 4)))
    assert packed(ours) == ["some of its layers are the library's"]


@pytest.mark.parametrize("asked", ["hidden_states", "attentions"])
@pytest.mark.parametrize("name", [PIXTRAL, SIGLIP])
def test_outputs_of_layers_are_the_librarys(name, asked):
    (ours, theirs), batch = pair(state(name)), batch_of(name, *BATCHES[0])
    for implementation in ("sdpa", "eager"):
        found = []
        for each in (ours, theirs):
            each.set_attn_implementation(implementation)
            given = {n: x.to(next(each.parameters()).dtype) if x.is_floating_point() else x for n, x in batch.items()}
            found.append(each(**given, **{f"output_{asked}": True})[asked])
        assert len(found[0]) == len(found[1]) and (implementation == "sdpa" or len(found[0]) >= 2)
        for a, b in zip(*found):
            assert a is None or (a.shape == b.shape and torch.allclose(a.double(), b, atol=1e-4))
        assert_same(ours, theirs, batch)
        assert packed(ours) == [None] or not eager._TOLD, "without, it is packed again"


def test_a_mask_of_the_callers_own_is_taken_as_it_is():
    ours, theirs = pair(naflex())
    assert_same(ours, theirs, padded((2, 3), (4, 4)) | dict(attn_mask=torch.randn(2, 1, 16, 16)))
    ours, theirs = pair(state(SIGLIP))
    x, mask = torch.randn(2, 4, 32), torch.rand(2, 1, 4, 4) > 0.4
    mask[..., 0] = True
    additive = torch.zeros(2, 1, 1, 4).index_fill(3, torch.tensor([3]), torch.finfo(torch.float32).min)
    additive[..., 1] = 0.5
    for given in (mask, additive):
        out = ours.encoder(inputs_embeds=x, attention_mask=given).last_hidden_state
        given = given if given.dtype == torch.bool else given.double()
        expected = theirs.encoder(inputs_embeds=x.double(), attention_mask=given).last_hidden_state
        assert_close(out.double(), expected, atol=2e-5)
        assert packed(ours) == ["the mask is not one of padding"]


def test_texts_keep_their_padding():
    """SigLIP 2's tower of texts pools its last token, padding or not."""
    transformers = pytest.importorskip("transformers")
    text = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=99)
    ours, theirs = pair(randomize(transformers.Siglip2TextModel(transformers.Siglip2TextConfig(**text)).eval()))
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    out, expected = (each(torch.arange(8).view(2, 4), mask).pooler_output for each in (ours, theirs))
    assert_close(out.double(), expected, atol=2e-5)
    assert not packed(ours)


class Mixes(nn.Module):
    """An MLP whose output depends on the other tokens."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) + x.roll(1, 1)


def test_layers_that_mix_tokens_are_found_out_by_numbers():
    original = naflex()
    for block in original.blocks:
        block.mlp = Mixes(block.mlp)
    ours, theirs = pair(original)
    for _ in range(2):
        assert_same(ours, theirs, padded((2, 3), (4, 4)))
        assert "differ" in packed(ours)[0]


def test_lora():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(5)
    original = peft.get_peft_model(copy.deepcopy(state(SIGLIP)), config).eval()
    ours, theirs = pair(original)
    batch = batch_of(SIGLIP, *BATCHES[0])
    assert_same(ours, theirs, batch)
    found = [offsets for _, offsets in attention_in(ours, batch)]
    assert packed(ours) == [None] and [0, 4, 7, 8] in found


def test_copies_and_restored_models_run_the_librarys_code():
    library = pytest.importorskip("transformers.models.pixtral.modeling_pixtral")
    for name in TOWERS:
        ours, batch = vitfast.accelerate(copy.deepcopy(state(name)), pack=True), batch_of(name, *BATCHES[0])
        outputs(ours, batch)
        for model in (copy.deepcopy(ours), vitfast.restore(ours)):
            assert all(module._compiled_call_impl is None for module in model.modules())
            for a, b in zip(outputs(model, batch), outputs(state(name), batch), strict=True):
                assert torch.equal(a, b)
    assert not any(isinstance(module._compiled_call_impl, padding.Tower) for module in ours.modules())
    gc.collect()  # models of other tests
    assert not isinstance(library.generate_block_attention_mask, padding._Masks)


@pytest.mark.slow
@pytest.mark.parametrize("name", [NAFLEX, PIXTRAL])
def test_compiled_code_keeps_the_padding(name):
    ours, theirs = pair(state(name))
    batch = batch_of(name, *BATCHES[0])
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="eager")
    with torch.no_grad():
        assert_close(outputs(compiled, batch)[0].double(), outputs(theirs, batch)[0], atol=2e-5)
    assert packed(ours) == [padding.AT_THE_FIRST_CALL]
