"""The outputs of a ViT's blocks, in the forms in which timm's `forward_intermediates` returns them."""

from torch import Tensor

FORMS = ("NCHW", "NLC")


def check_form(output_fmt: str) -> None:
    if output_fmt not in FORMS:
        raise ValueError(f"forward_intermediates: output_fmt must be 'NCHW' or 'NLC', got {output_fmt!r}")


def pack(outputs: list[Tensor], prefix: int, grid: tuple[int, int], output_fmt: str, with_prefix: bool, names: bool):
    """Tokens (B, T+N, D) of each block -> maps: alone, paired with prefix tokens, or in a dictionary.

    prefix: T. grid: patches down and across. with_prefix: give the prefix tokens too. names: as a dictionary.
    """
    tokens = [y[:, :prefix] for y in outputs] if prefix and with_prefix else None
    maps = [y[:, prefix:] for y in outputs]
    if output_fmt == "NCHW":
        maps = [y.transpose(1, 2).unflatten(2, grid).contiguous() for y in maps]
    if names:
        return {"image_intermediates": maps} | ({"image_intermediates_prefix": tokens} if tokens else {})
    return list(zip(maps, tokens)) if tokens else maps
