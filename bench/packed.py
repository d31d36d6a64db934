"""A mix of image sizes as others compute it: attention over packed samples, and training steps of a whole ViT.

Each peer of attention is a function of q, k, v, all (tokens, H, Dh); what depends on the sizes alone (offsets, a block
mask) is made once, outside of what is timed, as a model makes it once for all its layers. Each way of a training step
has the same weights and images, laid out beforehand as its loader would. The ViT has a class token without a position
and positions resampled for each image, which is what NaFlexVit computes too.
"""

import functools
from collections.abc import Callable

import clock
import harness
import padding
import torch
import torch.nn.functional as F
from harness import compiled
from mixes import PATCH, Mix
from peers import FLASH, library_function, randomised
from torch import Tensor, nn

import vitfast
from vitfast import ViT, ops
from vitfast.model.activation_memory import settle, settle_in_training
from vitfast.ops.packed import PackedImages
from vitfast.tools.verify import exact_fp32, worst

CLASSES = 1000
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def offsets_of(mix: Mix) -> Tensor:
    """(S + 1,) int32."""
    return torch.tensor([0, *mix.lengths], device=clock.DEVICE).cumsum(0).int()


def flash(mix: Mix, name: str) -> Attention:
    """flash-attn's varlen."""
    function, offsets, longest = library_function(*FLASH[name], "flash_attn_varlen_func"), offsets_of(mix), mix.longest
    sizes = dict(cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest)
    return functools.partial(function, **sizes)


def torch_varlen(mix: Mix) -> Attention:
    """torch.nn.attention.varlen (torch 2.10 and later), with the backend that torch picks."""
    function = library_function("torch", "torch.nn.attention.varlen", "varlen_attn")
    offsets, longest = offsets_of(mix), mix.longest
    return lambda q, k, v: function(q, k, v, offsets, offsets, longest, longest)


def nested(mix: Mix) -> Attention:
    """SDPA on jagged nested tensors, with the backend that torch picks."""
    offsets = offsets_of(mix).long()
    sizes = dict(min_seqlen=min(mix.lengths), max_seqlen=mix.longest)  # else torch asks the device for them

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        jagged = [torch.nested.nested_tensor_from_jagged(x, offsets, **sizes).transpose(1, 2) for x in (q, k, v)]
        return F.scaled_dot_product_attention(*jagged).transpose(1, 2).values()

    return attention


def flex(mix: Mix, how: str) -> Attention:
    """flex_attention over all tokens as one sequence, compiled ("compile", "max-autotune").

    Its mask is block-diagonal: blocks without a pair are left out.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    images = torch.arange(len(mix.lengths), device=clock.DEVICE)
    owner = images.repeat_interleave(torch.tensor(mix.lengths, device=clock.DEVICE))
    same = lambda b, h, i, j: owner[i] == owner[j]  # noqa: E731
    # compiled, so that the mask of every pair is not in memory
    mask = create_block_mask(same, None, None, mix.tokens, mix.tokens, device=clock.DEVICE, _compile=True)
    function = compiled(flex_attention, how, fullgraph=True)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = [x.transpose(0, 1)[None] for x in (q, k, v)]  # views (1, H, tokens, Dh)
        return function(*heads, block_mask=mask)[0].transpose(0, 1)

    return attention


PEERS: dict[str, Callable[[Mix], Attention]] = {
    **{name: functools.partial(flash, name=name) for name in FLASH},
    "torch varlen": torch_varlen,
    "torch nested": nested,
    "flex compile": functools.partial(flex, how="compile"),
    "flex max-autotune": functools.partial(flex, how="max-autotune"),
}


# ---- training steps


@functools.cache
def weights(model: str, depth: int) -> dict[str, Tensor]:
    """Random weights of `plain` in fp32."""
    torch.manual_seed(0)
    return randomised(plain(model, depth)).state_dict()


def plain(model: str, depth: int) -> ViT:
    with clock.DEVICE:
        return ViT.from_preset(model, depth=depth, num_classes=CLASSES, no_embed_class=True, dynamic_img_size=True)


def images_of(mix: Mix) -> list[Tensor]:
    """(3, height, width) in fp32 each, the same every time."""
    torch.manual_seed(1)
    return [torch.randn(3, *size, device=clock.DEVICE) for size in mix.images]


def upstream_of(mix: Mix, chosen: list[int] | None = None) -> Tensor:
    """Gradients of the logits (S, classes) in fp32, zero but for the `chosen` images if given."""
    torch.manual_seed(2)
    found = torch.randn(len(mix.images), CLASSES, device=clock.DEVICE)
    if chosen is not None:
        found[[i for i in range(len(found)) if i not in chosen]] = 0.0
    return found


def step(forward: Callable, images, upstream: Tensor) -> Tensor:
    """Forward and backward; the gradients add up in the model's parameters."""
    logits = forward(images)
    logits.backward(upstream.to(logits.dtype))
    return logits.detach()


