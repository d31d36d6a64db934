"""The Vision Transformer (Dosovitskiy et al., 2020, arXiv 2010.11929) with timm's argument names, attribute names and state_dict."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import positions
from .checkpoint import load_model, save
from .errors import InputError
from .hybrid import HybridEmbed
from .keep import ASKED, KEEPS, choose
from .layers import Block, LayerNorm, LayerScale, PatchEmbed
from .presets import pair, preset

_POOLS = ("token", "avg", "")
_ACTIVATIONS = {"gelu": "none", "gelu_tanh": "tanh"}  # timm's names -> torch's `approximate`
_INITS = ("", "jax", "jax_nlhb", "moco", "reset", "skip")


def _per_channel(name: str, value: float | Sequence[float], chans: int) -> tuple[float, ...]:
    values = (float(value),) * chans if isinstance(value, (int, float)) else tuple(float(v) for v in value)
    if len(values) == 1:
        values *= chans
    if len(values) != chans:
        raise InputError(f"ViT: {name} must be one number or one for each of the {chans} channels, got {len(values)}")
    if name == "std" and min(values) <= 0:
        raise InputError(f"ViT: std must be positive, got {values}")
    return values


@torch.fx.wrap
def _checked(images: Tensor, chans: int, size: tuple[int, int] | None) -> Tensor:
    """Raises ValueError unless images are (B, chans, *size); size None leaves it open."""
    if images.dim() != 4 or images.shape[1] != chans or (size is not None and tuple(images.shape[2:]) != size):
        want = "(B, {}, {}, {})".format(chans, *(size or ("H", "W")))
        raise ValueError(
            f"ViT: images must be {want}, got {tuple(images.shape)}; set_input_size or dynamic_img_size=True takes other sizes"
        )
    return images


@torch.fx.wrap
def _at_grid(
    name: str, table: Tensor, images: Tensor, patch: tuple[int, int], grid: tuple[int, int], prefix: int
) -> Tensor:
    """A table of positions at the grid that these images give."""
    return positions.resize_table(name, table, grid, (images.shape[2] // patch[0], images.shape[3] // patch[1]), prefix)


class PreLogits(nn.Module):
    """The hidden layer of the pre-training head: tanh(fc(x)), (B, D) -> (B, representation_size)."""

    def __init__(self, dim: int, size: int):
        super().__init__()
        self.fc = nn.Linear(dim, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).tanh()


class ViT(nn.Module):
    """Vision Transformer on vitfast's operations; ViT-B/16 unless told otherwise.

    Images are (B, in_chans, H, W): normalised floats, or raw uint8, of which (x / 255 - mean) / std is taken in the patch projection.

    img_size, patch_size: int or (height, width). num_classes: 0 for no head. global_pool: "token" (class token), "avg" (mean of the
    patches, normalised after pooling unless `fc_norm` says otherwise), "" (no pooling: the head sees every token). mlp_ratio: F / D.
    qkv_bias, proj_bias: biases of qkv, and of the other linear layers in a block. init_values: LayerScale's start value, None for none.
    class_token, reg_tokens: prefix tokens. pos_embed: "learn" (1-D), "learn2d" (columns and rows; patches only), "relative" (1-D, in
    each layer's attention, on PyTorch's), "sincos2d" (fixed) or "none". pos_embed_at: where learned ones are added, "stem", "layers"
    (before each, own tables) or "layers_shared"; dropout follows the first only. no_embed_class: positions for patches only.
    dynamic_img_size: take images of any size that the patch divides. drop_rate: dropout before the head; pos_drop_rate and proj_drop_rate:
    the paper's dropout; drop_path_rate: stochastic depth, rising linearly from 0. weight_init: timm's modes. head_init_bias: the head's bias
    at the start. representation_size: width of the tanh layer of the pre-training head, None for none. act_layer: "gelu" (erf) or
    "gelu_tanh". norm_eps: of every LayerNorm. mean, std: of raw uint8 images, on the 0..1 scale. residual_in_fp32: keep the residual stream
    in fp32 when the matrix products run in 16 bits. backbone: the CNN of a hybrid, "r50" or what `hybrid.HybridEmbed` says, None for a ViT.
    keep: what blocks keep for backward, see `set_keep`; it is of a run, and not in `config`.
    """

    # Of the class too: models pickled before there was a choice have neither.
    keep = "auto"
    _keep_rows = 0  # tokens of the batch for which "auto" was settled

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        init_values: float | None = None,
        class_token: bool = True,
        pos_embed: str = "learn",
        no_embed_class: bool = False,
        reg_tokens: int = 0,
        fc_norm: bool | None = None,
        dynamic_img_size: bool = False,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        weight_init: str = "",
        head_init_bias: float | None = None,
        representation_size: int | None = None,
        act_layer: str = "gelu",
        norm_eps: float = 1e-6,
        mean: float | Sequence[float] = 0.5,
        std: float | Sequence[float] = 0.5,
        residual_in_fp32: bool = False,
        pos_embed_at: str = "stem",
        backbone: str | dict | None = None,
        keep: str = "auto",
    ):
        config = {
            k: v for k, v in locals().items() if k not in ("self", "__class__", "keep")
        }  # keep is of a run, not of the model
        super().__init__()
        for name, value, known in (
            ("global_pool", global_pool, _POOLS),
            ("pos_embed", pos_embed, positions.KINDS),
            ("pos_embed_at", pos_embed_at, positions.PLACES),
            ("act_layer", act_layer, _ACTIVATIONS),
            ("weight_init", weight_init, _INITS),
        ):
            if value not in known:
                raise InputError(f"ViT: {name} must be one of {', '.join(map(repr, known))}, got {value!r}")
        for name in ("in_chans", "embed_dim", "depth", "num_heads"):
            if config[name] < 1:
                raise InputError(f"ViT: {name} must be at least 1, got {config[name]}")
        if embed_dim % num_heads:
            raise InputError(f"ViT: embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")
        if pos_embed_at != "stem" and pos_embed not in ("learn", "learn2d"):
            raise InputError(
                f"ViT: pos_embed_at={pos_embed_at!r} is for pos_embed='learn' or 'learn2d', got pos_embed={pos_embed!r}"
            )
        if pos_embed == "learn2d" and embed_dim % 2:
            raise InputError(f"ViT: pos_embed='learn2d' joins two halves, so embed_dim must be even, got {embed_dim}")
        if global_pool == "token" and not class_token:
            raise InputError(
                "ViT: global_pool='token' needs class_token=True; without a class token use global_pool='avg'"
            )

        self.num_classes, self.in_chans, self.global_pool = num_classes, in_chans, global_pool
        self.embed_dim = self.num_features = embed_dim
        self.head_hidden_size = representation_size or embed_dim
        self.num_prefix_tokens = int(class_token) + reg_tokens
        self.num_reg_tokens, self.has_class_token = reg_tokens, class_token
        self.no_embed_class, self.dynamic_img_size = no_embed_class, dynamic_img_size
        self.grad_checkpointing = False
        self.residual_in_fp32 = residual_in_fp32
        self.mean, self.std = _per_channel("mean", mean, in_chans), _per_channel("std", std, in_chans)
        self._config = config

        if backbone is None:
            self.patch_embed = PatchEmbed(img_size, patch_size, in_chans, embed_dim)
        else:
            self.patch_embed = HybridEmbed(img_size, patch_size, in_chans, embed_dim, backbone)
            self._config["backbone"] = self.patch_embed.spec
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim)) if class_token else None
        self.reg_token = nn.Parameter(torch.empty(1, reg_tokens, embed_dim)) if reg_tokens else None
        grid, head_dim = self.patch_embed.grid_size, embed_dim // num_heads
        shapes = positions.table_shapes(pos_embed, pos_embed_at, grid, embed_dim, head_dim, depth, self._pos_prefix)
        self._tables = tuple(shapes)
        self.register_buffer("pos_embed", None)
        for name, shape in shapes.items():
            table = torch.empty(shape)
            setattr(self, name, table if pos_embed == "sincos2d" else nn.Parameter(table))
        self.pos_drop = nn.Dropout(pos_drop_rate)
        rates = [drop_path_rate * i / max(1, depth - 1) for i in range(depth)]
        self.blocks = nn.Sequential(
            *(
                Block(
                    embed_dim,
                    num_heads,
                    int(embed_dim * mlp_ratio),
                    qkv_bias=qkv_bias,
                    proj_bias=proj_bias,
                    init_values=init_values,
                    proj_drop=proj_drop_rate,
                    drop_path=rate,
                    approximate=_ACTIVATIONS[act_layer],
                    eps=norm_eps,
                    residual_in_fp32=residual_in_fp32,
                )
                for rate in rates
            )
        )
        self.set_keep(keep)
        self.feature_info = [
            dict(module=f"blocks.{i}", num_chs=embed_dim, reduction=max(pair(patch_size))) for i in range(depth)
        ]
        norm_after_pool = global_pool == "avg" if fc_norm is None else fc_norm
        self._config["fc_norm"] = norm_after_pool
        self.norm = nn.Identity() if norm_after_pool else LayerNorm(embed_dim, eps=norm_eps)
        self.fc_norm = LayerNorm(embed_dim, eps=norm_eps) if norm_after_pool else nn.Identity()
        self.pre_logits = PreLogits(embed_dim, representation_size) if representation_size else nn.Identity()
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(self.head_hidden_size, num_classes) if num_classes > 0 else nn.Identity()
        if weight_init != "skip":
            self.init_weights(needs_reset=False)

    # ---- making one

    @classmethod
    def from_preset(cls, name: str, **overrides) -> "ViT":
        """`ViT.from_preset("B/16", num_classes=10, img_size=384)`; names are the paper's, any constructor argument overrides."""
        return cls(**{**preset(name), **overrides})

    @classmethod
    def from_pretrained(cls, source: str | Path, **overrides) -> "ViT":
        """A model with the weights of a file, a folder or `hf-hub:owner/name`, in any format that `vitfast.load_checkpoint` reads.

        Constructor arguments override what the checkpoint says: another `img_size` resamples the positions, another `num_classes`
        replaces the whole head by a zero linear layer. Raises InputError where the weights do not fit, naming the keys.
        """
        return load_model(cls, source, overrides)

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes `folder/model.safetensors` (timm's naming) and `folder/config.json`, each replaced atomically."""
        save(self, folder)

    @property
    def config(self) -> dict:
        """The constructor arguments that make this model as it is now."""
        return {**self._config, "mean": self.mean, "std": self.std}

    @torch.no_grad()
    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Initialises every weight as timm's ViT does; mode "", "jax", "jax_nlhb", "moco" or "reset", else the constructor's.

        `needs_reset=False` skips modules that initialised themselves just now.
        """
        mode = mode or self._config["weight_init"]
        for name in self._tables:
            if isinstance(getattr(self, name), nn.Parameter):
                nn.init.trunc_normal_(getattr(self, name), std=0.02)
        if self._config["pos_embed"] == "sincos2d":
            table = positions.sincos_2d(self.patch_embed.grid_size, self.embed_dim, self._pos_prefix)
            self.pos_embed.copy_(table.to(self.pos_embed.device))
        for token in (self.cls_token, self.reg_token):
            if token is not None:
                nn.init.normal_(token, std=1e-6)
        for name, module in self.named_modules():
            if not name.startswith("patch_embed.backbone"):
                _init_module(module, name, mode, needs_reset)
        if needs_reset and isinstance(self.patch_embed, HybridEmbed):
            self.patch_embed.init_backbone()
        if isinstance(self.head, nn.Linear):
            if mode == "jax_nlhb":
                nn.init.constant_(self.head.bias, -math.log(self.num_classes))
            if self._config["head_init_bias"] is not None:
                nn.init.constant_(self.head.bias, self._config["head_init_bias"])

    # ---- running it

    @property
    def _pos_prefix(self) -> int:
        """Prefix tokens that have a slot in the position table."""
        return 0 if self.no_embed_class or self._config["pos_embed"] == "learn2d" else self.num_prefix_tokens

    def _positions(self, images: Tensor) -> tuple[Tensor | None, list[tuple]]:
        """What is added at the stem and what each block takes besides its tokens, see positions.distribute."""
        tables = {name: getattr(self, name) for name in self._tables}
        if self.dynamic_img_size:
            sizes = self.patch_embed.patch_size, self.patch_embed.grid_size, self._pos_prefix
            tables = {name: _at_grid(name, table, images, *sizes) for name, table in tables.items()}
        return positions.distribute(
            tables, self._config["pos_embed_at"], len(self.blocks), self.num_prefix_tokens - self._pos_prefix
        )

    def _embed(self, images: Tensor) -> tuple[Tensor, list[tuple]]:
        """(B, C, H, W) -> (B, T+N, D), positions added, dropped out; and what each block takes besides."""
        images = _checked(images, self.in_chans, None if self.dynamic_img_size else self.patch_embed.img_size)
        tokens = [t for t in (self.cls_token, self.reg_token) if t is not None]
        prefix = None if not tokens else tokens[0] if len(tokens) == 1 else torch.cat(tokens, dim=1)
        table, layers = self._positions(images)
        x = self.pos_drop(self.patch_embed(images, prefix, table, self.mean, self.std))
        return x.float() if self.residual_in_fp32 else x, layers

    def _run(self, block: Block, x: Tensor, *layer: Tensor | None) -> Tensor:
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, x, *layer, use_reentrant=False)
        return block(x, *layer)

    def _final(self, x: Tensor) -> Tensor:
        """The norm after the last block, in the parameters' dtype where the stream is fp32."""
        return self.norm(x.to(self.patch_embed.proj.weight.dtype) if self.residual_in_fp32 else x)

    def forward_features(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> all tokens after the last norm, (B, T+N, D)."""
        x, layers = self._embed(images)
        self._decide_keep(x)
        for block, layer in zip(self.blocks, layers):
            x = self._run(block, x, *layer)
        return self._final(x)

    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        """(B, T+N, D) -> (B, D), or unchanged with pool type ""."""
        pool_type = self.global_pool if pool_type is None else pool_type
        if pool_type == "token":
            return x[:, 0]
        return x[:, self.num_prefix_tokens :].mean(dim=1) if pool_type == "avg" else x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens -> logits (B, num_classes), or what the last linear layer sees with `pre_logits=True`."""
        x = self.head_drop(self.pre_logits(self.fc_norm(self.pool(x))))
        return x if pre_logits else self.head(x)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W), normalised floats or raw uint8 -> logits (B, num_classes)."""
        return self.forward_head(self.forward_features(images))

    def forward_intermediates(
        self,
        images: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
    ):
        """What chosen blocks put out, as timm's method of the same name.

        indices: the last n blocks (int), these blocks (negative from the end), all (None). Maps are (B, D, H/P, W/Q) with "NCHW",
        (B, N, D) with "NLC". Returns (final tokens, list), the list alone with `intermediates_only`, or a dictionary.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"forward_intermediates: output_fmt must be 'NCHW' or 'NLC', got {output_fmt!r}")
        take = _take(indices, len(self.blocks))
        (x, layers), outputs = self._embed(images), []
        self._decide_keep(x)
        for i, block in enumerate(self.blocks[: max(take) + 1] if stop_early else self.blocks):
            x = self._run(block, x, *layers[i])
            if i in take:
                outputs.append(self._final(x) if norm else x)
        prefix = [y[:, : self.num_prefix_tokens] for y in outputs] if self.num_prefix_tokens else None
        maps = [y[:, self.num_prefix_tokens :] for y in outputs]
        if output_fmt == "NCHW":
            grid = self.patch_embed.dynamic_feat_size(images.shape[-2:])
            maps = [y.transpose(1, 2).unflatten(2, grid).contiguous() for y in maps]
        if output_dict:
            result = {"image_intermediates": maps}
            if prefix is not None and return_prefix_tokens:
                result["image_intermediates_prefix"] = prefix
            return result if intermediates_only else {**result, "image_features": self._final(x)}
        if return_prefix_tokens and prefix is not None:
            maps = list(zip(maps, prefix))
        return maps if intermediates_only else (self._final(x), maps)

    def get_intermediate_layers(
        self,
        images: Tensor,
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
    ) -> list:
        """DINO's name for forward_intermediates: (B, N, D) each, or (B, D, H/P, W/Q) with `reshape`."""
        return self.forward_intermediates(
            images, n, return_prefix_tokens, norm, output_fmt="NCHW" if reshape else "NLC", intermediates_only=True
        )

    def attention_maps(self, images: Tensor, indices: int | Sequence[int] | None = None) -> list[Tensor]:
        """The exact attention matrices, one (B, H, N, N) per layer in fp32 at least, prefix tokens first; rows sum to 1.

        indices: the last n layers (int), these layers (negative from the end), all (None). Each map is computed from q and k beside the
        fused attention of its own layer, so nothing is kept in training and no more than the maps asked for is held here. No gradients.
        """
        return list(self.each_attention_map(images, indices))

    @torch.no_grad()
    def each_attention_map(self, images: Tensor, indices: int | Sequence[int] | None = None) -> Iterator[Tensor]:
        """`attention_maps` one after another: each is made when it is asked for, and none is held here."""
        take = _take(indices, len(self.blocks))
        x, layers = self._embed(images)
        for i, (block, layer) in enumerate(zip(self.blocks[: max(take) + 1], layers)):
            if i in take:
                yield block.attention_map(x, *layer)
            x = block(x, *layer)

    # ---- changing it

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the whole head, the pre-training head's hidden layer included, by one zero linear layer (the paper, 3.2)."""
        if global_pool is not None:
            if global_pool not in _POOLS or (global_pool == "token" and not self.has_class_token):
                raise InputError(f"reset_classifier: this model cannot pool by {global_pool!r}")
            self.global_pool = global_pool
        weight = self.patch_embed.proj.weight
        self.num_classes, self.head_hidden_size, self.pre_logits = num_classes, self.embed_dim, nn.Identity()
        self.head = (
            nn.Linear(self.embed_dim, num_classes, device=weight.device, dtype=weight.dtype)
            if num_classes > 0
            else nn.Identity()
        )
        if num_classes > 0:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)
        for module in (self.pre_logits, self.head):
            module.train(self.training)
        self._config.update(num_classes=num_classes, global_pool=self.global_pool, representation_size=None)

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Takes images of another size from now on; the patch size stays, the positions are resampled in 2-D."""
        old = self.patch_embed.grid_size
        self.patch_embed.set_input_size(img_size)
        for name in self._tables:
            before = getattr(self, name)
            table = positions.resize_table(name, before.detach(), old, self.patch_embed.grid_size, self._pos_prefix)
            setattr(
                self, name, nn.Parameter(table, before.requires_grad) if isinstance(before, nn.Parameter) else table
            )
        self._config["img_size"] = self.patch_embed.img_size

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in backward in place of keeping what it computed; a hybrid's CNN each of its stages."""
        changed, self.grad_checkpointing = enable != self.grad_checkpointing, enable
        if changed and self.keep == "auto":
            self.set_keep("auto")  # what was settled was for the other mode
        if isinstance(self.patch_embed, HybridEmbed):
            self.patch_embed.backbone.set_grad_checkpointing(enable)

    def set_keep(self, keep: str) -> None:
        """What blocks keep for backward: "least", "all" (see ops.mlp_block), or "auto".

        "auto" is settled on "all" or "least" in the first eager training forward on a GPU, by the memory that is free then, and again in one
        with more tokens than any before. Until then, while blocks are checkpointed and on CPUs it is "least". torch.compile takes what it
        finds: call `decide_keep` before it.
        """
        if keep not in KEEPS:
            raise InputError(f"ViT: keep must be one of {', '.join(map(repr, KEEPS))}, got {keep!r}")
        self.keep, self._keep_rows = keep, 0
        self._set_blocks("all" if keep == "all" else "least")

    def decide_keep(self, batch: int, dtype: torch.dtype | None = None) -> str:
        """Settles keep="auto" for training on `batch` images at a time in `dtype` (the parameters' unless given); returns what is kept now."""
        self._settle(batch * (self.num_prefix_tokens + self.patch_embed.num_patches), dtype)
        return self.blocks[0].keep

    def _decide_keep(self, x: Tensor) -> None:
        """The same for tokens (B, N, D) of an eager training forward, where they are more than ever before."""
        if (
            self.keep != "auto"
            or not self.training
            or not torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or not isinstance(x, Tensor)
        ):
            return
        rows, kind = x.shape[0] * x.shape[1], x.device.type
        if kind in ASKED and rows > self._keep_rows:
            self._settle(rows, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None)

    def _settle(self, rows: int, dtype: torch.dtype | None) -> None:
        weight = self.patch_embed.proj.weight
        if self.keep == "auto" and weight.device.type in ASKED and not self.grad_checkpointing:
            self._keep_rows = rows
            self._set_blocks(
                choose(self.blocks, self.parameters(), rows, (dtype or weight.dtype).itemsize, weight.device)
            )

    def _set_blocks(self, keep: str) -> None:
        for block in self.blocks:
            block.keep = keep

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drops the blocks after the last one wanted, and the norm and head where asked. Returns the indices kept."""
        take = _take(indices, len(self.blocks))
        self.blocks = self.blocks[: max(take) + 1]
        for name in self._tables:
            table = getattr(self, name)
            if len(table) > 1:  # one for each layer
                setattr(self, name, nn.Parameter(table.detach()[: len(self.blocks)], table.requires_grad))
        self._config["depth"] = len(self.blocks)
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.fc_norm = nn.Identity()
            self.reset_classifier(0, "")
        return take

    # ---- what optimisers ask

    def get_classifier(self) -> nn.Module:
        """The last linear layer."""
        return self.head

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that are usually not decayed."""
        return {"pos_embed", "cls_token", "reg_token", *self._tables}

    def group_matcher(self, coarse: bool = False) -> dict:
        """Patterns that sort parameters into layers, for layer-wise learning rates."""
        return dict(
            stem=r"^cls_token|reg_token|pos_embed|patch_embed", blocks=[(r"^blocks\.(\d+)", None), (r"^norm", (99999,))]
        )


