"""Table 8: every kind of positions at every place, from every seed."""

import csv

from commands import run_cli

from vitfast.experiments import runs as experiments


def test_every_variant_is_trained_from_every_seed_and_has_its_cell(tmp_path, capsys, monkeypatch):
    seen = []

    def run(config, resume):
        seen.append((config.pos_embed, config.pos_embed_at, config.seed))
        return dict(finished=True, accuracy=len(seen) / 100)

    monkeypatch.setattr(experiments, "train", run)
    flags = "--recipe digits --data digits --device cpu --seed 4 --seeds 2".split()
    code, out, err = run_cli(capsys, "positions", *flags, "--output", tmp_path)
    assert code == 0, err
    three = ["stem", "layers", "layers_shared"]
    places = {"none": ["stem"], "learn": three, "learn2d": three, "relative": ["stem"]}
    variants = [(kind, place) for kind, some in places.items() for place in some]
    assert seen == [(*variant, seed) for variant in variants for seed in (4, 5)]
    cells = [f"{2 * i / 100 + 0.015:.4f} ± 0.0071" for i in range(8)]
    rows = [
        ["no positions", cells[0], "", ""],
        ["1-D", *cells[1:4]],
        ["2-D", *cells[4:7]],
        ["relative", cells[7], "", ""],
    ]
    assert out.splitlines()[2:] == [f"| {' | '.join(row)} |" for row in rows]
    assert out == (tmp_path / "positions.md").read_text()
    written = list(csv.DictReader(open(tmp_path / "positions.csv")))
    assert [(row["positions"], row["at"]) for row in written] == variants and written[0]["accuracies"] == "0.01 0.02"