class Way:
    """A ViT and the images of a mix, ready for training steps. layout: its name in padding.py."""

    layout = "packed"

    def __init__(self, mix: Mix, how: str, dtype: torch.dtype):
        self.mix, self.dtype = mix, dtype
        self.model = self.load().to(dtype).train()
        self.images = self.lay_out([image.to(dtype) for image in images_of(mix)])
        self.forward = self.call if how == "eager" else self.compile(how)

    def load(self) -> nn.Module:
        model = plain(self.mix.model, self.mix.sizes["depth"])
        model.load_state_dict(weights(self.mix.model, self.mix.sizes["depth"]))
        return model

    def lay_out(self, images: list[Tensor]):
        return vitfast.pack(images, PATCH)

    @property
    def rows(self) -> int:
        """Tokens in a step, padding included."""
        return self.mix.tokens

    def compile(self, how: str) -> Callable:
        settle(self.model, self.rows, self.dtype)  # before torch.compile, which takes what it finds
        return compiled(self.call, how, fullgraph=True)

    def call(self, images) -> Tensor:
        return self.model(images)

    def __call__(self, upstream: Tensor) -> Tensor:
        """Logits (S, classes) after a step with these gradients of theirs."""
        return step(self.forward, self.images, upstream)

    def gradients(self) -> dict[str, Tensor]:
        """By the ViT's names and in its shapes."""
        return {name: p.grad for name, p in self.model.named_parameters()}

    def share(self) -> float | None:
        """The share of the work that is padding (padding.py)."""
        linear = padding.token_share(self.mix, self.layout)
        return padding.model_share(self.mix, linear, padding.attention_share(self.mix, self.layout, "both"))


class KeyLengths:
    """In the place of the layout of packed tokens: tokens (S, longest, D), the keys of each image."""

    def __init__(self, lengths: Tensor):
        self.options = dict(key_lengths=lengths)


class Padded(Way):
    """Zero patches after those of each image; attention ends at the last key that counts."""

    layout = "padded"

    def lay_out(self, images: list[Tensor]) -> tuple[PackedImages, Tensor]:
        given, most, count = vitfast.pack(images, PATCH), self.mix.longest - 1, len(images)
        patches = given.patches.new_zeros(count, most, *given.patches.shape[1:])
        places = torch.zeros(count, most, dtype=torch.int32, device=clock.DEVICE)
        for i, (own, number) in enumerate(zip(given.patches.split(given.counts), given.places.split(given.counts))):
            patches[i, : len(own)], places[i, : len(own)] = own, number
        offsets = torch.arange(count + 1, dtype=torch.int32, device=clock.DEVICE) * most
        filled = PackedImages(patches.flatten(0, 1), places.flatten(), offsets, given.grids, (most,) * count, most)
        return filled, torch.tensor(self.mix.lengths, device=clock.DEVICE, dtype=torch.int32)

    @property
    def rows(self) -> int:
        return len(self.mix.lengths) * self.mix.longest

    def call(self, images) -> Tensor:
        (filled, lengths), model = images, self.model
        x, _, _ = model._embed_packed(filled)
        x, layout = x.unflatten(0, (len(lengths), self.mix.longest)), KeyLengths(lengths)
        settle_in_training(model, x)
        for block in model.blocks:
            x = block(x, layout=layout)
        return model.forward_head(model._final(x))


