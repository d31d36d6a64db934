"""The results of `estimate` and of `estimate_baseline` in words."""

from ...model.sizes import USABLE
from .gpus import GIB


def as_text(name: str, found: dict) -> str:
    """The result of `estimate` or of `estimate_baseline` as text.

    name: the model's name.
    """
    size = f"{found['img_size'][0]} x {found['img_size'][1]} px"
    if found.get("crops"):
        kinds = [f"{count} of {' x '.join(map(str, dict.fromkeys(side)))} px" for count, side in found["crops"]]
        size = f"of each image {' and '.join(kinds)}".replace(" of ", " crops of ", 1)
    size += f", {found['tokens']} tokens" if "tokens" in found else ""
    forward, training = (found[key] / 1e9 for key in ("flops_per_image", "train_flops_per_image"))
    work = f"{forward:,.2f} GFLOP an image forward, {training:,.2f} in training"
    lines = [f"{name}, {size}: {found['params']:,} parameters, {work}", ""]
    if "operations" in found:
        lines += [*_operations(found), "", *_memory(found), "", *_times(found)]
    else:
        lines += [f"fixed memory, GiB: {_listed(found['memory']['state'], GIB)}"]
        lines += ["FLOPs by torch's counter; no times, which are known of the kernels of ViTs alone"]
    if found["train_flops"] is not None:
        whole = f"{found['train_images']:,.0f} images, {found['train_flops'] / 1e18:,.4g} exaFLOP"
        lines += [f"the whole training: {whole}"]
    return "\n".join(lines)


def _times(found: dict) -> list[str]:
    """Lines with the times of a step, and of the whole training where its length is known."""
    where, lines = f"batch {found['batch_size']:,} on {found['gpus']} x {found['device']['gpu']}", []
    where += f" in {found['accumulate']} micro-batches of {found['micro_batch']:,}" if found["accumulate"] > 1 else ""
    assumed = f"{found['predicted']['efficiency']:.0%} of that, {found['predicted']['basis']}"
    for how, pace in (("the floors", found["floor"]), (assumed, found["predicted"])):
        line = f"{where}, {how}: {1e3 * pace['step_seconds']:,.1f} ms a step, {pace['images_per_second']:,.0f} images/s"
        if pace["gpu_days"] is not None:
            line += f", {pace['train_seconds'] / 3600:,.1f} hours, {pace['gpu_days']:,.1f} GPU-days"
        lines.append(line)
    if reached := found.get("reached"):
        share = f"{reached['share_of_floor']:.0%} of the floors' {found['floor']['images_per_second']:,.0f}"
        share += ", which no code exceeds: check the number" * (reached["share_of_floor"] > 1)
        lines += ["", f"{reached['images_per_second']:,.0f} images/s is {share}"]
        lines += [f"{p['share']:.0%} of the {p['images_per_second']:,.0f} that {p['said']}" for p in reached["peers"]]
    if found["dropout"]:
        left_out = "their further passes over memory are not in these times"
        lines.append(f"dropout runs the layers on smaller operations: {left_out}")
    return lines


def _operations(found: dict) -> list[str]:
    """A table of the operations of a step."""
    columns = "{:<28}{:>6}{:>20}{:>20}{:>20}"
    header = ("times", "GFLOP fwd / bwd", "MB fwd / bwd", "floor us fwd / bwd")
    lines = [columns.format(f"each, batch {found['micro_batch']:,}", *header)]
    for row in found["operations"]:
        cells = [
            f"{row[f'forward_{key}'] * scale:{form}} / {row[f'backward_{key}'] * scale:{form}}"
            for key, scale, form in (("flops", 1e-9, ",.1f"), ("bytes", 1e-6, ",.0f"), ("floor", 1e6, ",.0f"))
        ]
        lines.append(columns.format(row["name"], row["times"], *cells))
    return lines


def _memory(found: dict) -> list[str]:
    device, memory, keep = found["device"], found["memory"], found["keep"]
    kept, working = _listed(memory["kept_per_image"], 2**20), memory["working_per_image"] / 2**20
    choice = "keep has no effect with dropout"
    if not found["dropout"]:
        more = f"'all' keeps {keep['more_per_image'] / 2**20:.2f} MiB an image more than 'least'"
        both = "largest batch {all:,} with 'all', {least:,} with 'least'".format(**keep["largest_batch"])
        choice = f"keep={keep['taken']!r} taken; {more}, which backward then does not write again; {both}"
    flops, moved = device["flops_per_second"] / 1e12, device["bytes_per_second"] / 1e9
    fits = f"largest batch on each {found['largest_batch']:,} (estimate)"
    if not found["largest_batch"]:
        fits = "not even one image fits beside the fixed memory"
    return [
        f"fixed memory, GiB: {_listed(memory['state'], GIB)}",
        f"kept for backward, MiB an image: {kept}; {working:.2f} more at the peak",
        choice,
        f"{device['gpu']}: {flops:,.0f} TFLOP/s in {found['dtype']}, {moved:,.0f} GB/s (data sheet); "
        f"{USABLE:.0%} of {device['memory_bytes'] / GIB:.0f} GiB: {fits}",
    ]


def _listed(sizes: dict[str, int], unit: int) -> str:
    kinds = ", ".join(f"{name} {size / unit:,.2f}" for name, size in sizes.items() if size)
    return f"{sum(sizes.values()) / unit:,.2f} ({kinds})"
