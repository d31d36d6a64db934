"""Made-up entries of result files, for tests of the report and the targets."""

import json
from pathlib import Path

import report

ROOT = Path(__file__).parents[2]


def entry(name: str, median: float, **info) -> dict:
    common = dict(
        device="GPU",
        dtype="bfloat16",
        flops=10**9,
        bytes=10**7,
        floor_us=50.0,
        percent_of_floor=5e-3 / median,
        peak_mib=2048.0,
    )
    common.update(tflops=1e-3 / median, gigabytes_per_second=1e-2 / median)
    return dict(name=name, fullname=f"bench/{name}", stats=dict(median=median, iqr=2e-6), extra_info=common | info)


def model_entry(impl: str, speed: float, op: str = "train", shape: str = "B/16 224 B256", **more) -> dict:
    precision = "amp" if " amp" in impl else "bf16"
    info = dict(
        op=op,
        shape=shape,
        direction="both",
        impl=impl,
        precision=precision,
        batch=256,
        images_per_second=speed,
        model_flops=10**12,
    )
    info.update(
        mfu_ceiling=0.5, mfu_datasheet=0.4, attention="cudnn", largest_batch={"24 GiB": 90, "80 GiB": 310}, error=0.015
    )
    return entry(f"{op} {impl}", 256 / speed, **(info | more))


def op_entry(op: str, impl: str, direction: str, microseconds: float, shape: str = "B/16 224 B256", **more) -> dict:
    info = dict(op=op, shape=shape, direction=direction, impl=impl)
    return entry(f"{op} {impl} {direction}", 1e-6 * microseconds, **(info | more))


def planted_results(*cases: dict) -> report.Results:
    machines = [dict(device="GPU", ceilings=dict(copy=4e12))]
    measured = {str(i): dict(ceilings=machines[0]["ceilings"]) | case for i, case in enumerate(cases)}
    return report.Results("h200", machines=machines, measured=measured)


def state_file(folder: Path, name: str, date: str, **cases: list[dict]) -> None:
    """A result file of this date, with cases under benchmarks, failed or skipped."""
    content = dict(benchmarks=[], failed=[], skipped=[], datetime=date) | cases
    facts = dict(device="GPU", ceilings=dict(copy=4e12, bfloat16=8e14))
    (folder / f"{name}.json").write_text(json.dumps(content | dict(machine_info=dict(vitfast=facts))))


def text_of(figures) -> list[str]:
    return list(map(str, figures))