class OneSize(Way):
    """A step for each size of images; gradients add up."""

    layout = "one size at a time"

    def lay_out(self, images: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        groups = self.mix.groups.values()
        return [(torch.stack([images[i] for i in group]), torch.tensor(group, device=clock.DEVICE)) for group in groups]

    def compile(self, how: str) -> Callable:
        """The blocks, once for all sizes: torch cannot compile the backward of resampled positions."""
        # fullgraph: one compilation too many fails, it does not go on without
        blocks, model = compiled(self.model.blocks, how, fullgraph=True, dynamic=True), self.model

        def call(images: Tensor) -> Tensor:
            x, _ = model._embed(images)
            settle_in_training(model, x)
            return model.forward_head(model._final(blocks(x)))

        return call

    def __call__(self, upstream: Tensor) -> Tensor:
        logits = torch.empty(len(upstream), CLASSES, dtype=self.dtype, device=clock.DEVICE)
        for images, group in self.images:
            logits[group] = step(self.forward, images, upstream[group])
        return logits


class NaFlex(Way):
    """timm's NaFlexVit (NaFlex, SigLIP 2): padded patches, a mask of every pair for attention."""

    layout = "padded"

    def load(self) -> nn.Module:
        from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg

        s = self.mix.sizes
        own = weights(self.mix.model, s["depth"])
        table, size = own["pos_embed"], (int(own["pos_embed"].shape[1] ** 0.5),) * 2
        options = dict(patch_size=PATCH, embed_dim=s["width"], depth=s["depth"], num_heads=s["heads"], class_token=True)
        options |= dict(pos_embed_grid_size=size, global_pool="token", fc_norm=False, norm_layer="layernorm")
        with clock.DEVICE:
            model = NaFlexVit(NaFlexVitCfg(**options), num_classes=CLASSES)
        state = {name: value for name, value in own.items() if name.startswith(("blocks.", "norm.", "head."))}
        state |= {"embeds.cls_token": own["cls_token"], "embeds.pos_embed": table.unflatten(1, size)}
        state["embeds.proj.weight"] = own["patch_embed.proj.weight"].permute(0, 2, 3, 1).flatten(1)  # channels last
        state["embeds.proj.bias"] = own["patch_embed.proj.bias"]
        model.load_state_dict(state)
        for module in model.modules():  # of its norms; ours are 1e-6
            if isinstance(module, nn.LayerNorm):
                module.eps = 1e-6
        return model

    def lay_out(self, images: list[Tensor]) -> dict[str, Tensor]:
        given, size = vitfast.pack(images, PATCH), (len(images), self.mix.longest - 1)
        patches = given.patches.permute(0, 2, 3, 1).flatten(1)
        filled = patches.new_zeros(*size, patches.shape[1])
        places = torch.zeros(*size, 2, dtype=torch.long, device=clock.DEVICE)
        valid = torch.zeros(size, dtype=torch.bool, device=clock.DEVICE)
        for i, (own, number) in enumerate(zip(patches.split(given.counts), given.places.split(given.counts))):
            number, across = number.long(), int(given.grids[i, 1])
            filled[i, : len(own)], valid[i, : len(own)] = own, True
            places[i, : len(own)] = torch.stack([number // across, number % across], 1)
        return dict(patches=filled, patch_coord=places, patch_valid=valid)

    def compile(self, how: str) -> Callable:
        return compiled(self.call, how)  # it breaks the graph at its positions

    def gradients(self) -> dict[str, Tensor]:
        found = {name.removeprefix("embeds."): p.grad for name, p in self.model.named_parameters()}
        found["pos_embed"] = found["pos_embed"].flatten(1, 2)
        weight = found.pop("proj.weight").unflatten(1, (PATCH, PATCH, 3)).permute(0, 3, 1, 2)
        return found | {"patch_embed.proj.weight": weight, "patch_embed.proj.bias": found.pop("proj.bias")}

    def share(self) -> float:
        linear = padding.token_share(self.mix, "padded")
        return padding.model_share(self.mix, linear, padding.full_share(self.mix))


WAYS: dict[str, type[Way]] = {
    "vitfast": Way,
    "vitfast padded": Padded,
    "vitfast one size at a time": OneSize,
    "timm NaFlexVit": NaFlex,
}


class Check:
    """Judges logits and gradients against a plain ViT in float64 that sees one image at a time.

    Some images are compared; the upstream gradient of all others is zero, though every way computes the whole batch.
    The limit comes from the error of the plain ViT in the same dtype. Gradients are compared as one vector.
    """

    def __init__(self, mix: Mix, dtype: torch.dtype):
        by_length = sorted(range(len(mix.lengths)), key=mix.lengths.__getitem__)
        self.mix, self.dtype = mix, dtype
        self.chosen = sorted({0, by_length[0], by_length[-1], len(mix.lengths) - 1})
        with ops.use_kernels("off"), exact_fp32():
            truth = self._plain(torch.float64)
            self.own = worst(self._plain(dtype), truth)
        self.truth = [t.cpu() for t in truth]  # its memory is nobody's who is measured

    def _plain(self, dtype: torch.dtype) -> list[Tensor]:
        way, images, upstream = Way(self.mix, "eager", dtype), images_of(self.mix), upstream_of(self.mix, self.chosen)
        way.model.set_grad_checkpointing()  # a document's logits of all layers in float64 would be tens of GB
        rows = [step(way.model, images[i].to(dtype)[None], upstream[[i]]) for i in self.chosen]
        return [*torch.cat(rows).double(), _flat(way.gradients())]

    def judge(self, impl: str, way: Way, when: str = "") -> dict[str, float]:
        way.model.zero_grad(set_to_none=True)
        logits = way(upstream_of(self.mix, self.chosen))
        result = [*logits[self.chosen].double(), _flat(way.gradients())]
        way.model.zero_grad(set_to_none=True)
        truth = [t.to(clock.DEVICE) for t in self.truth]
        return harness.judge(impl, f"{self.mix.shape}{when}", result, truth, self.own, self.dtype)


check_of = functools.lru_cache(maxsize=1)(Check)  # kept for the next way of the same mix


def _flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradients[name].double().flatten() for name in sorted(gradients)])
