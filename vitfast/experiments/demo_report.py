"""report.html of the demo: its two runs on one page, drawn as those of any run are."""

from pathlib import Path

from ..data.loader import open_data
from ..model.vit import ViT
from ..run.device import choose_device
from ..run.results import Results
from ..train.recipes import resolve
from ..train.report import curves, encoded_page, optional, origin, validation_sections, with_error


@optional()
def write_report(output: Path, summary: dict, results: Results) -> None:
    """Writes report.html into the results from the demo's run folders, or says in one line why not."""
    weights, images, cpu = output / "finetune" / "checkpoints" / "last", summary["test_images"], choose_device("cpu")
    model = ViT.from_pretrained(weights).eval()
    config = resolve("eval", dict(data="digits", weights=str(weights)))
    data = open_data(config, model.patch_embed.img_size, model.patch_embed.patch_size, cpu)
    sections = curves({task: output / task for task in ("pretrain", "finetune")})
    sections |= validation_sections(model, data, cpu, None, examined=images)
    numbers = {
        "test accuracy after pre-training": with_error(summary["pretrain_accuracy"], images),
        "test accuracy after fine-tuning at 48 px": with_error(summary["finetune_accuracy"], images),
        "test images, never trained on": f"{images}",
        "training speed, pre-training": f"{summary['images_per_second']:,.0f} images/s",
        "device": summary["device"],
        "time": f"{summary['seconds']:.0f} s",
        "parameters": f"{summary['finetune']['parameters']:,}",
    }
    introduction = (
        f"A {len(model.blocks)}-layer, {model.embed_dim}-wide Vision Transformer, pre-trained from scratch on 8 x 8 "
        "scans of handwritten digits, then fine-tuned at a higher resolution: its position embeddings interpolated in "
        "2-D, its head replaced by one zero linear layer. ± is the standard error."
    )
    results.write("report.html", encoded_page("vitfast demo", numbers | origin(), sections, introduction))
