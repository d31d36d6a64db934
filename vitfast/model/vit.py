"""The Vision Transformer (Dosovitskiy et al., 2020, arXiv 2010.11929) with timm's names."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import InputError
from ..ops.packed import PackedImages
from . import config as arguments
from .activation_memory import choose_saved_activations
from .block import Block
from .checkpoint.load import load_model
from .checkpoint.writers import save
from .config import POOLS, Keep, Pool, ViTConfig, WeightInit, documented, with_arguments_of
from .heads import AttentionPoolLatent, PreLogits
from .hybrid import HybridEmbed
from .init import init_weights
from .intermediates import Intermediates
from .layers import NORMS, weights_dtype
from .patch_embed import PatchEmbed, checked_images, with_tokens
from .positions import Positions, resize_table
from .preprocessing import FIELDS, Preprocessed
from .presets import preset
from .sizes import Sizes
from .variable_size import ManyImages, PackedForward, of_many_sizes, together

if TYPE_CHECKING:
    from typing_extensions import Self

Batch = Tensor | PackedImages
Change = Callable[[Tensor], Tensor]  # of the patch embeddings (B, N, D)
for _leaf in ("checked_images", "with_tokens"):  # they look at shapes in Python, so they are leaves to FX
    torch.fx.wrap(_leaf)


@documented
class ViT(Intermediates, PackedForward, Preprocessed, Positions, nn.Module):
    """Vision Transformer on vitfast's operations; ViT-B/16 unless told otherwise.

    Images are (B, in_chans, H, W): normalised floats, or raw uint8, which the patch projection normalises to
    (x / 255 - mean) / std. Images of many sizes come as a list of (in_chans, H_i, W_i), or as vitfast.pack packs such
    a list: nothing is padded, and positions are resampled for each grid. The arguments have timm's names. Raises
    InputError for values that no ViT can have.
    """

    @with_arguments_of(ViTConfig)
    def __init__(self, *args, **kwargs):
        c = ViTConfig(*args, **kwargs)
        sizes = Sizes(c)
        super().__init__()
        self.num_classes, self.in_chans, self.global_pool = c.num_classes, c.in_chans, c.global_pool
        self.embed_dim = self.num_features = c.embed_dim
        self.head_hidden_size, self.num_prefix_tokens = sizes.head_width, sizes.prefix
        self.num_reg_tokens, self.has_class_token = c.reg_tokens, c.class_token
        self.no_embed_class, self.dynamic_img_size = c.no_embed_class, c.dynamic_img_size
        self.grad_checkpointing, self.residual_in_fp32 = False, c.residual_in_fp32
        for name in (*FIELDS, "class_names"):
            if isinstance(getattr(type(self), name, property()), property):  # else it is an attribute of a subclass
                vars(self)[name] = getattr(c, name)
        stem = c.img_size, c.patch_size, c.in_chans, c.embed_dim
        if c.backbone is None:
            self.patch_embed = PatchEmbed(*stem, bias=not c.pre_norm)  # timm's: a bias would be normalised away
        else:
            self.patch_embed = HybridEmbed(*stem, c.backbone)
        self.cls_token = nn.Parameter(torch.empty(1, 1, c.embed_dim)) if c.class_token else None
        self.reg_token = nn.Parameter(torch.empty(1, c.reg_tokens, c.embed_dim)) if c.reg_tokens else None
        self._config = c.as_dict() | dict(fc_norm=sizes.after_pooling)
        self._config.pop("class_names", None)  # they change with the head
        if c.backbone is not None:
            self._config["backbone"] = self.patch_embed.spec
        self._make_tables()
        self.pos_drop = nn.Dropout(c.pos_drop_rate)
        norm = partial(NORMS[c.norm_layer], eps=c.norm_eps)
        self.norm_pre = norm(c.embed_dim) if c.pre_norm else nn.Identity()
        rates = [c.drop_path_rate * i / max(1, c.depth - 1) for i in range(c.depth)]
        self.blocks = nn.Sequential(*(Block(c, norm, rate) for rate in rates))
        self.set_keep(c.keep)
        feature = dict(num_chs=c.embed_dim, reduction=self.patch_embed.feat_ratio())
        self.feature_info = [dict(module=f"blocks.{i}", **feature) for i in range(c.depth)]
        self.norm = nn.Identity() if sizes.after_pooling else norm(c.embed_dim)
        pool = (c.embed_dim, c.num_heads, sizes.block.hidden, c.act_layer, norm)
        self.attn_pool = AttentionPoolLatent(*pool) if c.global_pool == "map" else None
        self.fc_norm = norm(c.embed_dim) if sizes.after_pooling else nn.Identity()
        self.pre_logits = PreLogits(c.embed_dim, c.representation_size) if c.representation_size else nn.Identity()
        self.head_drop = nn.Dropout(c.drop_rate)
        self.head = nn.Linear(self.head_hidden_size, c.num_classes) if c.num_classes > 0 else nn.Identity()
        if c.weight_init != "skip":
            self.init_weights(needs_reset=False)

    # ---- making one

    @classmethod
    def from_preset(cls, name: str, **overrides) -> "Self":
        """Makes a new model by the name of a preset, such as "B/16"; arguments override the preset's."""
        return cls(**{**preset(name), **overrides})

    @classmethod
    def from_pretrained(cls, source: str | Path, **overrides) -> "Self":
        """Makes a model with the weights of a file, a folder or `hf-hub:owner/name`.

        The weights may have any format that load_checkpoint reads. Constructor arguments override the checkpoint's.
        Another `img_size` resamples the positions. Another `num_classes` replaces the whole head by a linear layer of
        zeros and drops the class names. Raises InputError if something does not fit, or if the weights belong to a
        model that is not this ViT.
        """
        return load_model(cls, source, overrides)

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes `folder/model.safetensors` (timm's names) and `folder/config.json`, atomically."""
        save(self, folder)

    @property
    def config(self) -> dict:
        """The constructor arguments that make this model as it is now."""
        changed = {name: getattr(self, name) for name in ("global_pool", "dynamic_img_size", *FIELDS)}
        names = {} if self.class_names is None else dict(class_names=self.class_names)
        return self._config | changed | names

    def init_weights(self, mode: WeightInit = "", needs_reset: bool = True) -> None:
        """Initialises every weight as timm's ViT does; mode "", "jax", "jax_nlhb", "moco" or "reset".

        "" is the mode of the constructor. `needs_reset=False` skips modules that have just initialised themselves.
        """
        init_weights(self, mode or self._config["weight_init"], needs_reset)

    # ---- running it

    def _embed(self, images: Batch, change_patches: Change | None = None) -> tuple[Tensor, list[tuple]]:
        """Images -> tokens with positions, (B, T+N, D) or (tokens, D); and each block's other arguments."""
        tokens = [t for t in (self.cls_token, self.reg_token) if t is not None]
        prefix = None if not tokens else tokens[0] if len(tokens) == 1 else torch.cat(tokens, dim=1)
        table, of_prefix, layers = self._positions(images)
        if isinstance(images, PackedImages):
            prefix = prefix if of_prefix is None else prefix + of_prefix.to(prefix.dtype)
            x = self.patch_embed(images.patches, prefix, table, self.mean, self.std, images.offsets)
        elif change_patches is None:
            x = self.patch_embed(images, prefix, table, self.mean, self.std)
        else:
            x = with_tokens(change_patches(self.patch_embed(images, mean=self.mean, std=self.std)), prefix, table)
        x = self.norm_pre(self.pos_drop(x))
        options, subsets = self._attention_options(images, x), self._subsets(images)
        return x.float() if self.residual_in_fp32 else x, list(zip(layers, options, subsets))

    def _run(self, block: Block, x: Tensor, *layer: Tensor | None) -> Tensor:
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, x, *layer, use_reentrant=False)
        return block(x, *layer)

    def _encode(self, images: Batch, change_patches: Change | None = None) -> tuple[Tensor, list[tuple]]:
        """Images -> all tokens after the last norm; and what the blocks were given."""
        x, layers = self._embed(images, change_patches)
        for block, layer in zip(self.blocks, layers):
            x = self._run(block, x, *layer)
        return self._final(x), layers

    def _checked(self, images: Tensor) -> Tensor:
        """The images. Raises TypeError or ValueError unless they have this model's channels and size."""
        return checked_images(images, self.in_chans, None if self.dynamic_img_size else self.patch_embed.img_size)

    def _final(self, x: Tensor) -> Tensor:
        """Applies the norm after the last block, in the parameters' dtype even if the stream is fp32."""
        return self.norm(x.to(weights_dtype(self.patch_embed.proj)) if self.residual_in_fp32 else x)

    @overload
    def forward_features(self, images: Tensor, change_patches: Change | None = None) -> Tensor: ...
    @overload
    def forward_features(self, images: list[Tensor] | tuple[Tensor, ...] | PackedImages) -> list[Tensor]: ...
    def forward_features(self, images: ManyImages, change_patches: Change | None = None) -> Tensor | list[Tensor]:
        """Images (B, C, H, W) -> all tokens after the last norm (B, T+N, D); a list gives a list.

        change_patches: a function of the patch embeddings (B, N, D), which is applied before prefix tokens and
        positions are added; masked patch prediction uses it.
        """
        if of_many_sizes(images):
            if change_patches is not None:
                raise NotImplementedError("ViT: change_patches is for images of one size, (B, C, H, W)")
            return self._encode_many(images).apart(jagged=isinstance(images, Tensor))
        images = self._checked(images)
        if change_patches is None and self.packs(images):
            return self._encode_many(images).x.unflatten(0, (len(images), -1))
        return self._encode(images, change_patches)[0]

    def pool(self, x: Tensor, pool_type: Pool | None = None) -> Tensor:
        """Tokens (B, T+N, D), or a list of (T+N_i, D) -> one vector for each image (B, D); "" pools nothing."""
        pool_type = self.global_pool if pool_type is None else pool_type
        if pool_type and (of_many_sizes(x) or self.packs(x)):
            return self._pool_packed(together(x), pool_type)
        if pool_type == "map":
            return self.attn_pool(x[:, self.num_prefix_tokens :])
        if pool_type == "token":
            return x[:, 0]
        return x[:, self.num_prefix_tokens :].mean(dim=1) if pool_type == "avg" else x

    def forward_head(self, x: Tensor | list[Tensor], pre_logits: bool = False) -> Tensor:
        """Tokens -> logits (B, num_classes), or with `pre_logits=True` the input of the last linear layer."""
        if of_many_sizes(x):
            return self._head_packed(together(x), pre_logits)
        return self._head(self.pool(x), pre_logits)

    def _head(self, x: Tensor, pre_logits: bool) -> Tensor:
        x = self.head_drop(self.pre_logits(self.fc_norm(x)))
        return x if pre_logits else self.head(x)

    def forward(self, images: Tensor | ManyImages) -> Tensor:
        """Images, as normalised floats or raw uint8 -> logits (B, num_classes).

        Images are (B, C, H, W) or, of many sizes, a list of (C, H, W), vitfast.pack's result or a nested tensor.
        """
        if of_many_sizes(images):
            return self._head_packed(self._encode_many(images))
        return self.forward_head(self.forward_features(images))

    # ---- changing it

    def reset_classifier(self, num_classes: int, global_pool: Pool | None = None) -> None:
        """Replaces the whole head, hidden layer included, by one linear layer of zeros (the paper, 3.2)."""
        num_classes = arguments.read("num_classes", num_classes, "reset_classifier: num_classes")
        if global_pool is not None:
            lacks = {"token": not self.has_class_token, "map": self.attn_pool is None}
            if global_pool not in POOLS or lacks.get(global_pool):
                raise InputError(f"reset_classifier: this model cannot pool by {global_pool!r}")
            self.global_pool = global_pool
        weight = next(self.patch_embed.proj.parameters())
        self.num_classes, self.head_hidden_size, self.pre_logits = num_classes, self.embed_dim, nn.Identity()
        made = dict(device=weight.device, dtype=weight.dtype)
        self.head = nn.Linear(self.embed_dim, num_classes, **made) if num_classes > 0 else nn.Identity()
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)
        for module in (self.pre_logits, self.head):
            module.train(self.training)
        self._config.update(num_classes=num_classes, global_pool=self.global_pool, representation_size=None)
        self.class_names = None

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Sets the image size; the patch size stays, and the positions are resampled in 2-D."""
        old = self.patch_embed.grid_size
        self.patch_embed.set_input_size(arguments.read("img_size", img_size, "set_input_size: img_size"))
        how = old, self.patch_embed.grid_size, self._pos_prefix, self._config["pos_resample"]
        self._change_tables(lambda name, table: resize_table(name, table, *how))
        self._config["img_size"] = self.patch_embed.img_size

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Sets whether backward computes blocks (and stages of a hybrid's CNN) again, to save memory."""
        changed, self.grad_checkpointing = enable != self.grad_checkpointing, enable
        if changed and self.keep == "auto":
            choose_saved_activations(self, 0)  # it was settled for the other mode
        if isinstance(self.patch_embed, HybridEmbed):
            self.patch_embed.backbone.set_grad_checkpointing(enable)

    def set_keep(self, keep: Keep) -> None:
        """Sets what blocks keep for backward: "least", "all" (see ops.mlp_block), or "auto".

        "auto" means "least" until `decide_keep` is called; the trainer calls it. On CPUs, and while blocks are
        checkpointed, it stays "least".
        """
        self.keep = arguments.read("keep", keep)
        choose_saved_activations(self, 0)

    def decide_keep(self, batch: int, dtype: torch.dtype | None = None) -> str:
        """Chooses what keep="auto" keeps, for training on `batch` images at once; returns "all" or "least".

        The choice depends on the free memory of the GPU. Call this before the first step and before torch.compile,
        because compiled code keeps the choice. dtype: that of the matrix products, by default that of the parameters.
        """
        return choose_saved_activations(self, batch * (self.num_prefix_tokens + self.patch_embed.num_patches), dtype)

    # ---- what optimisers ask

    def get_classifier(self) -> nn.Module:
        """Returns the last linear layer."""
        return self.head

    def no_weight_decay(self) -> set[str]:
        """Returns the names of parameters that usually have no weight decay."""
        return {"pos_embed", "cls_token", "reg_token", *self._tables}

    def group_matcher(self, coarse: bool = False) -> dict:
        """Returns patterns that sort parameters into layers, for layer-wise learning rates."""
        blocks = [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))]
        return dict(stem=r"^cls_token|reg_token|pos_embed|patch_embed", blocks=blocks)