def _take(indices: int | Sequence[int] | None, depth: int) -> list[int]:
    """Block numbers from timm's three ways to name them."""
    if indices is None:
        return list(range(depth))
    if isinstance(indices, int):
        if not 0 < indices <= depth:
            raise ValueError(f"indices must name 1 to {depth} last blocks, got {indices}")
        return list(range(depth - indices, depth))
    take = [i + depth if i < 0 else i for i in indices]
    if not take or min(take) < 0 or max(take) >= depth:
        raise ValueError(f"indices must lie in 0..{depth - 1} (or negative from the end), got {list(indices)}")
    return take


def _init_module(module: nn.Module, name: str, mode: str, needs_reset: bool) -> None:
    """timm's initialisation of one module, by mode."""
    if isinstance(module, nn.Linear) and mode != "reset":
        if mode.startswith("jax") and name == "head":
            nn.init.zeros_(module.weight)
        elif mode.startswith("jax"):
            nn.init.xavier_uniform_(module.weight)
        elif mode == "moco" and name.endswith("qkv"):
            bound = math.sqrt(6 / (module.weight.shape[0] // 3 + module.weight.shape[1]))  # q, k and v are three layers
            nn.init.uniform_(module.weight, -bound, bound)
        elif mode == "moco":
            nn.init.xavier_uniform_(module.weight)
        else:
            nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.normal_(module.bias, std=1e-6) if mode.startswith("jax") and ".mlp." in name else nn.init.zeros_(
                module.bias
            )
    elif isinstance(module, nn.Conv2d) and mode.startswith("jax"):
        std = math.sqrt(1 / module.weight[0].numel()) / 0.87962566103423978  # LeCun's, after the cut at two deviations
        nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
        nn.init.zeros_(module.bias)
    elif needs_reset and isinstance(module, (nn.Linear, nn.Conv2d, nn.LayerNorm, LayerScale)):
        module.reset_parameters()
