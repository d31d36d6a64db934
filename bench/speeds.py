"""Training speeds by GPU and model, as report.py writes them.

vitfast ships one table, docs/tutorials/fast-settings.md has the other. A speed is of one GPU, and a library's best.
"""

import csv
import io

from result_files import Results, counted

from vitfast.model.config import ViTConfig
from vitfast.model.presets import preset
from vitfast.tools.cost.gpus import GPUS, name_of, rates
from vitfast.tools.cost.measured import PRECISIONS, Measured, tokens
from vitfast.tools.cost.training import estimate

MODELS = {"S/16 224": 512, "B/16 224": 256, "B/16 384": 64, "L/16 224": 128, "H/14 224": 64}  # and their batches
MACHINE = {"commit": "commit", "torch": "torch", "triton": "triton", "timm": "timm", "driver_version": "driver"}


def measured(found: list[Results]) -> list[Measured]:
    """The rows of measured.csv."""
    fastest = {}
    for results in found:
        for case in sorted(counted(results.of("train")), key=lambda case: case["images_per_second"]):
            gpu, (model, size, _) = name_of(case["machine"]["device"]), case["shape"].split()
            if gpu is None or not case["impl"].startswith(("vitfast", "timm")) or case["precision"] not in PRECISIONS:
                continue
            facts, config = case["machine"], ViTConfig(**preset(model), img_size=int(size))
            floor = estimate(config, rates(gpu), batch_size=case["batch"], keep="auto")["floor"]
            row = Measured(
                gpu,
                model,
                int(size),
                case["batch"],
                config.embed_dim,
                config.depth,
                tokens(config),
                "timm" if case["impl"].startswith("timm") else "vitfast",
                case["precision"],
                case["impl"].removesuffix(" again"),
                round(case["images_per_second"], 1),
                round(case["images_per_second"] / floor["images_per_second"], 5),
                ", ".join(f"{word} {facts[key]}" for key, word in MACHINE.items() if key in facts),
                f"bench/results/{results.name}/{case['file']}",
            )
            fastest[gpu, f"{model} {size}", row.precision, row.library] = row
    return [fastest[key] for key in sorted(fastest)]


def as_csv(rows: list[Measured]) -> str:
    """The text of measured.csv."""
    writer = csv.DictWriter(text := io.StringIO(), Measured.__annotations__, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row._asdict() for row in rows)
    return text.getvalue()


def table_rows(rows: list[Measured]) -> tuple[list[str], list[list[str]], list[str]]:
    """(header, rows, sources) of images/s by GPU and model; bold ones are measured, others estimates."""
    ours = {(r.gpu, f"{r.model} {r.img_size}", r.precision): r for r in rows if r.library == "vitfast"}
    files = list(dict.fromkeys(r.file for r in ours.values()))
    lines = []
    for gpu in GPUS:
        for precision, words in PRECISIONS.items():
            if precision != "amp" and not any(key[0] == gpu and key[2] == precision for key in ours):
                continue
            cells = []
            for name, batch in MODELS.items():
                row = ours.get((gpu, name, precision))
                if row is not None:
                    cells.append(f"**{row.images_per_second:,.0f}** ({files.index(row.file) + 1})")
                elif precision != "amp":
                    cells.append("-")
                else:
                    model, size = name.split()
                    config = ViTConfig(**preset(model), img_size=int(size))
                    pace = estimate(config, rates(gpu), batch_size=batch, keep="auto")["predicted"]
                    cells.append(f"{pace['images_per_second']:,.0f}")
            lines.append([gpu if precision == "amp" else f"{gpu}, {words}", *cells])
    machines = {r.file: r.machine for r in ours.values()}
    header = ["GPU", *(f"{name.replace(' ', ' at ')} px" for name in MODELS)]
    return header, lines, [f"({i}) `{file}`: {machines[file]}" for i, file in enumerate(files, 1)]
