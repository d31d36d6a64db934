"""on_metrics: the function that gets each row of the log, what its errors do, and that it changes nothing."""

import time

import pytest
from children import logged_run
from processes import done, ranks
from runs import QUICK, changed, cut_at, digits, same_runs

from vitfast import InputError
from vitfast.train import log
from vitfast.train.log import read_metrics
from vitfast.train.trainer import train

FIELDS = QUICK | dict(steps=6, log_every=2, eval_every=4)


def filled(run) -> list[dict]:
    """The rows of metrics.csv without empty cells."""
    return [{name: value for name, value in row.items() if value is not None} for row in read_metrics(run)]


@pytest.mark.slow
def test_it_gets_the_rows_of_the_log_and_may_change_them(tmp_path, monkeypatch):
    """Also those after a resume; what it does to a row reaches no file, and the run is that without it."""
    rows = []

    def take(row):
        rows.append(dict(row))
        row.clear()

    config = digits(tmp_path / "a", **FIELDS)
    cut_at(monkeypatch, 3)
    with pytest.raises(KeyError, match="power cut"):
        train(config, on_metrics=take)
    assert [row["step"] for row in rows] == [2]
    monkeypatch.undo()
    summary = train(config, on_metrics=take)
    assert [(row["step"], row["split"]) for row in rows[1:]] == [(4, "train"), (4, "val"), (6, "train"), (6, "val")]
    assert rows == filled(tmp_path / "a") and rows[-1]["accuracy"] == summary["accuracy"]
    assert rows[0].keys() - rows[-1].keys() == {"lr", "images_per_second", "waiting_for_data"}
    train(digits(tmp_path / "b", **FIELDS))
    assert same_runs(tmp_path / "a", tmp_path / "b")
    assert train(config, on_metrics=take) == summary and len(rows) == 5  # a finished run has no new rows


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "val"])
def test_an_error_stops_the_run_in_the_first_row_of_a_split_alone(split, tmp_path, caplog):
    config, seen = digits(tmp_path, **FIELDS), []

    def wrong(row):
        if row["split"] == split:
            raise ConnectionError("no route to wandb.ai")  # an OSError, and yet nothing is wrong with metrics.csv

    with pytest.raises(InputError, match=f"on_metrics raised ConnectionError for a {split} row of step .: no route"):
        train(config, on_metrics=wrong)

    def later(row):
        seen.append(row["split"])
        if seen.count(split) > 1:
            wrong(row)

    summary = train(changed(config, log_every=1), resume="never", on_metrics=later)
    assert summary["finished"] and seen.count("train") == 6 and seen.count("val") == 2
    warned = [text for text in caplog.messages if "on_metrics" in text]
    assert len(warned) == 1 and "no route to wandb.ai; the run goes on" in warned[0]


@pytest.mark.slow
def test_a_slow_one_is_named_and_its_seconds_are_not_those_of_training(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(log, "SLOW_CALL", 0.15)
    train(digits(tmp_path, **FIELDS), on_metrics=lambda row: time.sleep(0.2))
    named = [text for text in caplog.messages if text.startswith("on_metrics took")]
    assert len(named) == 1 and named[0].endswith(" s at step 4; training waits for it")
    seconds = [2 * 16 / row["images_per_second"] for row in read_metrics(tmp_path) if row["split"] == "train"]
    assert seconds[-1] < 0.4  # two calls between these steps


@pytest.mark.slow
def test_an_evaluation_that_it_did_not_get_comes_again_in_the_next_run(tmp_path):
    """Here the last one, which is after the last checkpoint: nothing else is left to do."""
    config, rows = digits(tmp_path, **FIELDS | dict(eval_every=6)), []

    def down(row):
        if row["split"] == "val":
            raise ConnectionError("no route")

    with pytest.raises(InputError, match="for a val row of step 6"):
        train(config, on_metrics=down)
    summary = train(config, on_metrics=rows.append)
    assert [(row["step"], row["split"], row["accuracy"]) for row in rows] == [(6, "val", summary["accuracy"])]
    assert [(row["step"], row["split"]) for row in read_metrics(tmp_path)][2:] == [(6, "train"), (6, "val")]


@pytest.mark.slow
def test_it_runs_on_the_first_rank_alone_and_its_error_ends_all(tmp_path):
    said = done(ranks(2, logged_run, str(tmp_path / "a"), False))
    assert sorted(text.count("row of step") for text in said) == [0, 2]
    said = done(ranks(2, logged_run, str(tmp_path / "b"), True), code=1)
    assert sum("InputError: on_metrics raised KeyError for a train row of step 2: 'loss/train'" in t for t in said) == 1
    assert sum("TrainingError: the first rank could not go on; its message says why" in t for t in said) == 1


def test_what_is_no_function_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(InputError, match="on_metrics must be a function of one dictionary, got dict"):
        train(digits(tmp_path / "run", **FIELDS), on_metrics={})
    assert not (tmp_path / "run").exists()
